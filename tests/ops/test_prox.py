"""The prox on every backend of this machine: exact on a million hard blocks and where arithmetic is at its limits."""

import functools

import pytest
import torch
from ops.blocks import random_blocks
from ops.cases import DTYPES, bits, each_dtype
from ops.on_each_backend import EMULATED, assert_alike
from reference.ground_truth import GAP, assert_optimal, exact, relative_gap

from proxsparse import prox_nm, reference
from proxsparse.ops import prox_nm_list_, registry

OP = "prox_nm_"
HALF = (torch.bfloat16, torch.float16)
# In units of z_1: the error of a weight where the optimum is unique, before it is rounded to the dtype.
ERROR = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 1.2e-5, torch.float16: 1.2e-5}
full_precision = pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
each_poison = pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])


def is_slow(device: torch.device) -> bool:
    """Whether each block takes microseconds: the reference, and compiled GPU kernels on the CPU (tests/ptx)."""
    return registry.chosen_backend() in (*EMULATED, "reference") and device.type == "cpu"


def largest(weight: torch.Tensor) -> torch.Tensor:
    """[blocks, 4] -> [blocks, 1]: z_1, or 1 where all are zero."""
    z1 = weight.double().abs().amax(-1, keepdim=True)
    return z1.where(z1 > 0, 1.0)


def rounding(dtype: torch.dtype, weight: torch.Tensor) -> torch.Tensor | float:
    """Half a unit in the last place of these float64 numbers in a half-precision dtype; 0 in the others."""
    info = torch.finfo(dtype)
    return info.eps / 2 * weight.abs() + info.smallest_normal * info.eps if dtype in HALF else 0.0


# ------------------------------------------------------------------------------------------ how exact it is


@functools.cache
def judged(dtype: torch.dtype) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """[(lambda, blocks, their exact prox in float64)]: a million blocks for float64 and float32.

    Half of the blocks are in the order of their largest weight, so that neighbours are solved alike. float16 has no
    room for lambda * z_1 from 1e-4 to 1e3 at any other lambda.
    """
    cases = []
    for seed, reg_lambda in enumerate((0.05, 0.1) if dtype in HALF else (0.02, 0.7, 1.0, 30.0)):
        count = 25_000 if dtype in HALF else 125_000
        weight = random_blocks(2 * count, reg_lambda, seed=seed).to(dtype)
        weight[count:] = weight[count:][weight[count:].abs().amax(-1).argsort()]
        cases.append((reg_lambda, weight, exact(weight, reg_lambda)))
    return cases


@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=pytest.mark.slow), *DTYPES[1:]], ids=str)
def test_a_million_hard_blocks_match_the_ground_truth(dtype, device):
    step = 5 if is_slow(device) else 1
    for reg_lambda, blocks, best in judged(dtype):
        weight, best = blocks[::step].contiguous(), best[::step]
        result = prox_nm(weight.view(-1, 1000).to(device), reg_lambda)
        assert device.type == "cpu" or torch.equal(result, prox_nm(weight.view(-1, 1000).to(device), reg_lambda))
        result = result.view(-1, 4).cpu()
        assert_optimal(result, weight, reg_lambda, best=best)
        pruned = (result == 0) & (weight != 0)
        assert pruned.any()
        assert not result[pruned].signbit().any()
        if dtype in HALF:  # only its own rounding separates a weight from the exact prox, except where minimisers tie
            wrong = (result.double() - best).abs() > rounding(dtype, best) + 1e-5 * largest(weight)
            assert wrong.any(-1).double().mean() < 1e-3


@each_dtype
def test_blocks_of_one_strength(dtype, device):
    """lambda * z_1 decides how a block is solved; up to 1/6 and from 1.3 on the optimum is unique, ties apart."""
    count = 2_000 if is_slow(device) else 5_000
    small = (1e-4, 1e-3, 2e-3, 4e-3, 1e-2, 3e-2, 0.06, 0.1, 0.12, 0.16)
    for strength in (*small, 0.17, 0.2, 0.25, 0.3, 0.4, 0.75, 0.95, 1.1, 1.25, 1.31, 10.0, 1e3):
        weight = random_blocks(count, 0.7, seed=2)
        weight = (weight / largest(weight) * strength * (1 - 1e-6) / 0.7).to(dtype)
        result = prox_nm(weight.to(device), 0.7).cpu()
        assert_optimal(result, weight, 0.7)
        if not (0.3 if dtype in HALF else 1 / 6) < strength < 1.3:
            best, z = reference.prox_nm(weight.double(), 0.7), weight.double().abs().sort(-1, descending=True).values
            tie = (strength > 1) & (z[:, 1] - z[:, 2] <= 1e-6 * z[:, 0])  # either of them may stay
            error = (result.double() - best).abs() - rounding(dtype, best)
            assert ((error <= ERROR[dtype] * largest(weight)).all(-1) | tie).all(), strength


