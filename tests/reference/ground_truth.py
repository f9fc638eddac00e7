"""Two judges of the prox, in float64, that share no code with the package.

`search` knows nothing about the structure of the problem: it tries everything. `exact` uses the same theorem as the
package (the optimum of a 2:4 block is its 2-sparse, its 3-sparse or its dense stationary point) but finds the roots by
bisection, which needs no start and cannot diverge; it is fast enough for millions of blocks. `search` judges `exact`.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 12  # blocks at a time: the intermediate results stay in the cache
# Bisection to 1e-7 for the ends of a bracket and to 1e-10 for the root in it: there the objective is flat to third and
# to second order, and sweeps over the coordinates follow.
BRACKET_STEPS, ROOT_STEPS = 26, 36
# The objective's distance from the optimum, in units of z_1^2. fp32 cannot see differences of a few 1e-7 where two
# minimisers tie; a half-precision result has been rounded by eps / 2 a weight, to second order in the objective.
GAP = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2 * 2.0**-14, torch.float16: 2e-6 + 2 * 2.0**-20}


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


def assert_optimal(
    result: Tensor, weight: Tensor, reg_lambda: float, n: int = 2, scale: Tensor | float = 1.0, **given
) -> None:
    """`result` is a prox of n:4 blocks as good as the exact one of `weight`.

    Args:
        result, weight: of any shape and device, `weight` possibly in float64 where it has not been rounded.
        scale: of the input features, of any sign.
        given: best, the exact prox, if it is known; tolerance, another than GAP of the dtype of `result`.
    """
    found, blocks = ((tensor.cpu().double() * scale).reshape(-1, 4) for tensor in (result, weight))
    best = given.get("best")
    best = (exact if n == 2 else exact_one)(blocks, reg_lambda) if best is None else best
    gap, tolerance = relative_gap(found, best, blocks, reg_lambda, n), given.get("tolerance", GAP[result.dtype])
    if gap.numel():
        worst = gap.argmax()
        assert gap.max() <= tolerance, (
            f"lambda={reg_lambda}: {(gap > tolerance).sum()} of {len(gap)} blocks; the worst is "
            f"{blocks[worst].tolist()} -> {found[worst].tolist()} instead of {best[worst].tolist()}"
        )
        assert gap.min() >= -GAP[result.dtype], "the result is better than the ground truth: the ground truth is wrong"


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
    """The best point that many starts lead to: every support with three heights, and random points.

    [blocks, m] -> [blocks, m], signed like `weight`.
    """
    z = weight.double().abs()
    m = z.shape[-1]
    generator = torch.Generator().manual_seed(1)
    supports = torch.tensor(list(itertools.product((0.0, 1.0), repeat=m)), dtype=torch.float64)
    anywhere = torch.rand(3 * m, m, generator=generator, dtype=torch.float64)
    starts = torch.cat([supports, supports * 0.6, supports * 0.25, anywhere]) * z[:, None]
    points = descend(starts, z[:, None], reg_lambda, n, sweeps=40)
    height = objective(points, z[:, None], reg_lambda, n)
    order = height.topk(min(finalists, height.shape[1]), largest=False).indices
    points = points.gather(1, order[..., None].expand(-1, -1, m))
    points = descend(points, z[:, None], reg_lambda, n, sweeps=1000)
    winner = objective(points, z[:, None], reg_lambda, n).argmin(1)
    return points[torch.arange(len(z)), winner].copysign(weight.double())


# ------------------------------------------------------------------------------------------ with bisection


def bisect(rising: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, steps: int) -> Tensor:
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
    u1, u2, u3 = u[:, 0], u[:, 1], u[:, 2].contiguous()
    total, difference = u1 + u2, u1 - u2

    def residual(t):
        return t - u3 + (total / (1 + t)).square() / 4 - (difference / (1 - t)).square() / 4

    def slope(t):
        return 1 - total.square() / (2 * (1 + t) ** 3) - difference.square() / (2 * (1 - t) ** 3)

    ratio = (difference / total.clamp_min(1e-300)).sqrt()
    inflection = ((1 - ratio) / (1 + ratio)).clamp_max(0.999)
    convex = residual(inflection) >= 0  # the root lies between the lower extremum and the inflection
    up = torch.where(convex, 1.0, -1.0)
    left, right = torch.where(convex, 0.0, inflection), torch.where(convex, inflection, 0.999)
    extremum = bisect(lambda t: up * slope(t), left, right, BRACKET_STEPS)
    t = bisect(residual, torch.where(convex, extremum, left), torch.where(convex, right, extremum), ROOT_STEPS)
    half_sum, half_difference = total / (1 + t) / 2, difference / (1 - t) / 2
    return torch.stack([half_sum + half_difference, half_sum - half_difference, t, torch.zeros_like(t)], dim=-1)


def dense_point(u: Tensor) -> Tensor:
    """The stationary x of 1/2 |x - u|^2 + e_3(x), by its one unknown s = sum x.

    x_i^2 + (1 - s) x_i + e_2 - u_i = 0 with e_2 = (sum u - s) / 2, so x_i = (s - 1 + R_i) / 2 with the roots
    R_i^2 = s^2 + 1 + 4 u_i - 2 sum u, and 2 s - 4 + sum R_i = 0. Only the smallest, R_4, may be negative. In terms of
    v = s, or of v = R_4 where R_4^2 would not be positive at s = 0, the left side is convex: a minimum is its largest
    root.
    """
    u = u.T.contiguous()  # [4, blocks]
    offset = 1 + 4 * u[3] - 2 * u.sum(0)  # R_4^2 - s^2
    signed = offset < 0
    spread = 4 * (u - u[3])  # R_i^2 - R_4^2
    # The left side is own * v - 4 + four roots of v^2 + constant: R_1, R_2, R_3, and s or R_4, which v is not.
    constants = torch.where(signed, spread, spread + offset)
    constants[3] = offset.abs()
    own = torch.where(signed, 1.0, 2.0).double()
    times = torch.ones_like(u)
    times[3] = 3 - own

    def residual(v):
        return own * v - 4 + (times * (v.square() + constants).sqrt()).sum(0)

    def slope(v):
        return own + (times * v / (v.square() + constants).sqrt().clamp_min(1e-300)).sum(0)

    left, right = torch.full_like(offset, -4), torch.full_like(offset, 4)
    v = bisect(residual, bisect(slope, left, right, BRACKET_STEPS), right, ROOT_STEPS)
    roots = (v.square() + constants).sqrt()
    total, roots[3] = torch.where(signed, roots[3], v), torch.where(signed, v, roots[3])
    return ((total - 1 + roots) / 2).T


def exact_one(weight: Tensor, reg_lambda: float) -> Tensor:
    """The prox of 1:m blocks, [blocks, m] -> float64 [blocks, m], signed like `weight`.

    For lambda < 1 convex, w_i = max(z_i - lambda * s, 0) / (1 - lambda) with s = sum w found by bisection; for
    lambda >= 1 only the largest member stays, the first of equals.
    """
    z = weight.double().abs()
    if reg_lambda >= 1:
        kept = torch.arange(z.shape[-1]) == z.argmax(-1, keepdim=True)
        return torch.where(kept, weight.double(), 0.0)

    def shrunk(s):
        return (z - reg_lambda * s).clamp_min(0) / (1 - reg_lambda)

    most = z.sum(-1, keepdim=True)
    s = bisect(lambda s: s - shrunk(s).sum(-1, keepdim=True), torch.zeros_like(most), most, 2 * ROOT_STEPS)
    return shrunk(s).minimum(z).copysign(weight.double())
