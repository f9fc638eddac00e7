"""The exact prox of blocks of four weights, in registers. Algorithm and names are those of csrc/prox24_block.h.

A block is four magnitudes, each a tensor [BLOCKS]: z in the unit of the weights, u = lambda * z in the unit in which
lambda is 1; the solution is w or x = lambda * w. u1 >= u2 >= u3 >= u4 unless a function says otherwise.
"""

import triton
import triton.language as tl

from .formats import PTX

# For u1 >= (1 + sqrt 2) / 2 no 3-sparse candidate is better than the 2-sparse one; for u1 >= 1 no dense one is.
TWO_SPARSE_FROM = tl.constexpr(1.2071067811865475)
# Up to u1 = 0.3 there is one stationary point, and coordinate descent finds it (csrc/prox24_block.h, kConvexUpTo).
CONVEX_UP_TO = tl.constexpr(0.3)
DENSE_FROM = tl.constexpr(0.92)
# Blocks per lane in solve_24: the dense candidates of a lane are solved one after the other.
BLOCKS_PER_LANE = tl.constexpr(2)

# ---------------------------------------------------------------------------------------------- arithmetic


@triton.jit
def approximate(x, SINGLE: tl.constexpr, exact):
    """float32 on NVIDIA's GPUs: one instruction of the special function unit (error 2^-22); otherwise `exact`."""
    if not PTX or x.dtype == tl.float64:
        y = exact
    else:
        y = tl.inline_asm_elementwise(SINGLE + ".approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return y


@triton.jit
def reciprocal(x):
    return approximate(x, "rcp", 1 / x)


@triton.jit
def square_root(x):
    return approximate(x, "sqrt", tl.sqrt(x))


@triton.jit
def inverse_square_root(x):
    return approximate(x, "rsqrt", tl.rsqrt(x))


@triton.jit
def positive(x):
    return tl.maximum(x, 0.0)


# ---------------------------------------------------------------------------------------------- the order of a block


@triton.jit
def swap_if(swap, a, b):
    return tl.where(swap, b, a), tl.where(swap, a, b)


@triton.jit
def descending(a, b):
    """(larger, smaller, whether they were swapped); equal values are not swapped."""
    return tl.maximum(a, b), tl.minimum(a, b), b > a


@triton.jit
def sort4(a, b, c, d):
    """Sorts in descending order by swapping neighbours, so ties keep their order; also returns the six swaps."""
    a, b, ab1 = descending(a, b)
    c, d, cd1 = descending(c, d)
    b, c, bc1 = descending(b, c)
    a, b, ab2 = descending(a, b)
    c, d, cd2 = descending(c, d)
    b, c, bc2 = descending(b, c)
    return a, b, c, d, ab1, cd1, bc1, ab2, cd2, bc2


@triton.jit
def unsort4(a, b, c, d, ab1, cd1, bc1, ab2, cd2, bc2):
    """The inverse of `sort4`: the swaps in reverse order."""
    b, c = swap_if(bc2, b, c)
    a, b = swap_if(ab2, a, b)
    c, d = swap_if(cd2, c, d)
    b, c = swap_if(bc1, b, c)
    a, b = swap_if(ab1, a, b)
    c, d = swap_if(cd1, c, d)
    return a, b, c, d


# ---------------------------------------------------------------------------------------------- 2:4, the convex range


@triton.jit
def best_pair(z3, z4, w1, w2, w3, minus_lambda):
    """(w3, w4): w_i <- max(z_i - lambda * e_2(the three others), 0), w4 first.

    Takes -lambda, because Triton 3.6 needs an instruction for every negation.
    """
    x1 = minus_lambda * w1  # lambda first, so that huge weights do not overflow if lambda is small
    sum12 = tl.fma(minus_lambda, w2, x1)
    t3, t4 = tl.fma(x1, w2, z3), tl.fma(x1, w2, z4)
    w4 = positive(tl.fma(sum12, w3, t4))
    w3 = positive(tl.fma(sum12, w4, t3))
    return w3, w4


@triton.jit
def sweep_24(z1, z2, z3, z4, w1, w2, w3, w4, minus_lambda):
    """One sweep of coordinate descent, for magnitudes in any order and unit. 16 instructions."""
    w3, w4 = best_pair(z3, z4, w1, w2, w3, minus_lambda)
    w1, w2 = best_pair(z1, z2, w3, w4, w1, minus_lambda)
    return w1, w2, w3, w4


@triton.jit
def descend_24(z1, z2, z3, z4, reg_lambda, largest, HALF: tl.constexpr):
    """Coordinate descent from z, in any order, for lambda * z_i <= `largest` <= CONVEX_UP_TO.

    After the sweeps, the error is at most 1e-5 z1 if the result will be rounded to 16 bits (HALF), and at the level of
    rounding otherwise. Source of the formulas: an upper bound of the sweeps that 110,000 blocks of all families in
    tests/ops/blocks.py needed.
    """
    if z1.dtype == tl.float64:
        sweeps = (8 + 90 * largest).to(tl.int32)
    elif HALF:
        sweeps = (2.86 + 34 * largest).to(tl.int32)
    else:
        sweeps = (3.8 + 45 * largest).to(tl.int32)
    w1, w2, w3, w4 = z1, z2, z3, z4
    for _ in range(sweeps):
        w1, w2, w3, w4 = sweep_24(z1, z2, z3, z4, w1, w2, w3, w4, -reg_lambda)
    return w1, w2, w3, w4


# ---------------------------------------------------------------------------------------------- 2:4, the candidates


@triton.jit
def objective_24(u1, u2, u3, u4, x1, x2, x3, x4):
    """1/2 |x - u|^2 + e_3(x)."""
    d1, d2, d3, d4 = x1 - u1, x2 - u2, x3 - u3, x4 - u4
    return 0.5 * (d1 * d1 + d2 * d2 + d3 * d3 + d4 * d4) + x1 * x2 * x3 + (x1 * x2 + (x1 + x2) * x3) * x4


@triton.jit
def dense_may_win_24(u1, u2, u3, u4, x1, x2, x3):
    """Where true, the dense candidate may be better than x, the best one with x4 = 0.

    For u1 + u2 <= 1 it is better exactly if u4 > e_2(x). Otherwise, in 5.1 million blocks of all families in
    tests/ops/blocks.py it was never better for u4 < 0.927 e_2(x), the ratio at which all four weights are equal.
    """
    return (u3 > u1 * u2) & (u1 < 1) & (u4 > (x1 * x2 + (x1 + x2) * x3) * DENSE_FROM)


@triton.jit
def euler_step(f, slope, curvature, floor):
    """2f / (f' + sqrt(f'^2 - 2 f f'')): the step to the nearer root of the quadratic Taylor model."""
    root = square_root(positive(slope * slope - 2 * f * curvature))
    return 2 * f * reciprocal(tl.maximum(positive(slope) + root, floor))


@triton.jit
def three_sparse_24(u1, u2, u3, steps):
    """(x1, x2, x3, gain) with x4 = 0. Eliminating x1 and x2 exactly leaves phi(t) = 0 in t = x3, 0 <= t <= 0.75.

    The objective of x is lower than that of the 2-sparse candidate (u1, u2, 0, 0) by t * gain.
    """
    total, difference = u1 + u2, u1 - u2
    inflection = u2 * reciprocal(u1 + square_root(total * difference) + 1e-30)  # phi'' = 0: monotone from here
    t = tl.minimum(tl.minimum(inflection, u3), 0.75)
    half_total, half_difference = 0.5 * total, 0.5 * difference
    for _ in range(steps):
        product = reciprocal(1 - t * t)
        r1, r2 = product - t * product, product + t * product  # 1 / (1 + t), 1 / (1 - t)
        a, b = half_total * r1, half_difference * r2
        a, b = a * a, b * b
        phi, a, b = t - u3 + a - b, a * r1, b * r2
        slope, curvature = 1 - 2 * (a + b), 6 * (a * r1 - b * r2)
        t = tl.minimum(positive(t - euler_step(phi, slope, curvature, 1e-6)), 0.75)
    product = reciprocal(1 - t * t)
    half_sum, half_gap = half_total * (product - t * product), half_difference * (product + t * product)
    gain = u3 - 0.5 * t - half_total * half_sum + half_difference * half_gap
    x1, x2 = half_sum + half_gap, positive(half_sum - half_gap)
    x3 = positive(u3 - x1 * x2)  # a sweep restores the relative accuracy of small weights
    x2 = positive(u2 - x1 * x3)
    x1 = positive(u1 - x2 * x3)
    return x1, x2, x3, gain


@triton.jit
def dense_24(u1, u2, u3, u4, steps):
    """(x1, x2, x3, x4, x4 unclamped). With s = sum x, every x_i = (s - 1 + R_i) / 2, which leaves 2s - 4 + sum R_i = 0.

    The unknown v is s if k4 >= 0, and the signed root R_4 if k4 < 0; the left-hand side is convex in v in both cases.
    x4 unclamped is clearly negative where the dense problem has no solution.
    """
    total, k4 = u1 + u2 + u3 + u4, 1 - 2 * (u1 + u2 + u3 - u4)
    signed, kappa, shift = k4 < 0, tl.abs(k4), positive(k4)
    alpha = tl.where(signed, 1.0, 2.0).to(u1.dtype)
    beta = 3 - alpha
    k1, k2, k3 = 4 * (u1 - u4) + shift, 4 * (u2 - u4) + shift, 4 * (u3 - u4) + shift
    equal = 2 * total * reciprocal(1 + square_root(1 + 3 * total))  # s if all four were equal: a lower bound
    v = tl.where(signed, square_root(positive(equal * equal + k4)), equal)
    for _ in range(steps):
        square = v * v
        p1, p2, p3, p4 = square + k1, square + k2, square + k3, square + kappa
        i1, i2 = inverse_square_root(p1 + 1e-30), inverse_square_root(p2 + 1e-30)
        i3, i4 = inverse_square_root(p3 + 1e-30), inverse_square_root(p4 + 1e-30)
        b4 = beta * i4
        f = alpha * v - 4 + p4 * b4 + p1 * i1 + p2 * i2 + p3 * i3
        slope = alpha + v * (b4 + i1 + i2 + i3)
        # multiply by k first: for v = k = 0, i^3 overflows
        curvature = kappa * b4 * (i4 * i4) + k1 * i1 * (i1 * i1) + k2 * i2 * (i2 * i2) + k3 * i3 * (i3 * i3)
        v -= euler_step(f, slope, curvature, 1e-3)
    square = v * v
    other = square_root(square + kappa)
    s, root4 = tl.where(signed, other, v), tl.where(signed, v, other)
    shift = 0.5 * (1 - s)
    x1, x2 = 0.5 * square_root(square + k1) - shift, 0.5 * square_root(square + k2) - shift
    x3, x4 = 0.5 * square_root(square + k3) - shift, 0.5 * root4 - shift
    # A sweep restores the relative accuracy where R_i and 1 - s nearly cancel.
    y1, y2 = tl.minimum(positive(x1), u1), tl.minimum(positive(x2), u2)
    y3, y4 = tl.minimum(positive(x3), u3), tl.minimum(positive(x4), u4)
    y1, y2, y3, y4 = sweep_24(u1, u2, u3, u4, y1, y2, y3, y4, -1.0)
    return y1, y2, y3, y4, x4


# ---------------------------------------------------------------------------------------------- 2:4, the choice


@triton.jit
def best_without_fourth_24(u1, u2, u3, steps):
    """(x1, x2, x3): the better of the 2-sparse and the 3-sparse candidate; always the latter if u3 > u1 u2."""
    x1, x2, x3, gain = three_sparse_24(u1, u2, u3, steps)
    three = (u1 < TWO_SPARSE_FROM) & (tl.maximum(u3 - u1 * u2, gain) > 0)
    return tl.where(three, x1, u1), tl.where(three, x2, u2), tl.where(three, x3, 0.0)


@triton.jit
def best_with_fourth_24(u1, u2, u3, u4, x1, x2, x3, steps, TIE: tl.constexpr):
    """(x1, x2, x3, x4): the better of x and the dense candidate."""
    y1, y2, y3, y4, raw4 = dense_24(u1, u2, u3, u4, steps)
    LEAST: tl.constexpr = -1e-15 if u1.dtype == tl.float64 else -5e-7
    value, dense_value = objective_24(u1, u2, u3, u4, x1, x2, x3, 0.0), objective_24(u1, u2, u3, u4, y1, y2, y3, y4)
    dense = (raw4 > LEAST) & (y4 > 0) & (dense_value <= TIE * value)
    return tl.where(dense, y1, x1), tl.where(dense, y2, x2), tl.where(dense, y3, x3), tl.where(dense, y4, 0.0)


@triton.jit
def by_lane(x, PER_LANE: tl.constexpr, PER_ACCESS: tl.constexpr):
    """[BLOCKS] -> [lane, PER_LANE]: the blocks of each lane, in groups of PER_ACCESS neighbours in memory."""
    LANES: tl.constexpr = x.shape[0] // PER_LANE
    x = tl.reshape(x, (PER_LANE // PER_ACCESS, LANES, PER_ACCESS))
    return tl.reshape(tl.permute(x, (1, 0, 2)), (LANES, PER_LANE))


@triton.jit
def by_block(x, PER_LANE: tl.constexpr, PER_ACCESS: tl.constexpr):
    """The inverse of `by_lane`."""
    LANES: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (LANES, PER_LANE // PER_ACCESS, PER_ACCESS))
    return tl.reshape(tl.permute(x, (1, 0, 2)), (LANES * PER_LANE,))


@triton.jit
def of_lane(which, x):
    """[lane, PER_LANE] -> [lane]: the number (>= 0) of the one block for which `which` is true in each lane."""
    return tl.max(tl.where(which, x, 0.0), axis=1)


@triton.jit
def solve_24(u1, u2, u3, u4, steps, PER_LANE: tl.constexpr, PER_ACCESS: tl.constexpr):
    """The exact prox of sorted blocks.

    Each lane has PER_LANE blocks, few of which may be dense. Every iteration of the loop solves one dense candidate per
    lane, of any of its blocks, until no lane has one left.
    """
    TIE: tl.constexpr = 1 + 4 * (2.0**-52 if u1.dtype == tl.float64 else 2.0**-23)
    x1, x2, x3 = best_without_fourth_24(u1, u2, u3, steps)
    left = by_lane(dense_may_win_24(u1, u2, u3, u4, x1, x2, x3).to(tl.int32), PER_LANE, PER_ACCESS)
    u1, u2 = by_lane(u1, PER_LANE, PER_ACCESS), by_lane(u2, PER_LANE, PER_ACCESS)
    u3, u4 = by_lane(u3, PER_LANE, PER_ACCESS), by_lane(u4, PER_LANE, PER_ACCESS)
    x1, x2 = by_lane(x1, PER_LANE, PER_ACCESS), by_lane(x2, PER_LANE, PER_ACCESS)
    x3 = by_lane(x3, PER_LANE, PER_ACCESS)
    x4 = tl.zeros_like(x3)
    place = tl.arange(0, PER_LANE)[None, :]
    while tl.max(left) > 0:
        first = tl.min(tl.where(left > 0, place, PER_LANE), axis=1)
        which = first[:, None] == place
        y1, y2, y3, y4 = best_with_fourth_24(
            of_lane(which, u1),
            of_lane(which, u2),
            of_lane(which, u3),
            of_lane(which, u4),
            of_lane(which, x1),
            of_lane(which, x2),
            of_lane(which, x3),
            steps,
            TIE,
        )
        x1, x2 = tl.where(which, y1[:, None], x1), tl.where(which, y2[:, None], x2)
        x3, x4 = tl.where(which, y3[:, None], x3), tl.where(which, y4[:, None], x4)
        left = tl.where(which, 0, left)
    x1, x2 = by_block(x1, PER_LANE, PER_ACCESS), by_block(x2, PER_LANE, PER_ACCESS)
    return x1, x2, by_block(x3, PER_LANE, PER_ACCESS), by_block(x4, PER_LANE, PER_ACCESS)


# ---------------------------------------------------------------------------------------------- any blocks


@triton.jit
def largest_of(m0, m1, m2, m3):
    """The largest of all magnitudes; NaN or infinity if one of them is."""
    bits: tl.constexpr = tl.uint64 if m0.dtype == tl.float64 else tl.uint32
    # The bits of magnitudes have the order of the magnitudes, and integers are reduced in one instruction.
    b0, b1 = m0.to(bits, bitcast=True), m1.to(bits, bitcast=True)
    b2, b3 = m2.to(bits, bitcast=True), m3.to(bits, bitcast=True)
    return tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3))).to(m0.dtype, bitcast=True)


@triton.jit
def all_finite(m0, m1, m2, m3):
    """[BLOCKS]: true for blocks without a NaN or an infinity."""
    return (m0 < float("inf")) & (m1 < float("inf")) & (m2 < float("inf")) & (m3 < float("inf"))


@triton.jit
def largest_finite(m0, m1, m2, m3):
    """The largest magnitude of the finite blocks, which chooses their solver."""
    finite = all_finite(m0, m1, m2, m3)
    m0, m1 = tl.where(finite, m0, 0.0), tl.where(finite, m1, 0.0)
    m2, m3 = tl.where(finite, m2, 0.0), tl.where(finite, m3, 0.0)
    return largest_of(m0, m1, m2, m3)


@triton.jit
def shrink_sorted(m0, m1, m2, m3, reg_lambda, largest, PER_ACCESS: tl.constexpr):
    """The exact prox of finite magnitudes; magnitudes that do not shrink keep their bits."""
    z1, z2, z3, z4, ab1, cd1, bc1, ab2, cd2, bc2 = sort4(m0, m1, m2, m3)  # before rounding can make two of them equal
    u1, u2, u3, u4 = reg_lambda * z1, reg_lambda * z2, reg_lambda * z3, reg_lambda * z4
    # 2 steps where they suffice for 1e-6 u1^2 of the objective (float32)
    steps = 5 if m0.dtype == tl.float64 else tl.where(largest <= 0.35, 2, 3)
    x1, x2, x3, x4 = solve_24(u1, u2, u3, u4, steps, BLOCKS_PER_LANE, PER_ACCESS)
    x0, x1, x2, x3 = unsort4(x1, x2, x3, x4, ab1, cd1, bc1, ab2, cd2, bc2)
    inverse = 1 / reg_lambda
    w0, w1 = tl.where(x0 < reg_lambda * m0, inverse * x0, m0), tl.where(x1 < reg_lambda * m1, inverse * x1, m1)
    w2, w3 = tl.where(x2 < reg_lambda * m2, inverse * x2, m2), tl.where(x3 < reg_lambda * m3, inverse * x3, m3)
    return w0, w1, w2, w3


@triton.jit
def shrink(m0, m1, m2, m3, reg_lambda, largest, HALF: tl.constexpr, PER_ACCESS: tl.constexpr):
    """The exact prox of any magnitudes; a block with a NaN or an infinity does not change.

    Args:
        largest: lambda times `largest_finite`, or more. It chooses the solver.
        HALF: whether the result will be rounded to 16 bits.
        PER_ACCESS: the number of blocks of a lane that are neighbours in memory.
    """
    if largest <= CONVEX_UP_TO:
        w0, w1, w2, w3 = descend_24(m0, m1, m2, m3, reg_lambda, largest, HALF)
    else:
        w0, w1, w2, w3 = shrink_sorted(m0, m1, m2, m3, reg_lambda, largest, PER_ACCESS)
    finite = all_finite(m0, m1, m2, m3)
    w0, w1 = tl.where(finite, w0, m0), tl.where(finite, w1, m1)
    w2, w3 = tl.where(finite, w2, m2), tl.where(finite, w3, m3)
    return w0, w1, w2, w3
