"""The prox of blocks of 6, 8 or 10 weights in place; the conventions are those of prox.py."""

import torch
import triton
import triton.language as tl

from .formats import arithmetic_of, is_half, round_to_nearest, widened
from .launch import weights_of_piece
from .prox import BLOCKS_PER_PART, NUM_WARPS, rows_and_blocks, unit_of
from .wide_block import prox_wide


# Triton 3.8 does not compile blocks of 8 half numbers (PassManager::run failed) if it knows that 16 divides `columns`.
@triton.jit(do_not_specialize=["columns"])
def prox_wide_kernel(
    weight_ptr,  # [numel], contiguous; changed in place
    columns,  # in_features
    pieces,  # programs per row
    unit: tl.float64,  # lambda^(1 / (M - 3)); without the annotation Triton would pass fp32
    M: tl.constexpr,  # M - 2 weights of every M are kept
    BLOCKS: tl.constexpr,  # blocks per program, all in one row
):
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    arithmetic: tl.constexpr = arithmetic_of(dtype)
    index, _, inside = weights_of_piece(tl.program_id(0), columns, pieces, False, BLOCKS, M)
    old = tl.load(weight_ptr + index, mask=inside, other=0.0)
    w = widened(old, arithmetic)
    new = prox_wide(w, None, tl.full((), unit, arithmetic), M, BLOCKS, is_half(dtype))
    tl.store(weight_ptr + index, round_to_nearest(new, dtype), mask=inside & (new != w))


def prox_wide_(weight: torch.Tensor, reg_lambda: float, m: int) -> None:
    """`prox_24_` for blocks of m = 6, 8 or 10, of which m - 2 weights are kept; a row may end in a remainder."""
    if reg_lambda == 0 or weight.numel() == 0:
        return
    columns, pieces, blocks = rows_and_blocks(weight, None, m, BLOCKS_PER_PART)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        prox_wide_kernel[(weight.numel() // columns * pieces,)](
            weight, columns, pieces, unit_of(reg_lambda, m), M=m, BLOCKS=blocks, num_warps=NUM_WARPS
        )
