"""The op `proxsparse::prox_nm_`: the proximal operator of the N:M regularizer, in place."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse import reference
from proxsparse.ops.registry import register_kernel, select
from proxsparse.patterns import NMPattern, PatternLike, check_dtype

torch.library.define("proxsparse::prox_nm_", "(Tensor(a!) weight, float reg_lambda, int n, int m) -> ()")


@torch.library.impl("proxsparse::prox_nm_", "CompositeExplicitAutograd")
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int) -> None:
    if reg_lambda == 0 or weight.numel() == 0:
        return
    dense = whole_rows(weight, m)
    select("prox_nm_", dense, reg_lambda, n, m).run(dense, reg_lambda, n, m)
    write_back(weight, dense)


def whole_rows(tensor: Tensor, m: int, padding: float = 0.0) -> Tensor:
    """What kernels need: contiguous memory and, for blocks of 4, whole blocks; only other tensors are copied.

    The remainder of a 2:4 row, two weights that stay dense, is padded to a block with two zeros, which is 2:4 already.
    """
    if m == 4 and tensor.shape[-1] % m:
        return functional.pad(tensor, (0, -tensor.shape[-1] % m), value=padding)
    return tensor.contiguous()


def write_back(weight: Tensor, dense: Tensor) -> None:
    """Finishes an in-place op: copies `dense`, which the kernel has changed, to `weight` unless they are the same."""
    if dense is weight:
        torch.autograd.graph.increment_version(weight)  # autograd does not see writes of kernels
    else:
        weight.copy_(dense if dense.shape == weight.shape else dense[..., : weight.shape[-1]])


torch.library.register_fake("proxsparse::prox_nm_", lambda *arguments: None)


@register_kernel("prox_nm_", "reference")
def _reference(weight: Tensor, reg_lambda: float, n: int, m: int) -> None:
    weight.copy_(reference.prox_nm(weight, reg_lambda, NMPattern(n, m)))


def in_range(value: object, low: float, high: float = math.inf) -> bool:
    """Whether low <= value < high; False for what is not one number, such as a string or a tensor of two elements."""
    try:
        return bool(low <= value < high)
    except (TypeError, ValueError, RuntimeError):
        return False


def check_reg_lambda(reg_lambda: float) -> None:
    """Raises ValueError unless lambda is a finite number >= 0."""
    if not isinstance(reg_lambda, int | float) or not math.isfinite(reg_lambda) or reg_lambda < 0:
        raise ValueError(f"reg_lambda={reg_lambda!r} must be a finite number >= 0, a float (0 is the identity)")


def check_prox_arguments(weight: Tensor, reg_lambda: float, pattern: PatternLike) -> NMPattern:
    """Returns the parsed pattern. Raises ValueError for arguments that no backend supports."""
    pattern = NMPattern.parse(pattern)
    check_dtype(weight, "weight")
    pattern.check_blocks(weight.shape)
    check_reg_lambda(reg_lambda)
    return pattern


@torch.no_grad()
def prox_nm_(weight: Tensor, reg_lambda: float, pattern: PatternLike = "2:4") -> Tensor:
    """W <- argmin_V 1/2 ||V - W||_F^2 + lambda * Reg_{N:M}(V), in place; the exact minimizer for 2:4 and 1:M.

    For 4:6, 6:8 and 8:10 it is the best found point; of 30,000 hard blocks one was missed (docs/solver.md).

    Reg_{N:M}(V) sums e_{N+1}(|v|), the elementary symmetric polynomial, over blocks of M weights along the last
    dimension (paper, equations 4 and 7). The remainder of a row (`NMPattern.whole`) does not change. Weights that the
    prox does not change keep their bits; new zeros are +0.0; blocks with NaN or infinity do not change, but a NaN may
    become one with other bits.

    Args:
        weight: [..., in_features], float32, float64, bfloat16 or float16, any strides; arithmetic is fp64 for float64
            and fp32 otherwise. Changed in place.
        reg_lambda: lambda_1 >= 0, in units of 1 / |w|^(N-1). Not multiplied by any learning rate. 0: identity.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
    Returns:
        `weight`.
    Raises:
        ValueError: `NMPattern.check_blocks` refuses in_features; the dtype is not floating point; lambda is negative or
            not finite.
    """
    pattern = check_prox_arguments(weight, reg_lambda, pattern)
    torch.ops.proxsparse.prox_nm_(weight, float(reg_lambda), pattern.n, pattern.m)
    return weight


def prox_nm(weight: Tensor, reg_lambda: float, pattern: PatternLike = "2:4") -> Tensor:
    """`prox_nm_` on a copy of the weight. Same arguments and errors; not differentiable."""
    return prox_nm_(weight.detach().clone(memory_format=torch.contiguous_format), reg_lambda, pattern)
