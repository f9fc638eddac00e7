"""An AdamW step followed by the prox, in plain torch, with stochastic rounding."""

import math

import torch
from torch import Tensor

from proxsparse.patterns import PatternLike
from proxsparse.reference.prox import prox_nm


def adamw_prox(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    scale: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    reg_lambda: float,
    pattern: PatternLike,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step t of AdamW on v = c * w with the gradient g / c, then the prox of v (paper, Algorithm 1).

        g          = grad / c
        exp_avg    = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
        w          = w * (1 - lr * weight_decay)
                     - lr / c * exp_avg / (1 - beta1^t) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)
        w          = prox_{reg_lambda Reg_{N:M}}(c * w) / c

    Arithmetic is fp64 for a float64 weight and fp32 otherwise; only stored values are rounded. w is initialized with
    `master` if given, else with `weight`. For arguments, shapes and units see `proxsparse.ops.adamw_prox_`.

    Returns:
        New tensors (weight, exp_avg, exp_avg_sq, w): three in the dtypes of the arguments, and w before rounding.
    """
    arithmetic = torch.float64 if weight.dtype == torch.float64 else torch.float32
    w = (weight if master is None else master).to(arithmetic)
    c = torch.ones((), dtype=arithmetic, device=weight.device) if scale is None else scale.to(arithmetic)
    g = grad.to(arithmetic) / c
    mean = beta1 * exp_avg.to(arithmetic) + (1 - beta1) * g
    mean_square = beta2 * exp_avg_sq.to(arithmetic) + (1 - beta2) * g.square()
    root = mean_square.sqrt() / math.sqrt(1 - beta2**step)
    w = w * (1 - lr * weight_decay) - lr / c * (mean / (1 - beta1**step)) / (root + eps)
    if reg_lambda > 0:
        w = prox_nm(w, reg_lambda, pattern, scale)
    bits = [None] * 3 if seed is None else random_bits(weight, seed)
    return (
        round_to(w, weight.dtype, bits[0] if master is None else None),
        round_to(mean, exp_avg.dtype, bits[1]),
        round_to(mean_square, exp_avg_sq.dtype, bits[2]),
        w,
    )


def round_to(x: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """Rounds x to `dtype`: stochastically for bfloat16 if `bits` are given, else to nearest even; zeros are +0.0."""
    stochastic = bits is not None and dtype == torch.bfloat16
    rounded = stochastic_round(x.float(), bits) if stochastic else x.to(dtype)
    return torch.where(rounded == 0, 0.0, rounded)


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds float32 to bfloat16: the upper 16 bits of (bits of x) + r, so that the mean over r is x.

    Zeros are +0.0. Infinity and NaN are excluded, because the carry could change their sign.

    Args:
        bits: r, int32, the shape of x, uniform in [0, 2^16).
    """
    upper = (torch.where(x.isfinite(), x, 0.0).view(torch.int32) + bits) & -0x10000
    rounded = torch.where(x.isfinite(), upper.view(torch.float32), x).to(torch.bfloat16)
    return torch.where(rounded == 0, 0.0, rounded)


def random_bits(like: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """16 random bits per element, as int32, for weight, exp_avg and exp_avg_sq: a hash of (seed, flat position i).

    first = mix(mix(low(i) ^ low(seed)) ^ high(i) ^ high(seed)) gives the first two, second = mix(first) the third; low
    and high are the 32-bit halves. All backends give the same bits.
    """
    index = torch.arange(like.numel(), device=like.device).view(like.shape)
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    first = mix(mix((index & 0xFFFFFFFF) ^ low) ^ (index >> 32) ^ high)
    second = mix(first)
    return (first >> 16).int(), (first & 0xFFFF).int(), (second & 0xFFFF).int()


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, stored in int64, with the "lowbias32" constants."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        # x * factor modulo 2^32, in two halves that do not overflow the int64
        x = (((x * (factor >> 16)) & 0xFFFF) << 16) + x * (factor & 0xFFFF) & 0xFFFFFFFF
    return x ^ (x >> 16)
