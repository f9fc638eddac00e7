"""The ops on blocks as cases: inputs of any shape, the call, and its result by the reference in float64.

test_every_op.py runs every case on every backend, dtype, shape and layout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from ops.on_each_backend import backends_of
from torch import Tensor

from proxsparse import nm_mask, prox_nm_, reference
from proxsparse.ops import adamw_prox_, masked_weight_, pack_nm, prox_nm_list_, unpack_nm, use_backend
from proxsparse.patterns import NMPattern
from proxsparse.reference import pack

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
STEP = {"step": 3, "lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
NUMBERS = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 2.0, 1e-30])
Tensors = dict[str, Tensor]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What kernels compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def bits(tensor: Tensor) -> Tensor:
    """The bytes: -0.0 differs from 0.0, and a NaN equals itself."""
    return tensor.cpu().contiguous().view(torch.uint8)


def normal(shape, dtype: torch.dtype, seed: int, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def hard(shape, dtype: torch.dtype, seed: int) -> Tensor:
    """A third of the numbers are normal, a third small integers, and a third zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(3, shape, generator=generator)
    integers = torch.randint(-2, 3, shape, generator=generator).double()
    special = NUMBERS[torch.randint(len(NUMBERS), shape, generator=generator)].double()
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.where(kind == 0, numbers, torch.where(kind == 1, integers, special)).to(dtype)


def other_dtype(shape, dtype: torch.dtype, seed: int) -> Tensor:
    """The same of another dtype, without NaN: torch converts NaN to different bits, depending on the strides."""
    return hard(shape, torch.float32 if dtype == torch.bfloat16 else torch.bfloat16, seed).nan_to_num()


