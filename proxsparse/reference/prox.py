"""The exact proximal operator of the N:M regularizer, in plain torch."""

import math

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.reference.regularizers import elementary_symmetric

# If lambda * z_1 >= (1 + sqrt 2) / 2, the 2-sparse candidate is optimal; dense candidates lose already from 1 on.
TWO_SPARSE_FROM = (1 + math.sqrt(2)) / 2


def prox_nm(weight: Tensor, reg_lambda: float, pattern: PatternLike = "2:4", scale: Tensor | None = None) -> Tensor:
    """argmin_V 1/2 ||V - c * W||_F^2 + reg_lambda * Reg_{N:M}(V), divided by c; a global minimizer.

    All backends follow these conventions: arithmetic is fp64 for fp64 weights and fp32 otherwise; weights that the prox
    does not change keep their bits; blocks with NaN or infinity do not change, but a NaN may become one with other
    bits; new zeros are +0.0.

    Args:
        weight: [..., in_features], any float dtype.
        reg_lambda: lambda_1 >= 0, in units of 1 / |c * w|^(n-1); 0 is the identity.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
        scale: c, [in_features], the scaling of the input features, positive; None means 1.
    Returns:
        A new tensor, shape and dtype of `weight`; the remainder of a row does not change.
    """
    pattern = NMPattern.parse(pattern)
    if reg_lambda == 0 or weight.numel() == 0:
        return weight.clone()
    arithmetic = torch.float64 if weight.dtype == torch.float64 else torch.float32
    limits = torch.finfo(arithmetic)
    reg_lambda = min(max(reg_lambda, limits.tiny), limits.max)  # lambda and 1 / lambda are finite
    exact = weight.to(arithmetic)
    c = torch.ones_like(exact) if scale is None else scale.to(arithmetic).expand(exact.shape)
    v, c = pattern.blocks(exact * c), pattern.blocks(c)
    finite = v.isfinite().all(-1, keepdim=True)
    magnitude, order = torch.where(finite, v, 0.0).abs().sort(dim=-1, descending=True, stable=True)
    shrunk = torch.empty_like(v).scatter_(-1, order, solve(magnitude, reg_lambda, pattern))
    unchanged = (shrunk == v.abs()) | ~finite
    new = (shrunk.copysign(v) / c).to(weight.dtype)
    new = torch.where(new == 0, 0.0, new)  # +0.0, also for small negative numbers rounded to zero
    result = weight.clone(memory_format=torch.contiguous_format)
    blocks = pattern.blocks(result)  # a view of the result
    blocks.copy_(torch.where(unchanged, blocks, new))
    return result


def solve(z: Tensor, reg_lambda: float, pattern: NMPattern) -> Tensor:
    """argmin_{w >= 0} of sorted blocks: z [..., m], descending and >= 0 -> the same shape."""
    if (pattern.n, pattern.m) == (2, 4):
        return solve_24(z, reg_lambda)
    return solve_1m(z, reg_lambda) if pattern.n == 1 else solve_nm(z, reg_lambda, pattern.n)


def objective(w: Tensor, z: Tensor, reg_lambda: float, n: int) -> Tensor:
    """1/2 |w - z|^2 + lambda * e_{n+1}(w) of every block: [..., m] -> [...]; w >= 0."""
    return 0.5 * (w - z).square().sum(-1) + reg_lambda * elementary_symmetric(w, n + 1)


def solve_24(z: Tensor, reg_lambda: float) -> Tensor:
    """Exact prox of sorted 2:4 blocks: the best of the 2-sparse, the 3-sparse and the dense candidate.

    In units with lambda = 1 (u = lambda * z) the stationary point of the 3-sparse problem is the root of a scalar
    equation in t = x_3; the stationary point of the dense problem is the root of a scalar equation in s = x_1 + x_2 +
    x_3 + x_4. Both are computed by cubic (Euler) iterations, which converge monotonically from the chosen start. A
    final coordinate sweep in the original units restores the relative accuracy of tiny weights.

    The number of iterations is one more than in the kernels (csrc/prox24_block.h: 3 in fp32, 5 in fp64, by
    measurement), so that the reference does not have the truncation error of the kernels.
    """
    sparse3 = three_sparse_candidate(z, reg_lambda)
    dense, dense_valid = dense_candidate(z, reg_lambda)
    sparse2 = torch.cat([z[..., :2], torch.zeros_like(z[..., 2:])], dim=-1)

    # Objectives times lambda^2 do not depend on the unit of the weights: squares neither underflow nor overflow.
    u = reg_lambda * z
    undecided = u[..., 0] < TWO_SPARSE_FROM
    best, best_objective = sparse2, 0.5 * u[..., 2:].square().sum(-1)
    sparse3_objective = objective(reg_lambda * sparse3, u, 1.0, 2)
    dense_objective = objective(reg_lambda * dense, u, 1.0, 2)
    # Near a continuous transition fp32 objectives cannot be distinguished: prefer the denser valid candidate.
    tolerance = 1 + 4 * torch.finfo(z.dtype).eps
    take3 = undecided & (sparse3[..., 2] > 0) & (sparse3_objective <= best_objective * tolerance)
    best = torch.where(take3[..., None], sparse3, best)
    best_objective = torch.where(take3, torch.minimum(sparse3_objective, best_objective), best_objective)
    take4 = undecided & dense_valid & (dense[..., 3] > 0) & (dense_objective <= best_objective * tolerance)
    return torch.where(take4[..., None], dense, best)


