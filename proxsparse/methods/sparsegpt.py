"""SparseGPT: prunes column by column; the remaining columns are updated to compensate the error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.methods.registry import ranges, register_layer_method
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.training.options import AT_LEAST_1, NOT_NEGATIVE

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


@register_layer_method(
    "sparsegpt",
    updates_weights=True,
    paper="Frantar and Alistarh 2023, SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot",
    statistics=InputGram,
    check=ranges(damping=NOT_NEGATIVE, chunk=AT_LEAST_1),
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
    mask = torch.ones_like(updated, dtype=torch.bool)

    def pruned(j: int) -> Tensor:
        if j % pattern.m == 0 and j < pattern.whole(updated.shape[1]):  # not the remainder, which stays dense
            block = slice(j, j + pattern.m)
            mask[:, block] = nm_mask((updated[:, block] / factor.diagonal()[block]).square(), pattern)
        return torch.where(mask[:, j], updated[:, j], 0.0)

    compensate_(updated, factor, pruned, max(chunk - chunk % pattern.m, pattern.m))  # whole blocks
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


def compensate_(weight: Tensor, factor: Tensor, column: Callable[[int], Tensor], chunk: int = 128) -> None:
    """The loop of SparseGPT and GPTQ, in place: w_j <- q_j = `column(j)`, for which the later columns compensate.

    Args:
        weight: [out_features, in_features]. `column` may read column j and those after it in the same chunk.
        factor: U, see `inverse_factor`.
        chunk: columns after which the rest of the matrix is updated.
    """
    for start in range(0, weight.shape[1], chunk):
        stop = min(start + chunk, weight.shape[1])
        errors = torch.zeros_like(weight[:, start:stop])
        for j in range(start, stop):
            new = column(j)
            error = errors[:, j - start] = (weight[:, j] - new) / factor[j, j]
            weight[:, j] = new
            weight[:, j + 1 : stop] -= torch.outer(error, factor[j, j + 1 : stop])
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
