"""The kernels whose launch parameters tune.py measures: their sizes, parameters, and a trial that checks and runs them.

Everything is bfloat16. `size` is that of proxsparse/ops/tuning.py: out_features x in_features x rows, or weights.
"""

import contextlib
import functools
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from common import ROTATION_BYTES, rotation
from linear_speed import COPY_BYTES, Weights, error_of, random_weights, visits
from shapes import Shape
from torch import Tensor
from torch.nn import functional

from proxsparse import reference
from proxsparse.ops import adamw_prox_, prox_nm_, sparse_linear, use_backend
from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.ops.tuning import use_launch_parameters

DTYPE, SIGMA = torch.bfloat16, 0.02
SQUARE, WIDE = (4096, 4096), (14336, 4096)
# Of a 7B and 8B model: up and gate, o and q, down, k and v; then q, k, v in one and gate, up in one.
GEMV_SHAPES = [WIDE, SQUARE, (4096, 14336), (1024, 4096), (6144, 4096), (28672, 4096)]
GEMV_ROWS = [1, 8, 16, 4]
CUTLASS_SHAPES, CUTLASS_ROWS = [SQUARE, WIDE, (4096, 14336)], [2048, 64, 512, 17, 128, 4096, 32, 256, 1024]
PROX_SHAPES, PROX_LAMBDAS = [SQUARE, (4096, 11008)], [0.25, 25.0]
BACKEND_LAMBDAS = [25.0, 0.25, 10.0, 5.0, 2.5, 1.0, 50.0]
ADAMW_SHAPES = [SQUARE, (4096, 11008)]
TINY: Shape = (8, 64)  # for the rehearsal, and to compile
# Where two minimisers of a block nearly tie, fp32 may take the other one: 2e-5 of all weights at lambda 25, at most one
# of 256 consecutive ones (measured with float64 on a CPU). A kernel that skips weights skips many neighbours.
MAY_DIFFER, MAY_DIFFER_OF_256 = 1e-3, 0.05


@dataclass(frozen=True)
class Case:
    """One kernel at one size and strength.

    `condition` distinguishes measurements of the same size; `row` has further fields of the rows; `like` names the
    benchmark and the fields of its rows for which a prediction was made.
    """

    size: tuple[int, ...]
    condition: str = ""
    row: dict[str, object] = field(default_factory=dict)
    like: tuple[str, dict[str, object]] = ("", {})

    @property
    def name(self) -> str:
        """The size as in tuned.json."""
        return "x".join(map(str, self.size))


@dataclass(frozen=True)
class Trial:
    """A measurement of a case with certain parameters.

    Args:
        problem: runs the kernel once; None if it is right up to rounding, else what is wrong.
        run: what is timed: `calls` calls, each on other memory.
        renew: the copy before each run, of `copied` bytes read and written; it empties the caches and undoes `run`.
        moved: bytes that a run has to move.
        copies: launches of `renew`.
    """

    problem: Callable[[], str | None]
    run: Callable[[], object]
    renew: Callable[[], object]
    calls: int
    moved: int
    copied: int
    copies: int = 1


@dataclass(frozen=True)
class Kernel:
    """A kernel as tune.py measures it.

    Args:
        cases: in the order of their importance.
        parameters: of a device, without the defaults; the first `coarse` of them are measured first, in all cases.
        trial: (case, device) -> Trial; called and used while the parameters are in force.
        force: parameters -> context in which they are in force; {}: the defaults of the kernel.
        default: the parameters that others have to beat; {}: those of the kernel.
        in_triton: whether it is compiled at its first launch, and can be rehearsed in the interpreter on a CPU.
        share: of the time.
    """

    cases: Callable[[torch.device], list[Case]]
    parameters: Callable[[torch.device], list[dict]]
    trial: Callable[[Case, torch.device], Trial]
    force: Callable[[dict], contextlib.AbstractContextManager]
    default: dict = field(default_factory=dict)
    in_triton: bool = False
    coarse: int | None = None
    share: float = 1.0


# ---------------------------------------------------------------------------------------------- packed layers


@functools.lru_cache(maxsize=8)
def weights_of(shape: Shape, device: torch.device) -> Weights:
    """Equal random 2:4 weights, as linear_speed makes them, and x for every number of rows here."""
    return random_weights(shape, DTYPE, device, Namespace(sigma=SIGMA, rows=sorted({*GEMV_ROWS, *CUTLASS_ROWS})))


