"""The backend under test as the fixture `device`, the CUDA kernels built for this CPU."""

import os

import pytest
import torch
from ops.on_cpu import build, replace_extension
from ops.on_each_backend import backends_of

from proxsparse.ops import registry

ZEROS = torch.zeros(1, 4)
# What `supports` is asked of a small tensor and these arguments.
CALLS = {
    "prox_nm_": (1.0, 2, 4, None),
    "prox_nm_list_": (2, 4),
    "adamw_prox_": (*[ZEROS] * 3, None, None, None, 3, 0.05, 0.9, 0.99, 1e-6, 0.1, 0.3, 2, 4, 0.0, 0.1, None),
    "nm_mask": (2, 4),
    "masked_weight_": (ZEROS, ZEROS, None, 2, 4),
    "pack_nm": (2, 4),
}


def pytest_generate_tests(metafunc):
    """Tests that take `device` run on every backend of the op that their module names as OP."""
    if "device" in metafunc.fixturenames and hasattr(metafunc.module, "OP"):
        metafunc.parametrize("device", backends_of(metafunc.module.OP), indirect=True)


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory):
    """The kernels of csrc/cuda as C functions, built for this CPU once for all test processes."""
    folder = tmp_path_factory.getbasetemp()
    return build(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture
def cuda_on_cpu(cuda_library, monkeypatch):
    """The backend "cuda" serves tensors of the CPU."""
    replace_extension(cuda_library, monkeypatch)


@pytest.fixture
def serve(request, on_backend):
    """serve(op, (backend, device)) -> the device; the backend is chosen until the test ends."""

    def choose(op: str, place: tuple[str, str]) -> torch.device:
        if place == ("cuda", "cpu"):
            request.getfixturevalue("cuda_on_cpu")
        return on_backend(op, place, *CALLS[op])

    return choose


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