@functools.cache
def solved(reg_lambda: float, m: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """1,200 blocks of which two weights are dropped, and their prox in float64 by the reference."""
    weight = random_blocks(1200, reg_lambda, m, m - 2, seed=3).to(dtype)
    return weight, reference.prox_nm(weight.double(), reg_lambda, f"{m - 2}:{m}")


@each_dtype
@pytest.mark.parametrize("m", [6, pytest.param(8, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.slow)])
def test_hard_blocks_of_which_two_weights_are_dropped(m, dtype, device, require):
    """As good as the reference."""
    for reg_lambda in (0.1,) if dtype == torch.float16 else (0.02, 30.0):
        step = 10 if is_slow(device) else 1
        weight, best = (blocks[::step].contiguous() for blocks in solved(reg_lambda, m, dtype))
        require(OP, weight.to(device), reg_lambda, m - 2, m)
        result = prox_nm(weight.view(4, -1).to(device), reg_lambda, f"{m - 2}:{m}").cpu()
        gap = relative_gap(result.view(-1, m), best, weight, reg_lambda, m - 2)
        assert gap.abs().max() <= GAP[dtype] * m / 4
        assert not result[(result == 0) & (weight.view(4, -1) != 0)].signbit().any()


@each_dtype
@pytest.mark.parametrize("m", [4, 6, 8, 10])
def test_a_block_does_not_depend_on_its_neighbours(m, dtype, device, require):
    """Blocks are solved together, until all have converged; a weight that is 0 in between may grow again."""
    count = 480 if is_slow(device) else 9_600
    weight = torch.randn(count, m, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    require(OP, weight, 0.4, m - 2, m)
    alone, in_long_rows = (prox_nm(each, 0.4, f"{m - 2}:{m}") for each in (weight, weight.view(-1, 16 * m)))
    torch.testing.assert_close(in_long_rows.view(-1, m), alone, rtol=2 * torch.finfo(dtype).eps, atol=3e-4)


# ------------------------------------------------------------------------------------------ ties and units


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


@full_precision
@pytest.mark.parametrize("exponent", [-80, 80])
def test_the_unit_of_the_weights_does_not_matter(exponent, dtype, device):
    """A power of two changes no digit: prox(w * c; lambda / c) = c * prox(w; lambda), bit for bit."""
    unit = 2.0**exponent
    weight = torch.cat([random_blocks(20_000, 0.7, seed=20), torch.tensor([[1.5, 1.5, 1.5, 0.0]])]).to(device, dtype)
    assert torch.equal(prox_nm(weight * unit, 0.7 / unit), prox_nm(weight, 0.7) * unit)


# ------------------------------------------------------------------------------------------ what must not change


@each_dtype
def test_what_the_prox_does_not_change_keeps_its_bits(dtype, device):
    """Feasible blocks, -0.0 among them, and blocks with a number that is not finite; a NaN only stays a NaN."""
    for size in (0.05, 5.0):  # next to blocks that coordinate descent solves, and next to others
        weight = (size * torch.randn(600, 4)).to(dtype)
        weight[:200, :2] = torch.tensor([0.0, -0.0]).to(dtype)
        weight[50::50, 3], weight[60::50], weight[75::50, 0] = torch.inf, -torch.inf, torch.nan
        weight[75::100, 0] = torch.full((6, dtype.itemsize), 255, dtype=torch.uint8).view(dtype)[:, 0]  # also a NaN
        same = ~weight.isfinite().all(-1) | (torch.arange(600) < 200)
        keeps_bits = same[:, None] & ~weight.isnan()
        result = prox_nm(weight.view(1, -1).to(device), 0.5).cpu().view(-1, 4)
        assert torch.equal(bits(result[keeps_bits]), bits(weight[keeps_bits]))
        assert torch.equal(result.isnan(), weight.isnan())
        assert result[~same].isfinite().all()
        assert (result[~same] != weight[~same]).any()
        assert torch.equal(bits(prox_nm(weight.to(device), 0.0)), bits(weight))


@each_dtype
@each_poison
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
        cuda = registry.chosen_backend() == "cuda"
        rtol, atol = (2 * torch.finfo(dtype).eps, 1e-5 * strength) if cuda else (0, 0)
        torch.testing.assert_close(prox_nm(poisoned, 1.0), expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_zeros_are_positive_even_by_underflow(dtype, device):
    units = -torch.randint(1, 5, (4, 800))  # of the smallest number of the dtype
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    weight = (units.double() * smallest).to(device, dtype)
    result = prox_nm(weight, min(0.5 / (4 * smallest), 2.0**127))
    assert (result == 0).any()
    assert not result[result == 0].signbit().any()


# ------------------------------------------------------------------------------------------ the ends of the range


BLOCKS = torch.tensor([[1.0, -0.99, 1.01, 0.98], [-4.0, 2.0, 0.1, -3.0], [1.0, 1.0, 1.0, 0.5]], dtype=torch.float64)
LARGEST = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0]])
HUGE = [(x, *sizes) for x in DTYPES[:2] for sizes in ((1e30, 1.0), (1.0, 1e30), (1e25, 1e10))]
HUGE += [(torch.float32, 1, 3e38), (torch.bfloat16, 1e30, 1e10), (torch.float64, 1e200, 1e200)]