def feasible(shape, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits in two places of each block, subnormal numbers and every NaN among them; +0.0 or -0.0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)
    places = torch.rand((*shape[:-1], shape[-1] // 4, 4), generator=generator).argsort(-1).flatten(-2)
    zero = torch.where(torch.rand(shape, generator=generator) < 0.1, -0.0, 0.0).to(dtype)
    return torch.where(places < 2, raw.squeeze(-1), zero)


def scaling(shape, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.4, 2.5, shape[-1]).to(arithmetic(dtype))


def step_problem(shape, dtype, moment=None, parts=(), seed=0) -> Tensors:
    """The tensors of an AdamW step in the middle of a training; `parts` of master, scale."""
    weight, moment = normal(shape, torch.float64, 4 * seed), moment or arithmetic(dtype)
    tensors = {
        "weight": weight.to(dtype),
        "grad": normal(shape, dtype, 4 * seed + 1, 0.3),
        "exp_avg": normal(shape, moment, 4 * seed + 2, 0.2),
        "exp_avg_sq": (0.01 + normal(shape, torch.float64, 4 * seed + 3, 0.2).square()).to(moment),
        "master": weight.float(),
        "scale": scaling(shape, dtype),
    }
    return {name: x for name, x in tensors.items() if name in ("weight", "grad", "exp_avg", "exp_avg_sq", *parts)}


def step_(tensors: Tensors, **options) -> Tensors:
    """adamw_prox_ in place; returns what it changes."""
    assert adamw_prox_(**tensors, **STEP | options) is tensors["weight"]
    return {name: x for name, x in tensors.items() if name in ("weight", "exp_avg", "exp_avg_sq", "master")}


def adamw_in_float64(tensors: Tensors) -> Tensors:
    """AdamW alone from the same values on the CPU, where nothing is rounded; the weight is that of the master."""
    exact = {name: tensor.double().cpu().clone() for name, tensor in tensors.items()}
    exact["weight"] = exact.pop("master", exact["weight"])
    with use_backend("reference"):
        return step_(exact, reg_lambda=0.0)


def step_in_float64(tensors: Tensors, reg_lambda: float, pattern: str = "2:4") -> Tensors:
    """The same, then the prox."""
    exact = adamw_in_float64(tensors)
    scale = tensors["scale"].double().cpu() if "scale" in tensors else None
    if reg_lambda:
        exact["weight"] = reference.prox_nm(exact["weight"], reg_lambda, pattern, scale)
    return exact | ({"master": exact["weight"]} if "master" in tensors else {})


def short(dtype: torch.dtype) -> torch.dtype:
    """bfloat16 for float32, as the result of masked_weight_ and the gradient of a step may be."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def short_gradient(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The tensors of a step, with the gradient in bfloat16 for a float32 weight."""
    return tensors | {"grad": tensors["grad"].to(short(dtype))}


def masked(weight, pretrained, scale=None, pattern="2:4") -> Tensor:
    """masked_weight_ in five passes: c * w with the sign of W0, its mask, W0 there."""
    score = (weight if scale is None else weight * scale) * pretrained.to(weight.dtype).sign()
    return torch.where(reference.nm_mask(score, pattern), pretrained, 0.0)


def mask_of(score: Tensor, pattern: str) -> Tensor:
    """The mask by the rule, block by block; the remainder of a row is kept."""
    parsed, mask = NMPattern.parse(pattern), torch.ones(score.shape, dtype=torch.bool)
    parsed.blocks(mask).copy_(ranked(parsed.blocks(score), parsed.n))
    return mask


def ranked(score: Tensor, n: int) -> Tensor:
    """Kept where fewer than n members of the block are larger, or equal and earlier; a NaN stands above all numbers."""
    score = torch.where(score.isnan(), torch.inf, score.double())
    earlier = torch.ones(score.shape[-1], score.shape[-1], dtype=torch.bool).tril(-1)  # [i, j]: j comes before i
    mine, other = score[..., :, None], score[..., None, :]
    return ((other > mine) | ((other == mine) & earlier)).sum(-1) < n


def pack_there_and_back(weight) -> Tensors:
    values, indices = pack_nm(weight)
    return {"values": values, "indices": indices, "back": unpack_nm(values, indices)}


@dataclass(frozen=True)
class Case:
    op: str
    inputs: Callable  # (shape, dtype, seed) -> tensors on the CPU; one of a single dimension belongs to the columns
    call: Callable[[Tensors], Tensors]  # what it changes in place, or returns
    expected: Callable[[Tensors], Tensors]  # from inputs on the CPU; float64 where results may be rounded
    arguments: Callable[[Tensors], tuple]  # of torch.ops.proxsparse.<op>
    pattern: str = "2:4"
    block: int = 4  # weights in a block
    remainder: int = 0  # weights after the last block of a row
    same_bits: bool = False  # nothing is computed

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether the op supports rows of this length; packing has no remainders."""
        if self.op == "pack_nm" or self.block == 1:
            return shape[-1] % self.block == 0
        try:
            NMPattern.parse(self.pattern).check_blocks(shape)
        except ValueError:
            return False
        return True

    def served(self, tensors: Tensors) -> Tensors | None:
        """The result; None where packing refuses a dtype or an address, as the CUDA kernel does."""
        try:
            return self.call(tensors)
        except RuntimeError as refusal:
            if self.op == "pack_nm" and "does not support this call" in str(refusal):
                return None
            raise


def list_call(tensors):
    prox_nm_list_([tensors["weight"], tensors["other"]], [0.7, 0.2])
    return tensors


def step_arguments(tensors, reg_lambda, n=2, m=4):
    names = ("weight", "grad", "exp_avg", "exp_avg_sq", "master", "scale")
    numbers = (3, 0.05, 0.9, 0.99, 1e-6, 0.1, reg_lambda, n, m)
    return (*map(tensors.get, names), *numbers, None)


def everything(shape, dtype, seed):
    """Masters for half precision, and moments in bfloat16."""
    parts = ("scale",) if dtype == arithmetic(dtype) else ("scale", "master")
    return step_problem(shape, dtype, None if dtype == torch.float64 else torch.bfloat16, parts, seed)


def prox_in_float64(tensors, reg_lambdas, pattern="2:4"):
    return {name: reference.prox_nm(tensors[name].double(), x, pattern) for name, x in reg_lambdas.items()}


CASES = {
    "prox of a list": Case(
        "prox_nm_list_",
        lambda shape, dtype, seed: {"weight": normal(shape, dtype, seed), "other": normal(shape, dtype, seed + 1)},
        list_call,
        lambda t: prox_in_float64(t, {"weight": 0.7, "other": 0.2}),
        lambda t: ([t["weight"], t["other"]], [0.7, 0.2], 2, 4),
    ),
    "AdamW": Case(
        "adamw_prox_",
        lambda shape, dtype, seed: step_problem(shape, dtype, seed=seed),
        lambda t: step_(t, reg_lambda=0.0),
        adamw_in_float64,
        lambda t: step_arguments(t, 0.0),
        block=1,
    ),
    "AdamW and prox, gradient in bfloat16": Case(  # of a float32 weight
        "adamw_prox_",
        lambda shape, dtype, seed: short_gradient(everything(shape, dtype, seed), dtype),
        lambda t: step_(t, reg_lambda=0.6),
        lambda t: step_in_float64(t, 0.6),
        lambda t: step_arguments(t, 0.6),
    ),
    "masked weight, W0 of another dtype": Case(  # the op converts it
        "masked_weight_",
        lambda shape, dtype, seed: {
            **{"out": torch.zeros(shape, dtype=dtype), "weight": hard(shape, dtype, seed)},
            "pretrained": other_dtype(shape, dtype, seed + 1),
        },
        lambda t: {"out": masked_weight_(**t)},
        lambda t: {"out": masked(t["weight"], t["pretrained"].to(t["out"].dtype))},
        lambda t: (t["out"], t["weight"], t["pretrained"], None, 2, 4),
        same_bits=True,
    ),
    "pack": Case(
        "pack_nm",
        lambda shape, dtype, seed: {"weight": feasible(shape, dtype, seed)},
        lambda t: pack_there_and_back(t["weight"]),
        lambda t: (
            dict(zip(("values", "indices"), x := pack.pack_nm(t["weight"]), strict=True)) | {"back": pack.unpack_nm(*x)}
        ),
        lambda t: (t["weight"],),
        same_bits=True,
    ),
}


def cases_of(pattern: str, size: float, prox: float, step: float) -> dict[str, Case]:
    """The cases of every pattern. size: of the weights of the prox; prox, step: lambda."""
    n, m = map(int, pattern.split(":"))
    blocks = {"pattern": pattern, "block": m, "remainder": 2 if m > 4 else 0}
    return {
        f"prox, {pattern}": Case(
            "prox_nm_",
            lambda shape, dtype, seed: {"weight": normal(shape, dtype, seed, size)},
            lambda t: {"weight": prox_nm_(t["weight"], prox, pattern)},
            lambda t: prox_in_float64(t, {"weight": prox}, pattern),
            lambda t: (t["weight"], prox, n, m),
            **blocks,
        ),
        f"AdamW and prox, {pattern}": Case(
            "adamw_prox_",
            everything,
            lambda t: step_(t, reg_lambda=step, pattern=pattern),
            lambda t: step_in_float64(t, step, pattern),
            lambda t: step_arguments(t, step, n, m),
            **blocks,
        ),
        f"mask, {pattern}": Case(
            "nm_mask",
            lambda shape, dtype, seed: {"score": hard(shape, dtype, seed)},
            lambda t: {"mask": nm_mask(t["score"], pattern)},
            lambda t: {"mask": mask_of(t["score"], pattern)},
            lambda t: (t["score"], n, m),
            **blocks,
            same_bits=True,
        ),
        f"masked weight, {pattern}, scaled": Case(
            "masked_weight_",
            lambda shape, dtype, seed: {
                **{"out": torch.zeros(shape, dtype=dtype), "weight": hard(shape, dtype, seed)},
                **{"pretrained": hard(shape, dtype, seed + 1), "scale": scaling(shape, dtype)},
            },
            lambda t: {"out": masked_weight_(**t, pattern=pattern)},
            lambda t: {"out": masked(t["weight"], t["pretrained"], t["scale"], pattern)},
            lambda t: (t["out"], t["weight"], t["pretrained"], t["scale"], n, m),
            **blocks,
            same_bits=True,
        ),
        f"masked weight, {pattern}, in bfloat16": Case(  # W0 and the result of a float32 weight
            "masked_weight_",
            lambda shape, dtype, seed: {
                "weight": hard(shape, dtype, seed),
                **{name: hard(shape, short(dtype), seed + 1) for name in ("out", "pretrained")},
            },
            lambda t: {"out": masked_weight_(**t, pattern=pattern)},
            lambda t: {"out": masked(t["weight"], t["pretrained"], pattern=pattern)},
            lambda t: (t["out"], t["weight"], t["pretrained"], None, n, m),
            **blocks,
            same_bits=True,
        ),
    }


CASES |= cases_of("2:4", 1.0, 0.7, 0.6)
for _pattern in ("4:6", "6:8", "8:10"):  # with lambda so small that the weights hardly differ from case to case
    CASES |= cases_of(_pattern, 0.5, 0.005, 1e-4)


def on_backends(but: tuple[str, ...] = (), slow: tuple[str, ...] = ()):
    """Every case on every backend of this machine, except those in `but`.

    The patterns `slow` are marked so, and the reference of large blocks.
    """
    params = []
    for name, case in CASES.items():
        left_out = (*but, "cuda") if case.block > 4 else but  # CUDA has blocks of 4 only
        for place in backends_of(case.op):
            backend = place.values[0][0]
            is_slow = case.pattern in slow or (case.block > 4 and backend == "reference")
            marks = [*place.marks, *[pytest.mark.slow] * is_slow]
            if backend not in left_out:
                params.append(pytest.param(case, *place.values, id=f"{name}-{place.id}", marks=marks))
    return pytest.mark.parametrize(("case", "place"), params)


each_case, each_kernel = on_backends(), on_backends(but=("reference",), slow=("6:8", "8:10"))
each_traced_case = on_backends(slow=("6:8", "8:10"))  # torch sees no difference between these and 4:6


def assert_matches(case: Case, results: Tensors, inputs: Tensors, dtype: torch.dtype, what: object = "") -> None:
    """Computed in the arithmetic of `dtype`, that of the inputs, and rounded once; or the same bits."""
    for name, wanted in case.expected(inputs).items():
        found = results[name].cpu()
        assert found.shape == wanted.shape, (name, what)
        if case.same_bits:
            assert found.dtype == wanted.dtype
            assert torch.equal(bits(found), bits(wanted)), (name, what)
        elif found.numel():
            assert_close(found, wanted, dtype, f"{name} {what}")


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype, what="", stochastic=False) -> None:
    """Within the error of the arithmetic of `dtype`, and the rounding to the dtype in which it is stored."""
    rounds = found.dtype != arithmetic(dtype)
    stored = torch.finfo(found.dtype).eps * (1 if stochastic else 0.505) if rounds else 0.0
    computed = 64 * torch.finfo(arithmetic(dtype)).eps * exact.abs().max()
    tiny = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    error = (found.cpu().double() - exact).abs() - stored * exact.abs() - computed - tiny
    assert (error <= 0).all(), f"{what}: {error.max()} too far from the reference"
