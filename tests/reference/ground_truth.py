"""Two judges of the prox, in float64, that share no code with the package.

`search` knows nothing about the structure of the problem: it tries everything. `exact` uses the same theorem as the
package (the optimum of a 2:4 block is its 2-sparse, its 3-sparse or its dense stationary point) but finds the roots by
bisection, which needs no start and cannot diverge; it is fast enough for millions of blocks. `search` judges `exact`.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 14  # blocks at a time: the intermediate results stay in the cache


def elementary(members: list[Tensor], k: int) -> Tensor:
    """e_k of the members, by multiplying out (1 + x_1)(1 + x_2)... up to order k."""
    coefficients = torch.zeros(k + 1, *members[0].shape, dtype=torch.float64)
    coefficients[0] = 1
    for member in members:
        coefficients[1:] += member * coefficients[:-1]
    return coefficients[k]


def objective(w: Tensor, weight: Tensor, reg_lambda: float, n: int = 2) -> Tensor:
    """1/2 |w - weight|^2 + lambda * e_{n+1}(|w|) of every block in float64: [..., m] -> [...]."""
    w, weight = w.double(), weight.double()
    return 0.5 * (w - weight).square().sum(-1) + reg_lambda * elementary(list(w.abs().unbind(-1)), n + 1)


def relative_gap(w: Tensor, best: Tensor, weight: Tensor, reg_lambda: float, n: int = 2) -> Tensor:
    """(objective(w) - objective(best)) / z_1^2 of every block."""
    largest = weight.double().abs().amax(-1)
    gap = objective(w, weight, reg_lambda, n) - objective(best, weight, reg_lambda, n)
    return gap / torch.where(largest > 0, largest, 1.0).square()


def descend(w: Tensor, z: Tensor, reg_lambda: float, n: int, sweeps: int) -> Tensor:
    """Sweeps of exact minimisation over one coordinate at a time: the objective never rises. [..., m] -> [..., m]."""
    members, targets = list(w.unbind(-1)), z.unbind(-1)
    for _ in range(sweeps):
        for i, target in enumerate(targets):
            others = elementary(members[:i] + members[i + 1 :], n)
            members[i] = (target - reg_lambda * others).clamp_min(0)
    return torch.stack(members, dim=-1)


# ------------------------------------------------------------------------------------------ without any theorem


def search(weight: Tensor, reg_lambda: float, n: int, finalists: int = 6) -> Tensor:
    """The best point that many starts lead to: every support with three heights, random points, for 2:4 also a grid.

    [blocks, m] -> [blocks, m], signed like `weight`.
    """
    z = weight.double().abs()
    m = z.shape[-1]
    generator = torch.Generator().manual_seed(1)
    supports = torch.tensor(list(itertools.product((0.0, 1.0), repeat=m)), dtype=torch.float64)
    anywhere = torch.rand(3 * m, m, generator=generator, dtype=torch.float64)
    starts = torch.cat([supports, supports * 0.6, supports * 0.25, anywhere]) * z[:, None]
    if (n, m) == (2, 4):
        starts = torch.cat([starts, grid(z, reg_lambda)], dim=1)
    points = descend(starts, z[:, None], reg_lambda, n, sweeps=40)
    height = objective(points, z[:, None], reg_lambda, n)
    order = height.topk(min(finalists, height.shape[1]), largest=False).indices
    points = points.gather(1, order[..., None].expand(-1, -1, m))
    points = descend(points, z[:, None], reg_lambda, n, sweeps=1000)
    winner = objective(points, z[:, None], reg_lambda, n).argmin(1)
    return points[torch.arange(len(z)), winner].copysign(weight.double())


def grid(z: Tensor, reg_lambda: float, points: int = 33, kept: int = 12) -> Tensor:
    """The best of a grid over (w_3, w_4) with the exact minimiser over (w_1, w_2) >= 0: [blocks, 4] -> [blocks, kept, 4].

    For fixed w_3, w_4 that is a quadratic with cross term c = lambda * (w_3 + w_4): its interior stationary point, a
    minimum where c < 1, or an edge.
    """
    share = (1 - torch.linspace(0, torch.pi, points, dtype=torch.float64).cos()) / 2  # finer at both ends
    w3 = (z[:, 2, None, None] * share[:, None]).expand(-1, points, points).flatten(1)
    w4 = (z[:, 3, None, None] * share).expand(-1, points, points).flatten(1)
    cross, push = reg_lambda * (w3 + w4), reg_lambda * w3 * w4
    a, b, none = z[:, :1] - push, z[:, 1:2] - push, torch.zeros_like(w3)
    curvature = torch.where(cross < 1, 1 - cross.square(), 1.0)
    inside = ((a - cross * b) / curvature).clamp_min(0), ((b - cross * a) / curvature).clamp_min(0)
    pairs = (inside, (a.clamp_min(0), none), (none, b.clamp_min(0)))
    candidates = torch.cat([torch.stack([w1, w2, w3, w4], dim=-1) for w1, w2 in pairs], dim=1)
    order = objective(candidates, z[:, None], reg_lambda).topk(kept, largest=False).indices
    return candidates.gather(1, order[..., None].expand(-1, -1, 4))


# ------------------------------------------------------------------------------------------ with bisection


def bisect(rising: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, steps: int = 56) -> Tensor:
    """The root of a function that rises from `low` to `high`, or the end nearest to it."""
    for _ in range(steps):
        middle = (low + high) / 2
        below = rising(middle) < 0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def exact(weight: Tensor, reg_lambda: float) -> Tensor:
    """The prox of 2:4 blocks, [blocks, 4] -> float64 [blocks, 4], signed like `weight`."""
    return torch.cat([exact_chunk(chunk, reg_lambda) for chunk in weight.double().split(CHUNK)])


def exact_chunk(weight: Tensor, reg_lambda: float) -> Tensor:
    """`exact`, all blocks at once."""
    z, order = weight.abs().sort(dim=-1, descending=True, stable=True)
    u = reg_lambda * z
    sparse2 = torch.cat([z[:, :2], torch.zeros_like(z[:, 2:])], dim=-1)
    best, height = sparse2, objective(sparse2, z, reg_lambda)
    for stationary in (three_sparse_point(u), dense_point(u)):
        candidate = descend(stationary.clamp_min(0).minimum(u) / reg_lambda, z, reg_lambda, 2, sweeps=3)
        candidate_height = objective(candidate, z, reg_lambda)
        best = torch.where((candidate_height < height)[:, None], candidate, best)
        height = torch.minimum(candidate_height, height)
    return torch.empty_like(best).scatter_(-1, order, best).copysign(weight)


def three_sparse_point(u: Tensor) -> Tensor:
    """x_4 = 0 and the stationary (x_1, x_2, x_3) of 1/2 |x - u|^2 + x_1 x_2 x_3, by its one unknown t = x_3.

    x_1 + x_2 = (u_1 + u_2) / (1 + t) and x_1 - x_2 = (u_1 - u_2) / (1 - t), so t - u_3 + x_1 x_2 = 0. The left side is
    convex up to its inflection and concave after: a minimum has it rising, between its two extrema.
    """
    total, difference = u[:, 0] + u[:, 1], u[:, 0] - u[:, 1]

    def residual(t):
        return t - u[:, 2] + (total / (1 + t)).square() / 4 - (difference / (1 - t)).square() / 4

    def slope(t):
        return 1 - total.square() / (2 * (1 + t) ** 3) - difference.square() / (2 * (1 - t) ** 3)

    ratio = (difference / total.clamp_min(1e-300)).sqrt()
    inflection = ((1 - ratio) / (1 + ratio)).clamp_max(0.999)
    lower = bisect(slope, torch.zeros_like(inflection), inflection)
    upper = bisect(lambda t: -slope(t), inflection, torch.full_like(inflection, 0.999))
    t = bisect(residual, lower, upper)
    half_sum, half_difference = total / (1 + t) / 2, difference / (1 - t) / 2
    return torch.stack([half_sum + half_difference, half_sum - half_difference, t, torch.zeros_like(t)], dim=-1)


def dense_point(u: Tensor) -> Tensor:
    """The stationary x of 1/2 |x - u|^2 + e_3(x), by its one unknown s = sum x.

    x_i^2 + (1 - s) x_i + e_2 - u_i = 0 with e_2 = (sum u - s) / 2, so x_i = (s - 1 + R_i) / 2 with the roots
    R_i^2 = s^2 + 1 + 4 u_i - 2 sum u, and 2 s - 4 + sum R_i = 0. Only the smallest, R_4, may be negative. In terms of
    v = s, or of v = R_4 where R_4^2 would not be positive at s = 0, the left side is convex: a minimum is its largest
    root.
    """
    offset = 1 + 4 * u[:, 3:] - 2 * u.sum(-1, keepdim=True)  # R_4^2 = s^2 + offset
    signed = offset < 0
    spread = 4 * (u[:, :3] - u[:, 3:])

    def sum_and_root4(v):
        other = (v.square() + offset.abs()).sqrt()
        return torch.where(signed, other, v), torch.where(signed, v, other)

    def residual(v):
        total, root4 = sum_and_root4(v)
        roots = (torch.where(signed, v.square(), v.square() + offset) + spread).sqrt()
        return 2 * total - 4 + root4 + roots.sum(-1, keepdim=True)

    def slope(v):
        own = torch.where(signed, v.square(), v.square() + offset) + spread
        other = (v.square() + offset.abs()).sqrt()
        return torch.where(signed, 1 + 2 * v / other, 2 + v / other) + (v / own.sqrt()).nan_to_num().sum(-1, keepdim=True)

    left, right = torch.full_like(offset, -4), torch.full_like(offset, 4)
    v = bisect(residual, bisect(slope, left, right), right)
    total, root4 = sum_and_root4(v)
    roots = torch.cat([(torch.where(signed, v.square(), v.square() + offset) + spread).sqrt(), root4], dim=-1)
    return (total - 1 + roots) / 2


def exact_one(weight: Tensor, reg_lambda: float) -> Tensor:
    """The prox of 1:m blocks, [blocks, m] -> float64: for lambda < 1 convex, w_i = max(z_i - lambda * s, 0) / (1 - lambda).

    The unknown s = sum w is found by bisection; for lambda >= 1 only the largest member stays, the first of equals.
    """
    z = weight.double().abs()
    if reg_lambda >= 1:
        kept = torch.arange(z.shape[-1]) == z.argmax(-1, keepdim=True)
        return torch.where(kept, weight.double(), 0.0)

    def shrunk(s):
        return (z - reg_lambda * s).clamp_min(0) / (1 - reg_lambda)

    most = z.sum(-1, keepdim=True)
    s = bisect(lambda s: s - shrunk(s).sum(-1, keepdim=True), torch.zeros_like(most), most)
    return shrunk(s).minimum(z).copysign(weight.double())
