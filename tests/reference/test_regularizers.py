"""The penalties of the paper against their sums, written out, and against numbers by hand."""

import itertools
import math

import pytest
import torch
from ops.blocks import random_blocks

from proxsparse import NMPattern
from proxsparse.reference import frozen_denominator, frozen_penalty, reg_nm


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "2:6", "4:8"])
def test_reg_is_the_sum_over_subsets(pattern):
    """Reg_{N:M} = sum over blocks, over all subsets of n + 1 members, of the product of their magnitudes."""
    pattern = NMPattern.parse(pattern)
    weight = random_blocks(40, 0.7, m=pattern.m, n=pattern.n).flatten()
    subsets = (itertools.combinations(block, pattern.n + 1) for block in pattern.blocks(weight).tolist())
    expected = math.fsum(abs(math.prod(subset)) for subset in itertools.chain.from_iterable(subsets))
    assert reg_nm(weight, pattern).item() == pytest.approx(expected, rel=1e-12, abs=0)


def test_frozen_penalty_by_hand():
    """W = (1, -1), W0 = (2, -2), eps = 0.5: (1 / 2.5 * -1)^2 + (-1 / -2.5 * 1)^2; sign(0) = sign(-0) = 1."""
    weight, pretrained = torch.tensor([1.0, -1.0]), torch.tensor([2.0, -2.0])
    assert frozen_penalty(weight, pretrained, 0.5).item() == pytest.approx(2 * (1 / 2.5) ** 2)
    for zero in (0.0, -0.0):
        weight, pretrained = torch.tensor([3.0], dtype=torch.float64), torch.tensor([zero], dtype=torch.float64)
        assert frozen_penalty(weight, pretrained, 0.5).item() == pytest.approx((3 / 0.5 * 3) ** 2)


def test_eps_of_the_frozen_term_is_not_rounded_to_float32():
    pretrained = torch.tensor([0.0, -0.0, 2.0, -2.0], dtype=torch.float64)
    expected = torch.tensor([0.1, 0.1, 2.1, -2.1], dtype=torch.float64)
    assert torch.equal(frozen_denominator(pretrained, 0.1), expected)
