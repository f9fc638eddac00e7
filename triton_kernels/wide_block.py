# ruff: noqa: RUF005 (Triton cannot unpack a tuple into another one)
"""Blocks of m = 6, 8 or 10 of which m - 2 weights are kept, in registers, as in csrc/cpu/wide_prox.h.

A block takes 8 or 16 places of a tensor, whose last ones are padding; `split` makes a tuple of the m positions of every
block from it, each a tensor [BLOCKS]. In the unit in which lambda is 1, u is a block and x its prox.
"""

import triton
import triton.language as tl

from .block import inverse_square_root, positive
from .formats import join4, split4

MOST_SWEEPS = tl.constexpr(500)


@triton.constexpr_function
def places(m):
    """The numbers that a block takes in a tensor: a power of two."""
    return 4 if m == 4 else 8 if m <= 8 else 16


@triton.constexpr_function
def dense_from(m):
    """An x without zeros needs a smallest u above this part of e_{m-2}(the others) of the best x with a zero.

    The least ratios were 0.787, 0.679 and 0.596, for equal weights, in 108,000 blocks of all families in
    tests/ops/blocks.py.
    """
    return {6: 0.75, 8: 0.65, 10: 0.57}[m]


@triton.jit
def split8(x, BLOCKS: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (4 * BLOCKS, 2)))
    x0, x2, x4, x6 = split4(even, BLOCKS)
    x1, x3, x5, x7 = split4(odd, BLOCKS)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def split(x, M: tl.constexpr, BLOCKS: tl.constexpr):
    """[places(M) * BLOCKS] -> the M positions of every block, [BLOCKS] each."""
    if M <= 8:
        block = split8(x, BLOCKS)[:M]
    else:
        even, odd = tl.split(tl.reshape(x, (8 * BLOCKS, 2)))
        evens, odds = split8(even, BLOCKS), split8(odd, BLOCKS)
        block = (evens[0], odds[0])
        for i in tl.static_range(1, M // 2):
            block = block + (evens[i], odds[i])
    return block


@triton.jit
def join8(x, BLOCKS: tl.constexpr):
    even, odd = join4(x[0], x[2], x[4], x[6], BLOCKS), join4(x[1], x[3], x[5], x[7], BLOCKS)
    return tl.reshape(tl.join(even, odd), (8 * BLOCKS,))


@triton.jit
def join(x, M: tl.constexpr, BLOCKS: tl.constexpr):
    """The inverse of `split`; the padding is 0."""
    size: tl.constexpr = places(M)  # a call is no constexpr as a bound of the loop
    for _ in tl.static_range(M, size):
        x = x + (tl.zeros_like(x[0]),)
    if M <= 8:
        y = join8(x, BLOCKS)
    else:
        even = join8((x[0], x[2], x[4], x[6], x[8], x[10], x[12], x[14]), BLOCKS)
        odd = join8((x[1], x[3], x[5], x[7], x[9], x[11], x[13], x[15]), BLOCKS)
        y = tl.reshape(tl.join(even, odd), (16 * BLOCKS,))
    return y


@triton.jit
def two_smallest(x, M: tl.constexpr):
    """(least, second, their positions): the two smallest numbers of every block; of equal numbers, the later ones."""
    swapped = x[0] < x[1]
    least, second = tl.minimum(x[0], x[1]), tl.maximum(x[0], x[1])
    at_least, at_second = tl.where(swapped, 0, 1), tl.where(swapped, 1, 0)
    for i in tl.static_range(2, M):
        below, between = x[i] <= least, x[i] <= second
        second = tl.where(below, least, tl.minimum(x[i], second))
        at_second = tl.where(below, at_least, tl.where(between, i, at_second))
        least, at_least = tl.minimum(x[i], least), tl.where(below, i, at_least)
    return least, second, at_least, at_second


@triton.jit
def kept(score, M: tl.constexpr, BLOCKS: tl.constexpr):
    """Whether each of the scores [places(M) * BLOCKS] is among the M - 2 largest of its block; NaN is infinity."""
    _, _, at_least, at_second = two_smallest(split(tl.where(score == score, score, float("inf")), M, BLOCKS), M)
    keeps = ()
    for i in tl.static_range(M):
        keeps = keeps + (((at_least != i) & (at_second != i)).to(tl.int32),)
    return join(keeps, M, BLOCKS) != 0


@triton.jit
def larger_root(u, b, twice):
    """(x, 1 / root), x = (u + root) / 2, root = sqrt(u^2 - b^2 + twice^2): x (u - x) = t (b - t), twice = b - 2t."""
    square = (u - b) * (u + b) + twice * twice
    inverse = inverse_square_root(square + (1e-300 if u.dtype == tl.float64 else 1e-37))
    return 0.5 * (u + square * inverse), inverse


@triton.jit
def sweep_wide(u, x, M: tl.constexpr):
    """One sweep of coordinate descent, x_i <- max(u_i - e_{m-2}(the others), 0); (x, e_{m-1}(x))."""
    one, zero = tl.full(u[0].shape, 1.0, u[0].dtype), tl.zeros_like(u[0])
    product, but_one = one, zero  # of k numbers e_k and e_{k-1}, from the last position on
    products, buts = (one,), (zero,)
    for k in tl.static_range(1, M):
        but_one = but_one * x[M - k] + product
        product = product * x[M - k]
        products, buts = (product,) + products, (but_one,) + buts
    product, but_one = one, zero
    new = ()
    for i in tl.static_range(M):
        x_i = positive(u[i] - but_one * products[i] - product * buts[i])
        new = new + (x_i,)
        but_one = but_one * x_i + product
        product = product * x_i
    return new, but_one


@triton.jit
def half_squared_distance(u, x, M: tl.constexpr):
    total = tl.zeros_like(u[0])
    for i in tl.static_range(M):
        total += (x[i] - u[i]) * (x[i] - u[i])
    return 0.5 * total


@triton.jit
def either(condition, if_true, if_false, M: tl.constexpr):
    """One of two blocks."""
    block = ()
    for i in tl.static_range(M):
        block = block + (tl.where(condition, if_true[i], if_false[i]),)
    return block


@triton.jit
def without_smallest(u, M: tl.constexpr):
    """(the best x with a zero, its objective, whether an x without zeros may be better, the smallest number)."""
    a, b, at_least, at_second = two_smallest(u, M)
    bound = tl.full(a.shape, 1.0, a.dtype)
    best = ()
    for i in tl.static_range(M):
        small = (at_least == i) | (at_second == i)
        x_i, _ = larger_root(u[i], b, 0 * b)
        bound = tl.where(small, bound, bound * x_i)
        best = best + (tl.where(small, 0.0, u[i]),)
    alive = bound < b
    undecided = alive
    t = tl.where(alive, b - bound, 0.0)
    for _ in range(8 if a.dtype == tl.float64 else 6):
        twice = b - 2 * t
        product, slope = tl.full(a.shape, 1.0, a.dtype), tl.zeros_like(a)
        for i in tl.static_range(M):
            small = (at_least == i) | (at_second == i)
            x_i, inverse = larger_root(u[i], b, twice)
            slope = tl.where(small, slope, slope * x_i - product * twice * inverse)
            product = tl.where(small, product, product * x_i)
        alive = alive & (slope > -1)
        t = tl.where(alive, t - (t - b + product) / (1 + slope), 0.0)
        alive = alive & (t > 0)
        t = tl.where(alive, t, 0.0)
    x, others = (), ()
    for i in tl.static_range(M):
        x_i, _ = larger_root(u[i], b, b - 2 * t)
        x = x + (tl.where(at_least == i, 0.0, tl.where(at_second == i, t, x_i)),)
        others = others + (tl.where(at_least == i, 0.0, u[i]),)
    x, reg = sweep_wide(others, x, M)
    least, sparse = 0.5 * (a * a + b * b), half_squared_distance(u, x, M) + reg
    take = alive & (sparse <= least * (1 + (1e-15 if a.dtype == tl.float64 else 5e-7)))
    best, least = either(take, x, best, M), tl.where(take, tl.minimum(sparse, least), least)
    product, but_one = tl.full(a.shape, 1.0, a.dtype), tl.zeros_like(a)
    for i in tl.static_range(M):
        but_one = tl.where(at_least == i, but_one, but_one * best[i] + product)
        product = tl.where(at_least == i, product, product * best[i])
    return best, least, undecided & (a > but_one * dense_from(M)), a


@triton.jit
def solve_apart(u, M: tl.constexpr):
    """The prox where the objective may have several minima."""
    best, least, dense, a = without_smallest(u, M)
    x = ()
    for i in tl.static_range(M):
        x_i, _ = larger_root(u[i], a, 0 * a)
        x = x + (x_i,)
    waiting, sweeps = tl.max(dense.to(tl.int32)), 0
    reg = tl.zeros_like(a)
    while (waiting > 0) & (sweeps < MOST_SWEEPS):
        old, _ = sweep_wide(u, x, M)
        x, reg = sweep_wide(u, old, M)
        moved, top = tl.zeros_like(a), u[0]
        for i in tl.static_range(M):
            moved, top = tl.maximum(moved, tl.abs(x[i] - old[i])), tl.maximum(top, u[i])
        moves = moved > top * (2e-15 if a.dtype == tl.float64 else 1e-6)  # a number that is 0 may grow again
        waiting = tl.max((dense & moves).to(tl.int32))
        sweeps += 2
    smallest = x[0]
    for i in tl.static_range(1, M):
        smallest = tl.minimum(smallest, x[i])
    objective = half_squared_distance(u, x, M) + reg
    tie = 1 + (1e-15 if a.dtype == tl.float64 else 5e-7)
    return either(dense & (smallest > 0) & (objective <= least * tie), x, best, M)


@triton.jit
def solve_wide(u, M: tl.constexpr, HALF: tl.constexpr):
    """The prox of blocks u. Up to a rate of 1/2, coordinate descent is known to converge at it (docs/solver.md)."""
    total = u[0]
    for i in tl.static_range(1, M):
        total += u[i]
    mean = tl.max(total) / (M - 1)
    rate = (M - 1) * (M - 2) * mean
    for _power in tl.static_range(M - 4):
        rate *= mean
    if rate <= 0.5:
        error = rate
        needed = (M - 2) * (1e-16 if mean.dtype == tl.float64 else 3e-5 if HALF else 1e-7)
        x, _reg = sweep_wide(u, u, M)
        error *= rate
        while error > needed:
            x, _reg = sweep_wide(u, x, M)
            error *= rate
    else:
        x = solve_apart(u, M)
    return x


@triton.jit
def prox_wide(w, c, unit, M: tl.constexpr, BLOCKS: tl.constexpr, HALF: tl.constexpr):
    """[places(M) * BLOCKS] -> the prox of c * w, divided by c (None means 1); zeros are +0.0, unit = lambda^(1/(m-3)).

    A u above 1e4 (1e30 in float64), whose products overflow, is treated as that number, and stays.
    """
    block = split(tl.abs(w if c is None else w * c), M, BLOCKS)
    finite = block[0] < float("inf")
    for i in tl.static_range(1, M):
        finite = finite & (block[i] < float("inf"))
    u = ()
    for i in tl.static_range(M):
        u = u + (tl.where(finite, tl.minimum(block[i] * unit, 1e30 if w.dtype == tl.float64 else 10000.0), 0.0),)
    x = solve_wide(u, M, HALF)
    old, shrunk = join(u, M, BLOCKS), join(x, M, BLOCKS)
    new = shrunk / unit if c is None else shrunk / unit / tl.abs(c)
    return tl.where(shrunk < old, tl.where((w < 0) & (new > 0), -new, new), w)
