"""What the Triton prox has to do; test_triton_prox.py runs this file in a process of its own.

On the CPU that process has TRITON_INTERPRET=1, which has to be set before triton is imported; without it, on a GPU.
"""

import os

import pytest
import torch
from blocks import random_blocks

from proxsparse import prox_nm, reference, use_backend
from proxsparse.ops.prox_list import prox_nm_list_
from proxsparse.ops.tuning import use_launch_parameters
from proxsparse.triton_kernels import PROX_LAUNCHES, prox, prox_list_n4_, prox_n4_

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LAMBDA = 0.7  # not a float32 number: a rounded one would show in float64

# Units of z_1^2 and of z_1: the objective above the optimum, and the error of a weight where the optimum is unique.
GAP = {torch.float64: 1e-11, torch.float32: 2e-6}
ERROR = {torch.float64: 1e-13, torch.float32: 4e-6}
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
DTYPES = list(BITS)
COUNT = 125_000  # blocks a test: 750,000 in each of the two dtypes


def result(weight, reg_lambda=LAMBDA, n=2, scale=None):
    """The prox of a copy, by the kernel."""
    new = weight.clone().to(DEVICE)
    prox_n4_(new, reg_lambda, n, None if scale is None else scale.to(DEVICE))
    return new.cpu()


def optimum(weight, reg_lambda=LAMBDA, n=2):
    """The prox of the same numbers in float64."""
    return reference.prox_nm(weight.double(), reg_lambda, f"{n}:4")


def largest(weight):
    """[blocks, 4] -> [blocks]: z_1, or 1 where all are zero."""
    z1 = weight.double().abs().amax(-1)
    return torch.where(z1 > 0, z1, 1.0)


def gap(w, weight, reg_lambda=LAMBDA, n=2):
    """[blocks, 4] -> [blocks]: the objective of w above the optimum, over z_1^2."""
    z, best = weight.double().abs(), optimum(weight, reg_lambda, n).abs()
    above = reference.objective(w.double().abs(), z, reg_lambda, n) - reference.objective(best, z, reg_lambda, n)
    return above / largest(weight).square()


def error(w, weight, reg_lambda=LAMBDA, n=2):
    """[blocks, 4] -> [blocks]: the largest difference to the optimum, over z_1."""
    return (w.double() - optimum(weight, reg_lambda, n)).abs().amax(-1) / largest(weight)


def same_bits(a, b):
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


