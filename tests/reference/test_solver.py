"""The plain-torch solvers against searches that know no theorem, and against cases worked by hand."""

import math

import pytest
import torch
from ops.blocks import FAMILIES, random_blocks
from reference import ground_truth

from proxsparse import NMPattern
from proxsparse.reference import prox_nm
from proxsparse.reference.paper_solvers import enum_alm


def block(*members: float) -> torch.Tensor:
    return torch.tensor([members], dtype=torch.float64)


@pytest.fixture(scope="module", params=[0.01, 1.0])
def searched(request):
    """(weight, lambda, the best that a search without any theorem has found)."""
    weight = random_blocks(40 * len(FAMILIES), request.param, seed=11)
    return weight, request.param, ground_truth.search(weight, request.param, n=2)


def test_24_prox_is_never_worse_than_a_search_without_theorems(searched):
    weight, reg_lambda, found = searched
    gap = ground_truth.relative_gap(prox_nm(weight, reg_lambda), found, weight, reg_lambda)
    assert gap.max() <= 1e-12


def test_the_fast_judge_agrees_with_the_search(searched):
    """`ground_truth.exact` judges millions of blocks elsewhere, so it has to be right itself."""
    weight, reg_lambda, found = searched
    gap = ground_truth.relative_gap(ground_truth.exact(weight, reg_lambda), found, weight, reg_lambda)
    assert gap.max() <= 1e-13
    assert gap.min() >= -1e-9  # the search is no sham either: it finds every optimum


def test_search_and_judge_see_that_enum_alm_misses(searched):
    weight, reg_lambda, found = searched
    gap = ground_truth.relative_gap(enum_alm(weight, reg_lambda), found, weight, reg_lambda)
    assert gap.max() > 1e-2


@pytest.mark.parametrize(
    ("pattern", "reg_lambda"), [("1:4", 0.3), ("1:4", 0.8), ("1:4", 1.5), ("2:6", 0.3), ("2:6", 0.8), ("4:8", 0.8)]
)
def test_other_patterns_are_never_worse_than_a_search(pattern, reg_lambda):
    n, m = NMPattern.parse(pattern).n, NMPattern.parse(pattern).m
    weight = random_blocks((2 if m == 8 else 6) * len(FAMILIES), reg_lambda, m=m, n=n, seed=13)
    found = ground_truth.search(weight, reg_lambda, n=n)
    gap = ground_truth.relative_gap(prox_nm(weight, reg_lambda, pattern), found, weight, reg_lambda, n)
    assert gap.max() <= 1e-12


# ------------------------------------------------------------------------------------------ worked by hand, lambda = 1


def test_three_equal_weights_stay_three_where_enum_alm_drops_one():
    """w + w^2 = 1.05 for three equal weights; EnumALM's first sweep sets one of them to 0 and never comes back."""
    weight = block(1.05, 1.05, 1.05, 0.0)
    root = (math.sqrt(1 + 4 * 1.05) - 1) / 2
    exact, paper = prox_nm(weight, 1.0), enum_alm(weight, 1.0)
    torch.testing.assert_close(exact, block(root, root, root, 0.0), rtol=1e-14, atol=0)
    assert ground_truth.objective(exact, weight, 1.0).item() == pytest.approx(0.51429, abs=5e-6)
    assert sorted(paper[0].tolist()) == pytest.approx([0, 0, 1.05, 1.05], abs=1e-12)
    assert ground_truth.objective(paper, weight, 1.0).item() == pytest.approx(0.55125, abs=1e-12)


def test_of_four_ones_three_survive():
    """Two: objective 1. Three, w + w^2 = 1: 0.9549. Four, w + 3 w^2 = 1: 0.9677."""
    root = (math.sqrt(5) - 1) / 2
    result = prox_nm(block(1, 1, -1, 1), 1.0)
    torch.testing.assert_close(result, block(root, root, -root, 0.0), rtol=1e-14, atol=0)
    assert ground_truth.objective(result, block(1, 1, -1, 1), 1.0).item() == pytest.approx(0.95492, abs=5e-6)


def test_small_equal_weights_stay_dense():
    """w + 3 w^2 = 0.1 for four weights of 0.1."""
    root = (math.sqrt(1 + 12 * 0.1) - 1) / 6
    result = prox_nm(block(0.1, -0.1, 0.1, 0.1), 1.0)
    torch.testing.assert_close(result, block(root, -root, root, root), rtol=1e-14, atol=0)


@pytest.mark.parametrize("strength", [(1 + math.sqrt(2)) / 2 + 1e-6, 1.3, 10.0, 1e3, 1e6])
def test_two_survive_unchanged_from_the_threshold_on(strength):
    """lambda * z_1 >= (1 + sqrt 2) / 2: even a block of equal weights becomes 2-sparse."""
    assert prox_nm(block(strength, -strength, strength, strength), 1.0).tolist() == [[strength, -strength, 0.0, 0.0]]


def test_just_below_the_threshold_more_than_two_survive():
    strength = (1 + math.sqrt(2)) / 2 - 1e-3
    assert (prox_nm(block(strength, strength, strength, strength), 1.0) > 0).sum() == 3


@pytest.mark.parametrize("reg_lambda", [1.0, 1.5, 100.0])
def test_one_of_four_survives_unchanged_from_lambda_one_on(reg_lambda):
    assert prox_nm(block(0.5, -2.0, 1.5, 2.0), reg_lambda, "1:4").tolist() == [[0.0, -2.0, 0.0, 0.0]]


def test_one_of_four_by_hand():
    """lambda = 1/2, z = (2, 1, 0, 0): th = (2 + 1) / 3 = 1, so only z_1 is above th_1 = 1: w = (2 - 1) / (1/2) = 2."""
    assert prox_nm(block(2.0, 1.0, 0.0, 0.0), 0.5, "1:4").tolist() == [[2.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(
        prox_nm(block(2.0, 1.5, 0.0, 0.0), 0.5, "1:4"), block(5 / 3, 2 / 3, 0.0, 0.0), rtol=1e-14, atol=1e-15
    )
