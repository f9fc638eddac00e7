"""The prox on every backend of this machine: exact on a million hard blocks, any layout, and nothing else touched."""

import functools

import pytest
import torch
from ops.blocks import LAYOUTS, random_blocks
from ops.on_each_backend import INTERPRETED
from reference.ground_truth import GAP, assert_optimal, exact, exact_one

from proxsparse import prox_nm, prox_nm_, reference
from proxsparse.ops.registry import chosen_backend

OP = "prox_nm_"
DTYPES = list(GAP)
HALF = (torch.bfloat16, torch.float16)
# In units of z_1: the error of a weight where the optimum is unique, before it is rounded to the dtype.
ERROR = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 1.2e-5, torch.float16: 1.2e-5}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
full_precision = pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)


def largest(weight: torch.Tensor) -> torch.Tensor:
    """[blocks, 4] -> [blocks, 1]: z_1, or 1 where all are zero."""
    z1 = weight.double().abs().amax(-1, keepdim=True)
    return z1.where(z1 > 0, 1.0)


def rounding(dtype: torch.dtype, weight: torch.Tensor) -> torch.Tensor | float:
    """Half a unit in the last place of these float64 numbers in a half-precision dtype; 0 in the others."""
    info = torch.finfo(dtype)
    return info.eps / 2 * weight.abs() + info.smallest_normal * info.eps if dtype in HALF else 0.0


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


@each_dtype
def test_a_million_hard_blocks(dtype, device):
    step = 5 if chosen_backend() == "cuda" and device.type == "cpu" else 1
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
    count = 2_000 if chosen_backend() == "cuda" and device.type == "cpu" else 10_000
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


@full_precision
@pytest.mark.parametrize("below", [0.9, 0.5, 0.1, 0.01, 1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 0.0, -2.0])
def test_one_of_four(below, dtype, device):
    """An fp32 lambda is 1 from 1 - 1e-7 on, and 1 - lambda has lost its digits before."""
    weight, reg_lambda = random_blocks(10_000, 1 - below, n=1, seed=5).to(dtype), 1 - below
    result, best = prox_nm(weight.to(device), reg_lambda, "1:4").cpu(), exact_one(weight, reg_lambda)
    assert_optimal(result, weight, reg_lambda, 1, best=best, tolerance=1e-14 if dtype == torch.float64 else 1e-12)
    if below > 1e-3:
        assert ((result - best).abs() <= 100 * ERROR[dtype] * largest(weight)).all()  # the condition number at 0.99
    if below <= 0:
        assert ((result != 0).sum(-1) <= 1).all()


