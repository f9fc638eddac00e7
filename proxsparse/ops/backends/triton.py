"""The Triton kernels: the only file that imports triton_kernels, at the first call (importing triton takes a second).

They support NVIDIA GPUs, and AMD GPUs without inline assembly (compiled for gfx942, but never run on an AMD GPU).
"""

import importlib.util
import os

from torch import Tensor

from proxsparse.ops.registry import register_kernel


def _supports(weight: Tensor, n: int, m: int) -> str | None:
    if weight.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"supports only CUDA GPUs, but the tensor is on {weight.device} (slow on a CPU: TRITON_INTERPRET=1)"
    if (n, m) not in ((2, 4), (1, 4)):
        return f"supports the patterns 2:4 and 1:4, not {n}:{m}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; remedy: pip install triton"
    return None


def _supports_prox(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> str | None:
    return _supports(weight, n, m)


@register_kernel("prox_nm_", "triton", supports=_supports_prox)
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> None:
    from proxsparse import triton_kernels

    triton_kernels.prox_n4_(weight, reg_lambda, n, scale)


@register_kernel("prox_nm_list_", "triton", supports=_supports)
def _prox_nm_list_(weights: list[Tensor], reg_lambdas: list[float], n: int, m: int) -> None:
    from proxsparse import triton_kernels

    triton_kernels.prox_list_n4_(weights, reg_lambdas, n)


def _supports_adamw_prox(weight: Tensor, *arguments) -> str | None:
    *_, reg_lambda, n, m, _frozen_lambda, _frozen_eps, _seed = arguments
    return _supports(weight, n, m) if reg_lambda > 0 else _supports(weight, 2, 4)  # AdamW alone has no pattern


@register_kernel("adamw_prox_", "triton", supports=_supports_adamw_prox)
def _adamw_prox_(*arguments) -> None:
    from proxsparse import triton_kernels

    *head, n, _m, frozen_lambda, frozen_eps, seed = arguments
    triton_kernels.adamw_prox_n4_(*head, n, frozen_lambda, frozen_eps, seed)


def _supports_masked_weight(out: Tensor, weight: Tensor, pretrained: Tensor, scale, n: int, m: int) -> str | None:
    return _supports(out, n, m)


@register_kernel("masked_weight_", "triton", supports=_supports_masked_weight)
def _masked_weight_(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    from proxsparse import triton_kernels

    triton_kernels.masked_weight_n4_(out, weight, pretrained, scale, n)
