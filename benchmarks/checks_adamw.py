"""Checks of the fused step adamw_prox_ on one backend, against the reference in float64 and between guards."""

from dataclasses import dataclass, replace

import torch
from checking import (
    TIES,
    Guarded,
    Place,
    Skipped,
    check,
    guarded,
    needs,
    needs_memory,
    same_bits,
)
from torch import Tensor

from proxsparse import reference
from proxsparse.ops import adamw_prox_, use_backend
from proxsparse.ops.adamw_prox import arithmetic_of

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
# Makes the arithmetic exact in fp32 and its results far from bf16: w' = w (1 - 2^-10), exp_avg' = (exp_avg + g) / 2 and
# exp_avg_sq' = (exp_avg_sq + g^2) / 2; the step is zero where moments and gradient are.
EXACT = {"step": 1, "lr": 1.0, "betas": (0.5, 0.5), "eps": 1e-8, "weight_decay": 2.0**-10}
SEED = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Case:
    """A kind of step: dtypes of weight and moments, and what else it has."""

    name: str
    dtype: torch.dtype = torch.float32
    moments: torch.dtype | None = None  # None: the arithmetic's
    n: int = 2
    reg_lambda: float = 0.7
    frozen_lambda: float = 0.0
    scale: bool = False
    master: bool = False
    step: int = 3


CASES = [
    Case("fp32"),
    Case("fp32, 1:4", n=1),
    Case("fp32, AdamW alone", reg_lambda=0.0),
    Case("fp32, step 1000", step=1000),
    Case("fp32, frozen", frozen_lambda=0.25),
    Case("fp32, metric", scale=True),
    Case("fp32, frozen, metric", frozen_lambda=0.25, scale=True),
    Case("fp32, bf16 moments", moments=torch.bfloat16),
    Case("fp64", dtype=torch.float64),
    Case("fp64, frozen, metric", dtype=torch.float64, frozen_lambda=0.25, scale=True),
    Case("bf16", dtype=torch.bfloat16),
    Case("bf16, 1:4", dtype=torch.bfloat16, n=1),
    Case("bf16, bf16 moments", dtype=torch.bfloat16, moments=torch.bfloat16),
    Case("bf16, master", dtype=torch.bfloat16, master=True),
    Case("bf16, master, bf16 moments", dtype=torch.bfloat16, moments=torch.bfloat16, master=True),
    Case("bf16, master, frozen, metric", dtype=torch.bfloat16, master=True, frozen_lambda=0.25, scale=True),
    Case("bf16, frozen, metric", dtype=torch.bfloat16, frozen_lambda=0.25, scale=True),
    Case("fp16", dtype=torch.float16),
    Case("fp16, master, metric", dtype=torch.float16, master=True, scale=True),
]
ALL_OF_IT = CASES[16]
SMALL_CASES = ("fp32", "fp32, frozen, metric", "bf16", "bf16, bf16 moments", "bf16, master, frozen, metric")


@dataclass(frozen=True)
class Step:
    """The tensors of one call, in the order of the op: weight, grad, exp_avg, exp_avg_sq, master, pretrained, scale."""

    tensors: tuple[Tensor | None, ...]
    case: Case

    def run(self, backend: str | None, tensors: tuple[Tensor | None, ...], seed: int | None = None, **settings) -> None:
        """In place on `tensors`."""
        case = self.case
        fixed = {"step": case.step, "reg_lambda": case.reg_lambda, "pattern": f"{case.n}:4"} | SETTINGS
        fixed |= {"frozen_lambda": case.frozen_lambda, "seed": seed}
        with use_backend(backend):
            adamw_prox_(*tensors, **fixed | settings)

    def copies(self) -> tuple[Tensor | None, ...]:
        """Fresh tensors with the same values."""
        return tuple(None if tensor is None else tensor.clone() for tensor in self.tensors)


