"""The N:M sparsity pattern: a value object that defines how a weight is split into blocks."""

import re
from dataclasses import dataclass

import torch

# Far above any hardware format; bounds the cost of the reference for general N:M.
MAX_M = 64
TEXT = re.compile(r"\s*(\d{1,3})\s*:\s*(\d{1,3})\s*")  # compiled at import: Dynamo (torch 2.11) cannot trace re.compile
FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_dtype(tensor: torch.Tensor, what: str) -> None:
    """Raises ValueError unless the dtype is one of `FLOAT_DTYPES`."""
    if tensor.dtype not in FLOAT_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise ValueError(f"{what} has dtype {tensor.dtype}: must be one of {names}; convert it first")


@dataclass(frozen=True)
class NMPattern:
    """At most `n` nonzero weights in every block of `m` consecutive weights along in_features.

    `n` counts the KEPT weights; `prune_n` of Wanda and SparseGPT counts the pruned ones.

    Raises:
        ValueError: unless 1 <= n < m <= 64.
    """

    n: int
    m: int

    def __post_init__(self):
        if not 1 <= self.n < self.m <= MAX_M:
            raise ValueError(f"pattern {self.n}:{self.m}: needs 1 <= n < m <= {MAX_M} (n of every m weights are kept)")

    @classmethod
    def parse(cls, pattern: "PatternLike") -> "NMPattern":
        """`"2:4"` -> `NMPattern(2, 4)`; a pattern is returned as it is.

        Raises:
            ValueError: for any other text.
        """
        if isinstance(pattern, cls):
            return pattern
        match = TEXT.fullmatch(pattern) if isinstance(pattern, str) else None
        if match is None:
            raise ValueError(f'pattern {pattern!r} is not of the form "N:M", such as "2:4"')
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def density(self) -> float:
        """Fraction of the weights that are kept, n / m."""
        return self.n / self.m

    def check_blocks(self, shape: torch.Size, what: str = "weight") -> None:
        """Raises ValueError unless the last dimension of `shape` splits into whole blocks."""
        if len(shape) == 0 or shape[-1] % self.m:
            raise ValueError(
                f"{what} of shape {list(shape)}: the last dimension (in_features) must be a multiple of {self.m} "
                f"for {self} blocks; exclude this layer or choose another pattern"
            )

    def blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., in_features / m, m], a view if the strides allow it."""
        self.check_blocks(weight.shape)
        return weight.unflatten(-1, (weight.shape[-1] // self.m, self.m))

    def nonzeros(self, weight: torch.Tensor) -> torch.Tensor:
        """Number of nonzeros of each block: weight or mask [..., in_features] -> uint8 [..., in_features / m]."""
        # m <= 64 fits uint8; summing bool would convert every element to int64, 8 bytes a weight
        return (self.blocks(weight) != 0).view(torch.uint8).sum(-1, dtype=torch.uint8)

    def feasible_blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """Whether each block has at most n nonzeros: [..., in_features] -> bool [..., in_features / m]."""
        return self.nonzeros(weight) <= self.n

    def is_feasible(self, weight: torch.Tensor) -> bool:
        """Whether every block has at most n nonzeros."""
        return bool(self.feasible_blocks(weight).all())


PatternLike = str | NMPattern
