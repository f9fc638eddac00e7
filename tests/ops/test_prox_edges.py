"""The prox where arithmetic is at its limits: ties, units near overflow, numbers that are not finite, signed zeros."""

import pytest
import torch
from ops.blocks import random_blocks
from reference.ground_truth import GAP, assert_optimal

from proxsparse import prox_nm, prox_nm_, reference
from proxsparse.ops.registry import chosen_backend

OP = "prox_nm_"
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
each_dtype = pytest.mark.parametrize("dtype", GAP, ids=str)
full_precision = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.itemsize])


# ------------------------------------------------------------------------------------------ ties and units


def test_the_dense_point_is_found_where_three_weights_tie_at_s_zero():
    """There v = k = 0 for three weights, and 1 / (v^2 + k)^(3/2) is more than float32 holds."""
    weight = torch.tensor([[0.9159409, 0.5795862, 0.5795862, 0.5795862]])
    candidate, valid = reference.prox.dense_candidate(weight, 0.7)
    assert valid.all()
    assert candidate.isfinite().all()
    assert_optimal(candidate, weight, 0.7)


@full_precision
def test_a_tie_of_three_where_the_dense_start_is_exact(dtype, device):
    """Strengths around the one at which the smallest root R_4 of the dense problem vanishes."""
    high = torch.linspace(0.3, 1.0, 101, dtype=torch.float64)[:, None]
    low = high * torch.linspace(0.3, 1.0, 301, dtype=torch.float64)
    weight = torch.stack([high.expand_as(low), low, low, low], dim=-1).view(-1, 4).to(dtype)
    assert_optimal(prox_nm(weight.to(device), 1.0), weight, 1.0)


def test_ties_go_to_the_lower_index(device):
    weight = torch.tensor([[1.0, 3, 1, 2], [5, 5, 5, 5], [2, 0, 3, -2]], device=device)
    assert prox_nm(weight, 10.0).tolist() == [[0, 3, 0, 2], [5, 5, 0, 0], [2, 0, 3, 0]]
    assert prox_nm(weight, 10.0, "1:4").tolist() == [[0, 3, 0, 0], [5, 0, 0, 0], [0, 0, 3, 0]]


@full_precision
@pytest.mark.parametrize("exponent", [-80, 80])
def test_the_unit_of_the_weights_does_not_matter(exponent, dtype, device):
    """A power of two changes no digit: prox(w * c; lambda / c) = c * prox(w; lambda), bit for bit."""
    unit = 2.0**exponent
    weight = torch.cat([random_blocks(20_000, 0.7, seed=20), torch.tensor([[1.5, 1.5, 1.5, 0.0]])]).to(device, dtype)
    assert torch.equal(prox_nm(weight * unit, 0.7 / unit), prox_nm(weight, 0.7) * unit)


@full_precision
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_only_the_magnitude_of_the_scale_counts(pattern, dtype, device):
    weight = random_blocks(600, 0.7, seed=21).view(3, 800).to(device, dtype)
    scale = (0.2 + torch.rand(800, device=device)).to(dtype)
    sign = torch.where(torch.arange(800, device=device) % 3 == 0, -1.0, 1.0).to(dtype)
    assert torch.equal(prox_nm(weight, 0.7, pattern, scale * sign), prox_nm(weight, 0.7, pattern, scale))


# ------------------------------------------------------------------------------------------ what must not change


@each_dtype
@pytest.mark.parametrize("n", [1, 2])
def test_what_the_prox_does_not_change_keeps_its_bits(n, dtype, device):
    """Feasible blocks, -0.0 among them, and blocks with a number that is not finite; a NaN only stays a NaN."""
    for size in (0.05, 5.0):  # next to blocks that coordinate descent solves, and next to others
        weight = (size * torch.randn(600, 4)).to(dtype)
        weight[:200, : 4 - n] = torch.tensor([0.0, -0.0, -0.0])[: 4 - n].to(dtype)
        weight[50::50, 3], weight[60::50], weight[75::50, 0] = torch.inf, -torch.inf, torch.nan
        bits(weight)[75::100, 0] = -1  # also a NaN
        same = ~weight.isfinite().all(-1) | (torch.arange(600) < 200)
        keeps_bits = same[:, None] & ~weight.isnan()
        for scale in (None, torch.tensor([0.3, 3.0, 0.7, 1.1], device=device).repeat(600)):
            result = prox_nm(weight.view(1, -1).to(device), 0.5, f"{n}:4", scale).cpu().view(-1, 4)
            assert torch.equal(bits(result)[keeps_bits], bits(weight)[keeps_bits])
            assert torch.equal(result.isnan(), weight.isnan())
            assert result[~same].isfinite().all()
            assert (result[~same] != weight[~same]).any()


