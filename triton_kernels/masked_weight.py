"""W0 under the mask of a learned weight, for 2:4, 4:6, 6:8 and 8:10 blocks: one pass over memory."""

import torch
import triton
import triton.language as tl

from .block import sort4, unsort4
from .formats import arithmetic_of, join4, split4, widened
from .launch import LANES, weights_of_piece
from .prox import rows_and_blocks
from .wide_block import kept

# Four blocks per lane, and one warp, whose lanes exchange numbers without shared memory. Not measured on a GPU.
BLOCKS_PER_PROGRAM, NUM_WARPS = 4 * LANES, 1


@triton.jit
def kept4(score, BLOCKS: tl.constexpr):
    """Whether each of the scores [4 * BLOCKS] is among the two largest of its block; a NaN counts as infinity."""
    x0, x1, x2, x3 = split4(tl.where(score == score, score, float("inf")), BLOCKS)
    _, _, _, _, ab1, cd1, bc1, ab2, cd2, bc2 = sort4(x0, x1, x2, x3)
    last = tl.zeros((BLOCKS,), tl.int32)
    k0, k1, k2, k3 = unsort4(last + 1, last + 1, last, last, ab1, cd1, bc1, ab2, cd2, bc2)
    return join4(k0, k1, k2, k3, BLOCKS) != 0


@triton.jit
def under_mask(w, pretrained, c, column, columns, BLOCKS: tl.constexpr, M: tl.constexpr):
    """W0, `pretrained`, where the score c * w * sign(W0) is among the M - 2 largest of its block, else +0.0."""
    w0 = widened(pretrained, w.dtype)
    score = w if c is None else w * c
    # the sign of W0; a NaN has none, as in torch
    score = score * ((w0 > 0).to(w.dtype) - (w0 < 0).to(w.dtype))
    # the remainder of a row is kept
    keeps = kept4(score, BLOCKS) if M == 4 else kept(score, M, BLOCKS) | (column >= columns // M * M)
    return tl.where(keeps, pretrained, 0.0)


@triton.jit
def masked_weight_kernel(
    out_ptr,  # [numel], dtype of W0; overwritten. All tensors are contiguous
    weight_ptr,  # [numel]
    pretrained_ptr,  # W0, [numel], dtype of the weight, or bfloat16 for a float32 weight
    scale_ptr,  # c, [columns], the arithmetic's dtype, or None
    columns,  # in_features; without a scale, the whole weight is one row
    pieces,  # programs per row
    BLOCKS: tl.constexpr,  # blocks per program, all in one row
    M: tl.constexpr = 4,  # M - 2 weights of every M are kept
):
    arithmetic: tl.constexpr = arithmetic_of(weight_ptr.dtype.element_ty)
    index, column, inside = weights_of_piece(tl.program_id(0), columns, pieces, scale_ptr is not None, BLOCKS, M)
    w = widened(tl.load(weight_ptr + index, mask=inside, other=0.0), arithmetic)
    pretrained = tl.load(pretrained_ptr + index, mask=inside, other=0.0)
    c = None
    if scale_ptr is not None:
        c = tl.load(scale_ptr + column, mask=inside, other=1.0)
    tl.store(out_ptr + index, under_mask(w, pretrained, c, column, columns, BLOCKS, M), mask=inside)


def masked_weight_nm_(
    out: torch.Tensor, weight: torch.Tensor, pretrained: torch.Tensor, scale: torch.Tensor | None, m: int
) -> None:
    """out <- W0 where the score c * w * sign(W0) is among the m - 2 largest of its block of m, else +0.0.

    Shapes are those of `proxsparse.ops.masked_weight_`; all tensors are contiguous.

    Args:
        weight: on a CUDA GPU, or on the CPU if the environment had TRITON_INTERPRET=1 when triton was imported.
        out, pretrained: of one dtype: that of the weight, or bfloat16 for a float32 weight.
        scale: c, [in_features], in float32 (float64 for a float64 weight), or None.
        m: 4, 6, 8 or 10.
    """
    if weight.numel() == 0:
        return
    columns, pieces, blocks = rows_and_blocks(weight, scale, m, BLOCKS_PER_PROGRAM)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        masked_weight_kernel[(weight.numel() // columns * pieces,)](
            out, weight, pretrained, scale, columns, pieces, BLOCKS=blocks, M=m, num_warps=NUM_WARPS
        )
