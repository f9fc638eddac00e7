"""EnumALM: exact where the paper says so, and wrong where we say so."""

import math

import pytest
import torch
from lib.paper_solvers import enum_alm, enum_alm_by_block
from reference import ground_truth

from proxsparse.reference import prox_nm


def signed_blocks(count: int) -> torch.Tensor:
    """Uniform in [-1, 1]: [count, 4]."""
    return 2 * torch.rand(count, 4, dtype=torch.float64) - 1


@pytest.mark.parametrize("reg_lambda", [0.05, 0.3])
def test_easy_blocks_are_solved(reg_lambda):
    """EnumALM is only known to miss from lambda * z_1 = 0.31 on."""
    weight = signed_blocks(300)
    exact = ground_truth.exact(weight, reg_lambda)
    torch.testing.assert_close(enum_alm_by_block(weight, reg_lambda, 1e-12, 20_000).w, exact, rtol=0, atol=1e-9)
    together = enum_alm(weight.view(30, 40), reg_lambda)
    torch.testing.assert_close(together.view(300, 4), exact, rtol=0, atol=1e-7)
    assert enum_alm(weight.bfloat16(), reg_lambda).dtype == torch.bfloat16


def test_enum_alm_misses_the_optimum():
    """z = (1.05, 1.05, 1.05, 0), lambda = 1: three weights with w + w^2 = 1.05 have objective 0.51429."""
    block = torch.tensor([1.05, 1.05, 1.05, 0.0], dtype=torch.float64)
    root = (math.sqrt(1 + 4 * 1.05) - 1) / 2
    paper = enum_alm_by_block(block, 1.0, 1e-12, 1000).w
    assert sorted(paper.tolist()) == pytest.approx([0, 0, 1.05, 1.05], abs=1e-9)
    assert ground_truth.objective(paper, block, 1.0).item() == pytest.approx(0.55125, abs=1e-12)
    assert prox_nm(block, 1.0).tolist() == pytest.approx([root, root, root, 0], abs=1e-9)
