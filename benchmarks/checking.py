"""The frame of the checks of gpu_suite.py: who is checked where, weights that are hard, and memory with guards."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proxsparse import reference
from proxsparse.ops import use_backend
from proxsparse.ops.registry import list_backends, select
from proxsparse.patterns import NMPattern

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# One block, one row, rows that no tile divides, one column of blocks, many tiles; all sizes multiples of 16.
SHAPES = [(4,), (1, 4), (1, 12), (5, 12), (3, 1028), (129, 260), (1031, 4), (257, 4100), (2, 3, 20), (64, 256)]
SMALL_SHAPES = [(4,), (5, 12), (3, 1028), (67, 4)]
GUARD = 512  # elements before and after a weight
PATTERNS = {  # bytes of an element -> its integer type and bits that are NaN in every float type of that size
    2: (torch.int16, 0x7FA5),
    4: (torch.int32, 0x7FA5A5A5),
    8: (torch.int64, 0x7FF5A5A5A5A5A5A5),
}


@dataclass(frozen=True)
class Place:
    """Where a check runs: the device, the backend that is chosen explicitly, and how much is checked.

    Args:
        small: few and small sizes, only float32 and bfloat16.
        judge: whether results are compared with float64. Off under a sanitizer: a comparison launches hundreds of
            torch's kernels, and the sanitizer is there for the memory accesses of ours.
    """

    device: torch.device
    backend: str
    small: bool
    judge: bool = True

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """What is tried of sizes."""
        return SMALL_SHAPES if self.small else SHAPES

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes to check. Triton compiles a kernel for each, which takes a second or two."""
        return DTYPES[:2] if self.small else DTYPES


class Skipped(Exception):
    """A check that cannot run here, and why."""


@dataclass(frozen=True)
class Check:
    """A check of every backend of an op, or of `backends`; `alone`: it takes much of the memory."""

    op: str
    run: Callable[[Place], str | None]
    alone: bool
    backends: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """Such as prox_nm_.exact."""
        return f"{self.op}.{self.run.__name__}"

    def concerns(self, backend: str) -> bool:
        """Whether there is something of this backend to check."""
        return backend in (self.backends or list_backends(self.op))


CHECKS: list[Check] = []  # in the order of their definition


def check(op: str, alone: bool = False, backends: tuple[str, ...] | None = None):
    """Decorator: adds a check. It raises AssertionError or Skipped, or returns what is to be said of its success."""

    def add(function: Callable[[Place], str | None]) -> Callable[[Place], str | None]:
        CHECKS.append(Check(op, function, alone, backends))
        return function

    return add


def needs(place: Place, op: str, *arguments) -> None:
    """Raises Skipped, with the backend's own reason, if it does not serve these arguments."""
    with use_backend(place.backend):
        try:
            select(op, *arguments)
        except RuntimeError as error:
            raise Skipped(str(error).partition("cannot serve this call: ")[2].partition(";")[0] or str(error)) from None


def needs_memory(place: Place, gigabytes: float) -> None:
    """Raises Skipped for what is too large for this place."""
    if place.small or place.device.type != "cuda":
        raise Skipped("large sizes are for a GPU, without --small")
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(place.device)[0] / 1e9
    if gigabytes > 0.95 * free:
        raise Skipped(f"it needs {gigabytes:.0f} GB, {free:.0f} are free")


# ---------------------------------------------------------------------------------------------- weights


