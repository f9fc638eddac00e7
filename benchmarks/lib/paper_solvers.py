"""The paper's solvers of the 2:4 prox, for comparison: EnumALM, EnumPGD and EnumIPM (ProxSparse, section 3.3).

With z = |w| sorted descending, all three look for argmin_{w >= 0} g(w),

    g(w) = 1/2 |w - z|^2 + lambda * e_3(w),    e_3(w) = w_1 w_2 w_3 + w_1 w_2 w_4 + w_1 w_3 w_4 + w_2 w_3 w_4,

by minimizing g with w_4 = 0 and without this constraint, and take the best of the two results and [z_1, z_2, 0, 0]
(Algorithm 2). They differ in the solver of the two subproblems: `alm`, `pgd` or `ipm`. Only `ipm` is guaranteed to find
the minimizer. `proxsparse.reference.prox_nm`, which is not from the paper, is exact too and a hundred times faster
(benchmarks/solver_quality.py).

Corrections to the paper: g_3 has the cubic term lambda * w_1 w_2 w_3, as in Algorithm 1, not the pairwise term of
Theorem 4. Algorithm 1 must store w' before the sweep (else w' = w and every loop ends at once), and sums w_j w_k over
unordered pairs.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern
from proxsparse.reference import objective


class Solution(NamedTuple):
    """w: the result, [..., 4]; iterations: the number of iterations, [...]."""

    w: Tensor
    iterations: Tensor


# (z [problems, 4] sorted and >= 0, lambda [problems], support, tolerance, max_iterations) -> Solution
Solver = Callable[[Tensor, Tensor, int, float, int], Solution]


def enum_alm(weight: Tensor, reg_lambda: float, tolerance: float = 1e-8, max_sweeps: int = 100) -> Tensor:
    """EnumALM as in the code of the authors: sweeps over the whole weight until all blocks have converged.

    It can miss the optimum, for example for z = (1.05, 1.05, 1.05, 0), lambda = 1. `enum_solve(alm, ...)` stops each
    block separately.

    Args:
        weight: [..., in_features], in_features a multiple of 4; computed in its dtype.
        reg_lambda: lambda > 0.
        tolerance: stop when the sum of |w - w'| over the whole tensor is below this value.
        max_sweeps: for each of the two subproblems.
    Returns:
        A new tensor, shape and dtype of `weight`.
    """

    def alm_together(z: Tensor, support: int) -> Solution:
        target = truncated(z, support)
        w, sweeps, moved = target, 0, math.inf
        while sweeps < max_sweeps and not moved < tolerance:  # a NaN somewhere must not stop the other blocks
            before, w, sweeps = w, sweep(w, target, reg_lambda, support), sweeps + 1
            moved = float((w - before).abs().sum())
        return Solution(w, torch.full_like(z[:, 0], sweeps, dtype=torch.int64))

    return best_candidate(alm_together, weight, reg_lambda).w


def enum_solve(
    solver: Solver, weight: Tensor, reg_lambda: float | Tensor, tolerance: float, max_iterations: int
) -> Solution:
    """Algorithm 2 of the paper with `alm`, `pgd` or `ipm`, separately for each block.

    Args:
        weight: float64 [..., in_features], in_features a multiple of 4; any signs and order.
        reg_lambda: lambda > 0, one number or one for each block, [..., in_features / 4].
        tolerance: see the solver.
        max_iterations: for each of the two subproblems.
    Returns:
        w, the shape of `weight`, and the iterations of both subproblems together, [..., in_features / 4].
    """
    blocks = NMPattern(2, 4).blocks(weight)
    lam = torch.as_tensor(reg_lambda, dtype=weight.dtype, device=weight.device).expand(blocks.shape[:-1]).flatten()
    return best_candidate(lambda z, support: solver(z, lam, support, tolerance, max_iterations), weight, lam)


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


def iterate(
    step: Callable[..., tuple[Tensor, Tensor]], state: Tensor, data: tuple[Tensor, ...], max_iterations: int
) -> Solution:
    """state <- step(state, *data) for every problem, each until it has finished.

    Args:
        step: (state [running, k], rows of `data` of the running problems) -> (new state, bool [running]: finished).
        state: [problems, k]; data: tensors of [problems, ...].
    """
    state, running = state.clone(), torch.arange(len(state), device=state.device)
    iterations = torch.zeros_like(running)
    for _ in range(max_iterations):
        if not len(running):
            break
        state[running], finished = step(state[running], *(rows[running] for rows in data))
        iterations[running] += 1
        running = running[~finished]
    return Solution(state, iterations)


def alm(z: Tensor, lam: Tensor, support: int, tolerance: float, max_iterations: int) -> Solution:
    """ALM, Algorithm 1 of the paper: starting at w = z, sweeps of exact minimization over one weight at a time.

    Each sweep decreases g by at least 1/2 |w - w'|^2, so it stops after at most 3 lambda |z|^3 / tolerance^2 sweeps
    (Proposition 6), at a critical point that may not be the minimum.

    `tolerance` is the epsilon of the paper: a problem stops when |w - w'| <= tolerance.
    """
    target = truncated(z, support)

    def step(w: Tensor, target: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        after = sweep(w, target, lam, support)
        return after, (after - w).norm(dim=-1) <= tolerance

    return iterate(step, target, (target, lam), max_iterations)


def sweep(w: Tensor, target: Tensor, lam: float | Tensor, support: int = 4) -> Tensor:
    """w_i <- max(target_i - lambda * d e_3 / d w_i, 0), sequentially for i = 1 ... support; a new tensor."""
    w = w.clone()
    members = w.unbind(-1)
    for i in range(support):
        members[i].copy_((target[:, i] - lam * slope(members, i)).clamp_min(0))
    return w


def slope(members: Sequence[Tensor], i: int) -> Tensor:
    """d e_3 / d w_i = e_2 of the other three."""
    a, b, c = (members[j] for j in range(4) if j != i)
    return a * b + b * c + c * a


def pgd(z: Tensor, lam: Tensor, support: int, tolerance: float, max_iterations: int) -> Solution:
    """Projected gradient descent from w = z: w <- max(w - grad g(w) / L, 0), without the semidefinite constraint.

    The paper does not give a step size. With steps of at most 1 all iterates stay in the box [0, z]. There the row sums
    of the Hessian are at most L = 1 + lambda * (S - 2) * (z_1 + ... + z_{S-1}) for the support S, so a step of 1 / L
    decreases g and the iterates converge to a critical point. A problem stops when the projected gradient
    |L (w - w')| <= tolerance, in units of z.
    """
    target = truncated(z, support)
    lipschitz = 1 + lam * (support - 2) * z[:, : support - 1].sum(-1)

    def step(w: Tensor, target: Tensor, lam: Tensor, lipschitz: Tensor) -> tuple[Tensor, Tensor]:
        members = w.unbind(-1)
        pull = torch.stack([slope(members, i) for i in range(4)], dim=-1)
        gradient = w - target + lam[:, None] * pull
        after = (w - gradient / lipschitz[:, None]).clamp_min(0)
        return after, lipschitz * (after - w).norm(dim=-1) <= tolerance

    return iterate(step, target, (target, lam, lipschitz), max_iterations)


def ipm(z: Tensor, lam: Tensor, support: int, tolerance: float, max_iterations: int) -> Solution:
    """Interior point method for the convex problem: minimize g subject to its Hessian H being positive semidefinite.

    With S = support it follows the minimizers of F(w) = g(w) / mu - logdet H(w) - sum_i log w_i while mu is divided by
    10 repeatedly. Each of the two barriers has parameter S, so g at the minimizer of F is within 2 S mu of its minimum,
    and within (2 S + 1) mu at the points where mu is changed. The last mu is tolerance / (2 S + 1).

    F is self-concordant, because H and the barrier of H bound the third derivative of g. So the Newton step divided by
    1 + decrement stays in the domain and decreases F by a fixed amount (Nesterov, Introductory Lectures, 4.1.5). No
    line search is needed. The tolerance is at least 1e-13 |z|^2, because otherwise rounding makes H singular where the
    constraint is active. The barrier keeps weights that should be zero slightly above zero.
    """
    start = (1 / (4 * lam))[:, None].expand(-1, support)  # all eigenvalues of H are >= 1/2 here
    last = (1e-13 * z.square().sum(-1, keepdim=True)).clamp_min(tolerance) / (2 * support + 1)
    mu = torch.maximum(1 / lam.square()[:, None], last)

    def step(state: Tensor, z: Tensor, lam: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        w, mu = state[:, :-1], state[:, -1:]
        direction, decrement = newton_direction(w, z, lam, mu)
        centred = decrement < 0.25  # then the full step is safe; the next decrement is below 1/9
        w = w - direction / torch.where(centred, 1.0, 1 + decrement)
        finished = (centred & (mu <= last)).squeeze(-1)
        return torch.cat([w, torch.where(centred, torch.maximum(mu / 10, last), mu)], dim=-1), finished

    state, iterations = iterate(step, torch.cat([start, mu], dim=-1), (z[:, :support], lam, last), max_iterations)
    return Solution(torch.cat([state[:, :-1], torch.zeros_like(z[:, support:])], dim=-1), iterations)


def newton_direction(w: Tensor, z: Tensor, lam: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """(F'')^-1 F' and the Newton decrement sqrt(F' (F'')^-1 F') of F(w) = g(w) / mu - logdet H(w) - sum log w_i.

    H = I + lambda * sum_k w_k T_k is linear in w, with T_k[i, j] = 1 where i, j and k all differ. Hence
    d logdet H / d w_k = lambda tr(H^-1 T_k), and its derivative in w_l is -lambda^2 tr(H^-1 T_k H^-1 T_l).

    Args:
        w, z: [problems, S]; lam: [problems]; mu: [problems, 1].
    Returns:
        [problems, S] and [problems, 1].
    """
    third, lam = third_derivative(w), lam[:, None, None]
    hessian = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) + lam * torch.einsum("kij,pk->pij", third, w)
    gradient = w - z + lam[..., 0] / 2 * torch.einsum("kij,pi,pj->pk", third, w, w)
    change = lam[..., None] * torch.einsum("pij,kjl->pkil", torch.linalg.inv(hessian), third)  # lambda H^-1 T_k
    # multiplied by mu to avoid overflow
    slopes = gradient - mu * (torch.einsum("pkii->pk", change) + 1 / w)
    curvature = hessian + mu[..., None] * (torch.einsum("pkij,plji->pkl", change, change) + w.pow(-2).diag_embed())
    direction = torch.linalg.solve(curvature, slopes)
    return direction, ((slopes * direction).sum(-1, keepdim=True) / mu).clamp_min(0).sqrt()


def third_derivative(w: Tensor) -> Tensor:
    """T [S, S, S] of e_3 over S = w.shape[-1] weights: T[i, j, k] = 1 where i, j and k all differ, else 0."""
    different = 1 - torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return different[:, :, None] * different[:, None, :] * different[None, :, :]
