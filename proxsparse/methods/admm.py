"""ADMM: gradual pruning with refitted weights, by the alternating direction method of multipliers."""

import torch
from torch import Tensor

from proxsparse.methods.registry import ranges, register_layer_method
from proxsparse.methods.sparsegpt import InputGram, positive_definite
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.training.options import AT_LEAST_1, NOT_NEGATIVE, POSITIVE


@register_layer_method(
    "admm",
    updates_weights=True,
    paper="Boza 2024, Fast and Effective Weight Update for Pruned Large Language Models",
    statistics=InputGram,
    check=ranges(iterations=AT_LEAST_1, mask_iterations=AT_LEAST_1, damping=NOT_NEGATIVE, rho=POSITIVE),
)
def prune_admm(
    weight: Tensor,
    statistics: InputGram,
    pattern: NMPattern,
    *,
    iterations: int = 20,
    mask_iterations: int = 15,
    damping: float = 0.1,
    rho: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """min over N:M sparse V of  ||(V - W_0) X||_F^2,  with features scaled to norm 1.

    With s_j = ||X_j||_2 + 1e-8, A = X X^T / (s s^T) + damping * mean(diag) * I and W_0 <- W_0 * s; W = W_0, U = 0:

        Z <- (W + U) * mask;   U <- U + W - Z;   W <- (W_0 A + rho (Z - U)) (A + rho I)^-1

    The result is V = (W + U) * mask / s. Each of the first `mask_iterations` iterations selects a new mask from
    |W + U|; its density decreases from nearly dense to N:M (see `gradual_mask`). After that the mask is fixed.
    Algorithm and constants are those of the paper's code (fmfi-compbio/admm-pruning, lib/admm.py).

    Args:
        iterations: number of updates of W, Z and U.
        mask_iterations: number of the first iterations, which select a new mask; at most `iterations`.
        damping: added to the diagonal of X X^T, in units of its mean.
        rho: weight of the penalty |W - Z|^2, in the same units.
    Raises:
        InputError: A + rho I is not positive definite.
    """
    norms = statistics.sums.diagonal().sqrt() + 1e-8  # features that are 0 in every token are pruned first
    gram = statistics.sums / norms / norms[:, None]
    gram.diagonal().add_(damping * gram.diagonal().mean())
    w = weight.to(gram.dtype) * norms
    target = w @ gram
    gram.diagonal().add_(rho)
    with positive_definite(f"damping={damping} and rho={rho}"):
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    u, mask_iterations = torch.zeros_like(w), min(mask_iterations, iterations)
    for iteration in range(1, iterations + 1):
        if iteration <= mask_iterations:
            mask = gradual_mask((w + u).abs(), pattern, iteration / mask_iterations)
        z = torch.where(mask, w + u, 0.0)
        u += w - z
        w = (target + rho * (z - u)) @ inverse
    return mask, (w + u) / norms


def gradual_mask(score: Tensor, pattern: NMPattern, time: float) -> Tensor:
    """Prunes a fraction 1 - (1 - time)^3 of the weights that N:M pruning removes, smallest scores of the matrix first.

    The n largest of every block are always kept; at time = 1 all others are pruned. `score`: finite, [out_features,
    in_features]; `time`: in (0, 1]. Returns bool of the same shape, True = kept.
    """
    final = nm_mask(score, pattern)
    if time == 1:
        return final
    removable = score[~final]
    count = int(len(removable) * (1 - (1 - time) ** 3))
    return final | (score >= removable.kthvalue(count + 1).values)
