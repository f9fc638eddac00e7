"""One layer, its calibration inputs and what a method collects of them, for the tests of single methods."""

import torch
from torch import nn


def correlated_inputs(tokens, features, dtype=torch.float64, seed=0):
    """[tokens, features] from a few common factors plus noise, with feature scales that differ."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(tokens, features // 4, generator=generator, dtype=torch.float64)
    loading = torch.randn(features // 4, features, generator=generator, dtype=torch.float64)
    noise = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    scale = torch.rand(features, generator=generator, dtype=torch.float64) + 0.2
    return ((factors @ loading + noise) * scale).to(dtype)


def layer_and_statistics(statistics, inputs, out_features=6):
    torch.manual_seed(3)
    layer = nn.Linear(inputs.shape[1], out_features, bias=False, dtype=inputs.dtype).requires_grad_(False)
    collected = statistics(layer)
    for part in inputs.split(100):
        collected.add(part)
    return layer, collected