@each_dtype
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_changes_no_other_block_at_any_strength(poison, dtype, device):
    """All other blocks are small, where backends choose how to solve them by the largest weight of many.

    A warp of the CUDA kernels stops when all of its blocks have converged, which may be a sweep earlier without one.
    """
    for strength in (0.01, 0.15, 0.3):
        clean = random_blocks(256, 1.0, seed=22)
        clean = (strength * clean / clean.abs().amax(-1, keepdim=True).clamp_min(1e-30)).to(device, dtype)
        poisoned = clean.clone()
        poisoned[100, 2] = poison
        expected = prox_nm(clean, 1.0)
        expected[100] = poisoned[100]
        rtol, atol = (2 * torch.finfo(dtype).eps, 1e-5 * strength) if chosen_backend() == "cuda" else (0, 0)
        torch.testing.assert_close(prox_nm(poisoned, 1.0), expected, rtol=rtol, atol=atol, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("n", [1, 2])
def test_kept_weights_keep_their_bits_and_pruned_ones_become_plus_zero(n, dtype, device):
    weight, scale = torch.randn(8, 400).to(dtype), 0.25 + torch.rand(400, device=device)
    for c in (None, scale):
        result = prox_nm(weight.to(device), 1e4, f"{n}:4", c).cpu()
        kept = result != 0
        assert (kept.view(8, 100, 4).sum(-1) == n).all()
        assert torch.equal(bits(result[kept]), bits(weight[kept]))
        assert not result[~kept].signbit().any()


@each_dtype
def test_zeros_are_positive_even_by_underflow(dtype, device):
    units = -torch.randint(1, 5, (4, 800))  # of the smallest number of the dtype
    smallest, scale = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 2.0**100
    weight = (units.double() * smallest).to(device, dtype)
    result = prox_nm(weight, 0.5 / (4 * smallest * scale), scale=torch.full((800,), scale, device=device))
    assert (result == 0).any()
    assert not result[result == 0].signbit().any()


@each_dtype
def test_lambda_zero_is_the_identity(dtype, device):
    weight = random_blocks(50, 0.7, seed=17).to(device, dtype)
    assert torch.equal(bits(prox_nm(weight, 0.0)), bits(weight))
    assert torch.equal(bits(prox_nm_(weight.clone(), 0)), bits(weight))


# ------------------------------------------------------------------------------------------ the ends of the range


@full_precision
@pytest.mark.parametrize(("size", "reg_lambda"), [(1e30, 1.0), (1.0, 1e30), (1e25, 1e10)])
def test_a_huge_strength_prunes_to_the_two_largest(size, reg_lambda, dtype, device):
    weight = size * torch.tensor([[1.0, -0.99, 1.01, 0.98], [0.5, 0.0, -0.7, 0.6]], dtype=dtype, device=device)
    expected = torch.where(reference.nm_mask(weight.abs()), weight, 0.0)
    assert torch.equal(prox_nm(weight, reg_lambda), expected)


@full_precision
@pytest.mark.parametrize(("size", "reg_lambda"), [(1e-30, 1.0), (1.0, 1e-30), (1e-15, 1e-15), (1.0, 1e-50)])
def test_a_tiny_strength_changes_next_to_nothing(size, reg_lambda, dtype, device):
    weight = size * torch.tensor([[1.0, -0.99, 1.01, 0.98], [0.5, 0.1, -0.7, 0.6]], dtype=dtype, device=device)
    torch.testing.assert_close(prox_nm(weight, reg_lambda), weight, rtol=4 * torch.finfo(dtype).eps, atol=0)


OVERFLOWING = [(torch.float32, 1, 3e38), (torch.bfloat16, 1e30, 1e10), (torch.float64, 1e200, 1e200)]


@pytest.mark.parametrize(("dtype", "size", "reg_lambda"), OVERFLOWING, ids=str)
def test_the_two_largest_stay_where_lambda_times_a_weight_overflows(dtype, size, reg_lambda, device):
    blocks = [[1.0, 2.0, 3.0, 4.0], [-4.0, 2.0, 0.0, -3.0], [1.0, 1.0, 1.0, 0.5]]
    weight = (size * torch.tensor(blocks, dtype=torch.float64)).to(device, dtype)
    kept = weight * torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0]], device=device)
    assert torch.equal(prox_nm(weight, reg_lambda), kept)
    scale = torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=torch.float64, device=device).to(dtype)
    scaled = weight[:1] * torch.tensor([0, 1, 0, 1], device=device)  # 1, 6, 3, 4
    assert torch.equal(prox_nm(weight[:1], reg_lambda, scale=scale), scaled)


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
