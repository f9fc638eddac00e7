"""The prox of 2:4 blocks in place: one pass over memory, with every block solved in registers (block.py).

The conventions (unchanged bits, signs of zeros, ties) are those of `proxsparse.reference.prox_nm`.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .block import BLOCKS_PER_LANE, CONVEX_UP_TO, descend_24, largest_finite, largest_of, shrink
from .formats import (
    INTERPRETED,
    arithmetic_of,
    is_half,
    magnitude_bits,
    pack,
    unpack,
    with_signs_of,
    word_of,
    words_in,
)
from .launch import LANES, compiler_options, programs_for, registers_for
from .wide_block import places

# A program solves one piece at a time: 2 KB, 256 blocks of a bf16 weight, fewer of wider weights. One warp solves it,
# because the largest weight of the piece, which chooses the solver, then comes from one instruction without a barrier.
# With 8 blocks per lane, the work that every lane does once is shared.
BLOCKS_PER_PIECE = 8 * LANES
# If not all blocks are small, they are solved in parts of two blocks per lane. This needs fewer registers, so that more
# warps run at once.
BLOCKS_PER_PART = BLOCKS_PER_LANE.value * LANES
NUM_WARPS = 1
# The time of the interpreter depends on the number of programs and operations, not of blocks.
BLOCKS_IN_INTERPRETER = 65536
# Weights per row of the table of a list. Long rows keep the table small; short rows waste less work at the end.
WEIGHTS_PER_ROW = 2**18
TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def magnitudes(words, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """|w| of every block."""
    return unpack(words & magnitude_bits(dtype), dtype, BLOCKS)


@triton.jit
def prox_part(words_ptr, words, start, reg_lambda, largest, BLOCKS: tl.constexpr, dtype: tl.constexpr):
    """The prox of BLOCKS blocks; `largest` is lambda times the largest weight of the finite blocks, or more."""
    word = start + tl.arange(0, words_in(BLOCKS, dtype))
    old = tl.load(words_ptr + word, mask=word < words, other=0)
    v0, v1, v2, v3 = magnitudes(old, dtype, BLOCKS)
    w0, w1, w2, w3 = shrink(v0, v1, v2, v3, reg_lambda, largest, is_half(dtype), 2 if is_half(dtype) else 1)
    new = with_signs_of(old, pack(w0, w1, w2, w3, dtype, BLOCKS), dtype)
    tl.store(words_ptr + word, new, mask=word < words)


@triton.jit
def load_words(words_ptr, words, BLOCKS: tl.constexpr, dtype: tl.constexpr):
    """BLOCKS blocks from words_ptr on, of which `words` words exist (none if words <= 0); the rest are zeros."""
    word = tl.arange(0, words_in(BLOCKS, dtype))
    return tl.load(words_ptr + word, mask=word < words, other=0)


@triton.jit
def prox_piece(
    old, words_ptr, words, reg_lambda, BLOCKS: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """The prox of a piece, `old`, which has been loaded from words_ptr."""
    WORDS: tl.constexpr = words_in(BLOCKS, dtype)
    v0, v1, v2, v3 = magnitudes(old, dtype, BLOCKS)
    largest = reg_lambda * largest_of(v0, v1, v2, v3)
    if largest <= CONVEX_UP_TO:
        w0, w1, w2, w3 = descend_24(v0, v1, v2, v3, reg_lambda, largest, is_half(dtype))
        new = with_signs_of(old, pack(w0, w1, w2, w3, dtype, BLOCKS), dtype)
        word = tl.arange(0, WORDS)
        tl.store(words_ptr + word, new, mask=word < words)
    else:
        if largest != largest or largest == float("inf"):
            largest = reg_lambda * largest_finite(v0, v1, v2, v3)
        # In parts, which are loaded again from the cache: fewer blocks at once leave registers for more warps.
        for part in range(PARTS):
            prox_part(words_ptr, words, part * (WORDS // PARTS), reg_lambda, largest, BLOCKS // PARTS, dtype)


@triton.jit
def piece_of_weight(piece, weight_ptr, size, BLOCKS: tl.constexpr, dtype: tl.constexpr):
    """(pointer to the first word of a piece, words from there on); words <= 0: no piece."""
    words = size // (4 * BLOCKS // words_in(BLOCKS, dtype))
    start = piece.to(tl.int64) * words_in(BLOCKS, dtype)  # a weight may have more than 2^31 elements
    left = tl.minimum(words - start, words_in(BLOCKS, dtype)).to(tl.int32)
    return weight_ptr.to(tl.pointer_type(word_of(dtype)), bitcast=True) + start, left


# In both kernels, a program solves every num_programs-th piece. It loads the next piece before it solves the current
# one, so that it does not wait for memory. Pieces do not overlap, so no load reads what a store has changed.


@triton.jit(do_not_specialize=["total"])
def prox_24_kernel(
    weight_ptr,  # [size], contiguous, 16-byte aligned; changed in place
    size,
    total,  # pieces, BLOCKS blocks each
    reg_lambda: tl.float64,  # > 0; without the annotation Triton would pass fp32
    BLOCKS: tl.constexpr,  # blocks per piece
    PARTS: tl.constexpr,  # parts of a piece, if not all of its blocks are small
):
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    arithmetic: tl.constexpr = arithmetic_of(dtype)
    reg_lambda = tl.full((), reg_lambda, arithmetic)
    first, programs = tl.program_id(0), tl.num_programs(0)
    words_ptr, words = piece_of_weight(first, weight_ptr, size, BLOCKS, dtype)
    old = load_words(words_ptr, words, BLOCKS, dtype)
    for piece in range(first, total, programs):
        next_ptr, next_words = piece_of_weight(piece + programs, weight_ptr, size, BLOCKS, dtype)
        following = load_words(next_ptr, next_words, BLOCKS, dtype)
        prox_piece(old, words_ptr, words, reg_lambda, BLOCKS, PARTS, dtype)
        old, words_ptr, words = following, next_ptr, next_words


@triton.jit
def piece_of_table(piece, total, table_ptr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr):
    """(pointer to the first word of a piece, words from there on, lambda); words <= 0: no piece."""
    arithmetic: tl.constexpr = arithmetic_of(dtype)
    row_ptr, exists = table_ptr + piece // PIECES * 3, piece < total
    words_ptr = tl.multiple_of(tl.load(row_ptr, mask=exists, other=0).to(tl.pointer_type(word_of(dtype))), 16)
    weights = tl.multiple_of(tl.load(row_ptr + 1, mask=exists, other=0).to(tl.int32), 16)
    reg_lambda = tl.load(row_ptr + 2, mask=exists, other=0).to(tl.float64, bitcast=True).to(arithmetic)
    start = piece % PIECES * words_in(BLOCKS, dtype)
    return words_ptr + start, weights // (4 * BLOCKS // words_in(BLOCKS, dtype)) - start, reg_lambda


@triton.jit(do_not_specialize=["total"])
def prox_list_kernel(
    table_ptr,  # int64 [rows, 3]: address of the first weight, how many (a multiple of 16), bits of lambda
    total,  # pieces in all rows
    PIECES: tl.constexpr,  # pieces per row, BLOCKS blocks each
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    dtype: tl.constexpr,  # of all weights
):
    first, programs = tl.program_id(0), tl.num_programs(0)
    words_ptr, words, reg_lambda = piece_of_table(first, total, table_ptr, PIECES, BLOCKS, dtype)
    old = load_words(words_ptr, words, BLOCKS, dtype)
    for piece in range(first, total, programs):
        next_ptr, next_words, next_lambda = piece_of_table(piece + programs, total, table_ptr, PIECES, BLOCKS, dtype)
        following = load_words(next_ptr, next_words, BLOCKS, dtype)
        if words > 0:
            prox_piece(old, words_ptr, words, reg_lambda, BLOCKS, PARTS, dtype)
        old, words_ptr, words, reg_lambda = following, next_ptr, next_words, next_lambda


# ---------------------------------------------------------------------------------------------- the launchers


def unit_of(reg_lambda: float, m: int) -> float:
    """The unit of the prox for m > 4, lambda^(1/(m-3)); finite and positive in float32."""
    return min(max(reg_lambda, 2.0**-126), 2.0**127) ** (1 / (m - 3))


def rows_and_blocks(weight: torch.Tensor, scale: torch.Tensor | None, m: int, blocks: int) -> tuple[int, int, int]:
    """(columns, programs per row, blocks per program): for blocks of 4 without a scale, the whole weight is one row.

    `blocks` is the number of blocks of 4 per program on a GPU; blocks of more weights take two or four times as much.
    """
    columns = weight.numel() if scale is None and m == 4 else weight.shape[-1]
    in_row = triton.cdiv(columns, m)
    blocks = blocks_per_program(weight, in_row) if INTERPRETED else blocks * 4 // places(m)
    return columns, triton.cdiv(columns, m * blocks), blocks


def blocks_per_program(weight: torch.Tensor, blocks: int) -> int:
    """Blocks per piece for a weight with `blocks` blocks per row: 2 KB of the weight."""
    if INTERPRETED:
        return max(8, min(triton.next_power_of_2(blocks), BLOCKS_IN_INTERPRETER))
    return BLOCKS_PER_PIECE * 2 // weight.dtype.itemsize


def parts_of_piece(blocks: int) -> int:
    """The number of parts in which a piece is solved if not all of its blocks are small."""
    return 4 if INTERPRETED else max(2, blocks // BLOCKS_PER_PART)


def start(kernel, arguments: tuple, weight: torch.Tensor, total: int, blocks: int, **constants) -> None:
    """Launches a kernel of this file for `total` pieces of `blocks` blocks of weights like `weight`."""
    registers = registers_for(weight)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        kernel[(programs_for(weight.device, total, registers),)](
            *arguments,
            BLOCKS=blocks,
            PARTS=parts_of_piece(blocks),
            num_warps=NUM_WARPS,
            **constants,
            **compiler_options(registers),
        )


def prox_24_(weight: torch.Tensor, reg_lambda: float) -> None:
    """W <- argmin_V 1/2 ||V - W||_F^2 + lambda * Reg_{2:4}(V), in place.

    Reg_{2:4}(V) sums e_3(|v|) over the blocks of 4 (ProxSparse, equations 4 and 7); the minimiser is global.
    Arithmetic is fp64 for float64 and fp32 otherwise, rounded once to the dtype of the weight.

    Args:
        weight: [..., in_features], contiguous, in_features a multiple of 4; float32, bfloat16, float16 or float64; on a
            CUDA GPU, or on the CPU if the environment had TRITON_INTERPRET=1 when triton was imported. Changed in
            place. May be empty.
        reg_lambda: lambda_1 >= 0, in units of 1 / |w|; 0 is the identity.
    """
    if reg_lambda == 0 or weight.numel() == 0:
        return
    if weight.data_ptr() % 16:  # an unaligned view; the kernel loads 16 bytes at once
        aligned = weight.clone()
        prox_24_(aligned, reg_lambda)
        weight.copy_(aligned)
        return
    size = weight.numel()
    blocks = blocks_per_program(weight, size // 4)
    total = triton.cdiv(size, 4 * blocks)
    start(prox_24_kernel, (weight, size, total, float(reg_lambda)), weight, total, blocks)


def prox_list_24_(weights: Sequence[torch.Tensor], reg_lambdas: Sequence[float]) -> None:
    """`prox_24_` for each weight with its own lambda, in one launch, in place.

    The kernel reads a table of addresses, sizes and lambdas (24 bytes for 2^18 weights: 0.6 MB for 6.5 billion), which
    is copied from pinned memory without waiting for the GPU and reused until one of its entries changes. A weight
    whose size or address is not a multiple of 16 is solved in a separate launch.

    Args:
        weights: as for `prox_24_`, all of one dtype and on one device; they must not overlap.
        reg_lambdas: one for each weight.
    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would read a table that is freed after a while.
    """
    if weights and weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("prox_nm_list_ cannot be captured in a CUDA graph; capture prox_nm_ for each weight")
    entries = []
    for weight, reg_lambda in zip(weights, reg_lambdas, strict=True):
        if weight.numel() % 16 or weight.data_ptr() % 16:
            prox_24_(weight, reg_lambda)
        elif reg_lambda != 0 and weight.numel() != 0:
            entries.append((weight.data_ptr(), weight.numel(), float(reg_lambda)))
    if not entries:
        return
    device, dtype = weights[0].device, weights[0].dtype
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    table = table_of(tuple(entries), dtype.itemsize, device, stream)
    blocks = blocks_per_program(weights[0], WEIGHTS_PER_ROW // 4)
    pieces = triton.cdiv(WEIGHTS_PER_ROW, 4 * blocks)
    total = len(table) * pieces
    constants = {"PIECES": pieces, "dtype": TRITON_DTYPE[dtype]}
    start(prox_list_kernel, (table, total), weights[0], total, blocks, **constants)


@functools.lru_cache(maxsize=8)
def table_of(entries: tuple, itemsize: int, device: torch.device, stream: torch.Stream | None) -> torch.Tensor:
    """The table of prox_list_kernel, int64 [rows, 3]: WEIGHTS_PER_ROW weights of a tensor per row, fewer in its last.

    Args:
        entries: (address, number of weights, lambda) for each weight.
        itemsize: bytes per weight.
        stream: the stream that copies and reads the table; on another stream, the copy might not be complete.
    """
    addresses, sizes, reg_lambdas = zip(*entries, strict=True)
    addresses, sizes = torch.tensor(addresses), torch.tensor(sizes)
    reg_lambdas = torch.tensor(reg_lambdas, dtype=torch.float64)
    rows = (sizes + WEIGHTS_PER_ROW - 1) // WEIGHTS_PER_ROW
    entry = torch.repeat_interleave(torch.arange(len(entries)), rows)
    first = (torch.arange(len(entry)) - (rows.cumsum(0) - rows)[entry]) * WEIGHTS_PER_ROW
    columns = (
        addresses[entry] + first * itemsize,
        (sizes[entry] - first).clamp_max(WEIGHTS_PER_ROW),
        reg_lambdas[entry].view(torch.int64),
    )
    table = torch.stack(columns, dim=1)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
