"""What learns in a layer: the layer's own weight, or, under the mask, a weight v beside the model.

Dense learning (the paper's) ends with a jump: blocks that are not N:M yet are cut, and what the kept weights have
learned is put back to W0. Under the mask the model computes with m = W0 where the mask of v keeps, else +0, so every
step measures the model that would be saved, and nothing is left to jump (with --update all only these layers: the
others still return to W0). The gradient goes straight through, dL/dv = dL/dm (Bengio et al. 2013, arXiv 1308.3432,
section 4). v is only what ranks; the prox holds back, as ever, the weights that matter little beside their block.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.runtime.sharding import first_row, local, sum_of_shards


@dataclass
class LearnableLayer:
    """One layer while it learns; of a layer that is sharded, the rows that this process holds."""

    layer: nn.Linear | None  # None: dense, in a model that is not ours to change
    weight: nn.Parameter  # what the optimizer moves, like layer.weight: v under the mask, else layer.weight itself
    pretrained: Tensor  # W0, [rows here, in_features], in any dtype, on any device
    scale: Tensor | None  # c, [in_features]; None is 1
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
        """What would be kept now: bool [rows here, in_features]."""
        signs = self.own_pretrained() if self.masked else None
        return nm_mask(mask_score(local(self.weight), self.scale, signs), self.pattern)

    @torch.no_grad()
    def remask_(self) -> None:
        """m <- W0 where the mask of v keeps, else +0."""
        if self.masked:
            pretrained = self.own_pretrained()
            mask = nm_mask(mask_score(local(self.weight), self.scale, pretrained), self.pattern)
            local(self.layer.weight).copy_(torch.where(mask, pretrained, 0.0))

    def take_gradient_(self) -> None:
        """dL/dv = dL/dm."""
        if self.masked:
            self.weight.grad, self.layer.weight.grad = self.layer.weight.grad, None


def mask_score(weight: Tensor, scale: Tensor | None, pretrained: Tensor | None = None) -> Tensor:
    """|c * w|, what the mask ranks; c = 1 without a scaling.

    Given the pretrained weights it is c * w * sign(W0): the kept weight will be W0, so a learned weight of the other
    sign asks to be pruned, and the more so the larger it is.
    """
    values = weight if scale is None else weight * scale
    return values.abs() if pretrained is None else values * pretrained.sign()


@torch.no_grad()
def count_not_finite(learned: Iterable[LearnableLayer]) -> int:
    """How many of the learned weights, in all processes together, are NaN or infinite."""
    return sum(int(sum_of_shards((~local(one.weight).isfinite()).sum(), one.weight)) for one in learned)


@torch.no_grad()
def make_learnable_layers(
    layers: dict[str, nn.Linear],
    pretrained: dict[str, Tensor],
    scales: dict[str, Tensor],
    patterns: dict[str, NMPattern],
    masked: bool,
    first_masks: dict[str, Tensor],
) -> dict[str, LearnableLayer]:
    """Layer name -> what learns in it. Under the mask the layers compute from now on with W0 under their first masks.

    Args:
        pretrained: parameter name -> W0, from `distributed.place_`.
        scales: layer name -> c, [in_features]; {} ranks by magnitude.
        patterns: layer name -> N:M.
        first_masks: layer name -> bool [out_features, in_features], where a masked layer begins; a layer that is not
            there begins with the ranking of W0.
    """
    found = {}
    for name, layer in layers.items():
        scale, pattern, weight = scales.get(name), patterns[name], layer.weight
        if masked:
            weight = nn.Parameter(layer.weight.detach().clone())
            if name in first_masks:
                rows = local(weight)
                mask = first_masks[name][first_row(weight) :][: len(rows)]
                set_mask_(rows, mask.to(rows.device), scale, pattern)
        found[name] = LearnableLayer(layer, weight, pretrained[f"{name}.weight"], scale, pattern)
        found[name].remask_()
    return found


@torch.no_grad()
def set_mask_(weight: Tensor, mask: Tensor, scale: Tensor | None, pattern: NMPattern) -> None:
    """Learned weights whose mask is `mask`: |c * w| is dealt out anew in every block, the n largest to the kept ones.

    Within the kept ones, and within the others, the order of |c * w| stays; signs stay; W0 = 0 stays 0. In place.
    Only where two sizes are equal in the dtype of `weight`, or W0 is 0, may the mask begin with another of the two.

    Args:
        weight: [out_features, in_features].
        mask: bool, the same shape, n True in every block.
        scale: c, [in_features].
    """
    sizes, by_size = pattern.blocks(mask_score(weight, scale)).sort(dim=-1, descending=True, stable=True)
    kept_first = pattern.blocks(mask).gather(-1, by_size).byte().sort(dim=-1, descending=True, stable=True).indices
    dealt = torch.empty_like(sizes).scatter_(-1, by_size.gather(-1, kept_first), sizes)
    dealt = dealt.view_as(weight) * weight.sign()
    weight.copy_(dealt if scale is None else dealt / scale)
