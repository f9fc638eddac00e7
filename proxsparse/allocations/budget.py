"""What layers with these patterns keep and compute."""

import itertools
import math

from torch import nn

from proxsparse.patterns import WINDOWED, NMPattern
from proxsparse.reference.windows import expanded_features

Layers = dict[str, nn.Linear]


def numel(layers: Layers) -> int:
    return sum(layer.weight.numel() for layer in layers.values())


def kept_share(layers: Layers, patterns: dict[str, NMPattern]) -> float:
    """The share of the layers' weights that is kept; the remainder of a row is dense."""
    rows = {name: layer.weight.numel() // layer.in_features for name, layer in layers.items()}
    kept = [rows[name] * patterns[name].kept_features(layer.in_features) for name, layer in layers.items()]
    return sum(kept) / numel(layers)


def packed_cost(layers: Layers, patterns: dict[str, NMPattern]) -> tuple[float, float]:
    """The means of `arithmetic` and of the bytes in bf16 over the weights; layers without a pattern are dense."""
    shares = {name: arithmetic(layer.in_features, patterns.get(name)) for name, layer in layers.items()}
    total = numel(layers)
    # a packed value of 2 bytes has a position of 2 bits
    sizes = {name: 2.0 if share == 1 else 2 * share * 9 / 8 for name, share in shares.items()}
    return tuple(sum(layers[name].weight.numel() * each[name] for name in layers) / total for each in (shares, sizes))


def arithmetic(in_features: int, pattern: NMPattern | None) -> float:
    """Multiplications of a packed layer, where dense (or None) is 1: 0.5 for 2:4, 0.75 for 6:8, with padding.

    Other patterns are packed as the first of WINDOWED that all their masks fit, such as 3:4 as 6:8, or stay dense.
    """
    for packed in WINDOWED if pattern else ():
        if packed.fits(in_features) and always_fits(pattern, packed):
            return expanded_features(in_features, packed.m) / 2 / in_features
    return 1.0


def always_fits(pattern: NMPattern, packed: NMPattern) -> bool:
    """Whether every block of `packed` has at most packed.n nonzeros under every mask of the pattern."""
    n, m = pattern.n, pattern.m

    def most(start: int, stop: int) -> int:
        ends = [start, *range((start // m + 1) * m, stop, m), stop]  # of the parts of blocks of m
        return sum(min(n, end - begin) for begin, end in itertools.pairwise(ends))

    return all(most(start, start + packed.m) <= packed.n for start in range(0, math.lcm(m, packed.m), packed.m))
