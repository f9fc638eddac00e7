"""Random blocks of every kind that is hard for an N:M prox, shared by all tests of it."""

import math

import torch
from torch import Tensor

# What the outcome of the 2:4 prox hinges on: lambda * z_1 where three or four equal weights lose to two (first order),
# and where (1, 1, 1/2, 1/2) * z_1 turns from 2-sparse over 3-sparse to dense in one point.
CRITICAL_STRENGTHS = (0.5, 1.0, math.sqrt(2) - 0.5, (1 + math.sqrt(2)) / 2)


def small_numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Signed, of every size between 1e-12 and 1e-1."""
    exponent = -1 - 11 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 10**exponent


def gauss(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Like the weights of a trained layer."""
    return torch.randn(count, m, generator=generator, dtype=torch.float64)


def uniform(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Comparable members."""
    return torch.rand(count, m, generator=generator, dtype=torch.float64)


def ties(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Every member is one of two numbers."""
    pair = uniform(count, 2, generator)
    return pair.gather(1, torch.randint(2, (count, m), generator=generator))


def near_ties(count: int, m: int, generator: torch.Generator) -> Tensor:
    """All equal up to 1e-12 to 1e-1."""
    return 1 + small_numbers((count, 1), generator) * uniform(count, m, generator)


def all_equal(count: int, m: int, generator: torch.Generator) -> Tensor:
    """One number m times."""
    return torch.ones(count, m, dtype=torch.float64)


def zeros(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Any number of members is zero, all of them included."""
    density = uniform(count, 1, generator)
    return gauss(count, m, generator) * (uniform(count, m, generator) < density)


def huge_ratios(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Members of very different size, down to 1e-8."""
    return 10 ** (-8 * uniform(count, m, generator))


def one_huge(count: int, m: int, generator: torch.Generator) -> Tensor:
    """One member towers over comparable others."""
    block = uniform(count, m, generator) * 10 ** (-4 * uniform(count, 1, generator))
    block[:, 0] = 1
    return block


def two_levels(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Close to (1, ..., 1, 1/2, ..., 1/2), where all candidates meet."""
    level = torch.where(torch.arange(m) < m // 2, 1.0, 0.5).double()
    return level * (1 + small_numbers((count, m), generator))


FAMILIES = {
    family.__name__: family
    for family in (gauss, uniform, ties, near_ties, all_equal, zeros, huge_ratios, one_huge, two_levels)
}


def strengths(count: int, generator: torch.Generator) -> Tensor:
    """lambda * z_1 of every block, [count, 1]: a third each from [1e-4, 1e3] in log scale, [0.3, 1.3], and critical."""
    wide = 10 ** (-4 + 7 * uniform(count, 1, generator))
    undecided = 0.3 + uniform(count, 1, generator)
    critical = torch.tensor(CRITICAL_STRENGTHS, dtype=torch.float64)
    choice = torch.randint(len(critical), (count, 1), generator=generator)
    critical = critical[choice] * (1 + small_numbers((count, 1), generator))
    kind = torch.randint(3, (count, 1), generator=generator)
    return torch.where(kind == 0, wide, torch.where(kind == 1, undecided, critical))


def random_blocks(count: int, reg_lambda: float, m: int = 4, n: int = 2, seed: int = 0) -> Tensor:
    """`count` signed blocks, all families mixed, in float64: [count, m].

    The largest member z_1 makes lambda * z_1^(n-1), which alone decides the outcome, one of `strengths`; for n = 1
    where lambda alone decides, z_1 is one of them.
    """
    generator = torch.Generator().manual_seed(seed)
    share = -(-count // len(FAMILIES))
    shape = torch.cat([family(share, m, generator) for family in FAMILIES.values()])
    shape = shape[torch.randperm(len(shape), generator=generator)[:count]]
    largest = shape.abs().amax(-1, keepdim=True)
    strength = strengths(count, generator)
    height = strength if n == 1 else (strength / reg_lambda) ** (1 / (n - 1))
    sign = 1 - 2 * torch.randint(2, (count, m), generator=generator)
    place = uniform(count, m, generator).argsort(-1)
    return (shape / torch.where(largest > 0, largest, 1.0) * height * sign).gather(-1, place) + 0.0


# Views of a [24, 24] matrix whose last dimension is a multiple of 4.
LAYOUTS = {
    "contiguous": lambda base: base,
    "one row": lambda base: base[5:6],
    "one block": lambda base: base[3, 8:12],
    "in_features = 4": lambda base: base.view(-1, 4),
    "every third row": lambda base: base[::3],
    "a slice of columns": lambda base: base[:, 4:20],
    "an offset that is not aligned": lambda base: base.flatten()[3:-1],
    "every second column": lambda base: base[:, ::2],
    "transposed": lambda base: base.T,
    "three dimensions": lambda base: base.view(2, 12, 24),
    "permuted": lambda base: base.view(2, 12, 24).permute(2, 0, 1),
}
