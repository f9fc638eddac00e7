"""The N:M mask of scores, in plain torch."""

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern, PatternLike

# ---------------------------------------------------------------------------------------------- masks


def nm_mask(score: Tensor, pattern: PatternLike = "2:4") -> Tensor:
    """True on the n largest scores of every block; ties go to the lower index, a NaN counts as the largest.

    [..., in_features] -> bool, same shape, exactly n True a block.
    """
    pattern = NMPattern.parse(pattern)
    block = pattern.blocks(score.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf))
    kept = block.sort(dim=-1, descending=True, stable=True).indices[..., : pattern.n]
    return torch.zeros_like(block, dtype=torch.bool).scatter_(-1, kept, True).view(score.shape)
