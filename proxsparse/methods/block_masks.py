"""All masks of one block: six for 2:4."""

from itertools import combinations
from math import comb

import torch
from torch import Tensor

from proxsparse.errors import InputError
from proxsparse.patterns import NMPattern

# Bounds the memory, which is proportional to the number of masks times the number of blocks; 8:16 has 12,870 masks.
MOST = 20_000


def block_masks(pattern: NMPattern, device: torch.device | None = None) -> Tensor:
    """bool [C(m, n), m], True = kept: every way to keep n of m weights, in lexicographic order of the kept indices.

    Raises InputError if there are more than `MOST`.
    """
    count = comb(pattern.m, pattern.n)
    if count > MOST:
        raise InputError(
            f"pattern {pattern}: a block has {count} possible masks; this method enumerates them and supports at most "
            f"{MOST}; choose smaller blocks or another method"
        )
    kept = torch.tensor(list(combinations(range(pattern.m), pattern.n)), device=device)
    return torch.zeros(count, pattern.m, dtype=torch.bool, device=device).scatter_(1, kept, True)
