"""The exact prox of 2:4 and 1:4 blocks: one pass over memory, every block solved in registers.

The algorithm and the conventions are those of `proxsparse.reference.prox_nm`, where the equations are explained. The
solvers see a block as four magnitudes z1, z2, z3, z4 >= 0 and return w1, w2, w3, w4 >= 0, each a [BLOCKS] tensor.
"""

import torch
import triton
import triton.language as tl

# From lambda * z1 = (1 + sqrt 2) / 2 on a 3-sparse candidate never beats the 2-sparse one; dense ones lose from 1 on.
TWO_SPARSE_FROM = tl.constexpr(1.2071067811865475)
# Up to lambda * z1 = 0.16 the objective is strictly convex, and coordinate descent from z converges to its minimum.
CONVEX_UP_TO = tl.constexpr(0.16)

# Chosen by register count (two blocks a thread, 16-byte loads, no spills), not by timing.
BLOCKS_PER_PROGRAM, NUM_WARPS = 256, 4
# The interpreter pays per program and operation, not per block.
BLOCKS_PER_INTERPRETED_PROGRAM = 65536

# ---------------------------------------------------------------------------------------------- sorting a block


@triton.jit
def swap_if(swap, a, b):
    return tl.where(swap, b, a), tl.where(swap, a, b)


@triton.jit
def descending(a, b):
    """(larger, smaller, whether they were exchanged); equal values stay in place."""
    swap = b > a
    a, b = swap_if(swap, a, b)
    return a, b, swap


@triton.jit
def sort4(a, b, c, d):
    """Descending and stable (neighbours only), so ties go to the lower index; and the six decisions, for `unsort4`."""
    a, b, ab1 = descending(a, b)
    c, d, cd1 = descending(c, d)
    b, c, bc1 = descending(b, c)
    a, b, ab2 = descending(a, b)
    c, d, cd2 = descending(c, d)
    b, c, bc2 = descending(b, c)
    return a, b, c, d, ab1, cd1, bc1, ab2, cd2, bc2


@triton.jit
def unsort4(a, b, c, d, ab1, cd1, bc1, ab2, cd2, bc2):
    """The exchanges of `sort4` backwards."""
    b, c = swap_if(bc2, b, c)
    a, b = swap_if(ab2, a, b)
    c, d = swap_if(cd2, c, d)
    b, c = swap_if(bc1, b, c)
    a, b = swap_if(ab1, a, b)
    c, d = swap_if(cd1, c, d)
    return a, b, c, d


# ---------------------------------------------------------------------------------------------- solving a block


@triton.jit
def best_coordinate(z, reg_lambda, a, b, c):
    """max(z - lambda * e_2(a, b, c), 0): the best value of one weight of a 2:4 block while the three others stay."""
    a, lambda_b = reg_lambda * a, reg_lambda * b  # first, so that huge weights do not overflow under a small lambda
    return tl.maximum(z - (a * b + (a + lambda_b) * c), 0.0)


@triton.jit
def sweep_24(z1, z2, z3, z4, w1, w2, w3, w4, reg_lambda):
    """One sweep of coordinate descent, the last weight first; the weights in any order."""
    w4 = best_coordinate(z4, reg_lambda, w1, w2, w3)
    w3 = best_coordinate(z3, reg_lambda, w1, w2, w4)
    w2 = best_coordinate(z2, reg_lambda, w1, w3, w4)
    w1 = best_coordinate(z1, reg_lambda, w2, w3, w4)
    return w1, w2, w3, w4


@triton.jit
def scaled_objective(z1, z2, z3, z4, w1, w2, w3, w4, reg_lambda):
    """lambda^2 * (1/2 |w - z|^2 + lambda * e_3(w)): no under- or overflow, whatever the unit of the weights."""
    x1, x2, x3, x4 = reg_lambda * w1, reg_lambda * w2, reg_lambda * w3, reg_lambda * w4
    d1, d2, d3, d4 = reg_lambda * (w1 - z1), reg_lambda * (w2 - z2), reg_lambda * (w3 - z3), reg_lambda * (w4 - z4)
    return 0.5 * (d1 * d1 + d2 * d2 + d3 * d3 + d4 * d4) + x1 * x2 * x3 + (x1 * x2 + (x1 + x2) * x3) * x4


