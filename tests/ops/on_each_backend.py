"""The kernels of an op as parameters of a test: (backend, device). What needs a GPU is marked `gpu`."""

import os

import pytest

from proxsparse.ops import registry

GPU_BACKENDS = ("triton", "cuda", "gemv", "cutlass", "cusparselt")


def backends_of(op: str) -> list:
    """cpp and the reference on the CPU; triton, cuda and the reference on a GPU; triton on a CPU in its interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    found = []
    for name in registry.list_backends(op):
        on_cpu = name not in GPU_BACKENDS or (name == "triton" and interpreted)
        found += [pytest.param((name, "cpu"), id=name)] if on_cpu else []
        if name in (*GPU_BACKENDS, "reference") and not interpreted:
            label = "reference-on-gpu" if name == "reference" else name
            found.append(pytest.param((name, "cuda"), id=label, marks=pytest.mark.gpu))
    return found