@pytest.mark.parametrize(("dtype", "size", "reg_lambda"), HUGE, ids=str)
def test_a_huge_strength_keeps_the_two_largest_even_where_it_overflows(dtype, size, reg_lambda, device):
    weight = (size * BLOCKS).to(device, dtype)
    assert torch.equal(prox_nm(weight, reg_lambda), weight * LARGEST.to(device))


@full_precision
@pytest.mark.parametrize(("size", "reg_lambda"), [(1e-30, 1.0), (1.0, 1e-30), (1e-15, 1e-15), (1.0, 1e-50)])
def test_a_tiny_strength_changes_next_to_nothing(size, reg_lambda, dtype, device):
    weight = (size * BLOCKS).to(device, dtype)
    torch.testing.assert_close(prox_nm(weight, reg_lambda), weight, rtol=4 * torch.finfo(dtype).eps, atol=0)


# ------------------------------------------------------------------------------------------ a list of weights


def test_each_weight_of_a_list_is_changed_as_if_alone(device):
    """Every dtype, several sizes and layouts, lambda = 0; again with other values and lambdas in the same memory."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16)
    weights = [torch.zeros(16, 24, device=device, dtype=dtype) for dtype in dtypes]
    weights += [
        torch.zeros(24, 16, device=device).T[::2],
        torch.zeros(0, 8, device=device),
        torch.zeros(3, 4, device=device),
    ]
    reg_lambdas = [0.7, 0.2, 1.5, 0.0, 0.05, 0.3, 0.4, 3.0]
    for pattern, factor in (("2:4", 1.0), ("2:4", 0.5)):
        for seed, weight in enumerate(weights):
            weight.copy_(random_blocks(weight.numel() // 4, 0.7, seed=seed).view(weight.shape))
        lambdas, versions = [factor * x for x in reg_lambdas], [weight._version for weight in weights]
        expected = [prox_nm(weight, x, pattern) for weight, x in zip(weights, lambdas, strict=True)]
        prox_nm_list_(weights, lambdas, pattern)
        for weight, alone, version, x in zip(weights, expected, versions, lambdas, strict=True):
            assert (weight._version > version) == (x != 0 and weight.numel() != 0)
            if weight.is_cuda and weight.numel():  # there it is another program
                assert_alike(weight, alone)
            else:
                assert torch.equal(weight, alone)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_bad_number_does_not_keep_the_general_solver_from_stopping(poison, monkeypatch):
    sweeps = []
    original = reference.elementary_symmetric
    monkeypatch.setattr(reference.prox, "elementary_symmetric", lambda x, k: sweeps.append(k) or original(x, k))
    weight = random_blocks(9, 0.7, m=8, n=4, seed=23)
    weight[0] = 0.0
    reference.prox_nm(weight, 0.7, "4:8")
    needed = len(sweeps)
    weight[0, 3] = poison
    reference.prox_nm(weight, 0.7, "4:8")
    assert len(sweeps) == 2 * needed
