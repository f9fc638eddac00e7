"""The N:M mask of scores, in plain torch."""

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern, PatternLike

# ---------------------------------------------------------------------------------------------- masks


def nm_mask(score: Tensor, pattern: PatternLike = "2:4") -> Tensor:
    """True for the n largest scores of every block; for equal scores the lower index wins, and NaN is the largest.

    [..., in_features] -> bool of the same shape, exactly n True per block.
    """
    pattern = NMPattern.parse(pattern)
    block = pattern.blocks(score.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
    kept = block.sort(dim=-1, descending=True, stable=True).indices[..., : pattern.n]
    return torch.zeros_like(block, dtype=torch.bool).scatter_(-1, kept, True).view(score.shape)
