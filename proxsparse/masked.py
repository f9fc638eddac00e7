"""Learning under the mask: the forward pass sees W0 under the current mask, the gradient goes straight through to v.

Dense learning ends with a jump: blocks that are not N:M yet are cut, and what the kept weights have learned is put back
to W0. Here every step measures the model that would be saved, so nothing is left to jump (with --update all only these
layers: the others still return to W0). The learned weights are only what ranks; the prox holds back, as ever, the
weights that matter little beside their block.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern


def learned_weight(layer: nn.Linear) -> nn.Parameter:
    """The parameter that the optimizer moves, [out_features, in_features]: under a mask another than `layer.weight`."""
    return layer.parametrizations.weight.original if parametrize.is_parametrized(layer, "weight") else layer.weight


def pretrained_weight(layer: nn.Linear) -> Tensor:
    """W0 of a layer that learns under a mask; of any other `layer.weight`, which is W0 until it learns."""
    return layer.parametrizations.weight[0].pretrained if parametrize.is_parametrized(layer, "weight") else layer.weight


def ranking(weight: Tensor, scale: Tensor | None, pretrained: Tensor | None = None) -> Tensor:
    """|c * w|, what the mask ranks; c = 1 without a metric.

    Given the pretrained weights it is c * w * sign(W0): the kept weight will be W0, so a learned weight of the other
    sign asks to be pruned, and the more so the larger it is.
    """
    values = weight if scale is None else weight * scale
    return values.abs() if pretrained is None else values * pretrained.sign()


class StraightThrough(torch.autograd.Function):
    """(w, m) -> m, with dL/dw = dL/dm (Bengio et al. 2013, arXiv 1308.3432, section 4)."""

    @staticmethod
    def forward(_context, _learned: Tensor, masked: Tensor) -> Tensor:
        return masked.view_as(masked)

    @staticmethod
    def backward(_context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class MaskedWeight(nn.Module):
    """learned w -> W0 where c * w * sign(W0) is among the n largest of its block, else 0."""

    def __init__(self, pretrained: Tensor, scale: Tensor | None, pattern: NMPattern):
        super().__init__()
        self.pretrained, self.scale, self.pattern = pretrained, scale, pattern  # no buffers: they are not to be saved

    @torch.no_grad()
    def masked(self, learned: Tensor) -> Tensor:
        """[out_features, in_features]"""
        mask = nm_mask(ranking(learned, self.scale, self.pretrained), self.pattern)
        return torch.where(mask, self.pretrained, 0.0)

    def forward(self, learned: Tensor) -> Tensor:
        return StraightThrough.apply(learned, self.masked(learned))


@torch.no_grad()
def learn_under_masks_(
    layers: dict[str, nn.Linear], masks: dict[str, Tensor], metric: dict[str, Tensor], pattern: NMPattern
) -> None:
    """From now on the layers compute with W0 under the mask of their learned weights; first it is that of `masks`.

    Args:
        masks: layer name -> bool [out_features, in_features]; a layer that is not there starts from W0's own ranking.
        metric: layer name -> c, [in_features]; {} ranks by magnitude.
    """
    for name, layer in layers.items():
        scale, pretrained = metric.get(name), layer.weight.detach().clone()
        if name in masks:
            start_from_(layer.weight, masks[name].to(pretrained.device), scale, pattern)
        masked = MaskedWeight(pretrained, scale, pattern)
        parametrize.register_parametrization(layer, "weight", masked, unsafe=True)  # unsafe: its checks run the mask


@torch.no_grad()
def end_learning_under_masks_(layers: dict[str, nn.Linear]) -> None:
    """Ordinary layers again; their weights are the learned ones."""
    for layer in layers.values():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


@torch.no_grad()
def start_from_(weight: Tensor, mask: Tensor, scale: Tensor | None, pattern: NMPattern) -> None:
    """Learned weights whose mask is `mask`: |c * w| is dealt out anew in every block, the n largest to the kept ones.

    Within the kept ones, and within the others, the order of |c * w| stays; signs stay; W0 = 0 stays 0. In place.
    Only where two sizes are equal in the dtype of `weight`, or W0 is 0, may the mask begin with another of the two.

    Args:
        weight: [out_features, in_features].
        mask: bool, the same shape, n True in every block.
        scale: c, [in_features].
    """
    sizes, by_size = pattern.blocks(ranking(weight, scale)).sort(dim=-1, descending=True, stable=True)
    kept_first = pattern.blocks(mask).gather(-1, by_size).byte().sort(dim=-1, descending=True, stable=True).indices
    dealt = torch.empty_like(sizes).scatter_(-1, by_size.gather(-1, kept_first), sizes)
    dealt = dealt.view_as(weight) * weight.sign()
    weight.copy_(dealt if scale is None else dealt / scale)