# ------------------------------------------------------------------------------------------------- optimality


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("reg_lambda", [0.02, LAMBDA, 1.0, 30.0])
def test_the_objective_is_optimal_for_blocks_of_all_kinds(reg_lambda, dtype):
    weight = random_blocks(COUNT, reg_lambda, seed=1).to(dtype)
    assert gap(result(weight, reg_lambda), weight, reg_lambda).max() <= GAP[dtype]


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("strength", [1e-4, 0.12, 0.17, 0.4, 0.75, 0.95, 1.1, 1.25, 10.0, 1e3])
def test_the_objective_is_optimal_where_all_blocks_are_of_one_strength(strength, dtype):
    weight = random_blocks(COUNT // 5, 1.0, seed=2)
    weight = (weight / largest(weight)[:, None] * strength / LAMBDA).to(dtype)
    assert gap(result(weight), weight).max() <= GAP[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_the_weights_are_those_of_the_reference_where_the_optimum_is_unique(dtype):
    weight = random_blocks(30_000, LAMBDA).to(dtype)
    strength = LAMBDA * largest(weight)
    unique = (strength < 1 / 6) | (strength > 1.3)  # strictly convex; or always 2-sparse
    assert error(result(weight), weight)[unique].max() <= ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("strength", [1e-3, 4e-3, 1e-2, 3e-2, 0.06, 0.1, 0.16])
def test_coordinate_descent_where_all_blocks_are_small(strength, dtype):
    weight = random_blocks(20_000, LAMBDA)
    weight = (weight / largest(weight)[:, None] * strength * (1 - 1e-6) / LAMBDA).to(dtype)
    assert error(result(weight), weight).max() <= ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strength", [2e-3, 4e-3, 3e-2, 6e-2, 0.1, 0.16, 0.2, 0.25, 0.3])
def test_coordinate_descent_for_half_precision(strength, dtype):
    """Fewer sweeps, as long as they leave 1e-5 z_1 beside the rounding of the result."""
    weight = random_blocks(20_000, LAMBDA)
    weight = (weight / largest(weight)[:, None] * strength * 0.99 / LAMBDA).to(dtype)
    exact, eps = optimum(weight), torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * eps
    allowed = eps / 2 * exact.abs() + 1.2e-5 * largest(weight)[:, None] + tiny
    assert ((result(weight).double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", GAP, ids=str)
@pytest.mark.parametrize("reg_lambda", [0.3, 0.99, 1 - 1e-5, 1 - 1e-6, 1 - 1e-7, 1 - 1e-8, 1.0, 4.0])
def test_1_of_4(reg_lambda, dtype):
    weight = random_blocks(10_000, 1.0, n=1).to(dtype)
    new = result(weight, reg_lambda, n=1)
    assert gap(new, weight, reg_lambda, n=1).max() <= {torch.float64: 1e-14, torch.float32: 1e-12}[dtype]
    if reg_lambda < 0.999:
        assert error(new, weight, reg_lambda, n=1).max() <= 100 * ERROR[dtype]  # the condition number at 0.99
    if reg_lambda >= 1:
        assert ((new != 0).sum(-1) <= 1).all()


@pytest.mark.parametrize("exponent", [-80, 80])
def test_the_unit_of_the_weights_does_not_matter(exponent):
    weight, unit = random_blocks(20_000, LAMBDA).float(), 2.0**exponent
    assert torch.equal(result(weight * unit, LAMBDA / unit), result(weight) * unit)


def test_equal_weights_share_what_1_of_4_leaves():
    """w + 3 lambda w = 1, also where the lambda of float32 is 1."""
    torch.testing.assert_close(result(torch.ones(2, 8), 0.99999999, n=1), torch.full((2, 8), 0.25))


def test_ties_go_to_the_lower_index():
    weight = torch.tensor([[1.0, 3, 1, 2], [5, 5, 5, 5], [2, 0, 3, -2]])
    assert result(weight, reg_lambda=10).tolist() == [[0, 3, 0, 2], [5, 5, 0, 0], [2, 0, 3, 0]]
    assert result(weight, reg_lambda=10, n=1).tolist() == [[0, 3, 0, 0], [5, 0, 0, 0], [0, 0, 3, 0]]


# ------------------------------------------------------------------------------------------------- dtypes and scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_half_precision_is_float32_rounded_once(n, dtype):
    weight = random_blocks(30_000, LAMBDA).to(dtype) + 0.0
    half, single = result(weight, n=n), result(weight.float(), n=n).to(dtype) + 0.0
    # On a GPU they are two programs, and the compiler may join other multiplications and additions in each.
    assert (half != single).double().mean() <= (1e-4 if DEVICE == "cuda" else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scale_is_a_prox_of_the_scaled_weight(scale_dtype, dtype):
    scale = (0.25 + torch.rand(3264)).to(scale_dtype)
    weight = random_blocks(3264, LAMBDA).view(4, 3264).to(dtype)
    scaled = weight.double() * scale.double()
    new = result(weight, scale=scale).double() * scale.double()
    tolerance = {torch.bfloat16: 1e-4, torch.float16: 1e-5} | GAP  # that of rounding the weight
    assert gap(new.view(-1, 4), scaled.view(-1, 4)).max() <= tolerance[dtype]


@pytest.mark.parametrize("n", [1, 2])
def test_only_the_magnitude_of_the_scale_counts(n):
    scale, weight = 0.25 + torch.rand(44), random_blocks(11 * 10, LAMBDA).view(10, 44).float()
    sign = torch.where(torch.arange(44) % 3 == 0, -1.0, 1.0)
    assert same_bits(result(weight, n=n, scale=scale * sign), result(weight, n=n, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_kept_weights_keep_their_bits(n, dtype):
    weight, scale = torch.randn(8, 400).to(dtype), 0.25 + torch.rand(400)
    for metric in (None, scale):
        new = result(weight, reg_lambda=1e4, n=n, scale=metric)
        kept = new != 0
        assert (kept.view(8, 100, 4).sum(-1) == n).all()
        assert same_bits(new[kept], weight[kept])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_are_positive_even_by_underflow(dtype):
    units = -torch.randint(1, 5, (4, 800))  # of the smallest number of the dtype
    smallest, scale = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 2.0**100
    weight = (units.double() * smallest).to(dtype)
    new = result(weight, 0.5 / (4 * smallest * scale), scale=torch.full((800,), scale)).view(BITS[dtype])
    minus_zero = torch.iinfo(BITS[dtype]).min
    assert (new == 0).any()
    assert not (new == minus_zero).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("poison", [float("nan"), -float("inf")])
@pytest.mark.parametrize("size", [0.05, 1.0])  # solved by coordinate descent; by the three candidates
def test_a_block_that_is_not_finite_stays_as_it_is_and_alone(size, poison, n, dtype):
    weight = (size * torch.randn(6, 16).clamp(-2, 2)).to(dtype)
    poisoned = weight.clone()
    poisoned[1, 4:8] = poison
    poisoned[3, 2] = poison
    poisoned[5, 13] = poison
    expected = result(weight, n=n)
    for block in ((1, slice(4, 8)), (3, slice(0, 4)), (5, slice(12, 16))):
        expected[block] = poisoned[block]
    assert same_bits(result(poisoned, n=n), expected)


# ------------------------------------------------------------------------------------------------- shapes and calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4,), (1, 4), (3, 4), (1, 44), (7, 12), (2, 3, 8), (0, 8), (4, 0), (5, 16)], ids=str)
def test_shapes(shape, dtype, monkeypatch):
    monkeypatch.setattr(prox, "BLOCKS_IN_INTERPRETER", 8)  # several programs, the last one not full
    count = torch.Size(shape).numel()
    surrounded = torch.randn(16 + count + 16).to(dtype)
    scale = 0.5 + torch.rand(shape[-1])
    expected = surrounded.clone()
    expected[16 : 16 + count] = reference.prox_nm(
        surrounded[16 : 16 + count].view(shape), LAMBDA, scale=scale
    ).flatten()
    surrounded, scale = surrounded.to(DEVICE), scale.to(DEVICE)
    prox_n4_(surrounded[16 : 16 + count].view(shape), LAMBDA, 2, scale)
    resolution = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).resolution
    torch.testing.assert_close(
        surrounded.cpu(), expected, rtol=resolution, atol=1e-5 if dtype != torch.float64 else 1e-12
    )
    assert same_bits(surrounded.cpu()[:16], expected[:16])
    assert same_bits(surrounded.cpu()[16 + count :], expected[16 + count :])


def test_lambda_zero_is_the_identity():
    weight = torch.randn(8, 16)
    assert same_bits(result(weight, reg_lambda=0.0), weight)


def test_the_op_reaches_this_kernel_with_any_strides():
    weight = random_blocks(64, LAMBDA).view(16, 16).float()
    for view in (weight, weight.t(), weight[::2]):
        with use_backend("triton"):
            new = prox_nm(view.to(DEVICE), LAMBDA).cpu()
        assert same_bits(new, result(view.contiguous()))


def test_what_the_kernel_cannot_serve_is_refused():
    for weight, n in ((torch.ones(2, 6), 2), (torch.ones(4, 8).t(), 2), (torch.tensor(1.0), 2), (torch.ones(2, 8), 3)):
        with pytest.raises(ValueError, match=r"weight of shape|n=3"):
            prox_n4_(weight.to(DEVICE), LAMBDA, n, None)


# ------------------------------------------------------------------------------------------------- launch parameters

INTERPRETED_LAUNCHES = [
    {"blocks": 8, "warps": 1, "parts": 2},
    {"parts": 2},
]


@pytest.mark.parametrize("size", [0.05, 1.0])  # solved by coordinate descent; by the three candidates
@pytest.mark.parametrize("launch", INTERPRETED_LAUNCHES if DEVICE == "cpu" else PROX_LAUNCHES, ids=str)
def test_launch_parameters_change_nothing_but_the_speed(launch, size, monkeypatch):
    """More pieces than programs, so that every program solves several, and the last one is not full."""
    weight = size * random_blocks(24, LAMBDA, seed=5).float().view(2, 48)
    scale = torch.linspace(0.5, 1.5, 48)
    for c in (None, scale):
        new, expected = weight.clone().to(DEVICE), result(weight, scale=c)
        prox_n4_(new, LAMBDA, 2, None if c is None else c.to(DEVICE), **launch)
        torch.testing.assert_close(new.cpu(), expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", 64)
    weights = [weight.clone().to(DEVICE) for _ in range(2)]
    prox_list_n4_(weights, [LAMBDA, 0.1], 2, **launch)
    for new, reg_lambda in zip(weights, [LAMBDA, 0.1], strict=True):
        torch.testing.assert_close(new.cpu(), result(weight, reg_lambda), rtol=1e-4, atol=1e-5)


def test_the_ops_pass_on_what_was_measured(monkeypatch):
    """Not for a scale, which was not measured."""
    given = []
    for name in ("prox_n4_", "prox_list_n4_"):
        monkeypatch.setattr(f"proxsparse.triton_kernels.{name}", lambda *arguments, **launch: given.append(launch))
    weight = torch.ones(2, 8, device=DEVICE)
    with use_backend("triton"), use_launch_parameters("prox", blocks=512, warps=2):
        prox_nm(weight, 0.1)
        prox_nm(weight, 0.1, scale=weight[0])
        prox_nm_list_([weight], [0.1])
    assert given == [{"blocks": 512, "warps": 2}, {}, {"blocks": 512, "warps": 2}]


# ------------------------------------------------------------------------------------------------- a list of weights


@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (2, torch.float64), (2, torch.bfloat16)], ids=str)
def test_a_list_is_every_weight_alone(n, dtype, monkeypatch):
    """Sizes below, at and above a row of the table, sizes and addresses that are no multiple of 16, and lambda = 0."""
    monkeypatch.setattr(prox, "BLOCKS_IN_INTERPRETER", 32)
    row = 2 * 4 * prox.blocks_per_program(torch.empty(0, dtype=dtype, device=DEVICE), 2**20)  # of two programs
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", row)
    counts = (16, row, 41 * row // 16, 20, 25 * row // 16, 32)
    memory = [random_blocks(-(-count // 4) + 1, LAMBDA, seed=count).flatten() for count in counts]
    weights = [m[:-4].to(dtype).to(DEVICE).view(-1, 4) for m in memory[:5]] + [memory[5].to(dtype).to(DEVICE)[1:33]]
    reg_lambdas = [0.7, 0.02, 2.0, 0.7, 0.0, 0.3]
    for factor in (1.0, 0.5):  # again with other lambdas
        lambdas = [factor * reg_lambda for reg_lambda in reg_lambdas]
        expected = [result(weight.cpu(), x, n) for weight, x in zip(weights, lambdas, strict=True)]
        prox_list_n4_(weights, lambdas, n)
        results = torch.cat([weight.cpu().flatten() for weight in weights])
        differ = results.view(BITS[dtype]) != torch.cat([other.flatten() for other in expected]).view(BITS[dtype])
        # On a GPU they are two programs, and the compiler may join other multiplications and additions in each.
        assert differ.double().mean() <= (1e-3 if DEVICE == "cuda" else 0)


def test_a_table_is_kept_until_something_changes():
    weights = [torch.randn(8, 16, device=DEVICE) for _ in range(2)]
    prox.table_of.cache_clear()
    for reg_lambda in (0.3, 0.3, 0.4):  # each call finds other weights in the same memory
        expected = [result(weights[0].cpu(), reg_lambda), result(weights[1].cpu(), 0.1)]
        prox_list_n4_(weights, [reg_lambda, 0.1], 2)
        assert all(same_bits(weight.cpu(), other) for weight, other in zip(weights, expected, strict=True))
    assert (prox.table_of.cache_info().misses, prox.table_of.cache_info().hits) == (2, 1)


def test_a_list_of_two_dtypes_is_refused():
    with pytest.raises(ValueError, match=r"float64.*list of torch.float32"):
        prox_list_n4_([torch.ones(2, 8, device=DEVICE), torch.ones(2, 8, device=DEVICE).double()], [0.1, 0.1], 2)