def random_step(case: Case, shape: tuple[int, ...], device: torch.device) -> Step:
    """Like the middle of a training run whose prox has work to do: lambda * |w| around 0.7."""

    def normal(dtype: torch.dtype, size: float) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, size)

    master = normal(torch.float32, 1.0) if case.master else None
    weight = normal(case.dtype, 1.0) if master is None else master.to(case.dtype)
    arithmetic = arithmetic_of(weight)
    moments = case.moments or arithmetic
    exp_avg, exp_avg_sq = normal(moments, 0.1), normal(moments, 0.1).square()
    pretrained = weight + normal(case.dtype, 0.1) if case.frozen_lambda else None
    scale = 0.5 + torch.rand(shape[-1], dtype=arithmetic, device=device) if case.scale else None
    return Step((weight, normal(case.dtype, 0.1), exp_avg, exp_avg_sq, master, pretrained, scale), case)


def in_float64(step: Step) -> list[Tensor | None]:
    """Fresh tensors with the same values, in float64."""
    return [None if tensor is None else tensor.to(torch.float64, copy=True) for tensor in step.tensors]


def served(place: Place) -> list[Case]:
    """The cases that the backend serves; Skipped if there are none."""
    found = []
    for case in (case for case in CASES if not place.small or case.name in SMALL_CASES):
        try:
            require(place, case)
        except Skipped:
            if case is CASES[0]:
                raise
        else:
            found.append(case)
    return found


def require(place: Place, case: Case, seed: int | None = None) -> None:
    """Raises Skipped if the backend does not serve such a step."""
    tensors = random_step(case, (2, 8), place.device).tensors
    numbers = (case.step, SETTINGS["lr"], *SETTINGS["betas"], SETTINGS["eps"], SETTINGS["weight_decay"])
    needs(place, "adamw_prox_", *tensors, *numbers, case.reg_lambda, case.n, 4, case.frozen_lambda, 0.1, seed)


# name -> unit of the values here, and how far fp32 may be off in it: a prox near a bifurcation magnifies its errors
UNITS = {"weight": (1.0, 2e-5), "master": (1.0, 2e-5), "exp_avg": (0.1, 2e-6), "exp_avg_sq": (0.01, 2e-6)}


def judge(name: str, result: Tensor, exact: Tensor, arithmetic: torch.dtype, what: str) -> None:
    """Raises AssertionError unless `result` is `exact` rounded once, but for a few nearly tied minimisers."""
    unit, floor = UNITS[name]
    floor *= torch.finfo(arithmetic).eps / torch.finfo(torch.float32).eps
    allowed = 1.01 * torch.finfo(result.dtype).eps / 2 * exact.abs() + floor * exact.abs().clamp_min(unit)
    wrong = (result.double() - exact).abs() > allowed
    ties = 4 + TIES * wrong.numel() if name in ("weight", "master") else 0
    assert wrong.sum() <= ties, (
        f"{what} {name}: {wrong.sum()} of {wrong.numel()} are off, by up to {(result.double() - exact).abs().max():.1e}"
    )


@check("adamw_prox_")
def against_float64(place: Place) -> str:
    """Every case and odd shape, aligned or not, between guards: each tensor is the float64 step's, rounded once."""
    for case in served(place):
        for shape in place.shapes:
            for offset in (0, 4) if case.name in ("fp32", "bf16") else (0,):
                step = random_step(case, shape, place.device)
                what = f"{case.name} {list(shape)} offset={offset}"
                guards = [None if tensor is None else guarded(tensor, offset) for tensor in step.tensors]
                step.run(place.backend, tuple(guard and guard.tensor for guard in guards))
                if not place.judge:
                    continue
                exact = in_float64(step)
                if case.master:
                    exact[0], exact[4] = exact[4], None  # in float64 the weight is its own master
                step.run("reference", tuple(exact))
                compare(guards, exact, step, what)
    return f"{len(served(place))} of {len(CASES)} kinds of step"


