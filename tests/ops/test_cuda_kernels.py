"""The CUDA kernels without a GPU: compiled as C++ and run on the CPU, lane by lane; results against float64."""

import ctypes

import pytest
import torch
from ops.blocks import random_blocks
from ops.on_cpu import TYPES as DTYPES
from ops.on_cpu import address, build
from reference import ground_truth
from torch import Tensor

from proxsparse import reference
from proxsparse.patterns import NMPattern

# As in test_prox.py.
GAP = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2 * 2.0**-14, torch.float16: 2e-6 + 2 * 2.0**-20}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """launch_prox and launch_adamw_prox as C functions, built for this CPU."""
    return build(tmp_path_factory.mktemp("cuda_on_cpu"), "library", "prox.cu", "adamw_prox.cu")


@pytest.fixture
def prox(library):
    """prox(weight, reg_lambda, n, scale): in place, by csrc/cuda/prox.cu."""

    def run(weight: Tensor, reg_lambda: float, n: int = 2, scale: Tensor | None = None) -> Tensor:
        size, in_features = (ctypes.c_int64(number) for number in (weight.numel(), weight.shape[-1]))
        dtype, strength = DTYPES.index(weight.dtype), ctypes.c_double(reg_lambda)
        assert library.prox(address(weight), size, in_features, address(scale), dtype, strength, n) == 0
        return weight

    return run


def by_strength(blocks: Tensor) -> Tensor:
    """In the order of their largest weight: most warps then hold blocks of one kind, and descend where they can."""
    return blocks[blocks.abs().amax(-1).argsort()]


