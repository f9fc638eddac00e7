"""Builds proxsparse._C, _C_cuda and _C_cutlass, the compiled kernels; everything else is in pyproject.toml.

PROXSPARSE_EXTENSION decides what happens without a working C++ compiler:
    auto (default)  the package installs without the kernels, with a warning: all operations still run, slower
    0               the kernels are not built
    1               a failed build is an error
PROXSPARSE_CUDA decides about the CUDA kernels: auto (default: built where torch is a CUDA build and there is a CUDA
toolkit), 0 (not built), 1 (built for any torch; no toolkit is an error). TORCH_CUDA_ARCH_LIST names the GPUs to build
for; default: those of this machine, or 8.0;9.0;10.0+PTX without one. Where the CUDA kernels are built, so are those of
csrc/cutlass, if the package nvidia-cutlass is there already (its headers suffice: pip install --no-deps);
PROXSPARSE_CUTLASS=0 leaves them out, 1 insists. Each file takes a minute and up to 5 GB of memory; MAX_JOBS says how
many at a time.
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
# What setuptools and torch raise without a compiler, without Python.h, or with a compiler that is too old.
BUILD_ERRORS = (BaseError, OSError, RuntimeError, subprocess.CalledProcessError)
# What an extension holds, what serves without it, and what to do about it.
EXPLAINED = {
    "proxsparse._C": ("CPU kernels", "slow reference", "apt install g++ python3-dev   (or the like)"),
    "proxsparse._C_cuda": ("CUDA kernels", "Triton or slow reference", "install the CUDA toolkit of torch's version"),
    "proxsparse._C_cutlass": ("CUTLASS kernels", "dense or cuSPARSELt", "set MAX_JOBS=1 if the memory did not suffice"),
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
    """The environment's PROXSPARSE_EXTENSION, PROXSPARSE_CUDA or PROXSPARSE_CUTLASS: auto, 0 or 1."""
    value = os.environ.get(variable, "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"{variable}={value!r}: choose one of auto, 0, 1")
    return value


class BuildKernels(cpp_extension.BuildExtension):
    """Turns a failed build into one warning for each extension, unless PROXSPARSE_EXTENSION=1 asks for an error."""

    def build_extensions(self) -> None:
        self.attempt("proxsparse._C", super().build_extensions)  # fails as a whole where there is no compiler

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
    optional = mode("PROXSPARSE_EXTENSION") != "1"  # setuptools then accepts that the file is missing
    return cpp_extension.CppExtension(name, sorted(sources), depends=HEADERS, optional=optional, **options)


def cpu_kernels() -> cpp_extension.CppExtension:
    """proxsparse._C, from csrc/bindings.cpp and csrc/cpu."""
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]  # Apple clang refuses the flag
    # As PyTorch itself is compiled: without these two promises to libm and the FPU, no loop with a square root or a
    # choice becomes vector code. NaN and infinity keep their meaning.
    flags = ["-O3", "-g0", "-std=c++20", *openmp, "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
    sources = ["csrc/bindings.cpp", *glob.glob("csrc/cpu/*.cpp")]
    return kernels("proxsparse._C", sources, extra_compile_args=flags, extra_link_args=openmp)


def cuda_kernels(toolkit: str) -> cpp_extension.CppExtension:
    """proxsparse._C_cuda, from csrc/cuda: needs neither headers nor libraries of a CUDA build of torch."""
    cpp_extension.CUDA_HOME = toolkit
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
    return with_toolkit("proxsparse._C_cuda", glob.glob("csrc/cuda/*.c*"), toolkit, NVCC_FLAGS)


def cutlass_kernels(toolkit: str, headers: list[str]) -> cpp_extension.CppExtension:
    """proxsparse._C_cutlass, from csrc/cutlass: tiles for sm_90a where there is Hopper, and for all since sm_80."""
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    names = os.environ.get("TORCH_CUDA_ARCH_LIST") or " ".join(f"{major}.{minor}" for major, minor in capabilities)
    hopper = [name.startswith("9") for name in names.replace(";", " ").split()]
    sources = ["csrc/cutlass/bindings.cpp"]
    flags = ["-O3", "-std=c++20", "-DNDEBUG", "-diag-suppress=2908"]  # without NDEBUG wgmma is serialised: C7510
    if any(hopper):
        sources += glob.glob("csrc/cutlass/sm90_*.cu")
        flags.append("-gencode=arch=compute_90a,code=sm_90a")
    if not all(hopper):
        sources += glob.glob("csrc/cutlass/sm80_*.cu")
        flags += ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=compute_80"]
    return with_toolkit("proxsparse._C_cutlass", sources, toolkit, flags, headers)


def with_toolkit(name: str, sources: list[str], toolkit: str, flags: list[str], headers: list[str] = ()):
    """An extension of C++ and CUDA sources, linked to the static runtime of the toolkit."""
    libraries = {"library_dirs": [f"{toolkit}/lib64"], "libraries": ["cudart_static", "rt", "dl", "pthread"]}
    arguments = {"cxx": ["-O3", "-g0", "-std=c++20"], "nvcc": flags}
    folders = [f"{toolkit}/include", *headers]
    return kernels(name, sources, extra_compile_args=arguments, include_dirs=folders, **libraries)


def cutlass_headers() -> list[str]:
    """The folders of the package nvidia-cutlass; none if it is not installed."""
    package = importlib.util.find_spec("cutlass_library")
    source = os.path.join(os.path.dirname(package.origin), "source") if package else ""
    return [os.path.join(source, folder) for folder in ("include", "tools/util/include")] if package else []


def toolkits() -> list[str]:
    """The CUDA toolkits. The nvcc on PATH may be a script that lies elsewhere: demand the header."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), cpp_extension.CUDA_HOME, "/usr/local/cuda"]
    homes += sorted(glob.glob("/usr/local/cuda-*"), key=version, reverse=True)  # where the link is missing
    return [home for home in homes if home and os.path.exists(f"{home}/include/cuda_runtime_api.h")]


def version(home: str) -> list[int]:
    """ "/usr/local/cuda-13.0" -> [13, 0]."""
    return [int(number) for number in re.findall(r"\d+", os.path.basename(home))]


def extensions() -> list[cpp_extension.CppExtension]:
    """What the environment asks for and this machine can build."""
    wanted, found = mode("PROXSPARSE_CUDA"), toolkits()
    if mode("PROXSPARSE_EXTENSION") == "0":
        return []
    if wanted == "1" and not found:
        raise SystemExit("PROXSPARSE_CUDA=1: there is no CUDA toolkit; remedy: set CUDA_HOME to its folder")
    with_cuda = found and (wanted == "1" or (wanted == "auto" and torch.version.cuda is not None))
    if not with_cuda:
        return [cpu_kernels()]
    headers = [] if mode("PROXSPARSE_CUTLASS") == "0" else cutlass_headers()
    if mode("PROXSPARSE_CUTLASS") == "1" and not headers:
        raise SystemExit("PROXSPARSE_CUTLASS=1: nvidia-cutlass is not installed; remedy: pip install --no-deps it")
    return [cpu_kernels(), cuda_kernels(found[0]), *([cutlass_kernels(found[0], headers)] if headers else [])]


setup(
    packages=[
        *find_packages(include=["proxsparse", "proxsparse.*"]),
        "proxsparse.recipes",  # data only
        "proxsparse.triton_kernels",  # the bare name belongs to another project: installed, ours is a subpackage
    ],
    package_dir={"proxsparse.triton_kernels": "triton_kernels"},
    package_data={
        "proxsparse": ["py.typed"],
        "proxsparse.recipes": ["*.yaml"],
        "proxsparse.ops": ["*.json"],
    },
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
)