def compare(guards: list[Guarded | None], exact: list[Tensor | None], step: Step, what: str) -> None:
    """Weight, moments and master against float64; gradient, pretrained and scale against what they were."""
    names = ("weight", "grad", "exp_avg", "exp_avg_sq", "master", "pretrained", "scale")
    for name, guard, target, before in zip(names, guards, exact, step.tensors, strict=True):
        if guard is None:
            continue
        guard.assert_intact(f"{what} {name}")
        if name in UNITS:
            target = exact[0] if name == "master" else target
            judge(name, guard.tensor, target, arithmetic_of(guards[0].tensor), what)
        else:
            assert same_bits(guard.tensor, before), f"{what}: {name} was changed"
    weight, master = guards[0].tensor, guards[4]
    if master is not None:
        assert same_bits(weight, master.tensor.to(weight.dtype)), f"{what}: the weight is not its master rounded"
    new_zero = (weight == 0) & (step.tensors[0] != 0)
    assert not weight[new_zero].signbit().any(), f"{what}: a new zero is -0.0"


@check("adamw_prox_")
def any_shape_without_a_prox(place: Place) -> None:
    """AdamW alone knows no blocks: shapes that four does not divide, and strided tensors."""
    case = Case("AdamW alone", reg_lambda=0.0)
    require(place, case)
    for shape in ((1,), (7,), (3, 5), (129, 3)):
        step = random_step(case, shape, place.device)
        guards = [tensor if tensor is None else guarded(tensor) for tensor in step.tensors]
        step.run(place.backend, tuple(guard and guard.tensor for guard in guards))
        if place.judge:
            exact = in_float64(step)
            step.run("reference", tuple(exact))
            compare(guards, exact, step, f"AdamW alone {list(shape)}")
    strided = random_step(case, (12, 20), place.device)
    expected = strided.copies()
    transposed = tuple(None if tensor is None else tensor.T.contiguous().T for tensor in strided.tensors)
    strided.run(place.backend, expected)
    strided.run(place.backend, transposed)
    assert all(same_bits(a, b) for a, b in zip(transposed[:4], expected[:4], strict=True)), "strided tensors differ"


@check("adamw_prox_")
def empty(place: Place) -> None:
    """An empty shard is no error."""
    require(place, ALL_OF_IT)
    for shape in ((0, 8), (3, 0)):
        step = random_step(ALL_OF_IT, shape, place.device)
        step.run(place.backend, step.tensors)


@check("adamw_prox_")
def rounds_by_the_hash(place: Place) -> None:
    """Where arithmetic is exact, stochastic rounding gives the very bits of the reference, for any seed."""
    for moments in (torch.bfloat16, torch.float32):
        case = Case("bf16, stochastic", dtype=torch.bfloat16, moments=moments, reg_lambda=0.0)
        require(place, case, seed=SEED)
        for shape in place.shapes:
            for seed in (0, 1, 2**32, 2**64 - 1, SEED):
                weight, grad, exp_avg, exp_avg_sq = exact_tensors(shape, moments, place.device)
                for still in (True, False):  # a weight that the step leaves; moments that move
                    moving = (grad, exp_avg, exp_avg_sq)
                    tensors = (weight, *(torch.zeros_like(tensor) if still else tensor for tensor in moving))
                    step = Step((*tensors, None, None, None), case)
                    ours, theirs = step.copies(), step.copies()
                    step.run(place.backend, ours, seed=seed, **EXACT)
                    step.run("reference", theirs, seed=seed, **EXACT)
                    for name, a, b in zip(("weight", "grad", "exp_avg", "exp_avg_sq"), ours, theirs, strict=False):
                        if name != "weight" or still:
                            assert same_bits(a, b), f"{moments} moments, {list(shape)}, seed {seed}: {name} differs"


