"""What layers with these patterns keep and compute."""

from torch import nn

from proxsparse.patterns import NMPattern
from proxsparse.reference.windows import expanded_features

Layers = dict[str, nn.Linear]


def numel(layers: Layers) -> int:
    """Number of weights of all layers."""
    return sum(layer.weight.numel() for layer in layers.values())


def kept_share(layers: Layers, patterns: dict[str, NMPattern]) -> float:
    """The share of the layers' weights that is kept; the remainder of a row is dense."""
    rows = {name: layer.weight.numel() // layer.in_features for name, layer in layers.items()}
    kept = [rows[name] * patterns[name].kept_features(layer.in_features) for name, layer in layers.items()]
    return sum(kept) / numel(layers)


def mean_arithmetic(layers: Layers, patterns: dict[str, NMPattern]) -> float:
    """The mean of `arithmetic` over the weights of the layers; layers without a pattern are dense."""
    counts = [layer.weight.numel() * arithmetic(layer.in_features, patterns.get(n)) for n, layer in layers.items()]
    return sum(counts) / numel(layers)


def arithmetic(in_features: int, pattern: NMPattern | None) -> float:
    """Multiplications of a packed layer, where dense (or None) is 1: 0.5 for 2:4, 0.75 for 6:8, with padding."""
    return 1.0 if pattern is None else expanded_features(in_features, pattern.m) / 2 / in_features
