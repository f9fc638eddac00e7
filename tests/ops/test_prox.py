"""The prox on every backend of this machine: exact on a million hard blocks, any layout, and nothing else touched."""

import functools

import pytest
import torch
from ops.blocks import random_blocks
from ops.on_each_backend import backends_of
from reference import ground_truth

from proxsparse import prox_nm, prox_nm_, reference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# The objective's distance from the optimum, in units of z_1^2. fp32 cannot see differences of a few 1e-7 where two
# minimisers tie; a half-precision result has been rounded by eps / 2 a weight, to second order in the objective.
GAP = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2 * 2.0**-14, torch.float16: 2e-6 + 2 * 2.0**-20}
# float16 has no room for lambda * z_1 from 1e-4 to 1e3 at any other lambda.
LAMBDAS = {torch.float64: (0.02, 0.7, 1.0, 30.0), torch.float32: (0.02, 0.7, 1.0, 30.0)}
COUNT = {torch.float64: 250_000, torch.float32: 250_000}


@pytest.fixture(params=backends_of("prox_nm_"))
def device(request, on_backend):
    """The device of the backend under test, which serves every call of the test."""
    return on_backend("prox_nm_", request.param, 1.0, 2, 4, None)


@functools.cache
def judged(dtype: torch.dtype) -> list[tuple[float, torch.Tensor, torch.Tensor]]:
    """[(lambda, blocks, their exact prox in float64)]: a million blocks for float64 and float32."""
    cases = []
    for seed, reg_lambda in enumerate(LAMBDAS.get(dtype, (0.05, 0.1))):
        weight = random_blocks(COUNT.get(dtype, 50_000), reg_lambda, seed=seed).to(dtype)
        cases.append((reg_lambda, weight, ground_truth.exact(weight, reg_lambda)))
    return cases


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_hard_blocks(dtype, device):
    for reg_lambda, weight, exact in judged(dtype):
        result = prox_nm(weight.view(-1, 1000).to(device), reg_lambda)
        assert device.type == "cpu" or torch.equal(result, prox_nm(weight.view(-1, 1000).to(device), reg_lambda))
        result = result.view(-1, 4).cpu()
        gap = ground_truth.relative_gap(result, exact, weight, reg_lambda)
        worst = gap.argmax()
        assert gap.max() <= GAP[dtype], (
            f"lambda={reg_lambda}: {(gap > GAP[dtype]).sum()} of {len(gap)} blocks; the worst is "
            f"{weight[worst].tolist()} -> {result[worst].tolist()} instead of {exact[worst].tolist()}"
        )
        assert gap.min() >= -1e-12, "the result is better than the ground truth: the ground truth is wrong"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_the_rounded_exact_prox(dtype, device):
    """Only its own rounding separates a weight from the float64 prox, but where two minimisers tie."""
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for reg_lambda, weight, exact in judged(dtype):
        result = prox_nm(weight.to(device), reg_lambda).cpu().double()
        error = (result - exact).abs()
        allowed = eps / 2 * exact.abs() + 1e-5 * weight.double().abs().amax(-1, keepdim=True) + tiny
        assert (error > allowed).any(-1).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("reg_lambda", [0.1, 0.5, 0.9, 0.999, 1.0, 3.0])
