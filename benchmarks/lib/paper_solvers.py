"""EnumALM, the paper's solver of the 2:4 prox, for comparison (ProxSparse, section 3.3).

With z = |w| sorted descending, it looks for argmin_{w >= 0} g(w),

    g(w) = 1/2 |w - z|^2 + lambda * e_3(w),    e_3(w) = w_1 w_2 w_3 + w_1 w_2 w_4 + w_1 w_3 w_4 + w_2 w_3 w_4,

by alternating minimization of g with w_4 = 0 and without this constraint (Algorithm 1), and takes the best of the two
results and [z_1, z_2, 0, 0] (Algorithm 2). It can miss the optimum, for example for z = (1.05, 1.05, 1.05, 0),
lambda = 1. `proxsparse.reference.prox_nm`, which is not from the paper, is exact and faster
(benchmarks/solver_quality.py).

Corrections to the paper: Algorithm 1 must store w' before the sweep (else w' = w and every loop ends at once), and sums
w_j w_k over unordered pairs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern
from proxsparse.reference import objective


class Solution(NamedTuple):
    """w: the result, [..., 4]; iterations: the number of sweeps, [...]."""

    w: Tensor
    iterations: Tensor


def enum_alm(weight: Tensor, reg_lambda: float, max_sweeps: int = 100) -> Tensor:
    """EnumALM as in the code of the authors: sweeps over the whole weight until its sum of |w - w'| is below 1e-8.

    Args:
        weight: [..., in_features], in_features a multiple of 4; computed in its dtype.
        reg_lambda: lambda > 0.
        max_sweeps: for each of the two subproblems.
    Returns:
        A new tensor, shape and dtype of `weight`.
    """

    def together(z: Tensor, support: int) -> Solution:
        target = truncated(z, support)
        w, sweeps, moved = target, 0, math.inf
        while sweeps < max_sweeps and not moved < 1e-8:  # a NaN somewhere must not stop the other blocks
            before, w, sweeps = w, sweep(w, target, reg_lambda, support), sweeps + 1
            moved = float((w - before).abs().sum())
        return Solution(w, torch.full_like(z[:, 0], sweeps, dtype=torch.int64))

    return best_candidate(together, weight, reg_lambda).w


def enum_alm_by_block(weight: Tensor, reg_lambda: float | Tensor, tolerance: float, max_sweeps: int) -> Solution:
    """EnumALM as in the paper: each block stops when its |w - w'| <= tolerance, epsilon of the paper.

    Each sweep decreases g by at least 1/2 |w - w'|^2, so it stops after at most 3 lambda |z|^3 / tolerance^2 sweeps
    (Proposition 6), at a critical point that may not be the minimum.

    Args:
        weight: float64 [..., in_features], in_features a multiple of 4; any signs and order.
        reg_lambda: lambda > 0, one number or one for each block, [..., in_features / 4].
        max_sweeps: for each of the two subproblems.
    Returns:
        w, the shape of `weight`, and the sweeps of both subproblems together, [..., in_features / 4].
    """
    blocks = NMPattern(2, 4).blocks(weight)
    lam = torch.as_tensor(reg_lambda, dtype=weight.dtype, device=weight.device).expand(blocks.shape[:-1]).flatten()

    def by_block(z: Tensor, support: int) -> Solution:
        target = truncated(z, support)
        return descend(target, target, lam, tolerance, max_sweeps, support)

    return best_candidate(by_block, weight, lam)


def best_candidate(solve: Callable[[Tensor, int], Solution], weight: Tensor, lam: float | Tensor) -> Solution:
    """The best of [z_1, z_2, 0, 0], solve(z, 3) and solve(z, 4), in the order and with the signs of `weight`.

    Args:
        solve: (z [problems, 4], sorted and >= 0, support) -> the solution of the subproblem.
        weight: [..., in_features]; lam: one number or [problems].
    """
    blocks = NMPattern(2, 4).blocks(weight)
    z, order = blocks.reshape(-1, 4).abs().sort(dim=-1, descending=True, stable=True)
    best, iterations = truncated(z, 2), torch.zeros(len(z), dtype=torch.int64, device=z.device)
    best_objective = objective(best, z, lam, 2)
    for support in (3, 4):
        candidate = solve(z, support)
        iterations = iterations + candidate.iterations
        candidate_objective = objective(candidate.w, z, lam, 2)
        better = candidate_objective < best_objective
        best = torch.where(better[:, None], candidate.w, best)
        best_objective = torch.where(better, candidate_objective, best_objective)
    unsorted = torch.empty_like(best).scatter_(-1, order, best).view(weight.shape)
    signed = torch.where(unsorted > 0, unsorted.copysign(weight), 0.0)
    return Solution(signed, iterations.view(blocks.shape[:-1]))


def truncated(z: Tensor, support: int) -> Tensor:
    """z with zeros after the first `support` entries; as target of a subproblem, it keeps these weights at zero."""
    return torch.cat([z[:, :support], torch.zeros_like(z[:, support:])], dim=-1)


def descend(
    start: Tensor, target: Tensor, lam: Tensor, tolerance: float, max_sweeps: int, support: int = 4
) -> Solution:
    """Sweeps from `start` [problems, 4], for each problem until |w - w'| <= tolerance; lam: [problems]."""
    w, running = start.clone(), torch.arange(len(start), device=start.device)
    iterations = torch.zeros_like(running)
    while len(running) and iterations[running[0]] < max_sweeps:
        after = sweep(w[running], target[running], lam[running], support)
        finished = (after - w[running]).norm(dim=-1) <= tolerance
        w[running], iterations[running] = after, iterations[running] + 1
        running = running[~finished]
    return Solution(w, iterations)


def sweep(w: Tensor, target: Tensor, lam: float | Tensor, support: int) -> Tensor:
    """w_i <- max(target_i - lambda * d e_3 / d w_i, 0), sequentially for i = 1 ... support; a new tensor."""
    w = w.clone()
    members = w.unbind(-1)
    for i in range(support):
        a, b, c = (members[j] for j in range(4) if j != i)
        members[i].copy_((target[:, i] - lam * (a * b + b * c + c * a)).clamp_min(0))
    return w
