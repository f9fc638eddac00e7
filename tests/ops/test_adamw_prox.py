"""The fused step on every backend of this machine: AdamW, then the exact prox; stochastic rounding."""

import pytest
import torch
from ops.cases import STEP, adamw_in_float64, arithmetic, assert_close, copied, each_dtype, step_, step_problem
from reference.ground_truth import GAP, assert_optimal

from proxsparse import reference
from proxsparse.ops import adamw_prox_, masked_weight_, use_backend
from proxsparse.ops.adamw_prox_list import Masked, adamw_prox_list_
from proxsparse.ops.registry import chosen_backend, get_kernel

pytestmark = pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")
OP = "adamw_prox_"
BF16 = torch.bfloat16


def problem(shape, dtype, device, *arguments, **options):
    """`step_problem` on the device."""
    return {name: x.to(device) for name, x in step_problem(shape, dtype, *arguments, **options).items()}


# ------------------------------------------------------------------------------------------ what a step computes

PARTS = {
    "plain": {},
    "scaled": {"parts": ("scale",)},
    "bf16 moments": {"moment": BF16, "parts": ("scale",)},
    "master": {"parts": ("master", "scale")},
    "master, bf16 moments": {"moment": BF16, "parts": ("master",)},
}
each_dtype_and_part = pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(dtype, options, id=f"{dtype}-{name}")
        for dtype in (torch.float64, torch.float32, BF16, torch.float16)
        for name, options in PARTS.items()
        if "master" not in name or dtype != arithmetic(dtype)
        if "bf16" not in name or dtype != torch.float64
    ],
)


@each_dtype_and_part
@pytest.mark.parametrize("seed", [None, 2**63 + 12345], ids=["nearest", "stochastic"])
def test_without_the_prox_it_is_adamw(dtype, options, seed, device):
    tensors = problem((7, 276), dtype, device, **options)
    exact, again = adamw_in_float64(tensors), copied(tensors)
    for each in (tensors, again):
        step_(each, reg_lambda=0.0, seed=seed)
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        stochastic = seed is not None and tensors[name].dtype == BF16 and (name != "weight" or "master" not in tensors)
        assert_close(tensors[name], exact[name], dtype, name, stochastic)
    if "master" in tensors:
        assert_close(tensors["master"], exact["weight"], torch.float32)
        assert torch.equal(tensors["weight"], tensors["master"].to(dtype))


@each_dtype_and_part
@pytest.mark.parametrize("reg_lambda", [0.02, 0.6, 30.0])
def test_then_comes_the_exact_prox(dtype, options, reg_lambda, device):
    """The scaled result is as good as the exact prox of the exact AdamW step, up to its own rounding."""
    tensors = problem((12, 260), dtype, device, seed=1, **options)
    before, exact = tensors["weight"].clone(), adamw_in_float64(tensors)
    step_(tensors, reg_lambda=reg_lambda)
    for name in ("exp_avg", "exp_avg_sq"):
        assert_close(tensors[name], exact[name], dtype)
    scale = tensors.get("scale", torch.ones(())).cpu().double()
    w = tensors.get("master", tensors["weight"])
    stored = 0.0 if w.dtype == arithmetic(w.dtype) else 2 * torch.finfo(w.dtype).eps ** 2
    # the curvature that a rounded weight feels
    strength = 1 + reg_lambda * (exact["weight"] * scale).abs().amax()
    tolerance = GAP[arithmetic(dtype)] + stored * strength
    assert_optimal(w, exact["weight"], reg_lambda, scale=scale, tolerance=tolerance)
    pruned = (tensors["weight"] == 0) & (before != 0)
    assert reg_lambda < 0.1 or pruned.any()
    assert not tensors["weight"][pruned].signbit().any()


@each_dtype
def test_at_lr_zero_only_the_moments_move(dtype, device):
    tensors = problem((2, 96), dtype, device, parts=("scale",), seed=4)
    exact, before = adamw_in_float64(tensors), tensors["weight"].clone()
    step_(tensors, lr=0.0, reg_lambda=0.0, seed=5)
    assert torch.equal(tensors["weight"], before)
    assert_close(tensors["exp_avg"], exact["exp_avg"], dtype)


