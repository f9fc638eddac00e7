"""The budget of kept weights of all layers, and the rounding of targets to patterns."""

import math

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.methods.walk import layers_inside
from proxsparse.models.layers import decoder_blocks
from proxsparse.patterns import NMPattern

Layers = dict[str, nn.Linear]
MOST_SUMS = 10_000  # sums of kept weights that `nearest_counts` distinguishes; takes seconds if all sizes differ


def numel(layers: Layers) -> int:
    """Number of weights of all layers."""
    return sum(layer.weight.numel() for layer in layers.values())


def budget(layers: Layers, patterns: dict[str, NMPattern]) -> float:
    """The share of the layers' weights that is kept: (sum of numel * n / m) / (sum of numel)."""
    return sum(layer.weight.numel() * patterns[name].density for name, layer in layers.items()) / numel(layers)


def by_decoder_block(model: nn.Module, layers: Layers) -> list[Layers]:
    """The layers of each decoder block, in model order; decoder blocks without layers are left out."""
    blocks = [layers_inside(block, layers) for block in decoder_blocks(model)]
    return [block for block in blocks if block]


def nearest_counts(targets: list[float], sizes: list[int], pattern: NMPattern) -> list[int]:
    """The counts n_b nearest to the targets among those nearest to the budget:

        min sum_b (n_b - target_b)^2   over all n_b in 1 .. m-1 with the smallest |sum_b size_b n_b - n sum_b size_b|

    Solved by dynamic programming over the decoder blocks: for every reachable sum of size_b n_b it stores the best
    counts. If all decoder blocks have the same size, the budget is met exactly.

    Args:
        targets: weights to keep of every m, per decoder block.
        sizes: number of weights of each decoder block. The unit is their greatest common divisor, or a coarser one if
            there would be more than MOST_SUMS sums.
    """
    unit = max(math.gcd(*sizes), sum(sizes) * (pattern.m - 1) // MOST_SUMS)
    sizes = [round(size / unit) for size in sizes]
    ways = {0: (0.0, None)}  # sum of size_b n_b -> (squared distance from the targets, (last n, (previous n, ...)))
    for wanted, size in zip(targets, sizes, strict=True):
        longer = {}
        for kept, (distance, before) in ways.items():
            for n in range(1, pattern.m):
                way = (distance + (n - wanted) ** 2, (n, before))
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
    """The scores rescaled linearly to [0, 1]: float64 [decoder blocks]. Raises InputError if they are all equal."""
    scores = torch.tensor(scores, dtype=torch.float64)
    low, high = scores.min(), scores.max()
    if not low < high:
        raise InputError(
            f"the {len(scores)} decoder blocks with layers to prune all have the score {low:.4g}, so they cannot be "
            "ranked; choose uniform, exclude fewer layers, or with owl lower outlier_factor"
        )
    return (scores - low) / (high - low)


def mean_over_weights(values: Tensor, blocks: list[Layers]) -> Tensor:
    """The mean of one value per decoder block, weighted by the number of weights."""
    weights = torch.tensor([numel(block) for block in blocks], dtype=torch.float64)
    return (values * weights).sum() / weights.sum()
