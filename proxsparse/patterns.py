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

    `n` counts the KEPT weights; `prune_n` of Wanda and SparseGPT counts the pruned ones. If in_features is not a
    multiple of m, the remainder of each row stays dense: an even number, for 2:4, 4:6, 6:8, ... only (`has_windows`).

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
        """`"2:4"` -> `NMPattern(2, 4)`; a pattern is returned as it is. Raises ValueError for any other text."""
        if isinstance(pattern, cls):
            return pattern
        match = TEXT.fullmatch(pattern) if isinstance(pattern, str) else None
        if match is None:
            raise ValueError(f'pattern {pattern!r:.60} is not of the form "N:M", such as "2:4"')
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def parse_windowed(cls, pattern: "PatternLike") -> "NMPattern":
        """`parse` for layers to pack. Raises ValueError unless 2:4 kernels can run the pattern (`has_windows`)."""
        pattern = cls.parse(pattern)
        if not pattern.has_windows:
            raise ValueError(f"pattern {pattern}: packed layers are 2:4, 4:6, 6:8, ..., two less than an even number")
        return pattern

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def density(self) -> float:
        """Fraction of the weights of a block that are kept, n / m."""
        return self.n / self.m

    @property
    def has_windows(self) -> bool:
        """Whether the pattern is 2:4, 4:6, 6:8, ...: sparse tensor cores can run it, see `reference.windows`."""
        return self.m % 2 == 0 and self.n == self.m - 2

    def whole(self, in_features: int) -> int:
        """The number of input features in whole blocks; those after it are the dense remainder."""
        return in_features - in_features % self.m

    def kept_features(self, in_features: int) -> int:
        """Number of weights that are kept of a row."""
        return in_features // self.m * self.n + in_features % self.m

    def fits(self, in_features: int) -> bool:
        """Whether rows of this size split into blocks and, if allowed, a remainder."""
        remainder = self.has_windows and in_features % 2 == 0 and in_features > self.m
        return in_features % self.m == 0 or remainder

    def count(self, shape: torch.Size) -> int:
        """Number of blocks of a weight [..., in_features]."""
        return shape[:-1].numel() * (shape[-1] // self.m)

    def check_blocks(
        self, shape: torch.Size, what: str = "weight", remedy: str = "exclude this layer or choose another pattern"
    ) -> None:
        """Raises ValueError unless the last dimension of `shape` splits into blocks and, if allowed, a remainder."""
        if len(shape) == 0 or not self.fits(shape[-1]):
            needed = f"an even number of at least {self.m}" if self.has_windows else f"a multiple of {self.m}"
            raise ValueError(
                f"{what} of shape {list(shape)}: the last dimension (in_features) must be {needed} "
                f"for {self} blocks; {remedy}"
            )

    def blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., whole blocks, m] without the remainder; a view if the strides allow it."""
        self.check_blocks(weight.shape)
        whole = self.whole(weight.shape[-1])
        return weight[..., :whole].unflatten(-1, (whole // self.m, self.m))

    def nonzeros(self, weight: torch.Tensor) -> torch.Tensor:
        """Number of nonzeros of each block: weight or mask [..., in_features] -> uint8 [..., whole blocks]."""
        # m <= 64 fits uint8; summing bool would convert every element to int64, 8 bytes a weight
        return (self.blocks(weight) != 0).view(torch.uint8).sum(-1, dtype=torch.uint8)

    def counts(self, weight: torch.Tensor) -> torch.Tensor:
        """Element k: the number of blocks with k nonzeros; int64 [m + 1]."""
        return torch.bincount(self.nonzeros(weight).flatten(), minlength=self.m + 1)

    def feasible_blocks(self, weight: torch.Tensor) -> torch.Tensor:
        """Whether each block has at most n nonzeros: [..., in_features] -> bool [..., whole blocks]."""
        return self.nonzeros(weight) <= self.n

    def is_mask(self, mask: torch.Tensor) -> bool:
        """Whether a mask keeps exactly n weights of every block, and the remainder."""
        if not self.fits(mask.shape[-1]):
            return False
        return bool((self.nonzeros(mask) == self.n).all() and mask[..., self.whole(mask.shape[-1]) :].all())

    def is_feasible(self, weight: torch.Tensor) -> bool:
        """Whether every block has at most n nonzeros."""
        return bool(self.feasible_blocks(weight).all())


PatternLike = str | NMPattern
# The patterns of the C++ and Triton kernels.
WINDOWED = tuple(NMPattern(m - 2, m) for m in (4, 6, 8, 10))
# One pattern for each block size in which the zeros of a weight are counted, to find the pattern of the weight.
PROBES = (*WINDOWED, NMPattern(14, 16))
# A weight with a larger share of nonzeros is dense: 14:16, the densest pattern, has 2 zeros in at most 16 + 14 weights.
DENSE_SHARE = 15 / 16
MIXED = "mixed"  # instead of a pattern: the layers have different patterns


def block_counts(weight: torch.Tensor) -> dict[NMPattern, list[int]]:
    """`NMPattern.counts` of the `live_rows` of a weight for those of PROBES that have blocks in it."""
    weight = live_rows(weight)
    return {probe: probe.counts(weight).tolist() for probe in PROBES if probe.fits(weight.shape[-1])}


def live_rows(weight: torch.Tensor) -> torch.Tensor:
    """The rows of a weight [..., in_features] that are not 0 everywhere, as those of unused neurons are."""
    return weight[(weight != 0).any(-1)]


def pattern_of_zeros(name: str, weight: torch.Tensor) -> NMPattern | None:
    """`pattern_of_counts` of a weight [..., in_features]; an error begins with the name."""
    if int(weight.count_nonzero()) > DENSE_SHARE * weight.numel():  # saves most of the work for a dense weight
        return None
    return pattern_of_counts(f"{name}:", block_counts(weight), weight.shape[-1])


def pattern_of_counts(what: str, counts: dict[NMPattern, list[int]], in_features: int) -> NMPattern | None:
    """The pattern of the zeros of a weight, given its `block_counts`; None: it has none, as a dense weight.

    It is the `clear_pattern`; else, the first of WINDOWED that the zeros fit: weights that were kept may be 0 too. At
    least a tenth of the blocks with nonzeros must have n, because 8:32, for example, fits 6:8 by chance.

    Raises:
        ValueError: most blocks have the nonzeros of one of WINDOWED, but up to a tenth have more; or there are as many
            zeros as in 2:4, but no pattern is clear. Begins with `what`.
    """
    if pattern := clear_pattern(counts, in_features):
        return pattern
    unclear = ValueError(f"{what} sparse, but its pattern is not clear from its zeros; give its pattern, or exclude it")
    for pattern in filter(counts.get, WINDOWED):
        blocks = counts[pattern]
        wrong, nonzero = sum(blocks[pattern.n + 1 :]), sum(blocks[1:])
        if nonzero and not wrong:
            if nonzero <= 10 * blocks[pattern.n]:
                return pattern
            raise unclear
        if 0 < 10 * wrong <= nonzero <= 2 * blocks[pattern.n]:
            raise ValueError(f"{what} {not_quite(pattern, blocks)}")
    weights = {probe: sum(k * count for k, count in enumerate(blocks)) for probe, blocks in counts.items()}
    if any(weights.values()) and all(2 * kept <= probe.m * sum(counts[probe][1:]) for probe, kept in weights.items()):
        raise unclear
    return None


def pattern_of_mask(mask: torch.Tensor) -> NMPattern | None:
    """The pattern that a mask [out_features, in_features] keeps exactly; None: none.

    It is the `clear_pattern`, as other layers may need it (1010 is 2:4); else that with the smallest blocks.
    """
    clear = clear_pattern(block_counts(mask), mask.shape[-1])
    if clear and clear.is_mask(mask):
        return clear
    for m in range(2, MAX_M + 1):
        n = int(mask[:1, :m].sum())
        if 0 < n < m and NMPattern(n, m).is_mask(mask):
            return NMPattern(n, m)
    return None


def clear_pattern(counts: dict[NMPattern, list[int]], in_features: int) -> NMPattern | None:
    """The sparsest n:m such that no block has more than n nonzeros, most have some, and most of these have n.

    m is a block size of `counts`; of equal densities, the smallest. 5:6, 7:8, 9:10 and 15:16 do not count: a small
    dense layer has them if it ignores one of its inputs.
    """
    found = []
    for probe, blocks in counts.items():
        n = max(k for k, count in enumerate(blocks) if count or k == 0)
        clear = 0 < n <= max(3, probe.m - 2) and n < probe.m and 2 * blocks[n] >= sum(blocks[1:])
        # 1:32 leaves half of the blocks of 16 empty
        if clear and 2 * blocks[0] < sum(blocks) and NMPattern(n, probe.m).fits(in_features):
            found.append(NMPattern(n, probe.m))
    return min(found, key=lambda pattern: (pattern.density, pattern.m), default=None)


def not_quite(pattern: NMPattern, blocks: list[int]) -> str:
    """The message for a weight with too many nonzeros in some blocks; `blocks`: its `NMPattern.counts`."""
    return (
        f"not quite {pattern}: {sum(blocks[pattern.n + 1 :]):,} of {sum(blocks):,} blocks have more than {pattern.n} "
        f"nonzeros; prune it to {pattern} again, or give its pattern"
    )


def pattern_name(patterns: dict[str, PatternLike]) -> str:
    """The pattern of all layers, such as "2:4", or "mixed" if they differ."""
    names = {str(NMPattern.parse(pattern)) for pattern in patterns.values()}
    return names.pop() if len(names) == 1 else MIXED
