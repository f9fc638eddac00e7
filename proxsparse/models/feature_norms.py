"""Statistics of the inputs of a layer: the hook that adds them, and their norms."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxsparse.runtime.device import full_precision


def make_hook(statistics) -> Callable:
    """A forward pre-hook that adds the inputs of a layer to the statistics."""

    def hook(layer: nn.Module, args: tuple) -> None:
        with full_precision(args[0]):
            statistics.add(args[0].flatten(0, -2))

    return hook


class FeatureNorms:
    """||X_j||_2 of every input feature j of a layer, over all calibration tokens."""

    def __init__(self, layer: nn.Linear, device: torch.device | None = None):
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        self.tokens = 0
        self.sums = torch.zeros(layer.in_features, dtype=dtype, device=device or layer.weight.device)

    def add(self, inputs: Tensor) -> None:
        """inputs: [tokens, in_features]"""
        self.tokens += len(inputs)
        self.sums += inputs.to(self.sums.dtype).square().sum(0)

    def norms(self) -> Tensor:
        """[in_features]"""
        return self.sums.sqrt()