@triton.jit
def euler_step(f, slope, curvature, floor):
    """2f / (f' + sqrt(f'^2 - 2 f f'')): the step to the nearer root of the quadratic Taylor model."""
    root = tl.sqrt(tl.maximum(slope * slope - 2 * f * curvature, 0.0))
    return 2 * f / tl.maximum(tl.maximum(slope, 0.0) + root, floor)


@triton.jit
def three_sparse_candidate(z1, z2, z3, reg_lambda, STEPS: tl.constexpr):
    """(w1, w2, w3), w4 = 0: eliminating w1 and w2 exactly leaves phi(t) = 0 in t = lambda * w3, 0 <= t <= 0.75."""
    u1, u2, u3 = reg_lambda * z1, reg_lambda * z2, reg_lambda * z3
    total, difference = u1 + u2, u1 - u2
    inflection = u2 / (u1 + tl.sqrt(total * difference) + 1e-30)  # phi'' = 0; the iteration is monotone from here
    t = tl.minimum(tl.minimum(inflection, u3), 0.75)
    for _ in tl.static_range(STEPS):
        r1, r2 = 1 / (1 + t), 1 / (1 - t)
        a, b = total * r1, difference * r2
        a, b = a * a / 4, b * b / 4
        phi, slope, curvature = t - u3 + a - b, 1 - 2 * (a * r1 + b * r2), 6 * (a * r1 * r1 - b * r2 * r2)
        t = tl.minimum(tl.maximum(t - euler_step(phi, slope, curvature, 1e-6), 0.0), 0.75)
    half_sum, half_difference = total / (1 + t) / 2, difference / (1 - t) / 2
    w1, w2 = (half_sum + half_difference) / reg_lambda, tl.maximum(half_sum - half_difference, 0.0) / reg_lambda
    # A sweep in the original units restores the relative accuracy of tiny weights.
    w3 = tl.maximum(z3 - reg_lambda * w1 * w2, 0.0)
    w2 = tl.maximum(z2 - reg_lambda * w1 * w3, 0.0)
    w1 = tl.maximum(z1 - reg_lambda * w2 * w3, 0.0)
    return w1, w2, w3


@triton.jit
def dense_root(root, e, u, q):
    """x = (R - e) / 2, e = 1 - s, q = (sum u - s) / 2; the other form loses nothing where R and e nearly cancel."""
    return tl.where((e > 0) & (root > 0), 2 * (u - q) / (root + e), (root - e) / 2)


@triton.jit
def dense_candidate(z1, z2, z3, z4, reg_lambda, STEPS: tl.constexpr):
    """(w1, w2, w3, w4, x4): with s = sum x every x_i = (s - 1 + R_i) / 2, which leaves 2s - 4 + sum R_i = 0.

    The unknown v is s itself where k4 >= 0, and the signed root R_4 where k4 < 0; F is convex in v either way.
    x4 = lambda * w4 before it was clamped: clearly negative where the dense problem has no solution.
    """
    u1, u2, u3, u4 = reg_lambda * z1, reg_lambda * z2, reg_lambda * z3, reg_lambda * z4
    total = u1 + u2 + u3 + u4
    k4 = 1 - 2 * (u1 + u2 + u3 - u4)
    signed = k4 < 0
    alpha = tl.where(signed, 1.0, 2.0).to(z1.dtype)
    beta = 3 - alpha
    shift = tl.maximum(k4, 0.0)
    k1, k2, k3, kappa = 4 * (u1 - u4) + shift, 4 * (u2 - u4) + shift, 4 * (u3 - u4) + shift, tl.abs(k4)
    equal = 2 * total / (1 + tl.sqrt(1 + 3 * total))  # s if all four were equal: a lower bound
    v = tl.where(signed, tl.sqrt(tl.maximum(equal * equal + k4, 0.0)), equal)
    for _ in tl.static_range(STEPS):
        p1, p2, p3, p4 = v * v + k1, v * v + k2, v * v + k3, v * v + kappa
        i1, i2 = tl.rsqrt(p1 + 1e-30), tl.rsqrt(p2 + 1e-30)
        i3, i4 = tl.rsqrt(p3 + 1e-30), tl.rsqrt(p4 + 1e-30)
        f = alpha * v - 4 + beta * p4 * i4 + p1 * i1 + p2 * i2 + p3 * i3
        slope = alpha + v * (beta * i4 + i1 + i2 + i3)
        curvature = beta * kappa * i4 * i4 * i4 + k1 * i1 * i1 * i1 + k2 * i2 * i2 * i2 + k3 * i3 * i3 * i3
        v -= euler_step(f, slope, curvature, 1e-3)
    other = tl.sqrt(v * v + kappa)
    s, root4 = tl.where(signed, other, v), tl.where(signed, v, other)
    q, e = (total - s) / 2, 1 - s
    x1 = dense_root(tl.sqrt(v * v + k1), e, u1, q)
    x2 = dense_root(tl.sqrt(v * v + k2), e, u2, q)
    x3 = dense_root(tl.sqrt(v * v + k3), e, u3, q)
    x4 = dense_root(root4, e, u4, q)
    w1, w2 = tl.minimum(tl.maximum(x1, 0.0), u1) / reg_lambda, tl.minimum(tl.maximum(x2, 0.0), u2) / reg_lambda
    w3, w4 = tl.minimum(tl.maximum(x3, 0.0), u3) / reg_lambda, tl.minimum(tl.maximum(x4, 0.0), u4) / reg_lambda
    w1, w2, w3, w4 = sweep_24(z1, z2, z3, z4, w1, w2, w3, w4, reg_lambda)
    return w1, w2, w3, w4, x4


