"""Compiled GPU kernels on this CPU: nvcc's or Triton's PTX becomes C++ (translate.py), which machine.cpp runs.

The launchers of csrc are nvcc's own host code, linked with cudart.cpp instead of the CUDA runtime.
Everything compiled is kept in build/ptx, named after what it was made of.
"""

import ctypes
import fcntl
import functools
import hashlib
import math
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from ptx.translate import Entry, translate
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._pytree import tree_leaves

HERE, CHECKOUT = Path(__file__).parent, Path(__file__).parents[2]
BUILD = CHECKOUT / "build" / "ptx"
# -fwrapv: signed integers of PTX wrap around
GXX = ["g++", "-std=c++20", "-fPIC", "-shared", "-Og", "-fwrapv", "-ffp-contract=off", "-Wno-psabi", f"-I{HERE}"]
# The bindings accept tensors of the CPU. torch's headers come first, because they define kCUDA.
BINDINGS = '#include <torch/csrc/utils/pybind.h>\n#include "{0}/checks.h"\n#define kCUDA kCPU\n#include "{0}/{1}"\n'
LAZY_GLOBAL = os.RTLD_LAZY | os.RTLD_GLOBAL  # a library finds functions of those that are loaded later
DLOPEN = ctypes.CDLL(None).dlopen  # ctypes.CDLL resolves everything at once
DLOPEN.restype = ctypes.c_void_p


def require_compilers(*names: str) -> None:
    """Skips the test where a compiler is missing: g++, or nvcc with its toolkit."""
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    if "nvcc" in names and not setup()["toolkits"]():
        pytest.skip("there is no CUDA toolkit where setup.py looks for one")


@functools.cache
def setup() -> dict:
    """The names that setup.py defines."""
    with mock.patch("setuptools.setup"), mock.patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME):
        return runpy.run_path(str(CHECKOUT / "setup.py"))


def made(key: str, command: list, source: str, depends: str) -> Path:
    """A folder in which `command` ran on `source`, an existing file or a text for step.cpp; once for all processes.

    {folder} in the command is the folder. Depends: the contents of other files that it reads.
    """
    text = Path(source).read_text() if "\n" not in source else source
    digest = hashlib.sha256(repr((command, text, depends)).encode()).hexdigest()[:16]
    BUILD.mkdir(parents=True, exist_ok=True)
    folder = BUILD / f"{key}-{digest}"
    with open(f"{folder}.lock", "w") as lock, tempfile.TemporaryDirectory(dir=BUILD) as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            (inner := Path(temporary) / "inner").mkdir()
            (inner / "step.cpp").write_text(text)
            words = [str(word).format(folder=inner) for word in command]
            process = subprocess.run(words, capture_output=True, text=True)
            assert process.returncode == 0, process.stderr[-4000:]
            inner.rename(folder)
    return folder


def contents(*patterns: str) -> str:
    """Of files of the checkout."""
    return "".join(file.read_text() for pattern in patterns for file in sorted(CHECKOUT.glob(pattern)))


class Launch(ctypes.Structure):
    """Launch in launch.h."""

    _fields_ = [(name, ctypes.c_uint * 3) for name in ("grid", "block", "cluster")]
    _fields_ += [(name, ctypes.c_uint) for name in ("shared", "parameter_bytes", "tensors", "seed")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("parameters", "bounds", "step")]
    _fields_ += [("lane_bytes", ctypes.c_ulonglong)]


Hook = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(Launch), ctypes.POINTER(ctypes.c_void_p))


@functools.cache
def translated(ptx: str, name: str) -> tuple[Entry, ctypes.CDLL]:
    """A kernel as C++, compiled."""
    header = str(HERE / "ptx.h")
    precompiled = made("header", [*GXX, "-x", "c++-header", header, "-o", "{folder}/ptx.h.gch"], header, "")
    entry = translate(ptx, name)
    command = ["g++", f"-I{precompiled}", *GXX[1:], "{folder}/step.cpp", "-o", "{folder}/step.so"]
    return entry, ctypes.CDLL(str(made("kernel", command, entry.code, contents("tests/ptx/*.h")) / "step.so"))


