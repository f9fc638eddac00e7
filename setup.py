"""Builds proxsparse._C, the compiled CPU kernels; everything else about the package is in pyproject.toml.

PROXSPARSE_EXTENSION decides what happens without a working C++ compiler:
    auto (default)  the package installs without the kernels, with a warning: all operations still run, slower
    0               the kernels are not built
    1               a failed build is an error
"""

import glob
import os
import subprocess
import sys

from setuptools import find_packages, setup
from setuptools.errors import BaseError
from torch.utils.cpp_extension import BuildExtension, CppExtension

MODES = ("auto", "0", "1")
# What setuptools and torch raise without a compiler, without Python.h, or with a compiler that is too old.
BUILD_ERRORS = (BaseError, OSError, RuntimeError, subprocess.CalledProcessError)
WARNING = """
==================================================================================================
WARNING: proxsparse is installed WITHOUT its compiled CPU kernels: the build failed.
         Everything runs on the slow reference backend instead.
  cause  {cause}
  remedy apt install g++ python3-dev   (or the like), then install proxsparse again
==================================================================================================
"""


def build_mode() -> str:
    """The environment's PROXSPARSE_EXTENSION: auto, 0 or 1."""
    mode = os.environ.get("PROXSPARSE_EXTENSION", "auto")
    if mode not in MODES:
        raise SystemExit(f"PROXSPARSE_EXTENSION={mode!r}: choose one of {', '.join(MODES)}")
    return mode


class BuildKernels(BuildExtension):
    """Turns a failed build into one warning, unless PROXSPARSE_EXTENSION=1 asks for an error."""

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except BUILD_ERRORS as error:
            if build_mode() == "1":
                raise
            cause = str(error).strip().partition("\n")[0]
            print(WARNING.format(cause=cause), file=sys.stderr)


def cpu_kernels() -> CppExtension:
    """proxsparse._C, from csrc/bindings.cpp and csrc/cpu."""
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]  # Apple clang refuses the flag
    return CppExtension(
        "proxsparse._C",
        sources=["csrc/bindings.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))],
        depends=sorted(glob.glob("csrc/**/*.h", recursive=True)),
        # As PyTorch itself is compiled: without these two promises to libm and the FPU, no loop with a square root
        # or a choice becomes vector code. NaN and infinity keep their meaning.
        extra_compile_args=["-O3", "-g0", "-std=c++20", *openmp, "-fno-math-errno", "-fno-trapping-math"],
        extra_link_args=openmp,
        optional=build_mode() != "1",  # setuptools then accepts that the file is missing
    )


setup(
    packages=[
        *find_packages(include=["proxsparse", "proxsparse.*"]),
        "proxsparse.recipes",  # data only
        "proxsparse.triton_kernels",  # the bare name belongs to another project: installed, ours is a subpackage
    ],
    package_dir={"proxsparse.triton_kernels": "triton_kernels"},
    package_data={"proxsparse.recipes": ["*.yaml"]},
    ext_modules=[] if build_mode() == "0" else [cpu_kernels()],
    cmdclass={"build_ext": BuildKernels},
)
