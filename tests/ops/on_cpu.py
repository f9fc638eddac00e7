"""Builds csrc/cuda/*.cu for this CPU, lane by lane, and memory in which any access beyond a tensor is found."""

import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc" / "cuda"
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]  # in the order of Dtype in csrc/calls.h


def build(folder: Path, library: str, *kernels: str) -> ctypes.CDLL:
    """cuda_on_cpu/{library}.cpp with these files of csrc/cuda; skips the test where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    target = folder / f"{library}.so"
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    sources = [HERE / "cuda_on_cpu" / f"{library}.cpp", *(CSRC / kernel for kernel in kernels)]
    command = ["g++", *options, "-I", HERE / "cuda_on_cpu", "-x", "c++", *sources, "-o", target]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return ctypes.CDLL(str(target))


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Of the first number; null for None."""
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


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
