"""A layer whose mask is held while its kept weights are trained: pruned weights stay +0.0, with zero moments."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.mask_files import read_rows
from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.runtime.sharding import first_row, local, sum_of_shards
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


def hold_layers(
    layers: dict[str, nn.Linear], patterns: dict[str, NMPattern], masks: dict[str, Tensor] | None = None
) -> dict[str, HeldLayer]:
    """Layer name -> the layer with its mask; without `masks`, that of its zeros: the n largest weights of every block.

    A block with more zeros than the pattern needs keeps the first of them, so every block keeps n weights that can be
    trained. All processes of a sharded model must call it. Raises InputError as `require_held`.

    masks: layer name -> bool, True = kept, the rows of this process.
    """
    require_held(layers, patterns)
    found = {}
    for name, layer in layers.items():
        weight, pattern = local(layer.weight.detach()), patterns[name]
        mask = nm_mask(weight.abs(), pattern) if masks is None else masks[name].to(weight.device)
        found[name] = HeldLayer(layer, layer.weight, weight, None, pattern, mask)
    return found


def recorded_rows(path: Path, layers: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """Layer name -> the rows of this process of its mask in masks.safetensors, on the device of its weight."""
    rows = {}
    for name, layer in layers.items():
        first = first_row(layer.weight)
        rows[name] = slice(first, first + len(local(layer.weight)))
    return {name: mask.to(layers[name].weight.device) for name, mask in read_rows(path, rows).items()}


def require_held(layers: dict[str, nn.Linear], patterns: dict[str, NMPattern]) -> None:
    """Raises InputError, which names the layer, if one is not N:M."""
    for name, layer in layers.items():
        weight, pattern = local(layer.weight.detach()), patterns[name]
        if more := int(sum_of_shards((~pattern.feasible_blocks(weight)).sum(), layer.weight)):
            blocks = pattern.count(layer.weight.shape)
            raise InputError(
                f"layer {name} is not {pattern}: {more:,} of its {blocks:,} blocks have more than {pattern.n} non-zero "
                "weights; give a pruned model and its --pattern, or --exclude the layers that are dense"
            )
