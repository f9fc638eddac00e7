"""SparseGPT: prunes column by column; the remaining columns are updated to compensate the error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError, require
from proxsparse.methods.registry import register_layer_method
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern

REMEDY = "use more calibration samples or increase damping"


class InputGram:
    """X X^T of a layer's calibration inputs, [in_features, in_features]."""

    def __init__(self, layer: nn.Linear):
        size = layer.in_features
        self.tokens = 0
        self.sums = layer.weight.new_zeros(size, size, dtype=torch.promote_types(layer.weight.dtype, torch.float32))

    def add(self, inputs: Tensor) -> None:
        """inputs: [tokens, in_features]"""
        self.tokens += len(inputs)
        inputs = inputs.to(self.sums.dtype)
        self.sums.addmm_(inputs.T, inputs)

    def hessian(self) -> Tensor:
        """H = 2/n X X^T, the Hessian of the squared error of the layer's output; n = tokens."""
        return self.sums * (2 / self.tokens)


def check(damping: float, chunk: int, update_weights: bool) -> None:
    """Raises InputError for an option out of range."""
    require("damping", damping, damping >= 0, "a finite number >= 0")
    require("chunk", chunk, chunk >= 1, "at least 1 column")


@register_layer_method(
    "sparsegpt",
    updates_weights=True,
    paper="Frantar and Alistarh 2023, SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot",
    statistics=InputGram,
    check=check,
)
def prune_sparsegpt(
    weight: Tensor,
    statistics: InputGram,
    pattern: NMPattern,
    *,
    damping: float = 0.01,
    chunk: int = 128,
    update_weights: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """For every column j in order, with U^T U = H^-1 (U upper triangular) and q_j = w_j where kept, else 0:

        e = (w_j - q_j) / U_jj;   w_k <- w_k - e U_jk for all k > j

    The mask of a block is selected at its first column: the n largest w_k^2 / U_kk^2, with w as updated so far.

    Args:
        damping: added to the diagonal of H, in units of its mean.
        chunk: columns after which the rest of the matrix is updated; affects only the speed.
        update_weights: false: the same mask, but the kept weights are the pretrained ones.
    Raises:
        InputError: H is not positive definite.
    """
    hessian = statistics.hessian()
    updated = weight.to(hessian.dtype, copy=True)
    dead = hessian.diagonal() == 0  # features that are 0 in every token
    updated[:, dead] = 0
    hessian.diagonal()[dead] = 1
    factor = inverse_factor(hessian, damping)
    mask = torch.zeros_like(updated, dtype=torch.bool)
    chunk = max(chunk - chunk % pattern.m, pattern.m)  # whole blocks
    for start in range(0, updated.shape[1], chunk):
        columns = slice(start, start + chunk)
        mask[:, columns], errors = prune_chunk_(updated[:, columns], factor[columns, columns], pattern)
        updated[:, start + chunk :] -= errors @ factor[columns, start + chunk :]
    return mask, updated if update_weights else None


def inverse_factor(hessian: Tensor, damping: float, remedy: str = REMEDY) -> Tensor:
    """U, upper triangular with U^T U = (H + damping * mean(diag H) * I)^-1.

    Raises InputError, with the remedy, if this matrix is not positive definite.
    """
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    with positive_definite(f"damping={damping}", remedy):
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)


@contextmanager
def positive_definite(settings: str, remedy: str = REMEDY) -> Iterator[None]:
    """In the block a matrix without a Cholesky decomposition is an InputError with the settings and the remedy."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise InputError(f"the Hessian of the inputs is not positive definite with {settings}; {remedy}") from error


def prune_chunk_(weight: Tensor, factor: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor]:
    """Prunes the columns of `weight` [out_features, c] in place. Returns mask and errors e, both [out_features, c]."""
    mask, errors = torch.ones_like(weight, dtype=torch.bool), torch.zeros_like(weight)
    for j in range(weight.shape[1]):
        if j % pattern.m == 0 and j < pattern.whole(weight.shape[1]):  # not the remainder, which stays dense
            block = slice(j, j + pattern.m)
            mask[:, block] = nm_mask((weight[:, block] / factor.diagonal()[block]).square(), pattern)
        pruned = torch.where(mask[:, j], 0.0, weight[:, j])
        errors[:, j] = pruned / factor[j, j]
        weight[:, j] -= pruned
        weight[:, j + 1 :] -= torch.outer(errors[:, j], factor[j, j + 1 :])
    return mask, errors
