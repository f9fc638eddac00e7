"""AdamW, the gradient of the frozen-weight term, the scale and the exact prox in one pass over all tensors.

The equations are in `proxsparse.reference.adamw_prox`; block.py has the prox of a block.
"""

import math

import torch
import triton
import triton.language as tl

from .block import largest_finite, shrink
from .formats import arithmetic_of, is_half, join4, round_stochastically, round_to_nearest, split4, widened
from .launch import LANES, weights_of_program
from .prox import check_weight, gain_of, rows_and_blocks, unit_of
from .wide_block import prox_wide

# Two blocks per lane: a step reads and writes 40 to 110 bytes per block, so registers are scarce but time is not.
BLOCKS_PER_PROGRAM, NUM_WARPS = 2 * LANES, 1


@triton.jit
def mix(x):
    """A bijection of uint32 words after which every bit depends on all bits of x."""
    x ^= x >> 16
    x *= tl.full((), 0x7FEB352D, tl.uint32)
    x ^= x >> 15
    x *= tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def random_bits(index, seed_low, seed_high):
    """32 random bits for each flat position (int64); mix() of them gives 32 more."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    return mix(mix(low ^ seed_low.to(tl.uint32, bitcast=True)) ^ high ^ seed_high.to(tl.uint32, bitcast=True))


@triton.jit
def prox_scaled(w, c, reg_lambda, gain, N: tl.constexpr, BLOCKS: tl.constexpr, PER_ACCESS: tl.constexpr):
    """[4 * BLOCKS] -> the prox of c * w, divided by c (None means 1); zeros are +0.0."""
    v = tl.abs(w if c is None else w * c)
    v0, v1, v2, v3 = split4(v, BLOCKS)
    largest = reg_lambda * largest_finite(v0, v1, v2, v3)
    x0, x1, x2, x3 = shrink(v0, v1, v2, v3, reg_lambda, gain, largest, N, False, PER_ACCESS)
    shrunk = join4(x0, x1, x2, x3, BLOCKS)
    new = shrunk if c is None else shrunk / tl.abs(c)
    return tl.where(shrunk < v, tl.where((w < 0) & (new > 0), -new, new), w)


@triton.jit
def rounded(x, random, dtype: tl.constexpr):
    """x in `dtype`: rounded stochastically if `random` is given and dtype is bfloat16, else to nearest."""
    return (
        round_stochastically(x, random) if random is not None and dtype == tl.bfloat16 else round_to_nearest(x, dtype)
    )


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def adamw_prox_kernel(
    weight_ptr,  # [numel], changed in place; all tensors are contiguous
    grad_ptr,  # [numel], dtype of the weight, or bfloat16 for a float32 weight
    exp_avg_ptr,  # [numel], the arithmetic's dtype or bfloat16; changed in place
    exp_avg_sq_ptr,  # [numel], dtype of exp_avg; changed in place
    master_ptr,  # [numel], float32, or None; changed in place
    pretrained_ptr,  # [numel], dtype of the weight, or None
    scale_ptr,  # c, [columns], the arithmetic's dtype, or None
    columns,  # in_features; without a scale, the whole weight is one row
    pieces,  # programs per row
    decay: tl.float64,  # 1 - lr * weight_decay; without the annotations Triton would pass fp32
    rate: tl.float64,  # lr / (1 - beta1^t)
    root_factor: tl.float64,  # 1 / sqrt(1 - beta2^t)
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    reg_lambda: tl.float64,  # > 0 unless N = 0
    gain: tl.float64,  # 1 / (1 - reg_lambda), or 0 if reg_lambda >= 1; reg_lambda^(1 / (M - 3)) if M > 4
    frozen_lambda: tl.float64,
    frozen_eps: tl.float64,
    seed_low,  # the halves of the seed, int32, or None: rounding to nearest
    seed_high,
    N: tl.constexpr,  # weights kept of every M: 1 or 2 of 4, or M - 2; 0: no prox
    BLOCKS: tl.constexpr,  # blocks per program, all in one row
    M: tl.constexpr = 4,
):
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    moment: tl.constexpr = exp_avg_ptr.dtype.element_ty
    arithmetic: tl.constexpr = arithmetic_of(dtype)

    one_minus_beta1, one_minus_beta2 = tl.full((), 1 - beta1, arithmetic), tl.full((), 1 - beta2, arithmetic)
    beta1, beta2, eps = tl.full((), beta1, arithmetic), tl.full((), beta2, arithmetic), tl.full((), eps, arithmetic)
    decay, rate = tl.full((), decay, arithmetic), tl.full((), rate, arithmetic)
    root_factor = tl.full((), root_factor, arithmetic)
    reg_lambda, gain = tl.full((), reg_lambda, arithmetic), tl.full((), gain, arithmetic)
    frozen_lambda, frozen_eps = tl.full((), frozen_lambda, arithmetic), tl.full((), frozen_eps, arithmetic)

    index, column, inside = weights_of_program(scale_ptr, columns, pieces, BLOCKS, M)
    old = widened(tl.load(weight_ptr + index, mask=inside, other=0.0), arithmetic)
    g = widened(tl.load(grad_ptr + index, mask=inside, other=0.0), arithmetic)
    mean = widened(tl.load(exp_avg_ptr + index, mask=inside, other=0.0), arithmetic)
    square = widened(tl.load(exp_avg_sq_ptr + index, mask=inside, other=0.0), arithmetic)
    w = old
    if master_ptr is not None:
        w = tl.load(master_ptr + index, mask=inside, other=0.0)
    c = None
    if scale_ptr is not None:
        c = tl.load(scale_ptr + column, mask=inside, other=1.0)

    if pretrained_ptr is not None:
        w0 = widened(tl.load(pretrained_ptr + index, mask=inside, other=1.0), arithmetic)
        span = tl.where(w0 >= 0, w0 + frozen_eps, w0 - frozen_eps)
        g += frozen_lambda * (2 * w * (w - w0) * (2 * w - w0) / (span * span))
    if c is not None:
        g = g / c
    mean = beta1 * mean + one_minus_beta1 * g
    square = beta2 * square + one_minus_beta2 * g * g
    step = rate * mean / (tl.sqrt(square) * root_factor + eps)
    if c is not None:
        step = step / c
    w = w * decay - step
    if N and M > 4:
        w = prox_wide(w, c, gain, M, BLOCKS, is_half(dtype) and master_ptr is None)
    elif N:
        PER_ACCESS: tl.constexpr = 2 if is_half(dtype) else 1
        w = prox_scaled(w, c, reg_lambda, gain, N, BLOCKS, PER_ACCESS)

    weight_bits, mean_bits, square_bits = None, None, None
    if seed_low is not None:
        random = random_bits(index, seed_low, seed_high)
        weight_bits, mean_bits, square_bits = random >> 16, random & 0xFFFF, mix(random) & 0xFFFF
    if master_ptr is not None:
        tl.store(master_ptr + index, w, mask=inside)
        weight_bits = None
    tl.store(weight_ptr + index, rounded(w, weight_bits, dtype), mask=inside)
    tl.store(exp_avg_ptr + index, rounded(mean, mean_bits, moment), mask=inside)
    tl.store(exp_avg_sq_ptr + index, rounded(square, square_bits, moment), mask=inside)


# For blocks of 6, 8 or 10, for the reason in wide_prox.py.
adamw_prox_wide_kernel = triton.jit(adamw_prox_kernel.fn, do_not_specialize=["seed_low", "seed_high", "columns"])


def adamw_prox_nm_(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    pretrained: torch.Tensor | None,
    scale: torch.Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    reg_lambda: float,
    n: int,
    m: int,
    frozen_lambda: float,
    frozen_eps: float,
    seed: int | None,
) -> None:
    """Step t of AdamW on c * w, then the prox of n:m blocks, in place; the equations are in `reference.adamw_prox`.

    Shapes, dtypes and units are those of `proxsparse.ops.adamw_prox_`; all tensors are contiguous.

    Args:
        weight: on a CUDA GPU, or on the CPU if the environment had TRITON_INTERPRET=1 when triton was imported.
        scale: in float32 (float64 for a float64 weight), or None.
        n, m: 1:4, 2:4, 4:6, 6:8 or 8:10, ignored if reg_lambda is 0.
        seed: in [-2^63, 2^64), or None.
    Raises:
        ValueError: the prox does not support the pattern or the shape of the weight.
    """
    m = m if reg_lambda > 0 else 4
    if reg_lambda > 0:
        check_weight(weight, n, m)
    if weight.numel() == 0:
        return
    columns, pieces, blocks = rows_and_blocks(weight, scale, m, BLOCKS_PER_PROGRAM)
    kernel = adamw_prox_kernel if m == 4 else adamw_prox_wide_kernel
    halves = (None, None) if seed is None else (int32(seed), int32(seed >> 32))
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        kernel[(weight.numel() // columns * pieces,)](
            weight,
            grad,
            exp_avg,
            exp_avg_sq,
            master,
            pretrained if frozen_lambda > 0 else None,
            scale,
            columns,
            pieces,
            1 - lr * weight_decay,
            lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            float(beta1),
            float(beta2),
            float(eps),
            float(reg_lambda),
            gain_of(reg_lambda) if m == 4 else unit_of(reg_lambda, m),
            float(frozen_lambda),
            float(frozen_eps),
            *halves,
            N=n if reg_lambda > 0 else 0,
            BLOCKS=blocks,
            M=m,
            num_warps=NUM_WARPS,
        )


def int32(x: int) -> int:
    """The lower 32 bits of x as a signed integer."""
    return (x + 2**31) % 2**32 - 2**31
