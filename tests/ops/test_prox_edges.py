"""The prox where arithmetic is at its limits: lambda next to 1, units near overflow, a NaN among small weights."""

import pytest
import torch
from ops.blocks import random_blocks
from ops.on_each_backend import backends_of
from reference import ground_truth

from proxsparse import prox_nm, reference

GAP = {torch.float64: 1e-11, torch.float32: 2e-6}  # the objective's distance from the optimum, over z_1^2


@pytest.fixture(params=backends_of("prox_nm_"))
def device(request, on_backend):
    """The device of the backend under test, which serves every call of the test."""
    return on_backend("prox_nm_", request.param, 1.0, 2, 4, None)


# ------------------------------------------------------------------------------------------ 1:4, lambda next to 1


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("below", [1e-5, 1e-6, 1e-7, 1e-8])
def test_one_of_four_just_below_lambda_one(below, dtype, device):
    """An fp32 lambda is 1 for the last two, and 1 - lambda has lost its digits for all."""
    weight = random_blocks(20_000, 1 - below, n=1, seed=5).to(dtype)
    result = prox_nm(weight.to(device), 1 - below, "1:4").cpu()
    exact = ground_truth.exact_one(weight, 1 - below)
    gap = ground_truth.relative_gap(result, exact, weight, 1 - below, n=1)
    assert gap.max() <= {torch.float64: 1e-14, torch.float32: 1e-12}[dtype]


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("below", [1e-3, 1e-6, 1e-8])
def test_equal_weights_share_what_one_of_four_leaves(below, dtype, device):
    """w + 3 lambda w = 1."""
    result = prox_nm(torch.ones(3, 8, dtype=dtype, device=device), 1 - below, "1:4").cpu()
    expected = torch.full((3, 8), 1 / (1 + 3 * (1 - below)), dtype=dtype)
    torch.testing.assert_close(result, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


# ------------------------------------------------------------------------------------------ 2:4, ties and units


def test_the_dense_point_is_found_where_three_weights_tie_at_s_zero():
    """There v = k = 0 for three weights, and 1 / (v^2 + k)^(3/2) is more than float32 holds."""
    weight = torch.tensor([[0.9159409, 0.5795862, 0.5795862, 0.5795862]])
    candidate, valid = reference.prox.dense_candidate(weight, 0.7)
    assert valid.all()
    assert candidate.isfinite().all()
    gap = ground_truth.relative_gap(candidate, ground_truth.exact(weight, 0.7), weight, 0.7)
    assert gap.abs().max() <= GAP[torch.float32]


@pytest.mark.parametrize("dtype", GAP, ids=str)
def test_a_tie_of_three_where_the_dense_start_is_exact(dtype, device):
    """Strengths around the one at which the smallest root R_4 of the dense problem vanishes."""
    high = torch.linspace(0.3, 1.0, 301, dtype=torch.float64)[:, None]
    low = high * torch.linspace(0.3, 1.0, 301, dtype=torch.float64)
    weight = torch.stack([high.expand_as(low), low, low, low], dim=-1).view(-1, 4).to(dtype)
    result = prox_nm(weight.to(device), 1.0).cpu()
    gap = ground_truth.relative_gap(result, ground_truth.exact(weight, 1.0), weight, 1.0)
    assert gap.max() <= GAP[dtype]


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("exponent", [-80, 80])
def test_the_unit_of_the_weights_does_not_matter(exponent, dtype, device):
    """A power of two changes no digit: prox(w * c; lambda / c) = c * prox(w; lambda), bit for bit."""
    unit = 2.0**exponent
    weight = torch.cat([random_blocks(20_000, 0.7, seed=20), torch.tensor([[1.5, 1.5, 1.5, 0.0]])]).to(device, dtype)
    assert torch.equal(prox_nm(weight * unit, 0.7 / unit), prox_nm(weight, 0.7) * unit)


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_only_the_magnitude_of_the_scale_counts(pattern, dtype, device):
    weight = random_blocks(600, 0.7, seed=21).view(-1, 24).to(device, dtype)
    scale = (0.2 + torch.rand(24, device=device)).to(dtype)
    sign = torch.where(torch.arange(24, device=device) % 3 == 0, -1.0, 1.0).to(dtype)
    assert torch.equal(prox_nm(weight, 0.7, pattern, scale * sign), prox_nm(weight, 0.7, pattern, scale))


# ------------------------------------------------------------------------------------------ a NaN among others


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("strength", [0.01, 0.15, 0.3])
def test_a_bad_number_changes_no_other_block_at_any_strength(strength, poison, device):
    """All other blocks are small, where backends choose how to solve them by the largest weight of many."""
    clean = random_blocks(256, 1.0, seed=22).float()
    clean = (strength * clean / clean.abs().amax(-1, keepdim=True).clamp_min(1e-30)).to(device)
    poisoned = clean.clone()
    poisoned[100, 2] = poison
    expected = prox_nm(clean, 1.0)
    expected[100] = poisoned[100]
    torch.testing.assert_close(prox_nm(poisoned, 1.0), expected, rtol=0, atol=0, equal_nan=True)


OVERFLOWING = [(torch.float32, 1, 3e38), (torch.bfloat16, 1e30, 1e10), (torch.float64, 1e200, 1e200)]


@pytest.mark.parametrize(("dtype", "size", "reg_lambda"), OVERFLOWING, ids=str)
def test_the_two_largest_stay_where_lambda_times_a_weight_overflows(dtype, size, reg_lambda, device):
    weight = size * torch.tensor(
        [[1.0, 2.0, 3.0, 4.0], [-4.0, 2.0, 0.0, -3.0], [1.0, 1.0, 1.0, 0.5]], dtype=torch.float64
    )
    weight = weight.to(device, dtype)
    kept = weight * torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]], device=device)
    assert torch.equal(prox_nm(weight, reg_lambda), kept)
    scale = torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=torch.float64, device=device).to(dtype)
    with_metric = weight[:1] * torch.tensor([0, 1, 0, 1], device=device)  # 1, 6, 3, 4
    assert torch.equal(prox_nm(weight[:1], reg_lambda, scale=scale), with_metric)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_number_does_not_keep_the_general_solver_from_stopping(poison, monkeypatch):
    sweeps = []
    original = reference.elementary_symmetric
    monkeypatch.setattr(reference.prox, "elementary_symmetric", lambda x, k: sweeps.append(k) or original(x, k))
    weight = random_blocks(50, 0.7, m=8, n=4, seed=23)
    weight[0] = 0.0
    reference.prox_nm(weight, 0.7, "4:8")
    needed = len(sweeps)
    weight[0, 3] = poison
    sweeps.clear()
    reference.prox_nm(weight, 0.7, "4:8")
    assert len(sweeps) == needed


def test_eps_of_the_frozen_term_is_not_rounded_to_float32():
    pretrained = torch.tensor([0.0, -0.0, 2.0, -2.0], dtype=torch.float64)
    expected = torch.tensor([0.1, 0.1, 2.1, -2.1], dtype=torch.float64)
    assert torch.equal(reference.frozen_denominator(pretrained, 0.1), expected)
