"""The kernels of an op as parameters of a test: (backend, device). What needs a GPU is marked `gpu`.

On a machine with several GPUs, tests run on the second one too, while the first one is the current device.
"""

import pytest
import torch

from proxsparse.ops import registry

GPU_BACKENDS = ("triton", "cuda", "gemv", "cutlass")
EMULATED = ("triton", "cuda")
ON_CPU_OPS = ("prox_nm_", "adamw_prox_", "masked_weight_", "pack_nm")  # of these
SECOND_GPU = (pytest.mark.gpu, pytest.mark.multi_gpu)


class OnGPU:
    """As much of a CUDA tensor as `supports` looks at."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = (rows, columns), dtype, torch.device("cuda", 0)

    def __len__(self) -> int:
        return self.shape[0]


def op_of_kernels(op: str) -> str:
    """A list of weights has the kernels of one weight."""
    return {"prox_nm_list_": "prox_nm_"}.get(op, op)


def backends_of(op: str) -> list:
    """cpp, the reference and compiled GPU kernels (tests/ptx) on the CPU; triton, cuda, the reference on GPUs."""
    op, found = op_of_kernels(op), []
    for name in registry.list_backends(op):
        if name not in GPU_BACKENDS or (name in EMULATED and op in ON_CPU_OPS):
            marks, label = (pytest.mark.slow, f"{name}-on-cpu") if name in EMULATED else ((), name)
            found.append(pytest.param((name, "cpu"), id=label, marks=marks))
        if name in (*GPU_BACKENDS, "reference"):
            label = "reference-on-gpu" if name == "reference" else name
            found.append(pytest.param((name, "cuda"), id=label, marks=pytest.mark.gpu))
        if name in GPU_BACKENDS:
            found.append(pytest.param((name, "cuda:1"), id=f"{name}-on-second-gpu", marks=SECOND_GPU))
    return found


def assert_alike(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Two programs that compute the same prox may round differently, and differ where two minimisers nearly tie.

    Args:
        dtype: whose rounding is allowed; None: that of `result`.
    """
    eps = torch.finfo(dtype or result.dtype).eps
    digits = 1e-10 if (dtype or result.dtype) == torch.float64 else 2e-5 + eps
    result, expected = result.double(), expected.double()
    wrong = (result - expected).abs() > digits * (expected.abs() + 0.1 * expected.abs().max())
    assert wrong.sum() <= 4 + 5e-3 * wrong.numel(), f"{wrong.sum()} of {wrong.numel()} differ"
