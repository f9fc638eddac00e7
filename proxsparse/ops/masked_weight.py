"""The op `proxsparse::masked_weight_`: the pretrained weight under the mask of a learned weight, in one pass."""

import torch
from torch import Tensor

from proxsparse import reference
from proxsparse.ops.adamw_prox import arithmetic_of, check_tensor
from proxsparse.ops.prox import whole_rows, write_back
from proxsparse.ops.registry import define_op, register_kernel, select
from proxsparse.patterns import FLOAT_DTYPES, NMPattern, PatternLike, check_dtype


@define_op("masked_weight_", "(Tensor(a!) out, Tensor weight, Tensor pretrained, Tensor? scale, int n, int m) -> ()")
def _masked_weight_(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    if out.numel() == 0:
        return
    if (weight.dtype, pretrained.dtype) != (torch.float32, torch.bfloat16):
        pretrained = pretrained.to(out.dtype)
    scale = None if scale is None else whole_rows(scale.to(arithmetic_of(weight)), m, 1.0)
    # the score of the padding is that of -infinity times the sign of 1: the lowest
    arguments = (whole_rows(weight, m, -torch.inf), whole_rows(pretrained, m, 1.0), scale, n, m)
    dense = whole_rows(out if out.dtype == pretrained.dtype else torch.empty_like(pretrained), m)
    select("masked_weight_", dense, *arguments).run(dense, *arguments)
    write_back(out, dense)


@register_kernel("masked_weight_", "reference")
def _reference(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    out.copy_(reference.masked_weight(weight, pretrained, scale, NMPattern(n, m)))


@torch.no_grad()
def masked_weight_(
    out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None = None, pattern: PatternLike = "2:4"
) -> Tensor:
    """out <- W0 where the score c * w * sign(W0) is among the n largest of its block of m, else +0.0; in one pass.

    The mask is that of `nm_mask`: for equal scores the lower index wins, and NaN counts as infinity. With the
    sign of W0, a weight whose sign differs from that of W0 is pruned first. The score is computed in fp64 for a
    float64 weight and in fp32 otherwise, and is not rounded.

    Args:
        out: [..., in_features], shape, dtype and device of the weight, or bfloat16 for a float32 weight; overwritten.
            All tensors may have any strides.
        weight: w, the learned weight, float32, float64, bfloat16 or float16.
        pretrained: W0, the shape of the weight, any of these dtypes; first converted to the dtype of `out`.
        scale: c, [in_features], the scaling of the input features, positive; None means 1.
        pattern: "N:M" or an NMPattern; exactly N of every M weights are kept.
    Returns:
        `out`. The remainder of a row (`NMPattern.whole`) is that of W0.
    Raises:
        ValueError: `NMPattern.check_blocks` refuses in_features, or a tensor does not fit the weight.
    """
    pattern = check_masked(out, weight, pretrained, scale, pattern)
    torch.ops.proxsparse.masked_weight_(out, weight, pretrained, scale, pattern.n, pattern.m)
    return out


def check_masked(
    out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, pattern: PatternLike
) -> NMPattern:
    """The parsed pattern. Raises the errors of `masked_weight_`."""
    pattern = NMPattern.parse(pattern)
    check_dtype(weight, "weight")
    short = (torch.bfloat16,) if weight.dtype == torch.float32 else ()
    check_tensor(out, "out", weight.shape, (weight.dtype, *short), weight)
    check_tensor(pretrained, "pretrained", weight.shape, FLOAT_DTYPES, weight)
    if scale is not None:
        check_tensor(scale, "scale", weight.shape[-1:], FLOAT_DTYPES, weight)
    pattern.check_blocks(weight.shape)
    return pattern
