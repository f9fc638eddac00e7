"""The packed format of 2:4 weights, in plain torch: kept values and their 2-bit places, independent of the hardware.

A row of in_features weights becomes k = in_features / 2 values, in order of their places, and ceil(k / 4) bytes of
indices. Value j of the row belongs to block j // 2, at place (indices[j // 4] >> 2 * (j % 4)) & 3. Bits after the last
place are 0. The indices of a block are 4 bits, i0 | i1 << 2 with i0 < i1; a packed bf16 weight takes 9/16 of the dense
one.
"""

import torch
from torch import Tensor

from proxsparse.patterns import NMPattern, check_dtype
from proxsparse.reference.quantize import INTEGERS, check_quantized, columns

PATTERN = NMPattern(2, 4)


def pack_nm(weight: Tensor) -> tuple[Tensor, Tensor]:
    """2:4 weight [..., in_features] -> values [..., k], uint8 indices [..., ceil(k / 4)].

    Nonzeros (and NaN) are kept first, then -0.0, then +0.0, each in order of their places. So `unpack_nm` restores
    every nonzero bit for bit, and -0.0 if the block has fewer than two nonzeros.

    Raises:
        ValueError: in_features is not a multiple of 4, the dtype is not floating point, or a block has more than two
            nonzeros; the message names the first such block.
    """
    check_dtype(weight, "weight")
    blocks = PATTERN.blocks(weight)
    refuse_infeasible(weight, PATTERN)
    rank = torch.where(blocks != 0, 0, torch.where(blocks.signbit(), 1, 2))
    places = rank.argsort(dim=-1, stable=True)[..., : PATTERN.n].sort(dim=-1).values
    # as integers: moving floats could change the bits of a NaN
    values = blocks.view(INTEGERS[weight.itemsize]).gather(-1, places).view(weight.dtype)
    return values.flatten(-2), pack_places(places.flatten(-2))


def unpack_nm(values: Tensor, indices: Tensor) -> Tensor:
    """The inverse of `pack_nm`: [..., k] and [..., ceil(k / 4)] -> [..., in_features]. Shapes must fit."""
    places = unpack_places(indices, values.shape[-1]).long().unflatten(-1, (-1, PATTERN.n))
    kept = values.view(INTEGERS[values.itemsize]).unflatten(-1, (-1, PATTERN.n))
    blocks = kept.new_zeros((*kept.shape[:-1], PATTERN.m)).scatter_(-1, places, kept)
    return blocks.flatten(-2).view(values.dtype)


def empty(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors for the results of `pack_nm`, whose content is arbitrary."""
    *leading, columns = weight.shape
    return weight.new_empty((*leading, columns // 2)), weight.new_empty((*leading, -(-columns // 8)), dtype=torch.uint8)


def empty_weight(values: Tensor) -> Tensor:
    """A tensor for the result of `unpack_nm`, whose content is arbitrary."""
    return values.new_empty((*values.shape[:-1], 2 * values.shape[-1]))


def pack_places(places: Tensor) -> Tensor:
    """int64 [..., k], each 0 to 3 -> uint8 [..., ceil(k / 4)], the first in the lowest bits."""
    padded = torch.nn.functional.pad(places, (0, -places.shape[-1] % 4)).unflatten(-1, (-1, 4))
    shifts = torch.arange(0, 8, 2, device=places.device)
    return (padded << shifts).sum(-1).to(torch.uint8)


def unpack_places(indices: Tensor, k: int) -> Tensor:
    """The inverse of `pack_places`: uint8 [..., ceil(k / 4)] -> uint8 [..., k]."""
    shifts = torch.arange(0, 8, 2, device=indices.device, dtype=torch.uint8)
    return (indices.unsqueeze(-1) >> shifts & 3).flatten(-2)[..., :k]


def refuse_infeasible(weight: Tensor, pattern: NMPattern) -> None:
    """Raises ValueError for a weight with more than n nonzeros in some block."""
    wrong = ~pattern.feasible_blocks(weight)
    if count := int(wrong.sum()):
        raise ValueError(
            f"weight of shape {list(weight.shape)}: {count} of {wrong.numel()} blocks have more than {pattern.n} "
            f"nonzeros, the first is {first_block(wrong)}; prune it to {pattern} first"
        )


def check_packed(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> None:
    """Raises ValueError for tensors that `pack_nm` and `quantize_nm` cannot have returned; kernels do not check them.

    Args:
        values, indices: tensors of any origin, such as a file; for the format see the top of this module.
        scales: of values that are codes, see `reference.quantize`.
    """
    check_dtype(values, "values") if scales is None else check_quantized(values, scales)
    k = columns(values) // 2 if values.ndim else 0
    expected = [*values.shape[:-1], -(-k // 4)]
    if not values.ndim or k % PATTERN.n:
        raise ValueError(f"values of shape {list(values.shape)}: the last dimension must be a multiple of {PATTERN.n}")
    if indices.dtype != torch.uint8 or list(indices.shape) != expected or indices.device != values.device:
        raise ValueError(
            f"indices are {indices.dtype} {list(indices.shape)} on {indices.device}, but values of shape "
            f"{list(values.shape)} need torch.uint8 {expected} on {values.device}"
        )
    if torch.compiler.is_compiling():  # the contents of a tensor are not known in a graph
        return
    places = unpack_places(indices, 4 * indices.shape[-1])
    if bool(places[..., k:].any()):
        raise ValueError("indices: bits after the last place of a row must be 0; the file is damaged")
    blocks = places[..., :k].unflatten(-1, (-1, PATTERN.n))
    wrong = (blocks[..., 1:] <= blocks[..., :-1]).any(-1)
    if bool(wrong.any()):
        raise ValueError(
            f"indices out of order: {first_block(wrong)} has the places {blocks[wrong][0].tolist()}, which must be "
            "ascending; the file is damaged"
        )


def first_block(wrong: Tensor) -> str:
    """The first True in bool [..., blocks]: "block 3 of row 7", or of row "0, 7" in a batch of matrices."""
    *row, block = wrong.nonzero()[0].tolist()
    return f"block {block} of row {', '.join(map(str, row))}"
