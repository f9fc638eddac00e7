"""Builds the compiled kernels proxsparse._C, _C_cuda and _C_cutlass; everything else is in pyproject.toml.

PROXSPARSE_EXTENSION controls the C++ kernels:
    auto (default)  if the build fails, the package is installed without them, with a warning; all ops work, but slower
    0               not built
    1               a failed build is an error
PROXSPARSE_CUDA controls the CUDA kernels: auto (default: built if torch is a CUDA build and there is a CUDA toolkit and
a GPU), 0 (not built), 1 (built with any torch; a missing toolkit or GPU is an error). TORCH_CUDA_ARCH_LIST lists the
GPUs to build for ("8.0;9.0+PTX"); a GPU is then not needed. The kernels in csrc/cutlass are built together with the
CUDA kernels if the package nvidia-cutlass is installed (only its headers are needed: pip install --no-deps).
PROXSPARSE_CUTLASS=0 disables them; 1 makes a missing package an error. Each file takes a minute and up to 5 GB of
memory; MAX_JOBS limits the number of files compiled in parallel.
"""

import glob
import importlib.util
import os
import re
import subprocess
import sys

import torch
from setuptools import find_packages, setup
from setuptools.errors import BaseError
from torch.utils import cpp_extension

HEADERS = sorted(glob.glob("csrc/**/*.h", recursive=True))
NVCC_FLAGS = ["-O3", "-std=c++20", "-DNDEBUG", "--expt-relaxed-constexpr", "-prec-div=false", "-prec-sqrt=false"]
# Raised by setuptools and torch if the compiler or Python.h is missing, or the compiler is too old.
BUILD_ERRORS = (BaseError, OSError, RuntimeError, subprocess.CalledProcessError)
# extension -> (what it contains, what is used without it, what to do)
EXPLAINED = {
    "proxsparse._C": ("CPU kernels", "slow reference", "apt install g++ python3-dev   (or similar)"),
    "proxsparse._C_cuda": ("CUDA kernels", "Triton or slow reference", "install the CUDA toolkit of torch's version"),
    "proxsparse._C_cutlass": ("CUTLASS kernels", "gemv or reference", "set MAX_JOBS=1 if the memory was too small"),
}
WARNING = """
==================================================================================================
WARNING: proxsparse is installed WITHOUT its compiled {}: the build failed.
         Everything runs on the {} backend instead.
  remedy {}, then install proxsparse again
  cause  {}
==================================================================================================
"""


def mode(variable: str) -> str:
    """The value of PROXSPARSE_EXTENSION, PROXSPARSE_CUDA or PROXSPARSE_CUTLASS: auto, 0 or 1."""
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"{variable}={value!r}: choose one of auto, 0, 1")
    return value


class BuildKernels(cpp_extension.BuildExtension):
    """Reports a failed build as one warning per extension, or as an error with PROXSPARSE_EXTENSION=1."""

    def build_extensions(self) -> None:
        self.attempt("proxsparse._C", super().build_extensions)  # fails if there is no compiler

    def build_extension(self, extension) -> None:
        self.attempt(extension.name, super().build_extension, extension)

    def attempt(self, name: str, build, *arguments) -> None:
        try:
            build(*arguments)
        except BUILD_ERRORS as error:
            if mode("PROXSPARSE_EXTENSION") == "1":
                raise
            print(WARNING.format(*EXPLAINED[name], str(error).strip().partition("\n")[0]), file=sys.stderr)


def kernels(name: str, sources: list[str], **options) -> cpp_extension.CppExtension:
    optional = mode("PROXSPARSE_EXTENSION") != "1"  # setuptools accepts a missing file
    return cpp_extension.CppExtension(name, sorted(sources), depends=HEADERS, optional=optional, **options)


