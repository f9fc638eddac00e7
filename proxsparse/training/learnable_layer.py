"""The learned weight of a layer: the layer's own weight ("dense"), or a separate weight v ("masked").

Dense (the paper): the weights are learned, then projected: blocks that are not N:M are pruned, and the kept weights
are reset to W0. This projection changes the model at the end. Masked: the model computes with m = W0 where the mask of
v keeps, else +0, so every step measures the model that would be saved. The gradient is passed straight through, dL/dv =
dL/dm (Bengio et al. 2013, arXiv 1308.3432, section 4). v only determines the mask; the prox shrinks weights that are
small relative to their block.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.ops import masked_weight_, nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.reference import mask_score
from proxsparse.runtime.sharding import is_sharded, local, sum_of_shards


@dataclass
class LearnableLayer:
    """A layer in training; if it is sharded, the rows of this process."""

    layer: nn.Linear | None  # None: dense, without a layer to update
    weight: nn.Parameter  # the learned weight: v, sharded like layer.weight, if masked, else layer.weight itself
    pretrained: Tensor  # W0, [local rows, in_features], in any dtype, on any device
    scale: Tensor | None  # c, [in_features]; None: c = 1
    pattern: NMPattern

    @property
    def masked(self) -> bool:
        """Whether the layer computes with W0 under the mask."""
        return self.layer is not None and self.weight is not self.layer.weight

    def own_pretrained(self) -> Tensor:
        """W0 in the dtype and on the device of the weight."""
        return self.pretrained.to(local(self.weight))

    @torch.no_grad()
    def mask(self) -> Tensor:
        """The current mask: bool [local rows, in_features], True = kept."""
        signs = self.own_pretrained() if self.masked else None
        return nm_mask(mask_score(local(self.weight), self.scale, signs), self.pattern)

    @torch.no_grad()
    def remask_(self) -> None:
        """m <- W0 where the mask of v keeps, else +0."""
        if self.masked:
            weight = local(self.weight)
            pretrained = self.pretrained.to(weight.device)
            masked_weight_(local(self.layer.weight), weight, pretrained, self.scale, self.pattern)

    def take_gradient_(self) -> None:
        """dL/dv = dL/dm."""
        if self.masked:
            self.weight.grad, self.layer.weight.grad = self.layer.weight.grad, None


@contextmanager
def dense(model: nn.Module, learned: Iterable[LearnableLayer]) -> Iterator[nn.Module]:
    """Within the block, the masked layers of the model have their pretrained weights.

    W0 itself takes the place of a weight with its dtype and device; otherwise W0 is copied into the weight.
    """
    with ExitStack() as undo:
        for layer in learned:
            weight, pretrained = layer.layer.weight, layer.pretrained
            if is_sharded(weight) or (pretrained.dtype, pretrained.device) != (weight.dtype, weight.device):
                undo.callback(layer.remask_)
                local(weight.detach()).copy_(pretrained)
            else:
                undo.callback(setattr, weight, "data", weight.data)
                weight.data = pretrained
        yield model


def count_not_finite(learned: Iterable[LearnableLayer]) -> int:
    """Number of learned weights that are NaN or infinite, in all processes together."""
    return sum(int(sum_of_shards((~local(layer.weight).isfinite()).sum(), layer.weight)) for layer in learned)


def make_learnable_layers(
    layers: dict[str, nn.Linear],
    pretrained: dict[str, Tensor],
    scales: dict[str, Tensor],
    patterns: dict[str, NMPattern],
    masked: bool,
    short_dtype: torch.dtype | None = None,
) -> dict[str, LearnableLayer]:
    """Layer name -> its learnable layer. If `masked`, the weights of the layers become W0 under the mask of W0.

    Where W0 is in `short_dtype`, these weights and their gradients are too: autocast would cast them to it, and they
    need half the memory. Not if they are sharded, because FSDP2 keeps the dtype that it has seen first.

    Args:
        pretrained: parameter name -> W0, from `sharding.shard_and_move_`.
        scales: layer name -> c, [in_features]; {}: c = 1.
        patterns: layer name -> N:M.
        short_dtype: that of autocast, if every step has one forward pass: several gradients are summed in fp32.
    """
    found = {}
    for name, layer in layers.items():
        scale, pattern, weight = scales.get(name), patterns[name], layer.weight
        if masked:
            weight = nn.Parameter(layer.weight.detach().clone())
            if pretrained[f"{name}.weight"].dtype == short_dtype and not is_sharded(layer.weight):
                layer.weight.data = layer.weight.detach().to(short_dtype)
                weight.grad_dtype = short_dtype
        found[name] = LearnableLayer(layer, weight, pretrained[f"{name}.weight"], scale, pattern)
        found[name].remask_()
    return found
