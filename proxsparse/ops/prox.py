"""The ops `proxsparse::prox_nm_` and `prox_nm_list_`: the proximal operator of the N:M regularizer, in place.

Both have the same kernels; for a list `Kernel.run_list` needs as few launches as possible.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse import reference
from proxsparse.ops.registry import define_op, register_kernel, select
from proxsparse.patterns import NMPattern, PatternLike, check_dtype


@define_op("prox_nm_", "(Tensor(a!) weight, float reg_lambda, int n, int m) -> ()")
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


@define_op("prox_nm_list_", "(Tensor(a!)[] weights, float[] reg_lambdas, int n, int m) -> ()")
def _prox_nm_list_(weights: list[Tensor], reg_lambdas: list[float], n: int, m: int) -> None:
    groups: dict[tuple, list[tuple[Tensor, Tensor, float]]] = {}
    for weight, reg_lambda in zip(weights, reg_lambdas, strict=True):
        if reg_lambda != 0 and weight.numel() != 0:
            group = groups.setdefault((weight.device, weight.dtype), [])
            group.append((weight, whole_rows(weight, m), reg_lambda))
    for group in groups.values():
        originals, dense, lambdas = zip(*group, strict=True)
        kernel = select("prox_nm_", dense[0], lambdas[0], n, m)
        if kernel.run_list:
            kernel.run_list(dense, lambdas, n, m)
        else:
            for result, reg_lambda in zip(dense, lambdas, strict=True):
                kernel.run(result, reg_lambda, n, m)
        for weight, result in zip(originals, dense, strict=True):
            write_back(weight, result)


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


@torch.no_grad()
def prox_nm_list_(weights: Sequence[Tensor], reg_lambdas: Sequence[float], pattern: PatternLike = "2:4") -> None:
    """W_i <- argmin_V 1/2 ||V - W_i||_F^2 + lambda_i * Reg_{N:M}(V) for every weight, in place, as `prox_nm_` does.

    The Triton backend uses one launch for all 2:4 weights with the same device and dtype; otherwise there is one for
    each weight. The results are the same.

    Args:
        weights: each [..., in_features], any strides, dtypes and devices; they must not overlap. Changed in place.
        reg_lambdas: one lambda_1 >= 0 per weight, in units of 1 / |w|^(N-1); 0 does not change the weight.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
    Raises:
        ValueError: the numbers of weights and lambdas differ; a tensor occurs twice; or as `prox_nm_`, with the
            position in the list.
    """
    pattern = NMPattern.parse(pattern)
    if len(weights) != len(reg_lambdas):
        raise ValueError(f"{len(weights)} weights and {len(reg_lambdas)} lambdas: pass one lambda per weight")
    if len(set(weights)) != len(weights):  # tensors hash by identity; Dynamo of torch 2.11 cannot trace id()
        raise ValueError("a weight is in the list twice; pass every weight once, also if it is tied")
    for i, (weight, reg_lambda) in enumerate(zip(weights, reg_lambdas, strict=True)):
        try:
            check_prox_arguments(weight, reg_lambda, pattern)
        except ValueError as error:
            raise ValueError(f"weights[{i}]: {error}") from None
    torch.ops.proxsparse.prox_nm_list_(list(weights), [float(x) for x in reg_lambdas], pattern.n, pattern.m)
