"""The N:M mask of scores, and the weight under it, in plain torch."""

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern, PatternLike


def nm_mask(score: Tensor, pattern: PatternLike = "2:4") -> Tensor:
    """True for the n largest scores of every block; for equal scores the lower index wins, and NaN counts as infinity.

    [..., in_features] -> bool of the same shape, exactly n True per block; the remainder of a row is True.
    """
    pattern = NMPattern.parse(pattern)
    block = pattern.blocks(score.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
    dropped = block.sort(dim=-1, descending=True, stable=True).indices[..., pattern.n :]
    mask = torch.ones(score.shape, dtype=torch.bool, device=score.device)
    pattern.blocks(mask).scatter_(-1, dropped, False)  # a view of the mask
    return mask


def mask_score(weight: Tensor, scale: Tensor | None, pretrained: Tensor | None = None) -> Tensor:
    """|c * w|, or c * w * sign(W0) if `pretrained` is given; the mask keeps the largest. c = 1 without a scaling.

    With the sign, a learned weight whose sign differs from that of W0 is pruned first: the kept weight will be W0.
    """
    values = weight if scale is None else weight * scale
    return values.abs() if pretrained is None else values * pretrained.sign()


def masked_weight(
    weight: Tensor, pretrained: Tensor, scale: Tensor | None = None, pattern: PatternLike = "2:4"
) -> Tensor:
    """W0 where the mask of `mask_score` keeps, else +0.0."""
    return torch.where(nm_mask(mask_score(weight, scale, pretrained.to(weight.dtype)), pattern), pretrained, 0.0)