@triton.jit
def solve_24(z1, z2, z3, z4, reg_lambda):
    """argmin 1/2 |w - z|^2 + lambda * e_3(w) of a sorted block: its best 2-sparse, 3-sparse or dense candidate."""
    DOUBLE: tl.constexpr = z1.dtype == tl.float64
    # As in csrc/prox24_block.h. Interpreted on 250,000 random blocks of four lambdas the objective is within 5e-7
    # (fp32) and 4e-16 (fp64) of the optimum, over z1^2.
    STEPS: tl.constexpr = 5 if DOUBLE else 3
    LEAST_X4: tl.constexpr = -1e-15 if DOUBLE else -5e-7
    TOLERANCE: tl.constexpr = 4 * (2.0**-52 if DOUBLE else 2.0**-23)

    a1, a2, a3 = three_sparse_candidate(z1, z2, z3, reg_lambda, STEPS)
    d1, d2, d3, d4, x4 = dense_candidate(z1, z2, z3, z4, reg_lambda, STEPS)
    zero = tl.zeros_like(z1)
    objective2 = scaled_objective(z1, z2, z3, z4, z1, z2, zero, zero, reg_lambda)
    objective3 = scaled_objective(z1, z2, z3, z4, a1, a2, a3, zero, reg_lambda)
    objective4 = scaled_objective(z1, z2, z3, z4, d1, d2, d3, d4, reg_lambda)

    # Objectives cannot tell candidates apart near a continuous transition: prefer the denser valid one there.
    undecided = reg_lambda * z1 < TWO_SPARSE_FROM
    take3 = undecided & (a3 > 0) & (objective3 <= objective2 + TOLERANCE * objective2)
    best = tl.where(take3, tl.minimum(objective3, objective2), objective2)
    take4 = undecided & (x4 > LEAST_X4) & (d4 > 0) & (objective4 <= best + TOLERANCE * best)
    w1 = tl.where(take4, d1, tl.where(take3, a1, z1))
    w2 = tl.where(take4, d2, tl.where(take3, a2, z2))
    w3 = tl.where(take4, d3, tl.where(take3, a3, 0.0))
    w4 = tl.where(take4, d4, 0.0)
    return w1, w2, w3, w4


@triton.jit
def descend_24(z1, z2, z3, z4, reg_lambda, largest):
    """Coordinate descent from z, in any order, for lambda * z_i <= `largest` <= CONVEX_UP_TO.

    The number of sweeps, as in csrc/cpu/prox.cpp, leaves rounding alone: interpreted on 50,000 random blocks at each of
    its bounds, every weight is within 8e-8 (fp32) and 3e-16 (fp64) of the optimum, over z1.
    """
    sweeps = tl.where(largest <= 0.03, tl.where(largest <= 0.01, 5, 6), tl.where(largest <= 0.1, 9, 12))
    sweeps = tl.where(largest <= 0.001, 3, sweeps)
    if z1.dtype == tl.float64:
        sweeps = 2 * sweeps
    w1, w2, w3, w4 = z1, z2, z3, z4
    for _ in range(sweeps):
        w1, w2, w3, w4 = sweep_24(z1, z2, z3, z4, w1, w2, w3, w4, reg_lambda)
    return w1, w2, w3, w4