@functools.cache
def machine() -> ctypes.CDLL:
    """machine.cpp, compiled."""
    source = str(HERE / "machine.cpp")
    folder = made("machine", [*GXX, source, "-o", "{folder}/machine.so"], source, contents("tests/ptx/*.h"))
    return ctypes.CDLL(str(folder / "machine.so"))


class GPU:
    """What kernels run on.

    Attributes:
        seed: of the order in which threads run; another one in each launch.
        edit: changes the PTX of a kernel before it is translated.
        launches: (name of the kernel, Launch) of every launch.
        device: its properties as launchers see them; `code` is what the kernels are compiled for.
    """

    def __init__(self):
        self.seed, self.edit, self.launches = 0, lambda ptx: ptx, []
        self.device = {"processors": 132, "generation": 9, "code": 90, "shared_limit": 232448}
        self.libraries, self.ranges, self.error = {}, [], None

    @contextmanager
    def memory(self, *values) -> Iterator[None]:
        """Kernels may access these tensors, also those in lists and dicts, and nothing else."""
        before, self.error = self.ranges, None
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        self.ranges = before + [bound for t in tensors for bound in (t.data_ptr(), t.data_ptr() + t.nbytes)]
        try:
            yield
        except RuntimeError:
            if self.error is None:
                raise
        finally:
            self.ranges = before
        if self.error is not None:  # a launch with <<<>>> does not report it
            raise self.error

    def library(self, source: str, flags: tuple[str, ...], architecture: int) -> ctypes.CDLL:
        """A file of csrc, compiled by nvcc, loaded."""
        if source not in self.libraries:
            path, runtime = CHECKOUT / "csrc" / source, HERE / "cudart.cpp"
            target = f"-gencode=arch=compute_{architecture},code=compute_{architecture}"
            command = ["nvcc", *flags, target, "-shared", "-cudart", "none", "-Xcompiler", "-fPIC", "-Xlinker"]
            command += ["-zlazy", "--keep", "--keep-dir", "{folder}", path, runtime, "-o", "{folder}/kernels.so"]
            depends = contents("csrc/*.h", f"csrc/{Path(source).parent}/*.h", "tests/ptx/*.h") + runtime.read_text()
            folder = made(path.stem, command, str(path), depends)
            handle = DLOPEN(f"{folder}/kernels.so".encode(), LAZY_GLOBAL)
            hook = Hook(functools.partial(self._launch, (folder / f"{path.stem}.ptx").read_text()))
            self.libraries[source] = ctypes.CDLL(f"{folder}/kernels.so", handle=handle), hook
        library, hook = self.libraries[source]
        library.configure(hook, *self.device.values())
        return library

    def _launch(self, ptx: str, name: bytes, launch, pointers) -> int:
        copied = Launch.from_buffer_copy(launch.contents)
        try:
            self.run(ptx, name.decode(), copied, lambda i, size: ctypes.string_at(pointers[i], size))
        except Exception as error:
            self.error = error
            return 719  # cudaErrorLaunchFailure
        return 0

    def run(self, ptx: str, name: str, launch: Launch, argument: Callable[[int, int], bytes]) -> None:
        """Launches a kernel; `argument(i, size)` are the bytes of its parameter i."""
        self.launches.append((name, launch))
        grid, cluster = list(launch.grid), list(launch.cluster)
        assert all(grid), "an empty grid"
        assert all(g % c == 0 for g, c in zip(grid, cluster, strict=True)), "clusters do not divide the grid"
        assert math.prod(cluster) <= 8, "a cluster of more than 8 thread blocks"
        assert math.prod(launch.block) <= 1024, "more than 1024 threads"
        ptx = self.edit(ptx)
        entry, library = translated(ptx, name)
        parameters = bytearray(sum(entry.parameters[-1]))
        for i, (offset, size) in enumerate(entry.parameters):
            parameters[offset : offset + size] = argument(i, size)
        buffer = (ctypes.c_ubyte * len(parameters)).from_buffer(parameters)
        bounds = (ctypes.c_ulonglong * len(self.ranges))(*self.ranges)
        self.seed += 1
        launch.shared += entry.shared
        launch.parameter_bytes, launch.tensors, launch.seed = len(parameters), len(bounds) // 2, self.seed
        launch.parameters, launch.bounds = ctypes.addressof(buffer), ctypes.addressof(bounds)
        launch.step = ctypes.cast(library.step, ctypes.c_void_p).value
        launch.lane_bytes = ctypes.c_ulonglong.in_dll(library, "lane_bytes").value
        message = ctypes.create_string_buffer(1000)
        if machine().launch(ctypes.byref(launch), message, ctypes.c_size_t(len(message))):
            line, _, reason = message.value.decode().partition(":")
            text = ptx.splitlines()[int(line) - 1].strip()
            raise RuntimeError(f"{name[:60]}, line {line} of the PTX, {text!r}: {reason}")


