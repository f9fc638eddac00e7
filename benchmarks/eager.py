"""The paper's formulation of the prox, EnumALM, in a form that torch.compile turns into fast code.

`paper_solvers.enum_alm` asks after every sweep whether the whole tensor has converged, which splits a graph. Here the
number of sweeps is fixed (SWEEPS, the cap of enum_alm), and the four weights of a block lie in four planes, so that
generated code has no strides. With all 2 * SWEEPS sweeps in one graph it compiled for a minute on a CPU and ran slower
than eager; a graph of SWEEPS_A_GRAPH sweeps, called again and again, compiles in seconds.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

SWEEPS, SWEEPS_A_GRAPH = 100, 10


def sorted_planes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitudes of every block, descending, and where they were: [4, blocks] each."""
    return weight.abs().view(-1, 4).t().contiguous().sort(dim=0, descending=True, stable=True)


def sweeps(w: Tensor, z: Tensor, reg_lambda: Tensor) -> Tensor:
    """SWEEPS_A_GRAPH times w_i <- max(z_i - lambda * e_2(the others), 0) for i = 1 ... 4; [4, problems] each."""
    planes = list(w.unbind(0))
    for _ in range(SWEEPS_A_GRAPH):
        for i in range(4):
            a, b, c = (planes[j] for j in range(4) if j != i)
            planes[i] = (z[i] - reg_lambda * (a * b + b * c + c * a)).clamp_min(0)
    return torch.stack(planes)


def best_candidate(w: Tensor, z: Tensor, order: Tensor, weight: Tensor, reg_lambda: Tensor) -> Tensor:
    """Algorithm 2: the best of the 2-sparse, the 3-sparse (first half of w) and the dense candidate (second half)."""
    best = truncated(z, 2)
    best_objective = objective(best, z, reg_lambda)
    for candidate in w.chunk(2, dim=1):
        candidate_objective = objective(candidate, z, reg_lambda)
        better = candidate_objective < best_objective
        best, best_objective = torch.where(better, candidate, best), torch.minimum(candidate_objective, best_objective)
    unsorted = torch.empty_like(best).scatter_(0, order, best).t().reshape(weight.shape)
    return torch.where(unsorted > 0, unsorted.copysign(weight), 0.0)


def objective(w: Tensor, z: Tensor, reg_lambda: Tensor) -> Tensor:
    """1/2 |w - z|^2 + lambda * e_3(w): [4, blocks] -> [blocks]."""
    a, b, c, d = w.unbind(0)
    return 0.5 * (w - z).square().sum(0) + reg_lambda * (a * b * c + (a * b + (a + b) * c) * d)


def truncated(z: Tensor, support: int) -> Tensor:
    """z with zeros in the planes after the first `support`."""
    return torch.cat([z[:support], torch.zeros_like(z[support:])])


def enum_alm_fixed(weight: Tensor, reg_lambda: Tensor, transform: Callable = lambda function: function) -> Tensor:
    """EnumALM with SWEEPS sweeps for both supports at once; `transform` makes each stage faster, or leaves it.

    Args:
        weight: [..., in_features], in_features a multiple of 4; the arithmetic is that of its dtype.
        reg_lambda: lambda_1, a tensor without dimensions, so that another value needs no new graph.
    """
    z, order = transform(sorted_planes)(weight)
    both = torch.cat([truncated(z, 3), z], dim=1)
    w = both
    for _ in range(SWEEPS // SWEEPS_A_GRAPH):
        w = transform(sweeps)(w, both, reg_lambda)
    return transform(best_candidate)(w, z, order, weight, reg_lambda)


def compiled(weight: Tensor, limit_s: float) -> tuple[Callable, float]:
    """The `transform` of enum_alm_fixed that compiles, tried on this weight, and the seconds that took.

    Another lambda takes no more time, another shape or dtype does.

    Raises:
        TimeoutError: it took longer than `limit_s` seconds.
    """
    torch.compiler.reset()  # it compiles a function for so many shapes only
    stages = {
        stage: torch.compile(stage, fullgraph=True, dynamic=False) for stage in (sorted_planes, sweeps, best_candidate)
    }
    start = time.perf_counter()
    with time_limit(limit_s):
        enum_alm_fixed(weight, torch.ones((), dtype=weight.dtype, device=weight.device), stages.__getitem__)
    return stages.__getitem__, time.perf_counter() - start


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds. Only in the main thread, and not nested."""

    def give_up(signum, frame):
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
