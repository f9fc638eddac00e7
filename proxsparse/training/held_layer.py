"""A layer whose mask is held while its kept weights are trained: pruned weights stay +0.0, with zero moments."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.runtime.sharding import local, sum_of_shards
from proxsparse.training.learnable_layer import LearnableLayer


@dataclass
class HeldLayer(LearnableLayer):
    """A pruned layer in training; if it is sharded, the rows of this process."""

    held: Tensor  # bool [local rows, in_features], True = kept

    def mask(self) -> Tensor:
        """The held mask."""
        return self.held

    @torch.no_grad()
    def take_gradient_(self) -> None:
        """dL/dw = 0 for pruned weights, also if it is NaN. AdamW then leaves +0.0 as it is, with zero moments."""
        if self.weight.grad is not None:
            local(self.weight.grad).masked_fill_(~self.held, 0.0)


def hold_layers(layers: dict[str, nn.Linear], patterns: dict[str, NMPattern]) -> dict[str, HeldLayer]:
    """Layer name -> the layer with the mask that its zeros define: the n largest weights of every block.

    A block with more zeros than the pattern needs keeps the first of them, so every block keeps n weights that can be
    trained. All processes of a sharded model must call it. Raises as `require_held`.
    """
    require_held(layers, patterns)
    found = {}
    for name, layer in layers.items():
        weight, pattern = local(layer.weight.detach()), patterns[name]
        found[name] = HeldLayer(layer, layer.weight, weight, None, pattern, nm_mask(weight.abs(), pattern))
    return found


def require_held(layers: dict[str, nn.Linear], patterns: dict[str, NMPattern]) -> None:
    """Raises InputError if a layer is not N:M; names it."""
    for name, layer in layers.items():
        weight, pattern = local(layer.weight.detach()), patterns[name]
        if more := int(sum_of_shards((~pattern.feasible_blocks(weight)).sum(), layer.weight)):
            blocks = pattern.count(layer.weight.shape)
            raise InputError(
                f"layer {name} is not {pattern}: {more:,} of its {blocks:,} blocks have more than {pattern.n} non-zero "
                "weights; give a pruned model and its --pattern, or --exclude the layers that are dense"
            )
