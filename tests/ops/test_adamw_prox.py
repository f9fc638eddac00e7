"""The fused step on every backend of this machine: AdamW in float64, then the exact prox, each rounded once."""

import math

import pytest
import torch
from ops.blocks import random_blocks
from reference.ground_truth import GAP, assert_optimal

from proxsparse import reference
from proxsparse.ops import adamw_prox_, use_backend

pytestmark = pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OP = "adamw_prox_"
NUMBERS = {"step": 3, "lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
ALWAYS = ("weight", "grad", "exp_avg", "exp_avg_sq")


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def problem(shape, dtype, device="cpu", moment=None, parts=(), seed=0) -> dict[str, torch.Tensor]:
    """The tensors of a step in the middle of a training; `parts` of master, pretrained, scale."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: float) -> torch.Tensor:
        return size * torch.randn(shape, generator=generator, dtype=torch.float64)

    moment = moment or arithmetic(dtype)
    weight = normal(1.0)
    tensors = {
        "weight": weight.to(dtype),
        "grad": normal(0.3).to(dtype),
        "exp_avg": normal(0.2).to(moment),
        "exp_avg_sq": (0.01 + normal(0.2).square()).to(moment),
        "master": weight.float(),
        "pretrained": (weight + normal(0.1)).to(dtype),
        "scale": torch.logspace(-0.5, 0.5, shape[-1]).to(arithmetic(dtype)),
    }
    return {name: tensors[name].to(device) for name in (*ALWAYS, *parts)}


def step_(tensors: dict, **options) -> dict[str, torch.Tensor]:
    """The step, in place; returns the tensors."""
    settings = NUMBERS | {"frozen_lambda": 0.3 if "pretrained" in tensors else 0.0} | options
    assert adamw_prox_(**tensors, **settings) is tensors["weight"]
    return tensors


def copied(tensors: dict) -> dict:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def in_float64(tensors: dict) -> dict[str, torch.Tensor]:
    """AdamW alone from the same values in float64 on the CPU, where nothing is rounded."""
    exact = {name: tensor.double().cpu().clone() for name, tensor in tensors.items()}
    exact["weight"] = exact.pop("master", exact["weight"])
    with use_backend("reference"):
        return step_(exact, reg_lambda=0.0)


def assert_close(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, stochastic=False) -> None:
    """As computed in `dtype`'s arithmetic and then stored in the dtype of the result."""
    computed = 16 * torch.finfo(arithmetic(dtype)).eps
    stored = torch.finfo(result.dtype).eps * (1 if stochastic else 0.5) if result.dtype != arithmetic(dtype) else 0.0
    error, unit = (result.cpu().double() - exact).abs(), exact.abs().max()
    tiny = torch.finfo(result.dtype).smallest_normal * torch.finfo(result.dtype).eps
    assert (error <= stored * 1.01 * exact.abs() + computed * unit + tiny).all()


# ------------------------------------------------------------------------------------------ what a step computes

PARTS = {
    "plain": {},
    "scaled": {"parts": ("scale",)},
    "frozen": {"parts": ("pretrained",)},
    "both": {"parts": ("scale", "pretrained")},
    "bf16 moments": {"moment": torch.bfloat16, "parts": ("scale",)},
    "master": {"parts": ("master", "scale", "pretrained")},
    "master, bf16 moments": {"moment": torch.bfloat16, "parts": ("master",)},
}
each_dtype_and_part = pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(dtype, options, id=f"{dtype}-{name}")
        for dtype in DTYPES
        for name, options in PARTS.items()
        if "master" not in name or dtype in (torch.bfloat16, torch.float16)
        if "bf16" not in name or dtype != torch.float64
    ],
)


@each_dtype_and_part
@pytest.mark.parametrize("seed", [None, 2**63 + 12345], ids=["nearest", "stochastic"])
def test_without_the_prox_it_is_adamw(dtype, options, seed, device):
    tensors = problem((7, 276), dtype, device, **options)
    exact, again = in_float64(tensors), copied(tensors)
    for each in (tensors, again):
        step_(each, reg_lambda=0.0, seed=seed)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        bf16 = tensors[name].dtype == torch.bfloat16
        rounded = seed is not None and bf16 and (name != "weight" or "master" not in tensors)
        assert_close(tensors[name], exact[name], dtype, rounded)
    if "master" in tensors:
        assert_close(tensors["master"], exact["weight"], torch.float32)
        assert torch.equal(tensors["weight"], tensors["master"].to(dtype))


