"""The kernels whose launch parameters tune.py measures: sizes, parameters, and trials that check and run them.

Everything is bfloat16. Sizes are those of proxsparse/ops/tuning.py: out_features x in_features x rows, or weights.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from lib.measure import ROTATION_BYTES, LinearWeights, copy_buffers, rotation
from lib.shapes import Shape
from torch import Tensor
from torch.nn import functional

from proxsparse import reference
from proxsparse.ops import adamw_prox_, prox_nm_, sparse_linear, use_backend
from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.ops.tuning import use_launch_parameters

DTYPE, SIGMA = torch.bfloat16, 0.02
MEAN = SIGMA * 0.7979  # E|w| of a Gaussian
SQUARE, WIDE, DOWN, LLAMA_DOWN = (4096, 4096), (14336, 4096), (4096, 14336), (4096, 11008)
# Of a 7B and 8B model: up and gate, o and q, down, k and v; then q, k, v in one and gate, up in one.
GEMV_SHAPES, GEMV_ROWS = [WIDE, SQUARE, DOWN, (1024, 4096), (6144, 4096), (28672, 4096)], [1, 8, 16, 4]
CUTLASS_SHAPES, CUTLASS_ROWS = [SQUARE, WIDE, DOWN], [2048, 64, 512, 17, 128, 4096, 32, 256, 1024]
TINY: Shape = (8, 64)  # for the rehearsal on a CPU
STEP = {"step": 10, "lr": 1e-4, "weight_decay": 0.01, "reg_lambda": 0.25}
# Where two minimisers of a block nearly tie, fp32 may find the other one: 2e-5 of all weights at lambda 25, at most one
# in 256 consecutive ones (measured with float64 on a CPU). A kernel that skips weights skips many neighbours.
MAY_DIFFER, MAY_DIFFER_OF_256 = 1e-3, 0.05


@dataclass(frozen=True)
class Case:
    """One kernel at one size, the prox also at one lambda."""

    size: tuple[int, ...]
    reg_lambda: float | None = None

    def fields(self) -> dict[str, object]:
        """The fields of its rows."""
        strength = self.reg_lambda and {"lambda": self.reg_lambda, "lambda_mean": self.reg_lambda * MEAN}
        return {"size": "x".join(map(str, self.size))} | (strength or {})


@dataclass(frozen=True)
class Trial:
    """A measurement of a case with certain parameters.

    Args:
        problem: runs the kernel once; None if the result is right up to rounding, else what is wrong.
        run: what is timed: `calls` calls, each on other memory, that have to move `moved` bytes.
        renew: the copy before each run, of `copied` bytes read and written, in `copies` launches; it empties the caches
            and restores what `run` changed.
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
        cases: of a device, the most important first.
        parameters: of a device, without the defaults; the first `coarse` of them are measured first, in all cases.
        trial: (case, device) -> Trial; called and used while the parameters are in force.
        force: parameters -> context in which they are in force; {}: the defaults of the kernel.
        default: the parameters that others have to beat; {}: those of the kernel.
        in_triton: whether the Triton interpreter can rehearse it on a CPU.
        share: its part of the time.
    """

    cases: Callable[[torch.device], list[Case]]
    parameters: Callable[[torch.device], list[dict]]
    trial: Callable[[Case, torch.device], Trial]
    force: Callable[[dict], contextlib.AbstractContextManager]
    in_triton: bool = False
    default: dict = field(default_factory=dict)
    coarse: int | None = None
    share: float = 1.0


@functools.lru_cache(maxsize=8)
def linear_problem(shape: Shape, device: torch.device) -> tuple[LinearWeights, tuple[Tensor, Tensor]]:
    """Equal random 2:4 weights with x for every number of rows here, and buffers to copy."""
    all_rows = sorted({*GEMV_ROWS, *CUTLASS_ROWS})
    return LinearWeights.random(shape, DTYPE, device, SIGMA, all_rows), copy_buffers(device)


def linear_trial(name: str, case: Case, device: torch.device) -> Trial:
    """x W^T by an inference backend, compared with float64 and the error of the dense matmul."""
    *shape, rows = case.size
    weights, (source, target) = linear_problem(tuple(shape), device)
    x = weights.x[:rows]
    if reason := get_kernel("sparse_linear", name).supports(x, weights.packed[0][0]):
        raise RuntimeError(reason)

    def call(place: int) -> Tensor:
        return sparse_linear(x, *weights.packed[place], backend=name)

    def problem() -> str | None:
        error = weights.error_of(call, rows)
        of_dense = weights.error_of(lambda place: functional.linear(x, weights.dense[place]), rows)
        right = error <= weights.tolerance(of_dense)
        return None if right else f"its error is {error:.2g}, that of dense {of_dense:.2g}"

    calls = weights.visits(call)
    moved = sum(part.nbytes for part in weights.packed[0]) + x.nbytes + rows * shape[0] * DTYPE.itemsize

    def run() -> None:
        for place in range(calls):
            call(place)

    return Trial(problem, run, lambda: target.copy_(source), calls, calls * moved, 2 * source.nbytes)


def gemv_parameters(device: torch.device) -> list[dict]:
    """All combinations; the first 8 (two values of each number) show whether more or less of it is faster."""
    numbers = itertools.product(cuda.GEMV_WARPS, cuda.GEMV_SPLITS, cuda.GEMV_TILES)
    every = [{"warps": warps, "splits": splits, "tiles": tiles} for warps, splits, tiles in numbers]
    return sorted(every, key=lambda one: one["warps"] == 4 or one["splits"] in (2, 8) or one["tiles"] == 2)


@functools.lru_cache(maxsize=4)
def prox_problem(weights: int, device: torch.device) -> list:
    """Equal sets of one weight, enough that a run over all of them reads each from memory."""
    sets = rotation([(weights // TINY[1], TINY[1])], DTYPE, device, SIGMA)
    return sets if device.type == "cuda" else sets[:1]


@functools.lru_cache(maxsize=8)
def exact_prox(weights: int, reg_lambda: float, device: torch.device) -> Tensor:
    """The prox of the weight of `prox_problem`, in float64."""
    return reference.prox_nm(prox_problem(weights, device)[0].source.view(-1, 4).double(), reg_lambda).flatten()


def prox_trial(case: Case, device: torch.device) -> Trial:
    """The 2:4 prox in place; 4 bytes per weight."""
    (size,) = case.size
    sets, exact = prox_problem(size, device), exact_prox(size, case.reg_lambda, device)
    return trial_of(sets, lambda place: prox_nm_(sets[place].weights[0], case.reg_lambda), exact, 4)


@functools.lru_cache(maxsize=4)
def step_problem(weights: int, device: torch.device) -> tuple[list, Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Equal weights, a gradient, float32 moments for each weight, and the weight after one step in float64."""
    sets = prox_problem(weights, device)
    sets = sets[: max(1, ROTATION_BYTES // (10 * weights))]  # 10 bytes per weight in addition to its 2
    shape = sets[0].weights[0].shape
    grad = (1e-3 * torch.randn(shape, device=device)).to(DTYPE)
    moments = torch.randn(shape, device=device) * 1e-4, torch.rand(shape, device=device) * 1e-6
    before = sets[0].source.view(shape).double(), grad.double(), *(moment.double() for moment in moments)
    numbers = (STEP["step"], STEP["lr"], 0.9, 0.999, 1e-8, STEP["weight_decay"], STEP["reg_lambda"], "2:4", 0.0, 0.1)
    exact = reference.adamw_prox(*before, None, None, None, *numbers, None)[0].flatten()
    return sets, grad, [tuple(moment.clone() for moment in moments) for _ in range(len(sets) + 1)], exact


def step_trial(case: Case, device: torch.device) -> Trial:
    """A step of AdamW with the prox; 22 bytes per weight."""
    sets, grad, moments, exact = step_problem(*case.size, device)

    def step(place: int, fresh: bool = False) -> None:
        own = tuple(moment.clone() for moment in moments[-1]) if fresh else moments[place]
        adamw_prox_(sets[place].weights[0], grad, *own, **STEP)

    return trial_of(sets, step, exact, 22, check=lambda: step(0, fresh=True))


def trial_of(
    sets: list, call: Callable[[int], object], exact: Tensor, bytes_a_weight: int, check: Callable | None = None
) -> Trial:
    """The trial of a kernel that changes weights in place; `check` is the call whose result is compared."""

    def renew() -> None:
        for one in sets:
            one.renew()

    def problem() -> str | None:
        renew()
        check() if check else call(0)
        return difference(sets[0].flat, exact)

    def run() -> None:
        for place in range(len(sets)):
            call(place)

    moved = bytes_a_weight * exact.numel() * len(sets)
    return Trial(problem, run, renew, len(sets), moved, 2 * sum(one.flat.nbytes for one in sets), len(sets))


def difference(result: Tensor, exact: Tensor) -> str | None:
    """None if `result` is `exact` rounded, except where two minimisers nearly tie."""
    allowed = torch.finfo(result.dtype).eps * exact.abs() + 1e-5 * exact.abs().max()
    off = ~((result.flatten().double() - exact).abs() <= allowed)
    shares = off.view(-1, 256).double().mean(1)
    if shares.mean() <= MAY_DIFFER and shares.max() <= MAY_DIFFER_OF_256:
        return None
    return f"{off.sum()} of {off.numel()} weights differ from float64, the first at {off.nonzero()[0].item()}"


def linear_cases(shapes: list[Shape], all_rows: list[int]) -> Callable[[torch.device], list[Case]]:
    """device -> every shape and number of rows, those of the first row number first."""
    return lambda device: [Case((*shape, rows)) for rows in all_rows for shape in shapes]


def weight_cases(shapes: list[Shape], lambdas: list[float | None]) -> Callable[[torch.device], list[Case]]:
    """device -> every number of weights and lambda; on a CPU a tiny one."""

    def cases(device: torch.device) -> list[Case]:
        sizes = [rows * columns for rows, columns in (shapes if device.type == "cuda" else [TINY])]
        return [Case((size,), reg_lambda) for size in sizes for reg_lambda in lambdas]

    return cases


def triton_parameters(name: str) -> Callable[[torch.device], list[dict]]:
    """device -> the launch parameters that a Triton kernel accepts."""

    def parameters(device: torch.device) -> list[dict]:
        from proxsparse import triton_kernels  # late: importing triton takes a second

        return [dict(one) for one in getattr(triton_kernels, name)]

    return parameters


def force(kernel: str, backend_name: str | None) -> Callable[[dict], contextlib.AbstractContextManager]:
    """parameters -> context: the kernel is launched with them, on this backend of the op."""

    @contextlib.contextmanager
    def forced(parameters: dict) -> Iterator[None]:
        with use_launch_parameters(kernel, **parameters), use_backend(backend_name):
            yield

    return forced


BACKENDS = [{"backend": "triton"}, {"backend": "cuda"}]
KERNELS = {  # the most important first
    "gemv": Kernel(
        linear_cases(GEMV_SHAPES, GEMV_ROWS),
        gemv_parameters,
        functools.partial(linear_trial, "gemv"),
        force("gemv", None),
        coarse=8,
        share=5,
    ),
    "prox": Kernel(
        weight_cases([SQUARE, LLAMA_DOWN], [0.25, 25.0]),
        triton_parameters("PROX_LAUNCHES"),
        prox_trial,
        force("prox", "triton"),
        in_triton=True,
        share=2,
    ),
    "prox_backend": Kernel(
        weight_cases([SQUARE], [25.0, 0.25, 10.0, 5.0, 2.5, 1.0, 50.0]),
        lambda device: BACKENDS,
        prox_trial,
        lambda parameters: use_backend(parameters["backend"]),
        default=BACKENDS[0],
    ),
    "cutlass": Kernel(
        linear_cases(CUTLASS_SHAPES, CUTLASS_ROWS),
        lambda device: [{"tile": tile} for tile in sorted(cutlass.built_tiles(device))],
        functools.partial(linear_trial, "cutlass"),
        force("cutlass", None),
        share=3,
    ),
    "adamw_prox": Kernel(
        weight_cases([SQUARE, LLAMA_DOWN], [None]),
        triton_parameters("ADAMW_PROX_LAUNCHES"),
        step_trial,
        force("adamw_prox", "triton"),
        in_triton=True,
    ),
}