def cpu_kernels() -> cpp_extension.CppExtension:
    """proxsparse._C, from csrc/bindings.cpp and csrc/cpu."""
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]  # Apple clang refuses the flag
    # PyTorch is compiled with the same flags: without -fno-math-errno and -fno-trapping-math, loops with a square root
    # or a condition are not vectorized. NaN and infinity are still handled correctly.
    flags = ["-O3", "-g0", "-std=c++20", *openmp, "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
    sources = ["csrc/bindings.cpp", *glob.glob("csrc/cpu/*.cpp")]
    return kernels("proxsparse._C", sources, extra_compile_args=flags, extra_link_args=openmp)


def cuda_kernels(toolkit: str) -> cpp_extension.CppExtension:
    """proxsparse._C_cuda, from csrc/cuda; does not need the headers or libraries of a CUDA build of torch."""
    return with_toolkit("proxsparse._C_cuda", glob.glob("csrc/cuda/*.c*"), toolkit, NVCC_FLAGS)


def cutlass_kernels(toolkit: str, headers: list[str]) -> cpp_extension.CppExtension:
    """proxsparse._C_cutlass, from csrc/cutlass: tiles for sm_90a (Hopper) and for other GPUs since sm_80."""
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    names = os.environ.get("TORCH_CUDA_ARCH_LIST") or " ".join(f"{major}.{minor}" for major, minor in capabilities)
    hopper = [name.startswith("9") for name in names.replace(";", " ").split()]
    sources = ["csrc/cutlass/bindings.cpp"]
    # without NDEBUG wgmma is serialized (C7510); the last two flags avoid hundreds of warnings about CUTLASS's headers
    flags = ["-O3", "-std=c++20", "-DNDEBUG", "--expt-relaxed-constexpr", "-diag-suppress=2908"]
    if any(hopper):
        sources += glob.glob("csrc/cutlass/sm90_*.cu")
        flags.append("-gencode=arch=compute_90a,code=sm_90a")
    if not all(hopper):
        sources += glob.glob("csrc/cutlass/sm80_*.cu")
        flags += ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=compute_80"]
    return with_toolkit("proxsparse._C_cutlass", sources, toolkit, flags, headers)


def with_toolkit(name: str, sources: list[str], toolkit: str, flags: list[str], headers: list[str] = ()):
    """An extension of C++ and CUDA sources, linked to the static runtime of the toolkit."""
    cpp_extension.CUDA_HOME = toolkit
    libraries = {"library_dirs": [f"{toolkit}/lib64"], "libraries": ["cudart_static", "rt", "dl", "pthread"]}
    arguments = {"cxx": ["-O3", "-g0", "-std=c++20"], "nvcc": flags}
    folders = [f"{toolkit}/include", *headers]
    return kernels(name, sources, extra_compile_args=arguments, include_dirs=folders, **libraries)


def cutlass_headers() -> list[str]:
    """The include folders of the package nvidia-cutlass; [] if it is not installed."""
    package = importlib.util.find_spec("cutlass_library")
    source = os.path.join(os.path.dirname(package.origin), "source") if package else ""
    return [os.path.join(source, folder) for folder in ("include", "tools/util/include")] if package else []


def toolkits() -> list[str]:
    """The CUDA toolkits with headers: the nvcc on PATH may be a script outside of a toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), cpp_extension.CUDA_HOME, "/usr/local/cuda"]
    homes += sorted(glob.glob("/usr/local/cuda-*"), key=version, reverse=True)  # if the link /usr/local/cuda is missing
    return [home for home in homes if home and os.path.exists(f"{home}/include/cuda_runtime_api.h")]


def version(home: str) -> list[int]:
    """ "/usr/local/cuda-13.0" -> [13, 0]."""
    return [int(number) for number in re.findall(r"\d+", os.path.basename(home))]


def extensions() -> list[cpp_extension.CppExtension]:
    """The extensions that the environment variables request and this machine can build."""
    wanted, found = mode("PROXSPARSE_CUDA"), toolkits()
    if mode("PROXSPARSE_EXTENSION") == "0":
        return []
    if wanted == "0" or (wanted == "auto" and torch.version.cuda is None):
        return [cpu_kernels()]
    if not found or not (torch.cuda.is_available() or os.environ.get("TORCH_CUDA_ARCH_LIST")):
        missing = (
            "GPU; set TORCH_CUDA_ARCH_LIST, e.g. 9.0+PTX" if found else "CUDA toolkit; set CUDA_HOME to its folder"
        )
        if wanted == "1":
            raise SystemExit(f"PROXSPARSE_CUDA=1: there is no {missing}")
        print(f"the CUDA kernels are not built: there is no {missing}")
        return [cpu_kernels()]
    headers = [] if mode("PROXSPARSE_CUTLASS") == "0" else cutlass_headers()
    if mode("PROXSPARSE_CUTLASS") == "1" and not headers:
        raise SystemExit("PROXSPARSE_CUTLASS=1: nvidia-cutlass is missing; pip install --no-deps nvidia-cutlass")
    return [cpu_kernels(), cuda_kernels(found[0]), *([cutlass_kernels(found[0], headers)] if headers else [])]


setup(
    packages=[
        *find_packages(include=["proxsparse", "proxsparse.*"]),
        "proxsparse.recipes",  # data only
        "proxsparse.triton_kernels",  # installed as a subpackage, because another project uses the bare name
    ],
    py_modules=["proxsparse_autoload"],
    package_dir={"proxsparse.triton_kernels": "triton_kernels"},
    package_data={
        "proxsparse": ["py.typed"],
        "proxsparse.recipes": ["*.yaml"],
        "proxsparse.ops": ["*.json"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
)