def euler_step(f: Tensor, slope: Tensor, curvature: Tensor, floor: float) -> Tensor:
    """2f / (f' + sqrt(f'^2 - 2 f f'')): the step to the nearer root of the quadratic Taylor model."""
    root = (slope.square() - 2 * f * curvature).clamp_min(0).sqrt()
    return 2 * f / (slope.clamp_min(0) + root).clamp_min(floor)


def three_sparse_candidate(z: Tensor, reg_lambda: float) -> Tensor:
    """[..., 4] -> [..., 4] with w_4 = 0: eliminating w_1, w_2 leaves phi(t) = 0 for t = lambda * w_3 in [0, 0.75]."""
    u1, u2, u3, _ = (reg_lambda * z).unbind(-1)
    total, difference = u1 + u2, u1 - u2
    inflection = u2 / (u1 + (total * difference).sqrt() + 1e-30)  # phi'' = 0; the iteration is monotone from here
    t = torch.minimum(inflection, u3).clamp_max(0.75)
    for _ in range(6 if z.dtype == torch.float64 else 4):
        r1, r2 = 1 / (1 + t), 1 / (1 - t)
        a, b = (total * r1).square() / 4, (difference * r2).square() / 4
        phi, slope, curvature = t - u3 + a - b, 1 - 2 * (a * r1 + b * r2), 6 * (a * r1**2 - b * r2**2)
        t = (t - euler_step(phi, slope, curvature, 1e-6)).clamp(0, 0.75)
    half_sum, half_difference = total / (1 + t) / 2, difference / (1 - t) / 2
    w1 = (half_sum + half_difference) / reg_lambda
    w2 = (half_sum - half_difference).clamp_min(0) / reg_lambda
    z1, z2, z3, _ = z.unbind(-1)
    w3 = (z3 - reg_lambda * w1 * w2).clamp_min(0)
    w2 = (z2 - reg_lambda * w1 * w3).clamp_min(0)
    w1 = (z1 - reg_lambda * w2 * w3).clamp_min(0)
    return torch.stack([w1, w2, w3, torch.zeros_like(w1)], dim=-1)


def dense_candidate(z: Tensor, reg_lambda: float) -> tuple[Tensor, Tensor]:
    """[..., 4] -> (w [..., 4], valid [...]): with s = sum x, every x_i = (s - 1 + R_i) / 2 and 2s - 4 + sum R_i = 0.

    The unknown v is s itself where k4 >= 0, and the signed root R_4 where k4 < 0; F is convex in v either way.
    """
    u = reg_lambda * z
    u123, u4, total = u[..., :3], u[..., 3:], u.sum(-1, keepdim=True)
    k4 = 1 - 2 * (u123[..., :1] + u123[..., 1:2] + u123[..., 2:] - u4)
    signed = k4 < 0
    alpha = torch.where(signed, 1.0, 2.0).to(z.dtype)
    beta = 3 - alpha
    k = 4 * (u123 - u4) + k4.clamp_min(0)
    kappa = k4.abs()
    equal = 2 * total / (1 + (1 + 3 * total).sqrt())  # s for four equal weights: a lower bound
    v = torch.where(signed, (equal.square() + k4).clamp_min(0).sqrt(), equal)
    for _ in range(6 if z.dtype == torch.float64 else 4):
        i4, i = (v.square() + kappa + 1e-30).rsqrt(), (v.square() + k + 1e-30).rsqrt()
        f = alpha * v - 4 + beta * (v.square() + kappa) * i4 + ((v.square() + k) * i).sum(-1, keepdim=True)
        slope = alpha + v * (beta * i4 + i.sum(-1, keepdim=True))
        # multiply by k first: for v = k = 0, i^3 overflows
        curvature = beta * kappa * i4 * i4 * i4 + (k * i * i * i).sum(-1, keepdim=True)
        v = v - euler_step(f, slope, curvature, 1e-3)
    root, q = (v.square() + k).sqrt(), (v.square() + kappa).sqrt()
    s, root4 = torch.where(signed, q, v), torch.where(signed, v, q)
    roots, e = torch.cat([root, root4], dim=-1), 1 - s
    # the first form is accurate where R_i and e nearly cancel
    x = torch.where((e > 0) & (roots > 0), 2 * (u - (total - s) / 2) / (roots + e), (roots - e) / 2)
    valid = x[..., 3] > (-1e-15 if z.dtype == torch.float64 else -5e-7)
    w = list((x.clamp_min(0).minimum(u) / reg_lambda).unbind(-1))
    for i in (3, 2, 1, 0):
        a, b, c = (w[j] for j in range(4) if j != i)
        # multiply by lambda first: a * b may overflow
        w[i] = (z[..., i] - (reg_lambda * a * b + reg_lambda * b * c + reg_lambda * c * a)).clamp_min(0)
    return torch.stack(w, dim=-1), valid