@pytest.mark.parametrize("order", [lambda blocks: blocks, by_strength], ids=["mixed", "sorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hard_blocks(dtype, order, prox):
    half = dtype in (torch.bfloat16, torch.float16)
    for seed, reg_lambda in enumerate((0.05, 0.1) if half else (0.02, 0.7, 30.0)):
        weight = order(random_blocks(20_003, reg_lambda, seed=seed)).to(dtype)
        result, exact = prox(weight.clone(), reg_lambda), ground_truth.exact(weight, reg_lambda)
        gap = ground_truth.relative_gap(result, exact, weight, reg_lambda)
        worst = gap.argmax()
        assert gap.max() <= GAP[dtype], (
            f"lambda={reg_lambda}: {(gap > GAP[dtype]).sum()} of {len(gap)} blocks; the worst is "
            f"{weight[worst].tolist()} -> {result[worst].tolist()} instead of {exact[worst].tolist()}"
        )
        pruned = (result == 0) & (weight != 0)
        assert pruned.any()
        assert not result[pruned].signbit().any()
        if half:
            error, eps = (result.double() - exact).abs(), torch.finfo(dtype).eps
            tiny = torch.finfo(dtype).smallest_normal * eps
            allowed = eps / 2 * exact.abs() + 1e-5 * weight.double().abs().amax(-1, keepdim=True) + tiny
            assert (error > allowed).any(-1).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_a_layer_descend(dtype, prox):
    """std 0.02 and the lambdas of the paper: every weight within its own rounding of the exact prox."""
    weight = (0.02 * torch.randn(64, 256)).to(dtype)
    for reg_lambda in (0.25, 1.0, 3.0):
        exact = ground_truth.exact(weight.view(-1, 4), reg_lambda).view(weight.shape)
        error = (prox(weight.clone(), reg_lambda).double() - exact).abs()
        assert (error <= torch.finfo(dtype).eps * exact.abs() + 2e-6 * weight.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reg_lambda", [0.1, 0.9, 0.999, 1.0, 3.0])
def test_one_of_four(dtype, reg_lambda, prox):
    weight = random_blocks(5_000, reg_lambda, n=1, seed=5).to(dtype)
    exact = ground_truth.exact_one(weight, reg_lambda)
    gap = ground_truth.relative_gap(prox(weight.clone(), reg_lambda, 1), exact, weight, reg_lambda, n=1)
    assert gap.max() <= GAP[dtype]


@pytest.mark.parametrize("order", [lambda blocks: blocks, by_strength], ids=["mixed", "sorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_is_the_metric(dtype, order, prox):
    scale = (0.25 + torch.rand(20)).to(torch.float64 if dtype == torch.float64 else torch.float32)
    weight = (order(random_blocks(5_000, 0.1, seed=6)).view(-1, 20) / scale).to(dtype)
    metric = (weight.double() * scale.double()).view(-1, 4)
    result = prox(weight.clone(), 0.1, scale=scale).double() * scale.double()
    gap = ground_truth.relative_gap(result.view(-1, 4), ground_truth.exact(metric, 0.1), metric, 0.1)
    assert gap.max() <= 2 * GAP[dtype]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_at_every_alignment(dtype, n, prox):
    """The result does not depend on where a weight lies or ends, and nothing beside it is touched."""
    blocks = random_blocks(1_100, 0.1, seed=9).to(dtype).flatten()
    for count in (4, 8, 60, 64, 508, 512, 516, 1020, 2044, 2048, 2052, 4400):
        expected = prox(blocks.clone(), 0.1, n)[:count]
        for offset in (0, 1, 3, 4, 8):
            memory = torch.full((4500,), 7.0, dtype=dtype)
            weight = memory[16 + offset :][:count]
            weight.copy_(blocks[:count])
            prox(weight, 0.1, n)
            # whether a warp descends depends on the blocks around: equal up to the accuracy of both ways
            torch.testing.assert_close(weight, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
            assert (memory[: 16 + offset] == 7).all()
            assert (memory[16 + offset + count :] == 7).all()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_prox_does_not_change_keeps_its_bits(dtype, n, prox):
    """Feasible blocks, -0.0 among them, and blocks with a number that is not finite, NaNs with all their bits."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.empty(0, dtype=dtype).element_size()]
    for size in (0.05, 5.0):  # beside blocks that descend, and beside blocks that do not
        weight = (size * torch.randn(600, 4)).to(dtype)
        weight[:200, : 4 - n] = torch.tensor([0.0, -0.0, -0.0])[: 4 - n].to(dtype)
        weight[50::50, 3] = torch.tensor(float("inf"), dtype=dtype)
        weight[75::50, 0] = torch.tensor(float("nan"), dtype=dtype)
        weight.view(bits)[75::50, 0] += 5
        same = torch.arange(600) < 200
        same[50::50] = same[75::50] = True
        for scale in (None, torch.tensor([0.3, 3.0, 0.7, 1.1])):
            scale = scale if scale is None or dtype != torch.float64 else scale.double()
            result = prox(weight.clone(), 0.5, n, scale)
            assert torch.equal(result.view(bits)[same], weight.view(bits)[same])
            assert result[~same].isfinite().all()
            assert (result[~same] != weight[~same]).any()


# ------------------------------------------------------------------------------------------ the fused step

STEP = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def adamw_prox(library):
    """The fused step of csrc/cuda/adamw_prox.cu, in place, with the arguments of the op."""

    def run(tensors: list[Tensor | None], step, reg_lambda, n, frozen_lambda, seed):
        weight, grad, exp_avg, exp_avg_sq, master, pretrained, scale = tensors
        double, integer = ctypes.c_double, ctypes.c_int64
        status = library.adamw_prox(
            *(address(tensor) for tensor in (weight, grad, exp_avg, exp_avg_sq, master, pretrained, scale)),
            integer(weight.numel()),
            integer(weight.shape[-1]),
            DTYPES.index(weight.dtype),
            exp_avg.dtype == torch.bfloat16,
            integer(step),
            *(double(STEP[name]) for name in STEP),
            double(reg_lambda),
            n,
            double(frozen_lambda),
            double(0.1),
            seed is not None,
            ctypes.c_uint64(seed or 0),
        )
        assert status == 0

    return run


USUAL = {"reg_lambda": 0.8, "n": 2, "frozen_lambda": 0.0, "seed": None, "scaled": False, "shape": (33, 20)}
CASES = {
    "plain": {},
    "AdamW alone, an odd size": {"reg_lambda": 0.0, "shape": (7, 13)},
    "frozen weights": {"frozen_lambda": 0.3},
    "a metric": {"scaled": True, "shape": (9, 20)},
    "1:4": {"n": 1, "reg_lambda": 0.6},
    "convex": {"reg_lambda": 0.02},
    "a seed": {"seed": 2**63 + 12345},
    "everything": {"frozen_lambda": 0.3, "scaled": True, "seed": 7, "shape": (70, 52)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rounded_moments", [False, True], ids=["moments", "bfloat16 moments"])
@pytest.mark.parametrize("with_master", [False, True], ids=["", "master"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fused_step(dtype, with_master, rounded_moments, case, adamw_prox):
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    if with_master and dtype == arithmetic:
        pytest.skip("a weight in its own arithmetic is its own master")
    case = USUAL | CASES[case]
    shape, seed = case["shape"], case["seed"]
    weight, grad, pretrained = (torch.randn(shape).to(dtype) for _ in range(3))
    moments = [torch.randn(shape), torch.rand(shape)]
    moments = [moment.to(torch.bfloat16 if rounded_moments else arithmetic) for moment in moments]
    master = weight.float() + 1e-4 * torch.randn(shape) if with_master else None
    scale = (0.5 + torch.rand(shape[-1])).to(arithmetic) if case["scaled"] else None
    pattern = NMPattern(case["n"], 4) if case["reg_lambda"] > 0 else None
    before = [weight, grad, *moments, master, pretrained if case["frozen_lambda"] else None, scale]
    expected = reference.adamw_prox(
        *before, 3, *STEP.values(), case["reg_lambda"], pattern, case["frozen_lambda"], 0.1, seed
    )
    after = [None if tensor is None else tensor.clone() for tensor in before]
    adamw_prox(after, 3, case["reg_lambda"], case["n"], case["frozen_lambda"], seed)

    assert torch.equal(after[1], grad)
    results = {"weight": after[0], "exp_avg": after[2], "exp_avg_sq": after[3], "master": after[4]}
    for (name, result), wanted in zip(results.items(), expected, strict=True):
        if result is None:
            continue
        # Up to rounding; but where it decides (half a unit, minimisers that nearly tie) the outcome may be another.
        off = (result.double() - wanted.double()).abs() > 2e-5 * (1 + wanted.double().abs())
        assert off.double().mean() <= 0.01, name
        assert not result[result == 0].signbit().any(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_fused_step_at_every_alignment(dtype, adamw_prox):
    """One tensor that does not begin at a multiple of 16 bytes changes no result, and nothing beside it."""
    shape = (3, 172)
    moments = [torch.randn(shape), torch.rand(shape)]
    master = [torch.randn(shape)] if dtype == torch.bfloat16 else [None]
    tensors = [*(torch.randn(shape).to(dtype) for _ in range(2)), *moments, *master, torch.randn(shape).to(dtype)]
    tensors.append(0.5 + torch.rand(shape[-1]))  # c
    expected = [None if tensor is None else tensor.clone() for tensor in tensors]
    adamw_prox(expected, 3, 0.8, 2, 0.3, None)
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        memory = torch.full((tensor.numel() + 20,), 7.0, dtype=tensor.dtype)
        moved = memory[9:][: tensor.numel()].view(tensor.shape)
        arguments = [None if other is None else other.clone() for other in tensors]
        arguments[place] = moved.copy_(tensor)
        adamw_prox(arguments, 3, 0.8, 2, 0.3, None)
        for result, wanted in zip(arguments, expected, strict=True):
            assert result is None or torch.equal(result, wanted)
        assert (memory[:9] == 7).all()
        assert (memory[9 + tensor.numel() :] == 7).all()
