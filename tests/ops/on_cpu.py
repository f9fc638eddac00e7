"""The kernels of csrc/cuda on this CPU, lane by lane, and memory in which any access beyond a tensor is found."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from proxsparse.ops.backends import cuda

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc" / "cuda"
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]  # in the order of Dtype in csrc/calls.h


def build(folder: Path) -> ctypes.CDLL:
    """cuda_on_cpu/library.cpp with the kernels, built once in the folder; skips the test where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    target = folder / "cuda_on_cpu.so"
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    options += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # a GPU refuses such an access
    sources = [HERE / "cuda_on_cpu" / "library.cpp", *sorted(CSRC.glob("*.cu"))]
    command = ["g++", *options, "-I", HERE / "cuda_on_cpu", "-x", "c++", *sources, "-o", target]
    with open(folder / "cuda_on_cpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            process = subprocess.run(command, capture_output=True, text=True)
            assert process.returncode == 0, process.stderr[-4000:]
    return ctypes.CDLL(str(target))


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Of the first number; null for None."""
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def codes_of(values: Tensor, scales: Tensor | None) -> int:
    """How values are stored: an element of Codes (csrc/codes.h)."""
    if scales is None:
        return 0
    return 1 if values.dtype == torch.int8 else 2


class Extension:
    """proxsparse._C_cuda (csrc/cuda/bindings.cpp) on tensors of the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.metadata_calls, self.gemv_dependent = library, 0, []

    def prox_n4_(self, weight, reg_lambda, n, scale, stream):
        size, in_features = ctypes.c_int64(weight.numel()), ctypes.c_int64(weight.shape[-1])
        numbers = TYPES.index(weight.dtype), ctypes.c_double(reg_lambda), n
        assert self.library.prox(address(weight), size, in_features, address(scale), *numbers) == 0

    def adamw_prox_(self, *arguments):
        tensors, (step, *numbers, n, frozen_lambda, frozen_eps, seed, _stream) = arguments[:7], arguments[7:]
        (weight, _, exp_avg, *_), double, integer = tensors, ctypes.c_double, ctypes.c_int64
        sizes = integer(weight.numel()), integer(weight.shape[-1] if weight.dim() else 1)
        formats = TYPES.index(weight.dtype), exp_avg.dtype == torch.bfloat16
        numbers = *map(double, numbers), n, double(frozen_lambda), double(frozen_eps)
        random = seed is not None, ctypes.c_uint64(seed or 0)
        assert self.library.adamw_prox(*map(address, tensors), *sizes, *formats, integer(step), *numbers, *random) == 0

    def masked_weight_n4_(self, out, weight, pretrained, scale, n, stream):
        tensors, sizes = (out, weight, pretrained, scale), (weight.numel(), weight.shape[-1])
        formats = TYPES.index(weight.dtype), pretrained.dtype != weight.dtype
        assert self.library.masked_weight(*map(address, tensors), *map(ctypes.c_int64, sizes), *formats, n) == 0

    def gemv(self, x, values, indices, scales, bias, y, dependent, stream):
        assert x.data_ptr() % 8 == 0
        self.gemv_dependent.append(dependent)
        tensors = (address(tensor) for tensor in (x, values, indices, scales, bias, y))
        sizes = (*y.shape, x.shape[1], TYPES.index(x.dtype), codes_of(values, scales))
        assert self.library.gemv(*tensors, *sizes, 0, 0, 0, dependent, 132, 9, 90) == 0

    def pack_24(self, weight, values, indices, infeasible, stream):
        tensors, (rows, columns) = (weight, values, indices, infeasible), weight.shape
        if weight.numel():
            assert self.library.pack(*map(address, tensors), ctypes.c_int64(rows), columns, weight.itemsize) == 0

    def unpack_24(self, values, indices, weight, stream):
        self.pack_24(weight, values, indices, None, stream)

    def cutlass_metadata_(self, indices, metadata, architecture, stream):
        rows, columns = len(indices), 8 * indices.shape[1]
        self.metadata_calls += 1
        assert self.library.metadata(address(indices), address(metadata), rows, columns, architecture) == 0


def replace_extension(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "cuda" then serves tensors of the CPU with these kernels, and asks no GPU."""
    monkeypatch.setattr(cuda, "_C", Extension(library))
    monkeypatch.setattr(cuda, "_missing", None)
    monkeypatch.setattr(cuda, "_supports", lambda tensor, n, m: None if m == 4 and n in (1, 2) else "not this pattern")
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


def fenced(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy at the end (else at the start) of memory between two pages that must not be touched."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    inner = -(-size // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    offset = page + (inner - size if at_end else 0)
    copy = whole[offset : offset + size].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for fence in (whole.data_ptr(), whole.data_ptr() + page + inner):
        assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0, os.strerror(ctypes.get_errno())
    return copy


def survives(run: Callable[[], object]) -> bool:
    """Whether `run` ends, in a process of its own, without touching what it must not."""
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