@triton.jit
def solve_14(z1, z2, z3, z4, reg_lambda, gain):
    """argmin 1/2 |w - z|^2 + lambda * e_2(w) of a sorted block.

    lambda >= 1, where gain = 0: (z1, 0, 0, 0). lambda < 1 (convex), where gain = 1 / (1 - lambda): with
    w_k = ((z1 + ... + zk) / (1 + (k - 1) lambda) - gain * sum_{j<k} (zj - zk)) / k the last k with w_k > 0 wins, and
    w_i = w_k + gain * (z_i - z_k) for i <= k. Only differences are multiplied by the gain: ties stay exact.
    """
    sum2 = z1 + z2
    sum3 = sum2 + z3
    d12, d13, d23 = gain * (z1 - z2), gain * (z1 - z3), gain * (z2 - z3)
    d14, d24, d34 = gain * (z1 - z4), gain * (z2 - z4), gain * (z3 - z4)
    last2 = (sum2 / (1 + reg_lambda) - d12) / 2
    last3 = (sum3 / (1 + 2 * reg_lambda) - (d13 + d23)) / 3
    last4 = ((sum3 + z4) / (1 + 3 * reg_lambda) - (d14 + d24 + d34)) / 4
    take2, take3, take4 = gain * last2 > 0, gain * last3 > 0, gain * last4 > 0  # none if the gain is 0
    w1 = tl.where(take4, last4 + d14, tl.where(take3, last3 + d13, tl.where(take2, last2 + d12, z1)))
    w2 = tl.where(take4, last4 + d24, tl.where(take3, last3 + d23, tl.where(take2, last2, 0.0)))
    w3 = tl.where(take4, last4 + d34, tl.where(take3, last3, 0.0))
    w4 = tl.where(take4, last4, 0.0)
    return tl.minimum(w1, z1), tl.minimum(w2, z2), tl.minimum(w3, z3), tl.minimum(w4, z4)


@triton.jit
def solve_sorted(m0, m1, m2, m3, reg_lambda, gain, N: tl.constexpr):
    """The exact prox of the magnitudes of a block, in any order."""
    z1, z2, z3, z4, ab1, cd1, bc1, ab2, cd2, bc2 = sort4(m0, m1, m2, m3)
    if N == 2:
        w1, w2, w3, w4 = solve_24(z1, z2, z3, z4, reg_lambda)
    else:
        w1, w2, w3, w4 = solve_14(z1, z2, z3, z4, reg_lambda, gain)
    return unsort4(w1, w2, w3, w4, ab1, cd1, bc1, ab2, cd2, bc2)


# ---------------------------------------------------------------------------------------------- the kernel