@each_dtype_and_part
@pytest.mark.parametrize(("pattern", "reg_lambda"), [("2:4", 0.02), ("2:4", 0.6), ("2:4", 30.0), ("1:4", 0.5)])
def test_then_comes_the_exact_prox(dtype, options, pattern, reg_lambda, device):
    """The scaled result is as good as the exact prox of the exact AdamW step, up to its own rounding."""
    tensors = problem((12, 260), dtype, device, seed=1, **options)
    before = tensors["weight"].clone()
    exact = in_float64(tensors)
    step_(tensors, reg_lambda=reg_lambda, pattern=pattern)
    for name in ("exp_avg", "exp_avg_sq"):
        assert_close(tensors[name], exact[name], dtype)
    scale, n = tensors.get("scale", torch.ones(())).cpu().double(), int(pattern[0])
    w = tensors.get("master", tensors["weight"])
    stored = 0.0 if w.dtype == arithmetic(w.dtype) else 2 * torch.finfo(w.dtype).eps ** 2
    # the curvature that a rounded weight feels
    strength = 1 + reg_lambda * ((exact["weight"] * scale).abs().amax() if n == 2 else 1)
    tolerance = GAP[arithmetic(dtype)] + stored * strength
    assert_optimal(w, exact["weight"], reg_lambda, n, scale, tolerance=tolerance)
    pruned = (tensors["weight"] == 0) & (before != 0)
    assert reg_lambda < 0.1 or pruned.any()
    assert not tensors["weight"][pruned].signbit().any()


def test_a_stochastic_step_is_that_of_the_reference(device):
    """But for the few values that fp32 rounds otherwise before."""
    ours = problem((67, 64), torch.bfloat16, device, torch.bfloat16, ("pretrained", "scale"), seed=12)
    theirs, other = copied(ours), copied(ours)
    step_(ours, reg_lambda=0.6, seed=2**63 + 5)
    step_(other, reg_lambda=0.6, seed=6)
    with use_backend("reference"):
        step_(theirs, reg_lambda=0.6, seed=2**63 + 5)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert (ours[name] != theirs[name]).float().mean() <= 5e-3, name
        assert not torch.equal(ours[name], other[name]), f"the seed does not change {name}"


def test_the_paper_strength_keeps_small_weights(device):
    """Weights of the size 0.02 and lambda 0.25 as in the paper: lambda * z is small, and the prox a small shrink."""
    tensors = problem((64, 64), torch.float32, device, seed=2)
    for name, size in (("weight", 0.02), ("grad", 1e-3), ("exp_avg", 1e-3), ("exp_avg_sq", 1e-6)):
        tensors[name] *= size
    best = reference.prox_nm(in_float64(tensors)["weight"], 0.25)
    result = step_(tensors, reg_lambda=0.25)["weight"]
    torch.testing.assert_close(result.cpu().double(), best, rtol=1e-5, atol=1e-7)


def test_the_reference_serves_other_patterns():
    tensors = problem((12, 16), torch.float32, parts=("scale",), seed=3)
    with use_backend("reference"):
        expected = step_(copied(tensors), reg_lambda=0.0)["weight"]
    step_(tensors, reg_lambda=0.4, pattern="4:8")
    assert torch.equal(tensors["weight"], reference.prox_nm(expected, 0.4, "4:8", tensors["scale"]))


