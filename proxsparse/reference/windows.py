"""The patterns (m - 2):m with an even m, as 2:4 over more columns, which every 2:4 kernel can multiply.

A block of m columns is covered by m/2 - 1 windows of four columns that overlap by two: 0-3, 2-5, ..., (m-4)-(m-1). For
6:8, `expand` copies x_0 ... x_7 to the windows (x_0 x_1 x_2 x_3) (x_2 x_3 x_4 x_5) (x_4 x_5 x_6 x_7), and `deal` puts
every kept weight into one of the windows with its column, at most two weights into each, so that

    W x = deal(W) expand(x),    deal(W) is 2:4,    expanded columns = (m/2 - 1) * 4 / m * in_features.

Dealing from left to right always succeeds. A window takes what its first pair of columns still has (at most two
weights), then from its second pair. If a window is not full, all weights up to its end are dealt, and every pair after
it has a window of its own, the one that ends with it. If all windows are full, they hold m - 2 weights, which are all.

The remainder of in_features, fewer than m columns, is dense: one window (a, b, 0, 0) for each pair. Columns of zeros
follow, up to the largest multiple of 64, 32, 16 or 8 that adds at most 1/32. For 2:4 without a remainder both functions
return their argument. The equality of W x is that of arXiv 2603.05232 (SlideSparse).
"""

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse.patterns import NMPattern
from proxsparse.reference.pack import refuse_infeasible


def expanded_features(in_features: int, m: int) -> int:
    """The number of columns of `deal` and `expand`."""
    if m == 4 and in_features % 4 == 0:
        return in_features
    width = in_features // m * (2 * m - 4) + in_features % m * 2
    return next(width + -width % step for step in (64, 32, 16, 8, 4) if 32 * (-width % step) <= width)


def expand(x: Tensor, m: int) -> Tensor:
    """[..., in_features] -> [..., expanded_features]: every column in all windows that cover it."""
    in_features = x.shape[-1]
    if expanded_features(in_features, m) == in_features:
        return x
    blocks = x[..., : in_features - in_features % m].unflatten(-1, (in_features // m, m))
    return with_remainder(blocks.unfold(-1, 4, 2), x, m)


def with_remainder(windows: Tensor, x: Tensor, m: int) -> Tensor:
    """windows [..., blocks, m/2 - 1, 4] of x, then the pairs of its remainder, then zeros: [..., expanded_features]."""
    remainder = x.shape[-1] % m
    pairs = x[..., x.shape[-1] - remainder :].unflatten(-1, (remainder // 2, 2))
    joined = torch.cat([windows.flatten(-3), functional.pad(pairs, (0, 2)).flatten(-2)], -1)
    return functional.pad(joined, (0, expanded_features(x.shape[-1], m) - joined.shape[-1]))


def deal(weight: Tensor, m: int) -> Tensor:
    """[..., in_features] with at most m - 2 nonzeros in a block -> 2:4 weight [..., expanded_features].

    Raises ValueError for a block with more nonzeros; the message names the first one.
    """
    pattern = NMPattern(m - 2, m)
    if expanded_features(weight.shape[-1], m) == weight.shape[-1]:
        return weight
    refuse_infeasible(weight, pattern)
    blocks = pattern.blocks(weight)
    left, windows = blocks != 0, []
    for first in range(0, m - 2, 2):
        window = left[..., first : first + 4]
        taken = window & (window.cumsum(-1) <= 2)
        windows.append(torch.where(taken, blocks[..., first : first + 4], 0))
        window &= ~taken
    return with_remainder(torch.stack(windows, -2), weight, m)


def fold(weight: Tensor, in_features: int, m: int) -> Tensor:
    """The inverse of `deal`: [..., expanded_features] -> [..., in_features]."""
    if weight.shape[-1] == in_features:
        return weight
    columns = expand(torch.arange(in_features, device=weight.device), m)
    return weight.new_zeros(*weight.shape[:-1], in_features).index_add(-1, columns, weight)