def test_one_of_four(dtype, reg_lambda, device):
    weight = random_blocks(20_000, reg_lambda, n=1, seed=5).to(dtype)
    result = prox_nm(weight.to(device), reg_lambda, "1:4").cpu()
    exact = ground_truth.exact_one(weight, reg_lambda)
    gap = ground_truth.relative_gap(result, exact, weight, reg_lambda, n=1)
    assert gap.max() <= GAP[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_scale_is_the_metric(dtype, device):
    """argmin_V 1/2 |V - c W|^2 + lambda * Reg(V), divided by c."""
    scale = 0.1 + 4 * torch.rand(400, dtype=torch.float64)
    weight = (random_blocks(20_000, 0.7, seed=6).view(-1, 400) / scale).to(dtype)
    scale = scale.to(dtype)
    metric = (weight.double() * scale.double()).view(-1, 4)
    result = prox_nm(weight.to(device), 0.7, scale=scale.to(device)).cpu().double() * scale.double()
    gap = ground_truth.relative_gap(result.view(-1, 4), ground_truth.exact(metric, 0.7), metric, 0.7)
    assert gap.max() <= GAP[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_by_powers_of_two_is_exact_and_of_any_float_dtype(dtype, device):
    weight = random_blocks(60, 0.7, seed=7).view(-1, 24).to(device, dtype)
    scale = 2.0 ** torch.randint(-2, 3, (24,), device=device)
    expected = prox_nm(weight.double() * scale, 0.7) / scale
    for scale_dtype in DTYPES:
        result = prox_nm(weight, 0.7, scale=scale.to(scale_dtype))
        torch.testing.assert_close(result.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)
        strided = torch.stack([scale, -scale], dim=-1).to(scale_dtype)[:, 0]
        assert torch.equal(prox_nm(weight, 0.7, scale=strided), result)


# ------------------------------------------------------------------------------------------ layouts

LAYOUTS = {
    "contiguous": lambda base: base,
    "one row": lambda base: base[5:6],
    "one block": lambda base: base[3, 8:12],
    "in_features = 4": lambda base: base.view(-1, 4),
    "every third row": lambda base: base[::3],
    "a slice of columns": lambda base: base[:, 4:20],
    "an offset that is not aligned": lambda base: base.flatten()[3:-1],
    "every second column": lambda base: base[:, ::2],
    "transposed": lambda base: base.T,
    "three dimensions": lambda base: base.view(2, 12, 24),
    "permuted": lambda base: base.view(2, 12, 24).permute(2, 0, 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, device):
    """In place means in this memory, and nowhere beside it."""
    base = random_blocks(144, 0.7, seed=8).view(24, 24).to(device, dtype)
    inside = torch.zeros(24, 24, dtype=torch.bool, device=device)
    LAYOUTS[layout](inside).fill_(True)
    before = base.clone()
    weight = LAYOUTS[layout](base)
    expected = prox_nm(weight.contiguous(), 0.7)
    assert prox_nm_(weight, 0.7) is weight
    assert torch.equal(weight, expected)
    assert torch.equal(base[~inside], before[~inside])
    blocks = LAYOUTS[layout](before).reshape(-1, 4).cpu()
    gap = ground_truth.relative_gap(expected.reshape(-1, 4).cpu(), ground_truth.exact(blocks, 0.7), blocks, 0.7)
    assert gap.max() <= GAP[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_that_no_vector_register_divides(dtype, device):
    """1 to 40 and several thousand blocks in one row and in one column, aligned or not, between guards."""
    blocks = random_blocks(8385, 0.7, seed=9).to(dtype)
    exact = ground_truth.exact(blocks, 0.7)
    for count in (*range(1, 41), 1031, 8385):
        for shape, start in (((1, 4 * count), 512), ((count, 4), 515)):
            memory = torch.full((4 * count + 1024,), 7.0, dtype=dtype, device=device)
            weight = memory[start : start + 4 * count].view(shape)
            weight.copy_(blocks[:count].view(shape))
            prox_nm_(weight, 0.7)
            result = weight.reshape(-1, 4).cpu()
            gap = ground_truth.relative_gap(result, exact[:count], blocks[:count], 0.7)
            assert gap.max() <= GAP[dtype], (count, shape)
            assert (memory[:start] == 7).all(), (count, shape)
            assert (memory[start + 4 * count :] == 7).all(), (count, shape)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 4)])
def test_an_empty_tensor_is_left_alone(shape, device):
    weight = torch.zeros(shape, device=device)
    assert prox_nm_(weight, 0.7) is weight
    assert prox_nm(weight, 0.7).shape == shape


def test_a_leaf_that_requires_grad_changes_in_place(device):
    weight = torch.nn.Parameter(random_blocks(6, 0.7).float().to(device))
    expected = prox_nm(weight, 0.7)
    version = weight._version
    assert not expected.requires_grad
    assert prox_nm_(weight, 0.7) is weight
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert weight._version > version
    assert torch.equal(weight.detach(), expected)


def test_the_copy_leaves_its_input(device):
    weight = random_blocks(6, 0.7).view(4, 6).T.to(device)
    before = weight.clone()
    result = prox_nm(weight, 0.7)
    assert torch.equal(weight, before)
    assert not torch.equal(result, before)


# ------------------------------------------------------------------------------------------ single values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_number_stays_inside_its_block(dtype, device):
    blocks = random_blocks(64, 0.7, seed=10).to(device, dtype)
    clean = prox_nm(blocks, 0.7)
    bad = blocks.clone()
    for row, number in ((3, "nan"), (17, "inf"), (40, "-inf")):
        bad[row, row % 4] = float(number)
    result = prox_nm(bad, 0.7)
    touched = torch.zeros(64, dtype=torch.bool, device=device)
    touched[[3, 17, 40]] = True
    assert torch.equal(result[~touched], clean[~touched])
    torch.testing.assert_close(result[touched], bad[touched], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_pruned_becomes_plus_zero(dtype, pattern, device):
    weight = -random_blocks(2000, 0.7, seed=15).abs().to(device, dtype)
    result = prox_nm(weight, 0.7, pattern)
    pruned = (result == 0) & (weight != 0)
    assert pruned.any()
    assert not result[pruned].signbit().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_feasible_block_keeps_its_bits(dtype, device):
    for pattern, kept in (("2:4", 2), ("1:4", 1)):
        weight = random_blocks(500, 0.7, seed=16).to(device, dtype)
        weight.scatter_(-1, torch.rand(weight.shape, device=device).argsort(-1)[:, kept:], 0.0)
        for scale in (None, torch.tensor([0.3, 3.0, 0.7, 1.1], device=device)):
            assert torch.equal(prox_nm(weight, 0.7, pattern, scale), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lambda_zero_is_the_identity(dtype, device):
    weight = random_blocks(50, 0.7, seed=17).to(device, dtype)
    assert torch.equal(prox_nm(weight, 0.0), weight)
    assert torch.equal(prox_nm_(weight.clone(), 0), weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "reg_lambda"), [(1e30, 1.0), (1.0, 1e30), (1e25, 1e10)])
def test_a_huge_strength_prunes_to_the_two_largest(size, reg_lambda, dtype, device):
    weight = size * torch.tensor([[1.0, -0.99, 1.01, 0.98], [0.5, 0.0, -0.7, 0.6]], dtype=dtype, device=device)
    expected = torch.where(reference.nm_mask(weight.abs()), weight, 0.0)
    assert torch.equal(prox_nm(weight, reg_lambda), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "reg_lambda"), [(1e-30, 1.0), (1.0, 1e-30), (1e-15, 1e-15), (1.0, 1e-50)])
def test_a_tiny_strength_changes_next_to_nothing(size, reg_lambda, dtype, device):
    weight = size * torch.tensor([[1.0, -0.99, 1.01, 0.98], [0.5, 0.1, -0.7, 0.6]], dtype=dtype, device=device)
    torch.testing.assert_close(prox_nm(weight, reg_lambda), weight, rtol=4 * torch.finfo(dtype).eps, atol=0)


# ------------------------------------------------------------------------------------------ torch around it


def test_opcheck(device):
    weight = random_blocks(6, 0.7).float().to(device)
    scale = torch.ones(4, device=device)
    for arguments in ((weight, 0.7, 2, 4, None), (weight, 0.7, 1, 4, scale), (weight.T[:, :4], 0.7, 2, 4, scale)):
        torch.library.opcheck(torch.ops.proxsparse.prox_nm_.default, arguments)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(compiler, device):
    def step(weight):
        moved = weight * 2
        prox_nm_(moved, 0.35)
        prox_nm_(weight, 0.7)
        return moved + weight

    weight = random_blocks(6, 0.7).float().to(device)
    compiled_weight = weight.clone()
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler)(compiled_weight)
    assert torch.equal(compiled, step(weight))
    assert torch.equal(compiled_weight, weight)


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
        (torch.zeros(2, 8), {"scale": torch.ones(4)}, r"\[4\].*8 input features"),
        (torch.zeros(2, 8), {"scale": torch.ones(2, 8)}, r"\[2, 8\].*8 input features"),
        (torch.zeros(2, 8), {"scale": torch.ones(8, dtype=torch.int32)}, "torch.int32.*floating-point"),
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


def test_other_patterns_fall_to_the_reference():
    weight = random_blocks(20, 0.7, m=8, n=4).float()
    assert torch.equal(prox_nm(weight, 0.7, "4:8"), reference.prox_nm(weight, 0.7, "4:8"))