def test_at_lr_zero_only_the_moments_move_and_at_betas_zero_they_are_the_gradient(device):
    for dtype in DTYPES:
        tensors = problem((2, 96), dtype, device, parts=("scale",), seed=4)
        exact, before = in_float64(tensors), tensors["weight"].clone()
        step_(tensors, lr=0.0, reg_lambda=0.0, seed=5)
        assert torch.equal(tensors["weight"], before)
        assert_close(tensors["exp_avg"], exact["exp_avg"], dtype)
    tensors = problem((8, 24), torch.float32, device, seed=5)
    step_(tensors, betas=(0.0, 0.0), step=2**24, reg_lambda=0.0)
    assert torch.equal(tensors["exp_avg"], tensors["grad"])
    torch.testing.assert_close(tensors["exp_avg_sq"], tensors["grad"].square())


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size_and_shape_without_the_prox(dtype, device):
    """1 to 41 weights in one row, between guards that must survive, every option on."""
    for count in range(1, 42):
        parts = ("pretrained", "scale") if dtype == arithmetic(dtype) else ("pretrained", "scale", "master")
        moment = None if dtype == torch.float64 else torch.bfloat16
        expected = problem((count,), dtype, device, moment, parts, seed=count)
        guarded = {name: tensor.new_full((count + 33,), 7.0) for name, tensor in expected.items()}
        tensors = {name: memory[16:-17].copy_(expected[name]) for name, memory in guarded.items()}
        step_(tensors, reg_lambda=0.0)
        exact = in_float64(expected)
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert_close(tensors[name], exact[name], dtype)
        for name, memory in guarded.items():
            assert (memory[:16] == 7).all(), (count, name)
            assert (memory[-17:] == 7).all(), (count, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_number_of_blocks(dtype, device):
    """The same blocks in another shape and at another place give the same."""
    whole = problem((2048,), dtype, device, seed=6)
    after = step_(copied(whole), reg_lambda=0.6)
    for shape in ((4,), (1, 4), (3, 4), (1, 44), (5, 12), (2, 3, 8), (1, 1028), (33, 36)):
        here = slice(4, 4 + math.prod(shape))
        part = step_({name: t[here].view(shape).clone() for name, t in whole.items()}, reg_lambda=0.6)
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            rtol = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(part[name].flatten(), after[name][here], rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_tensor_that_begins_anywhere_changes_nothing(dtype, device):
    parts = ("pretrained", "scale") if dtype == torch.float32 else ("pretrained", "scale", "master")
    tensors = problem((3, 172), dtype, device, torch.float32, parts)
    expected = step_(copied(tensors), reg_lambda=0.8)
    for name, tensor in tensors.items():
        memory = tensor.new_full((tensor.numel() + 20,), 7.0)
        moved = memory[9:-11].view(tensor.shape).copy_(tensor)
        result = step_(copied(tensors) | {name: moved}, reg_lambda=0.8)
        assert all(torch.equal(result[x], expected[x]) for x in tensors), name
        assert (memory[:9] == 7).all()
        assert (memory[-11:] == 7).all()


def test_a_number_alone_and_no_number_at_all(device):
    alone = {name: tensor[0] for name, tensor in problem((1,), torch.float32, device).items()}
    exact = in_float64(alone)
    step_(alone, reg_lambda=0.0)
    assert alone["weight"].shape == ()
    assert_close(alone["weight"], exact["weight"], torch.float32)
    for shape in ((0, 8), (3, 0), (0,)):
        assert step_(problem(shape, torch.float32, device), reg_lambda=0.5)["weight"].shape == shape


STRIDES = {
    "transposed": lambda x: x.T.contiguous().T,
    "every second column": lambda x: torch.stack([x, torch.full_like(x, 7.0)], dim=-1).flatten(1)[:, ::2],
    "every third row": lambda x: torch.stack([x, *[torch.full_like(x, 7.0)] * 2], dim=1).flatten(0, 1)[::3],
}


@pytest.mark.parametrize("layout", STRIDES)
def test_any_strides(layout, device):
    tensors = problem((6, 96), torch.bfloat16, device, parts=("master", "pretrained", "scale"), seed=7)
    expected = step_(copied(tensors), reg_lambda=0.5)
    for name in tensors:
        value = STRIDES[layout](tensors[name]) if name != "scale" else torch.stack([tensors[name]] * 2, dim=-1)[:, 0]
        assert not value.is_contiguous()
        before = value._base.clone()
        result = step_(copied(tensors) | {name: value}, reg_lambda=0.5)
        assert all(torch.equal(result[x], expected[x]) for x in tensors), name
        if layout != "transposed":
            assert ((value._base == 7) == (before == 7)).all(), "what lies between is left alone"


# ------------------------------------------------------------------------------------------ single values


@pytest.mark.parametrize("where", ["weight", "grad"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bad_number_stays_inside_its_block(dtype, poison, where, device):
    clean = problem((16, 64), dtype, device, seed=8)
    bad = copied(clean)
    bad[where][5, 9] = poison
    adamw = step_(copied(bad), reg_lambda=0.0)
    for tensors in (clean, bad):
        step_(tensors, reg_lambda=0.6)
    block, here = (torch.zeros(16, 64, dtype=torch.bool, device=device) for _ in range(2))
    block[5, 8:12] = here[5, 9] = True
    assert torch.equal(bad["weight"][~block], clean["weight"][~block])
    torch.testing.assert_close(bad["weight"][block], adamw["weight"][block], equal_nan=True)
    assert not bad["weight"][5, 9].isfinite()
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(bad[name][~here], clean[name][~here])


def test_a_feasible_block_is_left_to_adamw(device):
    tensors = problem((2, 400), torch.float32, device, parts=("scale",), seed=9)
    pruned = torch.arange(400, device=device) % 4 >= 2
    for name in ("weight", "grad", "exp_avg"):
        tensors[name][:, pruned] = 0.0
    expected = step_(copied(tensors), reg_lambda=0.0)
    step_(tensors, reg_lambda=5.0)
    assert torch.equal(tensors["weight"], expected["weight"])
    assert not tensors["weight"][:, pruned].signbit().any()


# ------------------------------------------------------------------------------------------ torch around it


def test_versions_are_counted_and_leaves_stay_leaves(device):
    tensors = problem((6, 8), torch.bfloat16, device, parts=("master",))
    tensors["weight"].requires_grad_()
    versions = {name: tensor._version for name, tensor in tensors.items()}
    expected = step_({name: tensor.detach().clone() for name, tensor in tensors.items()}, reg_lambda=0.6)["weight"]
    step_(tensors, reg_lambda=0.6)
    assert all((tensors[name]._version > version) == (name != "grad") for name, version in versions.items())
    assert tensors["weight"].requires_grad
    assert tensors["weight"].grad_fn is None
    assert torch.equal(tensors["weight"].detach(), expected)


W, HALF, WIDE = torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((W.int(), W, W, W), {}, "int32.*convert"),
        ((W, torch.zeros(2, 4), W, W), {}, r"grad is torch.float32 \[2, 4\].*must be float32 \[2, 8\]"),
        ((W, HALF, W, W), {}, "grad is torch.bfloat16.*must be float32"),
        ((W, W, WIDE, WIDE), {}, "exp_avg is torch.float64.*float32 or bfloat16"),
        ((WIDE, WIDE, HALF, HALF), {}, "exp_avg is torch.bfloat16.*must be float64"),
        ((W, W, W, HALF), {}, "exp_avg_sq is torch.bfloat16.*must be float32"),
        ((W, W, W, W, W), {}, "can have a master, not torch.float32"),
        ((HALF, HALF, W, W, WIDE), {}, "master is torch.float64.*must be float32"),
        ((HALF, HALF, W, W, None, W), {"frozen_lambda": 0.1}, "pretrained is torch.float32.*must be bfloat16"),
        ((W, W, W, W, None, None, torch.ones(4)), {}, r"scale is .*\[4\].*\[8\]"),
        ((W, W, W, W), {"frozen_lambda": 0.1}, "frozen_lambda=0.1 needs the pretrained weights"),
        ((torch.zeros(2, 6),) * 4, {"reg_lambda": 0.1}, r"\[2, 6\].*multiple of 4.*exclude"),
        ((W,) * 4, {"reg_lambda": -0.1}, "reg_lambda=-0.1"),
        ((W,) * 4, {"pattern": "4:2"}, "4:2"),
        ((W,) * 4, {"step": 0}, "step=0.*counted from 1"),
        ((W,) * 4, {"lr": math.nan}, "lr=nan must be"),
        ((W,) * 4, {"eps": -1.0}, "eps=-1.0 must be"),
        ((W,) * 4, {"weight_decay": -1.0}, "weight_decay=-1.0 must be"),
        ((W,) * 4, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ((W,) * 4, {"frozen_eps": 0.0}, "frozen_eps=0.0"),
        ((W,) * 4, {"frozen_lambda": -1.0}, "frozen_lambda=-1.0"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_remedy(tensors, options, message):
    tensors = [tensor if tensor is None else tensor.clone() for tensor in tensors]
    with pytest.raises(ValueError, match=message):
        adamw_prox_(*tensors, **NUMBERS | {"reg_lambda": 0.0} | options)
    assert all(tensor is None or not tensor.any() or tensor.shape == (4,) for tensor in tensors)


def test_random_blocks_of_every_kind(device):
    """A step that moves nothing, so that the prox meets the hard blocks themselves."""
    weight = random_blocks(20_000, 0.7, seed=10).float()
    tensors = [weight.clone().to(device), *(torch.zeros_like(weight, device=device) for _ in range(3))]
    adamw_prox_(*tensors, reg_lambda=0.7, **NUMBERS | {"weight_decay": 0.0})
    assert_optimal(tensors[0], weight, 0.7)


def test_the_rest_to_one_of_beta_is_not_rounded_to_float32(device):
    """1 - float32(0.9999) is off by a part in 6,000."""
    zero, ones = torch.zeros(4, 8, device=device), torch.ones(4, 8, device=device)
    exp_avg, exp_avg_sq = zero.clone(), zero.clone()
    adamw_prox_(ones.clone(), ones, exp_avg, exp_avg_sq, step=1, lr=0.1, betas=(0.999, 0.9999))
    torch.testing.assert_close(exp_avg, 0.001 * ones, rtol=2e-7, atol=0)
    torch.testing.assert_close(exp_avg_sq, 0.0001 * ones, rtol=2e-7, atol=0)


def test_a_negative_zero_becomes_zero(device):
    zero = torch.zeros(2, 8, device=device)
    for reg_lambda in (0.0, 0.1):
        weight = -zero
        adamw_prox_(weight, zero, zero.clone(), zero.clone(), step=1, lr=0.1, reg_lambda=reg_lambda)
        assert not weight.signbit().any()