@triton.jit
def split4(x, BLOCKS: tl.constexpr):
    """[4 * BLOCKS] -> the four weights of every block, [BLOCKS] each."""
    even, odd = tl.split(tl.reshape(x, (BLOCKS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def join4(x0, x1, x2, x3, BLOCKS: tl.constexpr):
    """The inverse of `split4`."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (4 * BLOCKS,))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """The number of dtype nearest to x (ties to even), in the dtype of x, so that casting it to dtype is exact."""
    if dtype == tl.bfloat16:  # by hand, because Triton's interpreter truncates where the GPU rounds
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        nearest = bits.to(tl.float32, bitcast=True)
    else:
        nearest = x.to(dtype).to(x.dtype)
    return nearest


@triton.jit
def prox_n4_kernel(
    weight_ptr,  # [numel], contiguous; changed in place
    scale_ptr,  # [in_features] or None
    numel,  # a multiple of 4
    in_features,  # a multiple of 4
    reg_lambda: tl.float64,  # > 0; the annotation keeps Triton from passing it as fp32
    gain: tl.float64,  # 1 / (1 - lambda), or 0 from lambda = 1 on: the launcher's double tells 0.99999999 from 1
    N: tl.constexpr,  # weights kept of every 4: 1 or 2
    BLOCKS: tl.constexpr,  # blocks a program: it owns the weights [4 * BLOCKS * pid, 4 * BLOCKS * (pid + 1))
):
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    arithmetic: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    reg_lambda, gain = tl.full((), reg_lambda, arithmetic), tl.full((), gain, arithmetic)

    start = tl.program_id(0).to(tl.int64) * (4 * BLOCKS)  # a weight may have more than 2^31 elements
    offset = tl.arange(0, 4 * BLOCKS)
    inside = start + offset < numel
    old = tl.load(weight_ptr + start + offset, mask=inside, other=0.0)
    weight = old.to(arithmetic)
    magnitude = tl.abs(weight)
    if scale_ptr is not None:
        column = ((start % in_features).to(tl.int32) + offset) % in_features
        scale = tl.abs(tl.load(scale_ptr + column).to(arithmetic))
        magnitude *= scale

    m0, m1, m2, m3 = split4(magnitude, BLOCKS)
    # A block with a NaN or an infinity becomes zeros, which the solvers leave alone: it must not choose for the others.
    finite = (m0 < float("inf")) & (m1 < float("inf")) & (m2 < float("inf")) & (m3 < float("inf"))
    m0, m1 = tl.where(finite, m0, 0.0), tl.where(finite, m1, 0.0)
    m2, m3 = tl.where(finite, m2, 0.0), tl.where(finite, m3, 0.0)
    magnitude = join4(m0, m1, m2, m3, BLOCKS)
    if N == 2:
        largest = reg_lambda * tl.max(magnitude)
        if largest <= CONVEX_UP_TO:
            w0, w1, w2, w3 = descend_24(m0, m1, m2, m3, reg_lambda, largest)
        else:
            w0, w1, w2, w3 = solve_sorted(m0, m1, m2, m3, reg_lambda, gain, N)
    else:
        w0, w1, w2, w3 = solve_sorted(m0, m1, m2, m3, reg_lambda, gain, N)
    shrunk = join4(w0, w1, w2, w3, BLOCKS)

    new = shrunk
    if scale_ptr is not None:
        new = new / scale
    new = rounded(new, dtype)
    new = tl.where((weight < 0) & (new > 0), -new, new)  # the sign after rounding: what underflows becomes +0.0 too
    # The prox never grows a magnitude, so what did not shrink (zeros stand for what is not finite) keeps its bits.
    tl.store(weight_ptr + start + offset, tl.where(shrunk < magnitude, new.to(dtype), old), mask=inside)


def prox_n4_(weight: torch.Tensor, reg_lambda: float, n: int, scale: torch.Tensor | None = None) -> None:
    """W <- argmin_V 1/2 ||V - c * W||_F^2 + lambda * Reg_{n:4}(V), divided back by c, in place; n is 1 or 2.

    Reg_{n:4}(V) sums e_{n+1}(|v|) over the blocks of 4 (ProxSparse, equations 4 and 7); the minimiser is global.
    Arithmetic is fp64 for float64 and fp32 otherwise, rounded once to the dtype of the weight.

    Args:
        weight: [..., in_features], contiguous; float32, bfloat16, float16 or float64; on a CUDA GPU, or on the CPU if
            the environment had TRITON_INTERPRET=1 when triton was imported. Changed in place. May be empty.
        reg_lambda: lambda_1 >= 0, in units of 1 / |c * w|^(n-1); 0 is the identity.
        scale: c, [in_features], positive (only |c| counts), floating point, on the device of `weight`; None means 1.
    Raises:
        ValueError: n is neither 1 nor 2, in_features is no multiple of 4, or the weight is not contiguous.
    """
    if n not in (1, 2):
        raise ValueError(f"n={n}: these kernels serve 2:4 and 1:4; use the reference backend for other patterns")
    if weight.ndim == 0 or weight.shape[-1] % 4 or not weight.is_contiguous():
        raise ValueError(
            f"weight of shape {list(weight.shape)}, strides {list(weight.stride())}: it must be contiguous with a last "
            "dimension that is a multiple of 4; call weight.contiguous() or exclude this layer"
        )
    if reg_lambda == 0 or weight.numel() == 0:
        return
    count = weight.numel() // 4
    blocks = BLOCKS_PER_PROGRAM
    if not weight.is_cuda:
        blocks = min(triton.next_power_of_2(count), BLOCKS_PER_INTERPRETED_PROGRAM)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        prox_n4_kernel[(triton.cdiv(count, blocks),)](
            weight,
            None if scale is None else scale.contiguous(),
            weight.numel(),
            weight.shape[-1],
            float(reg_lambda),
            1 / (1 - reg_lambda) if reg_lambda < 1 else 0.0,
            N=n,
            BLOCKS=blocks,
            num_warps=NUM_WARPS,
        )
