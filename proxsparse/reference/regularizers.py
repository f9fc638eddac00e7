"""The N:M regularizer and the frozen-weight penalty of the paper, in plain torch."""

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern, PatternLike


def elementary_symmetric(x: Tensor, k: int) -> Tensor:
    """e_k(x): the sum of the products of all k-subsets, along the last dimension.

    [..., m] -> [...]; e_0 = 1, and e_k = 0 for k > m.
    """
    one = x.new_ones(1, *x.shape[:-1])
    e = torch.cat([one, x.new_zeros(k, *x.shape[:-1])])  # e_0 ... e_k of the members so far
    for member in x.unbind(-1):
        e = torch.cat([one, e[1:] + member * e[:-1]])
    return e[k]


def reg_nm(weight: Tensor, pattern: PatternLike = "2:4") -> Tensor:
    """Reg_{N:M}(W) = sum over blocks of e_{N+1}(|w|); for 2:4 the paper's equation (4). Differentiable.

    Args:
        weight: [..., in_features], any float dtype.
    Returns:
        A scalar; 0 if and only if every block is N:M sparse.
    """
    pattern = NMPattern.parse(pattern)
    return elementary_symmetric(pattern.blocks(weight.abs()), pattern.n + 1).sum()


def frozen_denominator(pretrained: Tensor, eps: float) -> Tensor:
    """W0 + eps * sign(W0) with sign(0) = 1, the denominator of the frozen-weight term."""
    return torch.where(pretrained >= 0, pretrained + eps, pretrained - eps)


def frozen_penalty(weight: Tensor, pretrained: Tensor, eps: float) -> Tensor:
    """Reg_{W0}(W) = || W / (W0 + eps * sign(W0)) * (W - W0) ||_F^2 (paper, section 3.1); a scalar."""
    return (weight / frozen_denominator(pretrained, eps) * (weight - pretrained)).square().sum()


def frozen_penalty_grad(weight: Tensor, pretrained: Tensor, eps: float) -> Tensor:
    """d Reg_{W0} / dW = 2 W (W - W0) (2W - W0) / (W0 + eps * sign(W0))^2, elementwise."""
    return 2 * weight * (weight - pretrained) * (2 * weight - pretrained) / frozen_denominator(pretrained, eps).square()
