"""Swap search: replaces the mask of each block, one after another, by the one with the smallest output error."""

import torch
from torch import Tensor

from proxsparse.methods.block_masks import block_masks
from proxsparse.methods.registry import ranges, register_layer_method
from proxsparse.methods.sparsegpt import InputGram
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.training.options import AT_LEAST_1

CHUNK = 128  # columns of P H that are kept up to date at a time; affects only the speed


@register_layer_method(
    "swap",
    updates_weights=False,
    paper="ours; nearest published: Zimmer et al. 2025, SparseSwaps (arXiv 2512.10922)",
    statistics=InputGram,
    check=ranges(sweeps=AT_LEAST_1),
)
def prune_swap(weight: Tensor, statistics: InputGram, pattern: NMPattern, *, sweeps: int = 20) -> tuple[Tensor, None]:
    """Starts from Wanda's mask and reduces the error of the layer's output, see `improve_mask`.

    Args:
        sweeps: largest number of passes over all blocks. Each costs one product of `weight` with X X^T.
    Raises:
        InputError: a block has too many possible masks to enumerate them.
    """
    gram = statistics.sums
    start = nm_mask(weight.abs().to(gram.dtype) * gram.diagonal().sqrt(), pattern)
    return improve_mask(weight, gram, start, pattern, sweeps), None


def improve_mask(weight: Tensor, gram: Tensor, mask: Tensor, pattern: NMPattern, sweeps: int = 20) -> Tensor:
    """Block coordinate descent on  ||P X||_F^2 = sum over rows of p H p^T,  P = W where pruned, else 0.

    With r_b = sum over k outside block b of p_k H_kb, block b prunes the set S, out of C(m, n), with the smallest

        p_S H_bb p_S^T + 2 r_b p_S^T.

    The blocks are processed in order, each for all rows at once, sweep after sweep, until no block changes. Then no
    change of a single block reduces the error. (SparseSwaps exchanges the best pair of a row at a time; here an
    exchange stays within a block and may contain several pairs.)

    A block changes only if the gain exceeds the rounding error. So the error never increases, ties keep the current
    mask, and the search ends. One sweep costs one product of P with H over the rows that changed in the previous
    sweep. The memory is a few copies of W plus [out_features, C(m, n)].

    Args:
        weight: [out_features, in_features].
        gram: H = X X^T of the layer's inputs, [in_features, in_features], in any scale and in the dtype to compute in.
        mask: the initial mask, bool, the shape of `weight`, exactly N:M.
    Returns:
        The new mask, bool, the shape of `weight`.
    """
    candidates = ~block_masks(pattern, weight.device)
    weight, mask = weight.to(gram.dtype), mask.clone()
    rows = torch.arange(len(weight), device=weight.device)
    for _ in range(sweeps):
        mask[rows], changed = sweep(weight[rows], gram, mask[rows], candidates)
        rows = rows[changed]
        if len(rows) == 0:
            break
    return mask


def sweep(weight: Tensor, gram: Tensor, mask: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Updates every block once, in order. Returns the new mask, and bool [rows]: whether the row has changed.

    `weight`, `gram` and `mask` are those of `improve_mask`, for any number of rows; `candidates`: bool [C(m, n), m],
    True = pruned.
    """
    m = candidates.shape[1]
    columns = weight.shape[1] - weight.shape[1] % m  # without the remainder, which stays dense
    mask, changed = mask.clone(), torch.zeros_like(mask[:, 0])
    pruned = torch.where(mask, 0.0, weight)
    noise = rounding_noise(weight, gram, m)
    width = max(CHUNK - CHUNK % m, m)  # whole blocks
    for chunk in (slice(start, start + width) for start in range(0, columns, width)):
        response = pruned @ gram[:, chunk]  # P H of these columns, kept up to date below
        for start in range(chunk.start, min(chunk.stop, columns), m):
            block = slice(start, start + m)
            w, p, own = weight[:, block], pruned[:, block], gram[block, block]
            others = response[:, start - chunk.start :][:, :m] - p @ own  # r_b
            choice, error = best_choice(w, others, own, candidates)
            gains = (p * (p @ own + 2 * others)).sum(1) - error > noise[:, start // m]
            if not gains.any():
                continue
            mask[:, block] = torch.where(gains[:, None], ~choice, mask[:, block])
            new = torch.where(mask[:, block], 0.0, w)
            response += (new - p) @ gram[block, chunk]
            pruned[:, block] = new
            changed |= gains
    return mask, changed


def best_choice(weight: Tensor, others: Tensor, own: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The S with the smallest  p_S H_bb p_S^T + 2 r_b p_S^T,  bool [rows, m], True = pruned; and that value, [rows].

    `weight`, `others`: w_b and r_b, [rows, m]; `own`: H_bb, [m, m]; `candidates`: bool [C(m, n), m].
    """
    singles = candidates.to(weight.dtype).T  # [m, C]
    pairs = (singles[:, None] * singles).flatten(0, 1)  # [m * m, C]
    products = (weight[:, :, None] * weight[:, None, :] * own).flatten(1)  # [rows, m * m]
    error, best = (products @ pairs + (2 * weight * others) @ singles).min(dim=1)
    return candidates[best], error


def rounding_noise(weight: Tensor, gram: Tensor, m: int) -> Tensor:
    """eps * (sum over a row of |w_k| sqrt(H_kk)) * (the same over a block): [rows, blocks].

    Because |H_jk| <= sqrt(H_jj H_kk), this is one rounding error of an upper bound of the block's part of p H p^T.
    """
    reach = weight.abs() * gram.diagonal().sqrt()
    of_blocks = reach[:, : reach.shape[1] // m * m].unflatten(1, (-1, m)).sum(-1)
    return torch.finfo(gram.dtype).eps * reach.sum(1, keepdim=True) * of_blocks