def exact_tensors(shape: tuple[int, ...], moments: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Weight, gradient and moments of few digits and like exponents, so that EXACT is."""

    def few_digits(dtype: torch.dtype) -> Tensor:
        sign = 1 - 2 * torch.randint(2, shape, device=device)
        return ((1 + torch.randint(128, shape, device=device) / 128) * sign).to(dtype)

    return few_digits(torch.bfloat16), few_digits(torch.bfloat16), few_digits(moments), few_digits(moments).abs()


@check("adamw_prox_")
def stochastic_step(place: Place) -> None:
    """A whole step with a seed: the reference's bits, but for the few values that fp32 rounds otherwise before."""
    case = replace(ALL_OF_IT, moments=torch.bfloat16)
    require(place, case, seed=SEED)
    step = random_step(case, (67, 64) if place.small else (1023, 1028), place.device)
    ours, again, theirs, other = (step.copies() for _ in range(4))
    step.run(place.backend, ours, seed=SEED)
    step.run(place.backend, again, seed=SEED)
    step.run("reference", theirs, seed=SEED)
    step.run(place.backend, other, seed=SEED + 1)
    assert all(same_bits(a, b) for a, b in zip(ours[:4], again[:4], strict=True)), "the same seed gives other bits"
    for name, a, b, c in zip(("weight", "grad", "exp_avg", "exp_avg_sq"), ours, theirs, other, strict=False):
        share = (a != b).float().mean().item()
        assert share <= TIES, f"{name}: {share:.2%} differ from the reference"
        assert name == "grad" or not same_bits(a, c), f"{name}: the seed changes nothing"


@check("adamw_prox_")
def deterministic(place: Place) -> None:
    """Twice the same bits, for every case."""
    for case in served(place):
        step = random_step(case, (37, 260) if place.small else (1023, 1028), place.device)
        first, second = step.copies(), step.copies()
        step.run(place.backend, first)
        step.run(place.backend, second)
        assert all(a is None or same_bits(a, b) for a, b in zip(first, second, strict=True)), (
            f"{case.name}: runs differ"
        )


@check("adamw_prox_", alone=True)
def beyond_32_bits(place: Place) -> None:
    """More than 2^32 elements: each part is stepped as if alone, and is rounded by the hash of its 64-bit position."""
    if place.backend == "reference":
        raise Skipped("the reference is what others are compared with")
    rows, columns = 2**20 + 4, 4096
    needs_memory(place, 4 * 2 * rows * columns / 1e9 + 4)
    case = Case("bf16", dtype=torch.bfloat16, moments=torch.bfloat16, reg_lambda=25.0)
    require(place, case)
    window = random_step(case, (64, columns), place.device)
    tensors = [torch.zeros(rows, columns, dtype=torch.bfloat16, device=place.device) for _ in range(4)]
    starts = [start // columns // 16 * 16 for start in (0, 2**31 - 32 * columns, 2**32 - 32 * columns)]
    parts = [slice(start, start + 64) for start in starts]
    for part in parts:
        for tensor, values in zip(tensors, window.tensors, strict=False):
            tensor[part].copy_(values[: len(tensor[part])])
    window.run(place.backend, (*tensors, None, None, None))
    alone = window.copies()
    window.run(place.backend, alone)
    for part in parts:
        for tensor, values in zip(tensors, alone, strict=False):
            assert same_bits(tensor[part], values[: len(tensor[part])]), f"rows {part.start} to {part.stop} differ"
    untouched = tensors[0][64 : starts[1]]
    assert not untouched.any(), "zeros between the parts have changed"

    for tensor in tensors[1:]:
        tensor.zero_()
    weight = tensors[0].fill_(1.0)
    Step((), Case("", reg_lambda=0.0)).run(place.backend, (*tensors, None, None, None), seed=SEED, **EXACT)
    for part in parts:
        expected = stochastic_one(part.start * columns, weight[part].numel(), place.device)
        assert same_bits(weight[part].flatten(), expected), f"rows {part.start} to {part.stop}: another hash"


def stochastic_one(start: int, count: int, device: torch.device) -> Tensor:
    """1 - 2^-10 rounded to bf16 by the hash of SEED and the positions from `start` on."""
    index = torch.arange(start, start + count, device=device)
    low, high = SEED & 0xFFFFFFFF, SEED >> 32
    first = reference.mix(reference.mix((index & 0xFFFFFFFF) ^ low) ^ (index >> 32) ^ high)
    value = torch.full((count,), 1 - 2.0**-10, device=device)
    return reference.stochastic_round(value, (first >> 16).to(torch.int32))
