"""The plain-torch solvers against searches that know no theorem."""

import pytest
import torch
from ops.blocks import FAMILIES, random_blocks
from reference import ground_truth

from proxsparse import NMPattern
from proxsparse.reference import prox_nm


@pytest.mark.parametrize("reg_lambda", [0.01, 1.0])
def test_24_prox_and_judge_are_never_worse_than_a_search_without_theorems(reg_lambda):
    """`ground_truth.exact` judges millions of blocks elsewhere, so it has to be right itself."""
    weight = random_blocks(40 * len(FAMILIES), reg_lambda, seed=11)
    found = ground_truth.search(weight, reg_lambda, n=2)
    results = prox_nm(weight, reg_lambda), ground_truth.exact(weight, reg_lambda)
    prox, judge = (ground_truth.relative_gap(result, found, weight, reg_lambda) for result in results)
    assert prox.max() <= 1e-12
    assert judge.max() <= 1e-13
    assert judge.min() >= -1e-9  # the search is no sham either: it finds every optimum


@pytest.mark.parametrize(
    ("pattern", "reg_lambda"), [("1:4", 0.3), ("1:4", 0.8), ("1:4", 1.5), ("2:6", 0.3), ("2:6", 0.8), ("4:8", 0.8)]
)
def test_other_patterns_are_never_worse_than_a_search(pattern, reg_lambda):
    n, m = NMPattern.parse(pattern).n, NMPattern.parse(pattern).m
    weight = random_blocks((2 if m == 8 else 6) * len(FAMILIES), reg_lambda, m=m, n=n, seed=13)
    found = ground_truth.search(weight, reg_lambda, n=n)
    gap = ground_truth.relative_gap(prox_nm(weight, reg_lambda, pattern), found, weight, reg_lambda, n)
    assert gap.max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("below", [0.9, 0.5, 0.1, 0.01, 1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 0.0, -2.0])
def test_one_of_four(below, dtype):
    """An fp32 lambda is 1 from 1 - 1e-7 on, and 1 - lambda has lost its digits before."""
    weight, reg_lambda = random_blocks(10_000, 1 - below, n=1, seed=5).to(dtype), 1 - below
    result, best = prox_nm(weight, reg_lambda, "1:4"), ground_truth.exact_one(weight, reg_lambda)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-12
    ground_truth.assert_optimal(result, weight, reg_lambda, 1, best=best, tolerance=tolerance)
    if below > 1e-3:
        largest = weight.double().abs().amax(-1, keepdim=True)
        error = 1e-11 if dtype == torch.float64 else 4e-4  # the condition number at 0.99 is 100
        assert ((result - best).abs() <= error * largest.where(largest > 0, 1.0)).all()
    if below <= 0:
        assert ((result != 0).sum(-1) <= 1).all()
    else:  # equal weights share what is left: w + 3 lambda w = 1
        equal = prox_nm(torch.ones(3, 8, dtype=dtype), reg_lambda, "1:4")
        shared = torch.full((3, 8), 1 / (1 + 3 * reg_lambda), dtype=dtype)
        torch.testing.assert_close(equal, shared, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_scale_is_the_metric_and_only_its_magnitude_counts():
    """argmin_V 1/2 |V - c W|^2 + lambda * Reg(V), divided by c."""
    sign = torch.where(torch.arange(4000) % 3 == 0, -1.0, 1.0)
    for scale_dtype in (torch.float64, torch.bfloat16):
        scale = (0.25 + 4 * torch.rand(4000)).to(scale_dtype)
        weight = random_blocks(5_000, 0.1, seed=6).view(-1, 4000) / scale.double()
        result = prox_nm(weight, 0.1, scale=scale)
        ground_truth.assert_optimal(result, weight, 0.1, scale=scale.double())
        assert torch.equal(prox_nm(weight, 0.1, scale=(scale * sign).to(scale_dtype)), result)
