"""Laws that the prox, the penalties and the mask obey for every input, searched for counterexamples by hypothesis."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.blocks import random_blocks
from reference.ground_truth import objective, relative_gap

from proxsparse import NMPattern
from proxsparse.reference import frozen_denominator, frozen_penalty, nm_mask, prox_nm, reg_nm

PATTERNS = ("2:4", "1:4")  # the general solver is iterative, too slow for this many calls
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("repeatable")

# Comparable numbers, repeated ones and exact zeros are where a prox goes wrong; sizes far apart come last.
members = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 1.05, 1.2071067811865475]),
    st.floats(-1.5, 1.5).map(lambda x: x if abs(x) > 1e-8 else 0.0),  # no product of them underflows
    st.floats(1e-8, 1e3),
)
lambdas = st.one_of(st.floats(0.3, 1.3), st.floats(1e-4, 1e3))


@st.composite
def problems(draw, patterns=PATTERNS):
    """(weight of two blocks, lambda, pattern)."""
    pattern = NMPattern.parse(draw(st.sampled_from(patterns)))
    size = 2 * pattern.m
    weight = draw(st.lists(members, min_size=size, max_size=size))
    return torch.tensor(weight, dtype=torch.float64), draw(lambdas), pattern


def same_objective(w, other, weight, reg_lambda, pattern, tolerance=1e-12):
    blocks = [pattern.blocks(tensor) for tensor in (w, other, weight)]
    return relative_gap(*blocks, reg_lambda, pattern.n).abs().max() <= tolerance


@given(problems(), st.randoms(use_true_random=False))
def test_a_permutation_of_a_block_permutes_its_prox(problem, random):
    weight, reg_lambda, pattern = problem
    order = random.sample(range(pattern.m), pattern.m)
    straight = pattern.blocks(prox_nm(weight, reg_lambda, pattern))
    permuted = pattern.blocks(prox_nm(pattern.blocks(weight)[:, order].flatten(), reg_lambda, pattern))
    for block, one, other in zip(pattern.blocks(weight), straight, permuted, strict=True):
        # Of equal weights the first survives, so compare as sets of pairs (magnitude before, magnitude after).
        before, after = block.abs().tolist(), one.abs().tolist()
        before_permuted, after_permuted = block[order].abs().tolist(), other.abs().tolist()
        pairs = sorted(zip(before, after, strict=True))
        assert sorted(zip(before_permuted, after_permuted, strict=True)) == pairs


@given(problems(), st.floats(1e-3, 1e3))
def test_scaling_the_weights_is_scaling_lambda(problem, factor):
    """prox_lambda(s z) = s * prox_{lambda s^(n-1)}(z)."""
    weight, reg_lambda, pattern = problem
    scaled = prox_nm(factor * weight, reg_lambda, pattern)
    rescaled = factor * prox_nm(weight, reg_lambda * factor ** (pattern.n - 1), pattern)
    assert same_objective(scaled, rescaled, factor * weight, reg_lambda, pattern)


def assert_laws(weight, reg_lambda, pattern, sign):
    """A sign goes through; weights only shrink; staying or pruning is no better; a feasible block keeps its bits."""
    result, pruned = prox_nm(weight, reg_lambda, pattern), torch.where(nm_mask(weight.abs(), pattern), weight, 0.0)
    assert torch.equal(prox_nm(weight * sign, reg_lambda, pattern), result * sign)
    assert (result.abs() <= weight.abs()).all()
    assert (result * weight >= 0).all()
    height = objective(pattern.blocks(result), pattern.blocks(weight), reg_lambda, pattern.n)
    for other in (weight, pruned, torch.zeros_like(weight)):
        bound = objective(pattern.blocks(other), pattern.blocks(weight), reg_lambda, pattern.n)
        assert (height <= bound * (1 + 1e-14)).all()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert torch.equal(prox_nm(pruned.to(dtype), reg_lambda, pattern), pruned.to(dtype))
    identity = prox_nm(weight, 0.0, pattern)
    assert torch.equal(identity, weight)
    assert identity is not weight


@given(problems(), st.integers(0, 255))
def test_laws_of_one_call(problem, bits):
    weight, reg_lambda, pattern = problem
    sign = torch.tensor([1.0 - 2 * (bits >> i % 8 & 1) for i in range(len(weight))], dtype=torch.float64)
    assert_laws(weight, reg_lambda, pattern, sign)


@pytest.mark.parametrize("pattern", ["2:6", "4:8"])
def test_the_general_solver_obeys_the_same_laws(pattern):
    pattern = NMPattern.parse(pattern)
    assert_laws(random_blocks(36, 0.7, m=pattern.m, n=pattern.n, seed=14), 0.7, pattern, sign=-1.0)


@given(problems(("2:4", "1:4", "2:6", "4:8")))
def test_reg_is_the_sum_over_subsets(problem):
    """Reg_{N:M} = sum over blocks, over all subsets of n + 1 members, of the product of their magnitudes."""
    weight, _, pattern = problem
    expected = sum(
        abs(torch.tensor(subset, dtype=torch.float64).prod().item())
        for block in pattern.blocks(weight).tolist()
        for subset in itertools.combinations(block, pattern.n + 1)
    )
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