def test_the_ends_of_the_betas(device):
    """At 0 moments are the gradient, at any step; the rest to 1 is not rounded: 1 - float32(0.9999) is off by 2e-4."""
    tensors = problem((8, 24), torch.float32, device, seed=5)
    step_(tensors, betas=(0.0, 0.0), step=2**24, reg_lambda=0.0)
    assert torch.equal(tensors["exp_avg"], tensors["grad"])
    torch.testing.assert_close(tensors["exp_avg_sq"], tensors["grad"].square())
    ones = torch.ones(4, 8, device=device)
    exp_avg, exp_avg_sq = ones * 0, ones * 0
    adamw_prox_(ones.clone(), ones, exp_avg, exp_avg_sq, step=1, lr=0.1, betas=(0.999, 0.9999))
    torch.testing.assert_close(exp_avg, 0.001 * ones, rtol=2e-7, atol=0)
    torch.testing.assert_close(exp_avg_sq, 0.0001 * ones, rtol=2e-7, atol=0)


@pytest.mark.parametrize("where", ["weight", "grad"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
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


def test_a_feasible_block_is_left_to_adamw_and_zeros_are_positive(device):
    tensors = problem((2, 400), torch.float32, device, parts=("scale",), seed=9)
    pruned = torch.arange(400, device=device) % 4 >= 2
    for name, zero in (("weight", -0.0), ("grad", 0.0), ("exp_avg", 0.0)):  # -0.0 - 0.0 is -0.0
        tensors[name][:, pruned] = zero
    expected = step_(copied(tensors), reg_lambda=0.0)
    step_(tensors, reg_lambda=5.0)
    for weight in (expected["weight"], tensors["weight"]):
        assert torch.equal(weight, expected["weight"])
        assert not weight[:, pruned].signbit().any()


# ------------------------------------------------------------------------------------------ stochastic rounding

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)
WORD = 2**32 - 1
# What makes the arithmetic of the step exact in float32, and its results far from bfloat16, in any order of operations:
# w' = w * (1 - 2^-10), exp_avg' = (exp_avg + g) / 2, exp_avg_sq' = (exp_avg_sq + g^2) / 2. The step itself is zero
# where exp_avg' is: tests of the weight set exp_avg = grad = 0.
EXACT = {"step": 1, "lr": 1.0, "betas": (0.5, 0.5), "eps": 1e-8, "weight_decay": 2.0**-10}


def mix(x: int) -> int:
    """The hash of the contract, in Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def random_words(index: int, seed: int) -> tuple[int, int]:
    first = mix(mix((index & WORD) ^ (seed & WORD)) ^ (index >> 32) ^ (seed >> 32))
    return first, mix(first)


def rounded(values: torch.Tensor, bits: list[int]) -> torch.Tensor:
    """bfloat16 whose bits are the upper half of (bits of the float32 + r); -0.0 becomes 0.0."""
    words = [word & WORD for word in values.float().flatten().cpu().view(torch.int32).tolist()]
    upper = [(word + r) >> 16 for word, r in zip(words, bits, strict=True)]
    upper = [0 if half == 0x8000 else half for half in upper]
    signed = [half - 2**16 if half >= 2**15 else half for half in upper]
    return torch.tensor(signed, dtype=torch.int16).view(BF16).view(values.shape)


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.cpu().view(torch.int16), y.view(torch.int16))


@pytest.mark.parametrize("seed", SEEDS)
def test_stochastic_bits_are_those_of_the_definition(seed, device):
    """By the position through all dimensions."""
    shape = (67, 37)
    words = [random_words(index, seed) for index in range(67 * 37)]
    zero, ones = torch.zeros(shape, dtype=BF16, device=device), torch.ones(shape, device=device)

    weight = bfloat16(*shape)
    expected = rounded(weight.float() * (1 - 2.0**-10), [first >> 16 for first, _ in words])
    weight = weight.to(device)
    adamw_prox_(weight, zero, ones * 0, ones, seed=seed, **EXACT)
    assert same_bits(weight, expected)

    grad, exp_avg, exp_avg_sq = bfloat16(*shape), bfloat16(*shape), bfloat16(*shape).square()
    mean = rounded((exp_avg.float() + grad.float()) / 2, [first & 0xFFFF for first, _ in words])
    square = (exp_avg_sq.double() + grad.double().square()) / 2
    exact = square == square.float()
    square = rounded(square.float(), [second & 0xFFFF for _, second in words])
    exp_avg, exp_avg_sq = exp_avg.to(device), exp_avg_sq.to(device)
    adamw_prox_(ones.bfloat16(), grad.to(device), exp_avg, exp_avg_sq, seed=seed, **EXACT)
    assert same_bits(exp_avg, mean)
    assert exact.float().mean() > 0.9
    assert same_bits(exp_avg_sq[exact.to(device)], square[exact])


def test_a_stochastic_step_is_that_of_the_reference(device):
    """Except for the few values that fp32 rounds otherwise before; in any layout; the seed modulo 2^64."""
    ours = problem((67, 64), BF16, device, BF16, ("scale",), seed=12)
    theirs, other, again = copied(ours), copied(ours), copied(ours)
    for name, tensor in again.items():
        again[name] = tensor.T.contiguous().T if tensor.ndim == 2 else tensor
    step_(ours, reg_lambda=0.6, seed=2**63 + 5)
    step_(other, reg_lambda=0.6, seed=6)
    step_(again, reg_lambda=0.6, seed=5 - 2**63)
    with use_backend("reference"):
        step_(theirs, reg_lambda=0.6, seed=2**63 + 5)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert (ours[name] != theirs[name]).float().mean() <= 5e-3, name
        assert (ours[name] != other[name]).float().mean() > 0.1, f"the seed does not change {name}"
        assert torch.equal(ours[name], again[name])


def test_zeros_stay_plus_zero_and_small_weights_become_it(device):
    smallest = torch.tensor([0.0, 1.0, -1.0, 0.5]).mul(2.0**-133).bfloat16()  # 2^-133 is the smallest bfloat16
    weight = smallest.repeat(64, 16).to(device)
    zero = torch.zeros_like(weight)
    adamw_prox_(weight, zero, zero.float(), zero.float() + 1, seed=1, **EXACT | {"weight_decay": 0.75})
    assert not weight[weight == 0].signbit().any()
    assert (weight[:, ::4] == 0).all()
    if device.type == "cpu":  # GPUs may flush numbers below 2^-126 to zero
        shares = (weight != 0).float().mean(0).view(-1, 4).mean(0)
        torch.testing.assert_close(shares, torch.tensor([0.0, 0.25, 0.25, 0.0]), rtol=0, atol=0.06)


def test_a_bad_number_stays_one_when_it_is_rounded(device):
    r = torch.tensor([0, 1, 0x8000, 0xFFFF], dtype=torch.int32)
    for word in (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001, -(2**23) + 1):  # NaNs, the first two of a GPU
        x = torch.tensor([word] * 4, dtype=torch.int32).view(torch.float32)
        assert reference.stochastic_round(x, r).isnan().all()
    for infinity in (torch.inf, -torch.inf):
        x = torch.full((4,), infinity)
        assert torch.equal(reference.stochastic_round(x, r), x.bfloat16())
    weight = torch.ones(4, 64, dtype=BF16, device=device)
    grad = torch.zeros_like(weight)
    grad[0, 3], grad[1, 3], grad[2, 3] = torch.nan, torch.inf, -torch.inf
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    adamw_prox_(weight, grad, exp_avg, exp_avg_sq, step=1, lr=0.1, reg_lambda=0.2, seed=9)
    assert exp_avg[:3, 3].tolist()[1:] == [torch.inf, -torch.inf]
    for tensor in (weight[:3, 3], exp_avg[:1, 3], exp_avg_sq[:1, 3]):
        assert tensor.isnan().all()


# ------------------------------------------------------------------------------------------ many weights at once

SCALED, SETTINGS = {"parts": ("scale",)}, {"reg_lambda": 0.3}
LIST = [  # shape, dtype, further tensors, settings, dtype of W0 under the mask or None
    ((12, 272), torch.float32, SCALED, SETTINGS, BF16),
    ((7, 64), torch.float32, SCALED, SETTINGS | {"reg_lambda": 0.1, "lr": 0.01, "step": 5, "seed": None}, BF16),
    ((40, 1024), torch.float32, SCALED, SETTINGS, torch.float32),
    ((5, 1024), BF16, {"moment": BF16}, SETTINGS | {"seed": 7}, BF16),
    ((3, 256), BF16, {"moment": BF16}, SETTINGS | {"seed": 2**63 + 8}, BF16),
    ((5, 1024), BF16, {"parts": ("master", "scale")}, SETTINGS, None),
    ((5, 52), torch.float32, SCALED, SETTINGS | {"pattern": "4:6"}, torch.float32),
    ((6, 48), torch.float16, {}, SETTINGS | {"pattern": "6:8"}, torch.float16),
    ((6, 48), torch.float32, {}, SETTINGS | {"pattern": "4:8"}, torch.float32),  # only the reference
    ((4, 10), torch.float32, SCALED, SETTINGS, torch.float32),  # a remainder
    ((7,), torch.float32, {}, {"reg_lambda": 0.0}, None),
    ((0, 8), torch.float32, {}, SETTINGS, torch.float32),
    ((8, 32), torch.float64, {}, SETTINGS, torch.float64),
]


@pytest.mark.filterwarnings("ignore:.* not on the")
def test_a_list_is_every_step_alone(device):
    steps, masked, expected = [], [], []
    for place, (shape, dtype, options, settings, masked_dtype) in enumerate(LIST):
        tensors, pattern = problem(shape, dtype, device, seed=place, **options), settings.get("pattern", "2:4")
        mask_kernel, n_m = get_kernel("masked_weight_", chosen_backend()), map(int, pattern.split(":"))
        if mask_kernel.supports(*[tensors["weight"]] * 3, None, *n_m):
            continue  # this pattern
        alone, target = copied(tensors), None
        if masked_dtype:
            out, w0 = (torch.randn(shape).to(device, masked_dtype) for _ in range(2))
            target = Masked(out, w0, tensors.get("scale"))
        settings = STEP | {"seed": None} | settings | {"pattern": pattern, "scale": tensors.get("scale")}
        steps.append(settings | tensors)
        masked.append(target)
        adamw_prox_(**settings | alone)
        if target:
            out, scale = torch.empty_like(target.out), alone.get("scale")
            alone["out"] = masked_weight_(out, alone["weight"], target.pretrained, scale, pattern)
        expected.append(alone)
    assert len(steps) >= 9
    adamw_prox_list_(steps, masked)
    for place, (step, target, alone) in enumerate(zip(steps, masked, expected, strict=True)):
        found = step | ({"out": target.out} if target else {})
        assert all(torch.equal(found[name], alone[name]) for name in alone), place


def test_the_three_streams_of_bits_are_uniform_and_independent():
    count, seed, other = 1 << 16, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
    streams = [bits.double() / 2**16 - 0.5 for bits in reference.random_bits(torch.empty(count), seed)]
    streams += [reference.random_bits(torch.empty(count), other)[0].double() / 2**16 - 0.5]
    streams += [streams[0].roll(1), streams[0].roll(4)]
    for stream in streams:
        assert abs(stream.mean()) < 4 * 12**-0.5 / count**0.5
        assert stream.square().mean().item() == pytest.approx(1 / 12, rel=0.02)
    correlation = torch.corrcoef(torch.stack(streams)).fill_diagonal_(0).abs().max()
    assert correlation < 5 / count**0.5