class Extension:
    """proxsparse._C_cuda or _C_cutlass for tensors of the CPU: csrc's bindings, checks, launchers and kernels.

    Args:
        load: the name of a function and its arguments -> loads the libraries it needs.
    """

    def __init__(self, gpu: GPU, source: str, load: Callable[..., None]):
        name = f"_C_{Path(source).parent.name}"
        folder, text = BUILD / name, BINDINGS.format(CHECKOUT / "csrc", source)
        folder.mkdir(parents=True, exist_ok=True)
        sources, flags = [str(folder / "bindings.cpp"), str(HERE / "cudart.cpp")], ["-O0", "-std=c++20"]
        options = {"extra_include_paths": [f"{setup()['toolkits']()[0]}/include"], "build_directory": folder}
        before = sys.getdlopenflags()
        with open(folder / "of_tests.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)  # torch's; if its process was killed, torch waits for it forever
            if not Path(sources[0]).exists() or Path(sources[0]).read_text() != text:
                Path(sources[0]).write_text(text)
            sys.setdlopenflags(LAZY_GLOBAL)
            try:
                self.module = cpp_extension.load(name, sources, flags, **options)
            finally:
                sys.setdlopenflags(before)
        self.gpu, self.load = gpu, load

    def __getattr__(self, name: str) -> Callable:
        def call(*arguments):
            self.load(name, *arguments)
            with self.gpu.memory(arguments):
                return getattr(self.module, name)(*arguments)

        return call


FILES = {"prox_24_": "prox", "masked_weight_24_": "masked_weight", "adamw_prox_": "adamw_prox", "pack_24": "pack"}
FILES |= {"unpack_24": "pack", "cutlass_metadata_": "metadata", "gemv": "gemv"}


def cuda_extension(gpu: GPU) -> Extension:
    """proxsparse._C_cuda."""

    def load(name: str, *arguments) -> ctypes.CDLL:
        values = str(arguments[1].dtype) if name == "gemv" else ""
        for source in (*{"torch.int8": ["gemv_8"], "torch.uint8": ["gemv_4"]}.get(values, []), FILES[name]):
            library = gpu.library(f"cuda/{source}.cu", tuple(setup()["NVCC_FLAGS"]), 90)
        return library

    return Extension(gpu, "cuda/bindings.cpp", load)


def cutlass_flags() -> tuple[str, ...]:
    """nvcc's options for csrc/cutlass; skips the test where the headers are missing."""
    if not (headers := setup()["cutlass_headers"]()):
        pytest.skip("nvidia-cutlass is not installed")
    folders = (f"-I{folder}" for folder in headers)
    return ("-O3", "-std=c++20", "-DNDEBUG", "--expt-relaxed-constexpr", *folders)