@full_precision
@pytest.mark.parametrize("below", [1e-3, 1e-6, 1e-8])
def test_equal_weights_share_what_one_of_four_leaves(below, dtype, device):
    """w + 3 lambda w = 1."""
    result = prox_nm(torch.ones(3, 8, dtype=dtype, device=device), 1 - below, "1:4").cpu()
    expected = torch.full((3, 8), 1 / (1 + 3 * (1 - below)), dtype=dtype)
    torch.testing.assert_close(result, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


@each_dtype
def test_scale_is_the_metric(dtype, device):
    """argmin_V 1/2 |V - c W|^2 + lambda * Reg(V), divided by c."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for scale_dtype in (wide, torch.bfloat16):
        scale = (0.25 + 4 * torch.rand(4000)).to(scale_dtype)
        weight = (random_blocks(5_000, 0.1, seed=6).view(-1, 4000) / scale.double()).to(dtype)
        result = prox_nm(weight.to(device), 0.1, scale=scale.to(device))
        assert_optimal(result, weight, 0.1, scale=scale.double(), tolerance=(2 if dtype in HALF else 1) * GAP[dtype])


@each_dtype
def test_scale_by_powers_of_two_is_exact_and_of_any_float_dtype(dtype, device):
    weight = random_blocks(60, 0.7, seed=7).view(2, 120).to(device, dtype)
    scale = 2.0 ** torch.randint(-2, 3, (120,), device=device)
    expected = prox_nm(weight.double() * scale, 0.7) / scale
    for scale_dtype in DTYPES:
        result = prox_nm(weight, 0.7, scale=scale.to(scale_dtype))
        torch.testing.assert_close(result.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
        strided = torch.stack([scale, -scale], dim=-1).to(scale_dtype)[:, 0]
        assert torch.equal(prox_nm(weight, 0.7, scale=strided), result)


# ------------------------------------------------------------------------------------------ layouts


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, device):
    """In place means in this memory, and nowhere else."""
    base = random_blocks(144, 0.7, seed=8).view(24, 24).to(device, dtype)
    inside = torch.zeros(24, 24, dtype=torch.bool, device=device)
    LAYOUTS[layout](inside).fill_(True)
    before, weight = base.clone(), LAYOUTS[layout](base)
    expected = prox_nm(weight.contiguous(), 0.7)
    assert prox_nm_(weight, 0.7) is weight
    assert torch.equal(weight, expected)
    assert torch.equal(base[~inside], before[~inside])
    assert_optimal(expected, LAYOUTS[layout](before), 0.7)


@each_dtype
def test_sizes_that_no_vector_register_divides(dtype, device):
    """1 to 40 and several thousand blocks in one row and in one column, aligned or not, between guards."""
    blocks = random_blocks(8385, 0.7, seed=9).to(dtype)
    best = exact(blocks, 0.7)
    every = (1, 3, 8, 39) if INTERPRETED else range(1, 41)  # each call of Triton's interpreter takes a quarter second
    for count in (*every, 128, 129, 513, 1031, 8385):
        for shape, start in (((1, 4 * count), 512), ((count, 4), 515), ((count, 4), 516)):
            memory = torch.full((4 * count + 1024,), 7.0, dtype=dtype, device=device)
            weight = memory[start : start + 4 * count].view(shape)
            weight.copy_(blocks[:count].view(shape))
            prox_nm_(weight, 0.7)
            assert_optimal(weight, blocks[:count], 0.7, best=best[:count])
            assert (memory[:start] == 7).all(), (count, shape)
            assert (memory[start + 4 * count :] == 7).all(), (count, shape)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 4)])
def test_an_empty_tensor_is_left_alone(shape, device):
    weight = torch.zeros(shape, device=device)
    assert prox_nm_(weight, 0.7) is weight
    assert prox_nm(weight, 0.7).shape == shape


def test_a_leaf_that_requires_grad_changes_in_place_and_the_copy_leaves_its_input(device):
    weight = torch.nn.Parameter(random_blocks(6, 0.7).view(4, 6).T.float().to(device))
    before, version = weight.detach().clone(), weight._version
    expected = prox_nm(weight, 0.7)
    assert torch.equal(weight, before)
    assert not expected.requires_grad
    assert not torch.equal(expected, before)
    assert prox_nm_(weight, 0.7) is weight
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert weight._version > version
    assert torch.equal(weight.detach(), expected)


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("weight", "arguments", "message"),
    [
        (torch.zeros(3, 130), {}, r"\[3, 130\].*multiple of 4.*exclude"),
        (torch.tensor(1.0), {}, r"\[\].*multiple of 4"),
        (torch.zeros(2, 8, dtype=torch.int64), {}, "torch.int64.*convert"),
        (torch.zeros(2, 8, dtype=torch.complex64), {}, "torch.complex64.*convert"),
        (torch.zeros(2, 8), {"reg_lambda": -0.5}, "reg_lambda=-0.5.*>= 0"),
        (torch.zeros(2, 8), {"reg_lambda": float("nan")}, "reg_lambda=nan.*finite"),
        (torch.zeros(2, 8), {"reg_lambda": float("inf")}, "reg_lambda=inf.*finite"),
        (torch.zeros(2, 8), {"scale": torch.ones(4)}, r"\[4\].*shape \[8\]"),
        (torch.zeros(2, 8), {"scale": torch.ones(2, 8)}, r"\[2, 8\].*shape \[8\]"),
        (torch.zeros(2, 8), {"scale": torch.ones(8, dtype=torch.int32)}, "torch.int32.*floating point"),
        (torch.zeros(2, 8), {"pattern": "4:2"}, "4:2.*n < m"),
        (torch.zeros(2, 8), {"pattern": "2/4"}, "'2/4'.*N:M"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_remedy(weight, arguments, message):
    before = weight.clone()
    for function in (prox_nm, prox_nm_):
        with pytest.raises(ValueError, match=message):
            function(weight, **{"reg_lambda": 0.7, **arguments})
    assert torch.equal(weight, before)


def test_the_reference_serves_other_patterns():
    weight = random_blocks(20, 0.7, m=8, n=4).float()
    assert torch.equal(prox_nm(weight, 0.7, "4:8"), reference.prox_nm(weight, 0.7, "4:8"))