@functools.lru_cache(maxsize=2)
def memory_to_copy(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two buffers; to copy one to the other empties the caches."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    return source, source.clone()


def linear_cases(name: str, shapes: list[Shape], all_rows: list[int]) -> list[Case]:
    """Every shape and number of rows, those of the first row number first."""
    found = []
    for rows in all_rows:
        for shape in shapes:
            like = {"backend": name, "weights": "{}x{}".format(*shape), "rows": rows, "dtype": "bfloat16"}
            found.append(Case((*shape, rows), like=("linear_speed", like)))
    return found


def linear_trial(name: str, case: Case, device: torch.device) -> Trial:
    """x W^T by a backend of packed layers, against float64 and the error of the dense matmul."""
    *shape, rows = case.size
    weights = weights_of(tuple(shape), device)
    x = weights.x[:rows]
    if reason := get_kernel("sparse_linear", name).supports(x, weights.packed[0][0]):
        raise RuntimeError(reason)

    def call(place: int) -> Tensor:
        return sparse_linear(x, *weights.packed[place], backend=name)

    def problem() -> str | None:
        error = error_of(call, weights, rows)
        of_dense = error_of(lambda place: functional.linear(x, weights.dense[place]), weights, rows)
        allowed = 2 * of_dense + torch.finfo(DTYPE).eps * weights.expected.abs().max().item()
        return None if error <= allowed else f"its error is {error:.2g}, that of dense {of_dense:.2g}"

    calls = visits(call, len(weights), device)
    source, target = memory_to_copy(device)
    moved = sum(part.nbytes for part in weights.packed[0]) + x.nbytes + rows * shape[0] * DTYPE.itemsize

    def run() -> None:
        for place in range(calls):
            call(place)

    return Trial(problem, run, lambda: target.copy_(source), calls, calls * moved, 2 * source.nbytes)


def gemv_parameters(device: torch.device) -> list[dict]:
    """All combinations; the first 8 (two values of each number) show whether more or less of it is faster."""
    every = products(warps=cuda.GEMV_WARPS, splits=cuda.GEMV_SPLITS, tiles=cuda.GEMV_TILES)
    return sorted(every, key=lambda one: one["warps"] == 4 or one["splits"] in (2, 8) or one["tiles"] == 2)


def cutlass_parameters(device: torch.device) -> list[dict]:
    """Every tile that was built for this GPU."""
    return [{"tile": tile} for tile in sorted(cutlass.built_tiles(device))]


# ---------------------------------------------------------------------------------------------- the prox


def prox_cases(device: torch.device, shapes: list[Shape], lambdas: list[float], kernel: str | None) -> list[Case]:
    """Every size and strength; on a CPU one tiny size."""
    found = []
    for rows, columns in shapes if device.type == "cuda" else [TINY]:
        for reg_lambda in lambdas:
            like = {"kernel": kernel, "dtype": "bfloat16", "lambda": reg_lambda}
            row = {"lambda": reg_lambda, "lambda_mean": reg_lambda * SIGMA * 0.7979}  # E|w| of a Gaussian
            found.append(Case((rows * columns,), f"lambda {reg_lambda:g}", row, ("prox_speed", like)))
    return found


@functools.lru_cache(maxsize=4)
def prox_problem(weights: int, device: torch.device) -> list:
    """So many equal sets of one weight that a run over all of them finds each in memory."""
    sets = rotation([(weights // TINY[1], TINY[1])], DTYPE, device, SIGMA)
    return sets if device.type == "cuda" else sets[:1]


@functools.lru_cache(maxsize=8)
def exact_prox(weights: int, reg_lambda: float, device: torch.device) -> Tensor:
    """Of the weight of `prox_problem`, in float64."""
    return reference.prox_nm(prox_problem(weights, device)[0].source.view(-1, 4).double(), reg_lambda).flatten()


def prox_trial(case: Case, device: torch.device) -> Trial:
    """The 2:4 prox in place; 4 bytes a weight."""
    (size,), reg_lambda = case.size, case.row["lambda"]
    sets = prox_problem(size, device)

    def renew() -> None:
        for one in sets:
            one.renew()

    def run() -> None:
        for one in sets:
            prox_nm_(one.weights[0], reg_lambda)

    def problem() -> str | None:
        renew()
        prox_nm_(sets[0].weights[0], reg_lambda)
        return difference(sets[0].flat, exact_prox(size, reg_lambda, device))

    moved = 2 * sum(one.flat.nbytes for one in sets)
    return Trial(problem, run, renew, len(sets), moved, moved, len(sets))


def difference(result: Tensor, exact: Tensor) -> str | None:
    """None if `result` is `exact` rounded, except where two minimisers nearly tie."""
    allowed = torch.finfo(result.dtype).eps * exact.abs() + 1e-5 * exact.abs().max()
    off = ~((result.flatten().double() - exact).abs() <= allowed)
    shares = off.view(-1, 256).double().mean(1)
    if shares.mean() <= MAY_DIFFER and shares.max() <= MAY_DIFFER_OF_256:
        return None
    return f"{off.sum()} of {off.numel()} weights differ from float64, the first at {off.nonzero()[0].item()}"


# ---------------------------------------------------------------------------------------------- the fused step

STEP = {"step": 10, "lr": 1e-4, "weight_decay": 0.01, "reg_lambda": 0.25}


@dataclass(frozen=True)
class Fused:
    """Tensors of equal optimizer steps, and the weight after one of them in float64."""

    sets: list
    grad: Tensor
    first: tuple[Tensor, Tensor]  # the moments before the step
    moments: list[tuple[Tensor, Tensor]]  # of every set, changed by every run
    exact: Tensor


@functools.lru_cache(maxsize=4)
def fused_problem(weights: int, device: torch.device) -> Fused:
    """Moments in float32."""
    sets = prox_problem(weights, device)
    sets = sets[: max(1, ROTATION_BYTES // (10 * weights))]  # 10 bytes a weight come with its 2
    shape = sets[0].weights[0].shape
    grad = (1e-3 * torch.randn(shape, device=device)).to(DTYPE)
    first = torch.randn(shape, device=device) * 1e-4, torch.rand(shape, device=device) * 1e-6
    before = sets[0].source.view(shape).double(), grad.double(), *(moment.double() for moment in first)
    numbers = (STEP["step"], STEP["lr"], 0.9, 0.999, 1e-8, STEP["weight_decay"], STEP["reg_lambda"], "2:4", 0.0, 0.1)
    exact = reference.adamw_prox(*before, None, None, None, *numbers, None)[0].flatten()
    return Fused(sets, grad, first, [tuple(moment.clone() for moment in first) for _ in sets], exact)


def fused_trial(case: Case, device: torch.device) -> Trial:
    """A step of AdamW with the prox; 22 bytes a weight."""
    (size,) = case.size
    fused = fused_problem(size, device)
    sets = fused.sets

    def step(place: int, moments: tuple[Tensor, Tensor]) -> None:
        adamw_prox_(sets[place].weights[0], fused.grad, *moments, **STEP)

    def renew() -> None:
        for one in sets:
            one.renew()

    def run() -> None:
        for place, moments in enumerate(fused.moments):
            step(place, moments)

    def problem() -> str | None:
        renew()
        step(0, tuple(moment.clone() for moment in fused.first))
        return difference(sets[0].flat, fused.exact)

    copied = 2 * sum(one.flat.nbytes for one in sets)
    return Trial(problem, run, renew, len(sets), 22 * size * len(sets), copied, len(sets))


# ---------------------------------------------------------------------------------------------- all kernels


def adamw_cases(device: torch.device) -> list[Case]:
    """Two sizes, on a CPU a tiny one."""
    like = ("optimizer_step", {"optimizer": "ProxAdamW", "dtype": "bfloat16"})
    shapes = ADAMW_SHAPES if device.type == "cuda" else [TINY]
    return [Case((rows * columns,), like=like) for rows, columns in shapes]


def triton_parameters(name: str) -> list[dict]:
    """What a Triton kernel lists as legal."""
    from proxsparse import triton_kernels  # late: importing triton takes a second

    return [dict(one) for one in getattr(triton_kernels, name)]


def products(**values: tuple[int, ...]) -> list[dict]:
    """Every combination of values, by name."""
    return [dict(zip(values, numbers, strict=True)) for numbers in itertools.product(*values.values())]


def force(kernel: str, backend_name: str | None) -> Callable[[dict], contextlib.AbstractContextManager]:
    """parameters -> context: the kernel is launched with them, on this backend of the op."""

    @contextlib.contextmanager
    def forced(parameters: dict) -> Iterator[None]:
        with use_launch_parameters(kernel, **parameters), use_backend(backend_name):
            yield

    return forced


def force_backend(parameters: dict) -> contextlib.AbstractContextManager:
    """Of prox_backend, which has backends instead of launch parameters."""
    return use_backend(parameters["backend"])


BACKENDS = [{"backend": "triton"}, {"backend": "cuda"}]
KERNELS = {
    "gemv": Kernel(
        cases=lambda device: linear_cases("gemv", GEMV_SHAPES, GEMV_ROWS),
        parameters=gemv_parameters,
        trial=functools.partial(linear_trial, "gemv"),
        force=force("gemv", None),
        coarse=8,
        share=5,
    ),
    "prox": Kernel(
        cases=lambda device: prox_cases(device, PROX_SHAPES, PROX_LAMBDAS, "triton"),
        parameters=lambda device: triton_parameters("PROX_LAUNCHES"),
        trial=prox_trial,
        force=force("prox", "triton"),
        in_triton=True,
        share=2,
    ),
    "prox_backend": Kernel(
        cases=lambda device: prox_cases(device, PROX_SHAPES[:1], BACKEND_LAMBDAS, None),
        parameters=lambda device: BACKENDS,
        trial=prox_trial,
        force=force_backend,
        default=BACKENDS[0],
        share=1,
    ),
    "cutlass": Kernel(
        cases=lambda device: linear_cases("cutlass", CUTLASS_SHAPES, CUTLASS_ROWS),
        parameters=cutlass_parameters,
        trial=functools.partial(linear_trial, "cutlass"),
        force=force("cutlass", None),
        share=3,
    ),
    "adamw_prox": Kernel(
        cases=adamw_cases,
        parameters=lambda device: triton_parameters("ADAMW_PROX_LAUNCHES"),
        trial=fused_trial,
        force=force("adamw_prox", "triton"),
        in_triton=True,
        share=1,
    ),
}
