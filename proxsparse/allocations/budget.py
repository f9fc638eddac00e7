"""One budget of kept weights for all layers, and the rounding of wishes to patterns."""

import math

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.methods.walk import layers_inside
from proxsparse.models.layers import decoder_blocks
from proxsparse.patterns import NMPattern

Layers = dict[str, nn.Linear]
MOST_SUMS = 10_000  # sums of kept weights that `nearest_counts` tells apart: some seconds where all sizes differ


def budget(layers: Layers, patterns: dict[str, NMPattern]) -> float:
    """The share of the layers' weights that the patterns keep: sum of numel * n / m over sum of numel."""
    return sum(layer.weight.numel() * patterns[name].density for name, layer in layers.items()) / numel(layers)


def numel(layers: Layers) -> int:
    """How many weights the layers have in all."""
    return sum(layer.weight.numel() for layer in layers.values())


def by_decoder_block(model: nn.Module, layers: Layers) -> list[Layers]:
    """The layers of each decoder block, in model order, without decoder blocks that have none of them."""
    blocks = [layers_inside(block, layers) for block in decoder_blocks(model)]
    return [block for block in blocks if block]


def merge_layers(blocks: list[Layers]) -> Layers:
    """The layers of all decoder blocks in one."""
    return {name: layer for block in blocks for name, layer in block.items()}


def nearest_counts(wishes: list[float], sizes: list[int], pattern: NMPattern) -> list[int]:
    """The n_b nearest to the wishes w_b among those nearest to the budget:

        min sum_b (n_b - w_b)^2   over all n_b in 1 .. m-1 with the least |sum_b size_b n_b - n sum_b size_b|

    Where all decoder blocks have one size the budget is met exactly, and this is: round and clamp the wishes, then move
    those nearest to a rounding boundary until the sum is right. With other sizes it can take moves that partly cancel
    (a decoder block of size 3 up, one of size 2 down), so all sums that can be reached are looked at, decoder block by
    decoder block, and each keeps its best way. Of equally good ways the one that keeps more in early ones is taken.

    Args:
        sizes: weights of each decoder block. They are counted in their common divisor, or, where that would give more
            than MOST_SUMS sums, rounded to a coarser unit.
    """
    unit = max(math.gcd(*sizes), sum(sizes) * (pattern.m - 1) // MOST_SUMS)
    sizes = [round(size / unit) for size in sizes]
    ways = {0: (0.0, None)}  # sum of size_b n_b so far -> (squared distance from the wishes, (last n, (n before, ...)))
    for wish, size in zip(wishes, sizes, strict=True):
        longer = {}
        for kept, (distance, before) in ways.items():
            for n in range(1, pattern.m):
                way = (distance + (n - wish) ** 2, (n, before))
                longer[kept + size * n] = min(way, longer.get(kept + size * n, way))
        ways = longer
    target = pattern.n * sum(sizes)
    best = min(ways, key=lambda kept: (abs(kept - target), ways[kept]))
    counts, link = [], ways[best][1]
    while link:
        n, link = link
        counts.append(n)
    return counts[::-1]


def relative(scores: list[float]) -> Tensor:
    """[decoder blocks], float64: 0 for the lowest score, 1 for the highest, linear between."""
    scores = torch.tensor(scores, dtype=torch.float64)
    low, high = scores.min(), scores.max()
    if not low < high:
        raise InputError(
            f"all {len(scores)} decoder blocks score {low:.4g}, so none can keep more than another; choose uniform, or "
            "change what they are ranked by (with owl: a lower outlier_factor)"
        )
    return (scores - low) / (high - low)


def mean_over_weights(values: Tensor, blocks: list[Layers]) -> Tensor:
    """The mean of a value per decoder block, each as often as it has weights: wishes so centred meet the budget."""
    weights = torch.tensor([numel(block) for block in blocks], dtype=torch.float64)
    return (values * weights).sum() / weights.sum()


def check_choice(blocks: list[Layers], pattern: NMPattern) -> None:
    """Raises InputError if no decoder block could get another pattern than the given one."""
    if not 1 < pattern.n < pattern.m - 1:
        raise InputError(
            f"{pattern} leaves no choice: a decoder block keeps at least 1 and at most m - 1 of every m, and what one "
            "gains another must lose; take a pattern with 1 < n < m - 1, such as 2:4, or uniform"
        )
    if len(blocks) < 2:
        raise InputError(
            f"{len(blocks)} decoder block with layers to prune, and a budget is shared out between several; choose "
            "uniform, or exclude fewer layers"
        )
