"""`adamw_prox_` of many weights, each followed by `masked_weight_`, with as few kernel launches as possible."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxsparse.ops.adamw_prox import Arguments, arithmetic_of, checked
from proxsparse.ops.masked_weight import check_masked
from proxsparse.ops.registry import Kernel, select


class Masked(NamedTuple):
    """out <- W0 under the mask of the new weight, as `masked_weight_` with the pattern of the step."""

    out: Tensor
    pretrained: Tensor
    scale: Tensor | None


@torch.no_grad()
def adamw_prox_list_(steps: Sequence[dict], masked: Sequence[Masked | None]) -> None:
    """`adamw_prox_(**step)`, then `masked_weight_` of `masked`, for every weight, in place.

    The Triton backend uses one launch for all weights of one device and one kind (dtypes, pattern, what is given);
    other backends one or two for each. The results are the same.

    Args:
        steps: all arguments of `adamw_prox_` for each weight; the weights must not overlap.
        masked: for each weight, what becomes W0 under its mask; None: nothing.
    Raises:
        ValueError: as `adamw_prox_` and `masked_weight_`; nothing has changed.
        RuntimeError: as `adamw_prox_`.
    """
    calls: list[tuple[Kernel | None, Arguments, Masked | None]] = []
    found: dict[tuple, Kernel | None] = {}  # whether a kernel supports a call depends on device and pattern
    for step, target in zip(steps, masked, strict=True):
        arguments = checked(**{"master": None, "scale": None, **step})
        if target:
            check_masked(target.out, arguments.weight, target.pretrained, target.scale, step["pattern"])
        key = arguments.weight.device, arguments.reg_lambda > 0, arguments.n, arguments.m, target is None
        if key not in found:
            found[key] = list_kernel(arguments, target)
        calls.append((found[key] if fits_list(arguments, target) else None, arguments, target))
    launches: dict[Kernel, list[tuple]] = {}
    changed: list[Tensor | None] = []
    for kernel, arguments, target in calls:
        if kernel:
            launches.setdefault(kernel, []).append((*arguments, *(target or ())[:2]))
            changed += [arguments.weight, *arguments[2:5], target and target.out]
            continue
        torch.ops.proxsparse.adamw_prox_(*arguments)
        if target:
            mask = (target.out, arguments.weight, target.pretrained, target.scale, arguments.n, arguments.m)
            torch.ops.proxsparse.masked_weight_(*mask)
    # autograd does not see writes of kernels
    torch.autograd.graph.increment_version([tensor for tensor in changed if tensor is not None])
    for kernel, group in launches.items():
        kernel.run_list(group)


def list_kernel(arguments: Arguments, target: Masked | None) -> Kernel | None:
    """The kernel that runs many such calls in few launches, or None. Raises the RuntimeError of `select`."""
    kernel = select("adamw_prox_", *arguments)
    if target is not None:
        mask = (target.out, arguments.weight, target.pretrained, target.scale, arguments.n, arguments.m)
        if select("masked_weight_", *mask).backend != kernel.backend:
            return None
    return kernel if kernel.run_list else None


def fits_list(arguments: Arguments, target: Masked | None) -> bool:
    """Whether all tensors are as the kernels need them: none has to be copied before or after the launch."""
    weight, scale, m = arguments.weight, arguments.scale, arguments.m
    if target is not None and not (target.out.dtype == target.pretrained.dtype and target.scale is scale):
        return False
    blocks = target is not None or arguments.reg_lambda > 0
    whole = not blocks or m != 4 or weight.shape[-1] % 4 == 0
    in_arithmetic = scale is None or scale.dtype == arithmetic_of(weight)
    tensors = (tensor for tensor in (*arguments[:6], *(target or ())[:2]) if tensor is not None)
    return whole and in_arithmetic and all(tensor.is_contiguous() for tensor in tensors)
