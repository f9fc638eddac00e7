"""The Triton kernels for the GPU: the only file that imports triton_kernels (late: importing triton takes a second)."""

import importlib.util
import os

from torch import Tensor

from proxsparse.ops.registry import register_kernel


def _supports(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> str | None:
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it serves CUDA GPUs, the tensor is on {weight.device} (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
    if (n, m) not in ((2, 4), (1, 4)):
        return f"it serves the patterns 2:4 and 1:4, not {n}:{m}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; remedy: pip install triton"
    return None


@register_kernel("prox_nm_", "triton", supports=_supports)
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> None:
    from proxsparse import triton_kernels

    triton_kernels.prox_n4_(weight, reg_lambda, n, scale)
