"""The op `proxsparse::nm_mask`: keeps the n largest scores of every m."""

import torch
from torch import Tensor

from proxsparse import reference
from proxsparse.ops.prox import whole_rows
from proxsparse.ops.registry import define_op, register_kernel, select
from proxsparse.patterns import NMPattern, PatternLike, check_dtype


def _fake(score: Tensor, n: int, m: int) -> Tensor:
    return score.new_empty(score.shape, dtype=torch.bool)


@define_op("nm_mask", "(Tensor score, int n, int m) -> Tensor", _fake)
def _nm_mask(score: Tensor, n: int, m: int) -> Tensor:
    dense = whole_rows(score, m, -torch.inf)
    mask = select("nm_mask", dense, n, m).run(dense, n, m)
    return mask if mask.shape == score.shape else mask[..., : score.shape[-1]].contiguous()


@register_kernel("nm_mask", "reference")
def _reference(score: Tensor, n: int, m: int) -> Tensor:
    return reference.nm_mask(score, NMPattern(n, m))


@torch.no_grad()
def nm_mask(score: Tensor, pattern: PatternLike = "2:4") -> Tensor:
    """True for the n largest scores of every block of m along the last dimension.

    For equal scores the lower index wins; NaN counts as infinity. For a magnitude mask pass `weight.abs()`.

    Args:
        score: [..., in_features], floating point.
        pattern: "N:M" or an NMPattern; exactly N of every M scores are kept.
    Returns:
        bool, the shape of `score`; True = kept. The remainder of a row (`NMPattern.whole`) is kept.
    Raises:
        ValueError: `NMPattern.check_blocks` refuses in_features, or the dtype is not floating point.
    """
    pattern = NMPattern.parse(pattern)
    check_dtype(score, "score")
    pattern.check_blocks(score.shape, "score")
    return torch.ops.proxsparse.nm_mask(score, pattern.n, pattern.m)
