"""The Triton kernels: the only file that imports triton_kernels, at the first call (importing triton takes a second).

They support NVIDIA GPUs, and AMD GPUs without inline assembly (compiled for gfx942, but never run on an AMD GPU).
"""

import importlib.util
import os
from types import ModuleType

from torch import Tensor

from proxsparse.ops.adamw_prox import pattern_of
from proxsparse.ops.registry import register_kernel
from proxsparse.patterns import WINDOWED, NMPattern


def _supports(weight: Tensor, n: int, m: int) -> str | None:
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"supports only CUDA GPUs, but the tensor is on {weight.device} (slow on a CPU: TRITON_INTERPRET=1)"
    if NMPattern(n, m) not in WINDOWED:
        return f"supports the patterns {', '.join(map(str, WINDOWED))}, not {n}:{m}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; remedy: pip install triton"
    return None


def kernels() -> ModuleType:
    from proxsparse import triton_kernels

    return triton_kernels


def _prox_nm_list_(weights: list[Tensor], reg_lambdas: list[float], n: int, m: int) -> None:
    if m == 4:
        kernels().prox_list_24_(weights, reg_lambdas)
    else:  # one launch for each
        for weight, reg_lambda in zip(weights, reg_lambdas, strict=True):
            kernels().prox_wide_(weight, reg_lambda, m)


@register_kernel(
    "prox_nm_",
    "triton",
    supports=lambda weight, reg_lambda, n, m: _supports(weight, n, m),
    run_list=_prox_nm_list_,
)
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int) -> None:
    if m == 4:
        kernels().prox_24_(weight, reg_lambda)
    else:
        kernels().prox_wide_(weight, reg_lambda, m)


def _adamw_prox_list_(calls: list[tuple]) -> None:
    kernels().adamw_prox_list_([kernels().Step(*arguments) for arguments in calls])


@register_kernel(
    "adamw_prox_",
    "triton",
    supports=lambda weight, *others: _supports(weight, *pattern_of(others)),
    run_list=_adamw_prox_list_,
)
def _adamw_prox_(*arguments) -> None:
    _adamw_prox_list_([arguments])


@register_kernel("masked_weight_", "triton", supports=lambda out, weight, pretrained, scale, n, m: _supports(out, n, m))
def _masked_weight_(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    kernels().masked_weight_nm_(out, weight, pretrained, scale, m)