def solve_1m(z: Tensor, reg_lambda: float) -> Tensor:
    """Exact prox of sorted 1:M blocks, Reg = sum_{i<j} |w_i w_j|.

    lambda >= 1: [z_1, 0, ...]. lambda < 1 (convex): the largest k with w_k > 0, where with g = 1 / (1 - lambda)
    w_k = ((z_1 + ... + z_k) / (1 + (k - 1) lambda) - g * sum_{j<k} (z_j - z_k)) / k and w_i = w_k + g * (z_i - z_k) for
    i <= k. Only differences of weights are multiplied by g, so equal weights stay equal even if lambda is close to 1.
    """
    best = torch.cat([z[..., :1], torch.zeros_like(z[..., 1:])], dim=-1)
    if reg_lambda >= 1:
        return best
    gain = 1 / (1 - reg_lambda)  # in double precision: in fp32 lambda may round to 1
    for k in range(2, z.shape[-1] + 1):
        top, smallest = z[..., :k], z[..., k - 1 : k]
        above = gain * (top - smallest)
        last = (top.sum(-1, keepdim=True) / (1 + (k - 1) * reg_lambda) - above.sum(-1, keepdim=True)) / k
        candidate = torch.cat([torch.minimum(last + above, top), torch.zeros_like(z[..., k:])], dim=-1)
        best = torch.where(last > 0, candidate, best)
    return best


def solve_nm(z: Tensor, reg_lambda: float, n: int) -> Tensor:
    """Prox of sorted N:M blocks for any n: coordinate descent for every support S = n ... m; the best result.

    The sweeps w_i <- max(z_i - lambda * e_n(w without i), 0) start at the symmetric point xbar that solves
    xbar + lambda * C(S-1, n) * xbar^n = mean(z_1..z_S); no miss of the optimum has been observed from this start.
    For n = m - 2 that start misses the optimum of up to 8% of blocks with ties; w_i = (z_i + sqrt(z_i^2 - z_S^2)) / 2
    missed 1 of 30,000 blocks, half of them with ties.
    """
    m, tolerance = z.shape[-1], 4 * torch.finfo(z.dtype).eps
    best = torch.cat([z[..., :n], torch.zeros_like(z[..., n:])], dim=-1)
    best_objective = objective(best, z, reg_lambda, n)
    for support in range(n + 1, m + 1):
        top = z[..., :support]
        if n == m - 2:
            start = (top + ((top - top[..., -1:]) * (top + top[..., -1:])).sqrt()) / 2
        else:
            start = torch.minimum(symmetric_point(top, reg_lambda, n), top)
        w = list(start.unbind(-1))
        for _ in range(500):
            before = torch.stack(w, dim=-1)
            for i in range(support):
                others = torch.stack(w[:i] + w[i + 1 :], dim=-1)
                w[i] = (z[..., i] - reg_lambda * elementary_symmetric(others, n)).clamp_min(0)
            after = torch.stack(w, dim=-1)
            if bool(((after - before).abs() <= tolerance * z[..., :1]).all()):
                break
        candidate = torch.cat([after, torch.zeros_like(z[..., support:])], dim=-1)
        candidate_objective = objective(candidate, z, reg_lambda, n)
        better = candidate_objective < best_objective
        best = torch.where(better[..., None], candidate, best)
        best_objective = torch.where(better, candidate_objective, best_objective)
    return best


def symmetric_point(top: Tensor, reg_lambda: float, n: int) -> Tensor:
    """The root x in [0, mean] of x + lambda * C(S-1, n) * x^n = mean(top), by bisection; [..., S] -> [..., 1]."""
    mean = top.mean(-1, keepdim=True)
    low, high = torch.zeros_like(mean), mean.clone()
    for _ in range(60):
        middle = (low + high) / 2
        others = middle.expand(*middle.shape[:-1], top.shape[-1] - 1)
        value = middle + reg_lambda * elementary_symmetric(others, n)[..., None]
        low, high = torch.where(value < mean, middle, low), torch.where(value < mean, high, middle)
    return (low + high) / 2
