"""The backend under test as the fixture `device`; compiled CUDA kernels on this CPU (tests/ptx)."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ops.on_each_backend import backends_of, op_of_kernels
from ptx.gpu import GPU, cuda_extension, require_compilers

from proxsparse.ops import registry
from proxsparse.ops.backends import cuda

ZEROS = torch.zeros(1, 4)
# What `supports` is asked of a small tensor and these arguments.
CALLS = {
    "prox_nm_": (1.0, 2, 4),
    "adamw_prox_": (*[ZEROS] * 3, None, None, 3, 0.05, 0.9, 0.99, 1e-6, 0.1, 0.3, 2, 4, None),
    "nm_mask": (2, 4),
    "masked_weight_": (ZEROS, ZEROS, None, 2, 4),
    "pack_nm": (),
}


def pytest_generate_tests(metafunc):
    """Tests that take `device` run on every backend of the op that their module names as OP."""
    if "device" in metafunc.fixturenames and hasattr(metafunc.module, "OP"):
        metafunc.parametrize("device", backends_of(metafunc.module.OP), indirect=True)


@pytest.fixture(scope="session")
def emulated():
    """(GPU, proxsparse._C_cuda on it)."""
    require_compilers("g++", "nvcc")
    gpu = GPU()
    return gpu, cuda_extension(gpu)


@pytest.fixture
def cuda_on_cpu(emulated, monkeypatch):
    """The backend "cuda" serves tensors of the CPU. Returns the emulated GPU."""
    gpu, extension = emulated
    monkeypatch.setattr(cuda, "_C", extension)
    monkeypatch.setattr(cuda, "_missing", None)
    monkeypatch.setattr(cuda, "_supports", lambda tensor, n, m: None if (n, m) == (2, 4) else "not this pattern")
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    for name, value in {"seed": 0, "edit": lambda ptx: ptx, "launches": []}.items():
        monkeypatch.setattr(gpu, name, value)
    return gpu


@pytest.fixture
def triton_on_cpu(monkeypatch):
    """The backend "triton", as compiled for sm_90, serves tensors of the CPU. Returns the emulated GPU."""
    pytest.importorskip("triton")
    require_compilers("g++")
    from ptx.triton_launch import Kernel

    from proxsparse import triton_kernels
    from proxsparse.triton_kernels import adamw_prox, masked_weight, prox, wide_prox

    gpu = GPU()
    kernels = {"prox_24": prox, "prox_list": prox, "adamw_prox": adamw_prox, "masked_weight": masked_weight}
    kernels |= {"prox_wide": wide_prox}
    for name, module in kernels.items():
        monkeypatch.setattr(module, f"{name}_kernel", Kernel(gpu, getattr(module, f"{name}_kernel")))

    def with_memory(run, tensors, *arguments):
        with gpu.memory(tensors):  # their addresses are in a table
            run(tensors, *arguments)

    for name in ("prox_list_24_", "adamw_prox_list_"):
        monkeypatch.setattr(triton_kernels, name, partial(with_memory, getattr(triton_kernels, name)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that `supports` accepts tensors of the CPU; triton has read it
    return gpu


@pytest.fixture
def serve(request):
    """serve(op, (backend, device)) -> the device; the backend is chosen until the test ends.

    Skips the test if that backend does not support CALLS on this machine, with its own reason.
    """
    with contextlib.ExitStack() as stack:

        def choose(op: str, place: tuple[str, str]) -> torch.device:
            op, name, device = op_of_kernels(op), place[0], torch.device(place[1])
            if place in (("cuda", "cpu"), ("triton", "cpu")):
                request.getfixturevalue(f"{name}_on_cpu")
            reason = registry.get_kernel(op, name).supports(torch.zeros(1, 4, device=device), *CALLS[op])
            if reason is not None:
                pytest.skip(f"{name}: {reason}")
            stack.enter_context(registry.use_backend(name))
            return device

        yield choose


@pytest.fixture
def device(request, serve):
    """The device of the backend under test, which serves every call of the test."""
    return serve(request.module.OP, request.param)


@pytest.fixture
def require():
    """require(op, *arguments): skips the test if the backend under test does not serve this call."""

    def check(op: str, *arguments) -> None:
        if reason := registry.get_kernel(op, registry.chosen_backend()).supports(*arguments):
            pytest.skip(reason)

    return check


@pytest.fixture
def compiled():
    """proxsparse._C."""
    return pytest.importorskip("proxsparse._C", reason="the compiled extension is missing")
