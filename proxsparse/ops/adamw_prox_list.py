"""`adamw_prox_` of many weights, each followed by `masked_weight_`, with as few kernel launches as possible."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxsparse.ops.adamw_prox import checked_arguments
from proxsparse.ops.masked_weight import masked_weight_
from proxsparse.ops.prox import whole_rows
from proxsparse.ops.registry import Kernel, select


class Masked(NamedTuple):
    """out <- W0 under the mask of the new weight, as `masked_weight_` with the scale and pattern of the step."""

    out: Tensor
    pretrained: Tensor


@torch.no_grad()
def adamw_prox_list_(steps: Sequence[dict], masked: Sequence[Masked | None]) -> None:
    """`adamw_prox_(**step)`, then `masked_weight_(*masked)`, for every weight, in place.

    The Triton backend uses one launch for all weights of one device and one kind (dtypes, pattern, what is given);
    other backends one or two for each. The results are the same.

    Args:
        steps: all arguments of `adamw_prox_` for each weight; the weights must not overlap.
        masked: for each weight, what becomes W0 under its mask; None: nothing.
    Raises:
        ValueError: as `adamw_prox_` and `masked_weight_`; weights before it in the list may have changed.
    """
    launches: dict[Kernel, list[tuple]] = {}
    for step, target in zip(steps, masked, strict=True):
        arguments, pattern = checked_arguments(**step), step["pattern"]
        kernel = select("adamw_prox_", *arguments)
        if kernel.run_list and fits_list(kernel, arguments, target):
            launches.setdefault(kernel, []).append((*arguments, *(target or ())))
            continue
        torch.ops.proxsparse.adamw_prox_(*arguments)
        if target:
            masked_weight_(target.out, step["weight"], target.pretrained, step["scale"], pattern)
    for kernel, calls in launches.items():
        kernel.run_list(calls)
        for weight, _, *changed in calls:  # autograd does not see writes of kernels
            for tensor in (weight, *changed[:3], *changed[17:18]):
                if tensor is not None:
                    torch.autograd.graph.increment_version(tensor)


def fits_list(kernel: Kernel, arguments: tuple, target: Masked | None) -> bool:
    """Whether all tensors are as the kernels need them, so that none has to be copied before or after the launch."""
    weight, scale, n, m = arguments[0], arguments[6], *arguments[-5:-3]
    if target is not None:
        mask_arguments = (target.out, weight, target.pretrained, scale, n, m)
        dtypes = (weight.dtype, torch.bfloat16) if weight.dtype == torch.float32 else (weight.dtype,)
        same = target.out.dtype == target.pretrained.dtype and target.out.dtype in dtypes
        same &= target.out.shape == target.pretrained.shape == weight.shape
        if not same or select("masked_weight_", *mask_arguments).backend != kernel.backend:
            return False
    elif arguments[-6] == 0:  # reg_lambda: no blocks
        m = 1
    tensors = [tensor for tensor in (*arguments[:7], *(target or ())) if tensor is not None]
    in_arithmetic = scale is None or scale.dtype == (torch.float64 if weight.dtype == torch.float64 else torch.float32)
    return in_arithmetic and weight.numel() > 0 and all(whole_rows(tensor, m) is tensor for tensor in tensors)
