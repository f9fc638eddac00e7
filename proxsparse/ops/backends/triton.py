"""The Triton kernels: the only file that imports triton_kernels, at the first call (importing triton takes a second).

They support NVIDIA GPUs, and AMD GPUs without inline assembly (compiled for gfx942, but never run on an AMD GPU).
"""

import importlib.util
import os

from torch import Tensor

from proxsparse.ops.registry import register_kernel
from proxsparse.ops.tuning import launch_parameters


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


def measured(kernel: str, weight: Tensor, numel: int) -> dict[str, object]:
    """The launch parameters in tuned.json for this number of weights; {} for the defaults of the kernel."""
    return dict(launch_parameters(kernel, weight.dtype, weight.device, (numel,)))


@register_kernel("prox_nm_", "triton", supports=_supports_prox)
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> None:
    from proxsparse import triton_kernels

    # The table was measured without a scale, which needs more registers.
    launch = {} if scale is not None else measured("prox", weight, weight.numel())
    triton_kernels.prox_n4_(weight, reg_lambda, n, scale, **launch)


@register_kernel("prox_nm_list_", "triton", supports=_supports)
def _prox_nm_list_(weights: list[Tensor], reg_lambdas: list[float], n: int, m: int) -> None:
    from proxsparse import triton_kernels

    launch = measured("prox", weights[0], sum(weight.numel() for weight in weights))
    triton_kernels.prox_list_n4_(weights, reg_lambdas, n, **launch)


def _supports_adamw_prox(weight: Tensor, *arguments) -> str | None:
    *_, reg_lambda, n, m, _frozen_lambda, _frozen_eps, _seed = arguments
    return _supports(weight, n, m) if reg_lambda > 0 else _supports(weight, 2, 4)  # AdamW alone has no pattern


@register_kernel("adamw_prox_", "triton", supports=_supports_adamw_prox)
def _adamw_prox_(*arguments) -> None:
    from proxsparse import triton_kernels

    *head, n, _m, frozen_lambda, frozen_eps, seed = arguments
    launch = measured("adamw_prox", head[0], head[0].numel())
    triton_kernels.adamw_prox_n4_(*head, n, frozen_lambda, frozen_eps, seed, **launch)


def _supports_masked_weight(out: Tensor, weight: Tensor, pretrained: Tensor, scale, n: int, m: int) -> str | None:
    return _supports(out, n, m)


@register_kernel("masked_weight_", "triton", supports=_supports_masked_weight)
def _masked_weight_(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    from proxsparse import triton_kernels

    triton_kernels.masked_weight_n4_(out, weight, pretrained, scale, n)
