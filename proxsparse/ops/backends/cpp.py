"""The C++ kernels for the CPU: the only file that imports proxsparse._C."""

import importlib

import torch
from torch import Tensor

from proxsparse.ops.registry import register_kernel

try:
    _C, _missing = importlib.import_module("proxsparse._C"), None
except ImportError as error:
    _C = None
    _missing = f"the compiled extension is missing ({error}); remedy: apt install g++ python3-dev, then install again"


def _supports(tensor: Tensor, n: int, m: int) -> str | None:
    if _missing:
        return _missing
    if tensor.device.type != "cpu":
        return f"it serves the CPU, the tensor is on {tensor.device}"
    if m != 4 or n not in (1, 2):
        return f"it serves the patterns 2:4 and 1:4, not {n}:{m}"
    return None


def _supports_prox(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> str | None:
    return _supports(weight, n, m)


@register_kernel("prox_nm_", "cpp", supports=_supports_prox)
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> None:
    if scale is not None:  # in the kernel's arithmetic: fp64 for fp64, fp32 otherwise
        scale = scale.to(torch.float64 if weight.dtype == torch.float64 else torch.float32).contiguous()
    _C.prox_n4_(weight, reg_lambda, n, scale)


@register_kernel("nm_mask", "cpp", supports=_supports)
def _nm_mask(score: Tensor, n: int, m: int) -> Tensor:
    mask = torch.empty(score.shape, dtype=torch.bool)
    _C.mask_n4(score, n, mask)
    return mask


def _supports_adamw_prox(weight: Tensor, *arguments) -> str | None:
    *_, reg_lambda, n, m, _frozen_lambda, _frozen_eps, _seed = arguments
    if _C is not None and not hasattr(_C, "adamw_prox_"):
        return "the compiled extension is older than this op; remedy: install again"
    return _supports(weight, n, m) if reg_lambda > 0 else _supports(weight, 2, 4)  # AdamW alone knows no pattern


@register_kernel("adamw_prox_", "cpp", supports=_supports_adamw_prox)
def _adamw_prox_(*arguments) -> None:
    *head, n, _m, frozen_lambda, frozen_eps, seed = arguments
    _C.adamw_prox_(*head, n, frozen_lambda, frozen_eps, seed)