def hard_weights(shape: tuple[int, ...], reg_lambda: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh random blocks: Gaussian, ties of all or of pairs, zeros, huge ratios; lambda * max|w| from 1e-3 to 10."""
    blocks = math.prod(shape) // 4
    gauss = torch.randn(blocks, 4, dtype=torch.float64, device=device)
    uniform = torch.rand(blocks, 4, dtype=torch.float64, device=device)
    families = [
        gauss,
        gauss[:, :1].expand(-1, 4),
        gauss[:, :2].repeat(1, 2),
        gauss * (uniform < 0.6),
        gauss.sign() * 10 ** (-8 * uniform),
    ]
    kind = torch.randint(len(families), (blocks, 1), device=device)
    chosen = torch.stack(families).gather(0, kind[None].expand(1, -1, 4)).squeeze(0)
    strength = 10 ** (4 * torch.rand(blocks, 1, dtype=torch.float64, device=device) - 3)
    largest = chosen.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (chosen / largest * strength / reg_lambda).view(shape).to(dtype)


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of memory that nothing may write."""

    tensor: Tensor
    memory: Tensor
    start: int

    def assert_intact(self, what: str) -> None:
        """Raises AssertionError if a guard has changed."""
        integer, pattern = PATTERNS[self.memory.dtype.itemsize]
        bits = self.memory.view(integer)
        end = self.start + self.tensor.numel()
        for name, guard in (("before", bits[: self.start]), ("behind", bits[end:])):
            changed = (guard != pattern).nonzero()
            assert not len(changed), f"{what}: wrote {len(changed)} elements {name} the tensor, at {changed[0].item()}"


def guarded(values: Tensor, offset: int = 0) -> Guarded:
    """A copy of the values between guards of NaN; `offset` elements spoil its alignment."""
    integer, pattern = PATTERNS[values.dtype.itemsize]
    start = GUARD + offset
    memory = torch.full((start + values.numel() + GUARD,), pattern, dtype=integer, device=values.device)
    memory = memory.view(values.dtype)
    tensor = memory[start : start + values.numel()].view(values.shape)
    tensor.copy_(values)
    return Guarded(tensor, memory, start)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN and the sign of zero included."""
    integer = PATTERNS[a.dtype.itemsize][0]
    return a.shape == b.shape and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# ---------------------------------------------------------------------------------------------- judging

# The objective's distance from the optimum in float64, over z_1^2: fp32 cannot see differences of a few 1e-7 where two
# minimisers tie; a half-precision result has been rounded by eps / 2 a weight, to second order in the objective.
GAP = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2 * 2.0**-14, torch.float16: 4e-6}
# Where two minimisers nearly tie, fp32 may take the other one; such blocks are rare, and judged by the objective alone.
TIES = 5e-3


def judge_prox(result: Tensor, weight: Tensor, reg_lambda: float, n: int, scale: Tensor | None, what: str) -> None:
    """Raises AssertionError unless `result` is the prox of `weight` as exactly as its dtype can say.

    In float64: the objective is optimal up to GAP, half precision is the exact prox rounded once, new zeros are +0.0.
    """
    pattern = NMPattern(n, 4)
    c = torch.ones(weight.shape[-1:], device=weight.device) if scale is None else scale
    metric = weight.double() * c.double()
    exact = reference.prox_nm(metric, reg_lambda, pattern)
    got = result.double() * c.double()
    z, w, best = (pattern.blocks(part.contiguous()).reshape(-1, 4) for part in (metric, got, exact))
    square = z.abs().amax(-1).square().clamp_min(torch.finfo(torch.float64).tiny)
    gap = (objective(w, z, reg_lambda, n) - objective(best, z, reg_lambda, n)) / square
    worst = gap.argmax()
    assert gap[worst] <= GAP[weight.dtype], (
        f"{what}: objective {gap[worst]:.1e} above the optimum: {z[worst].tolist()} -> {w[worst].tolist()} "
        f"instead of {best[worst].tolist()}"
    )
    new_zero = (result == 0) & (weight != 0)
    assert not result[new_zero].signbit().any(), f"{what}: a new zero is -0.0"
    if weight.dtype in (torch.bfloat16, torch.float16) and scale is None:
        limits = torch.finfo(weight.dtype)
        allowed = limits.eps / 2 * best.abs() + 1e-5 * z.abs().amax(-1, keepdim=True)
        wrong = ((w - best).abs() > allowed + limits.smallest_normal * limits.eps).any(-1)
        assert wrong.sum() <= 1 + TIES * len(wrong), (
            f"{what}: {wrong.sum()} of {len(wrong)} blocks are not the rounded prox"
        )


def objective(w: Tensor, z: Tensor, reg_lambda: float, n: int) -> Tensor:
    """1/2 |w - z|^2 + lambda * e_{n+1}(|w|) of every block; infinite where a sign has turned."""
    turned = (w * z < 0).any(-1)
    return torch.where(turned, math.inf, reference.objective(w.abs(), z.abs(), reg_lambda, n))
