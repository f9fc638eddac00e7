"""The prox of 2:4 and 1:4 blocks in place: one pass over memory, every block solved in registers (block.py).

The conventions (what keeps its bits, which zeros, which ties) are those of `proxsparse.reference.prox_nm`.
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
    magnitude_bits_of,
    pack,
    split4,
    unpack,
    with_signs_of,
    word_of,
    words_in,
)

# Programs of one warp: the largest weight of a program, which chooses the solver, then comes from one instruction
# without a barrier, and is the largest of few. 8 blocks a lane share what every lane does once, and keep 64 bytes of a
# bf16 weight in flight for each.
BLOCKS_PER_PROGRAM, NUM_WARPS = 256, 1
# Blocks that are not all small are solved in parts, for the sake of the registers of all programs.
PARTS = tl.constexpr(4)
# The interpreter pays per program and operation, not per block.
BLOCKS_IN_INTERPRETER = 65536
# Weights a row of the table of a list covers: long rows keep the table small, short ones waste few programs at the end.
WEIGHTS_PER_ROW = 2**18
TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def scale_of(scale_ptr, column, columns, BLOCKS: tl.constexpr, arithmetic: tl.constexpr):
    """|c| of the four weights of every block from `column` on."""
    place = column + tl.arange(0, 4 * BLOCKS)
    scale = tl.load(scale_ptr + place, mask=place < columns, other=1.0).to(arithmetic)
    return split4(tl.abs(scale), BLOCKS)


@triton.jit
def magnitudes(words, scale_ptr, column, columns, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """|c * w| of every block."""
    m0, m1, m2, m3 = unpack(words & magnitude_bits_of(dtype), dtype, BLOCKS)
    if scale_ptr is not None:
        c0, c1, c2, c3 = scale_of(scale_ptr, column, columns, BLOCKS, arithmetic_of(dtype))
        m0, m1, m2, m3 = m0 * c0, m1 * c1, m2 * c2, m3 * c3
    return m0, m1, m2, m3


@triton.jit
def packed(old, v0, v1, v2, v3, w0, w1, w2, w3, scale_ptr, column, columns, dtype: tl.constexpr, BLOCKS: tl.constexpr):
    """The words of new weights: |c * w| went from v to w; the bits and signs of `old` where they stay."""
    if scale_ptr is not None:
        m0, m1, m2, m3 = unpack(old & magnitude_bits_of(dtype), dtype, BLOCKS)
        c0, c1, c2, c3 = scale_of(scale_ptr, column, columns, BLOCKS, arithmetic_of(dtype))
        w0, w1 = tl.where(w0 < v0, w0 / c0, m0), tl.where(w1 < v1, w1 / c1, m1)
        w2, w3 = tl.where(w2 < v2, w2 / c2, m2), tl.where(w3 < v3, w3 / c3, m3)
    return with_signs_of(old, pack(w0, w1, w2, w3, dtype, BLOCKS), dtype)


@triton.jit
def prox_part(
    words_ptr, words, start, scale_ptr, column, columns, reg_lambda, gain, largest,
    N: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The prox of BLOCKS blocks, of which no finite one exceeds `largest`, in units of 1 / lambda."""
    word = start + tl.arange(0, words_in(BLOCKS, dtype))
    old = tl.load(words_ptr + word, mask=word < words, other=0)
    v0, v1, v2, v3 = magnitudes(old, scale_ptr, column, columns, dtype, BLOCKS)
    w0, w1, w2, w3 = shrink(v0, v1, v2, v3, reg_lambda, gain, largest, N, is_half(dtype), 2 if is_half(dtype) else 1)
    new = packed(old, v0, v1, v2, v3, w0, w1, w2, w3, scale_ptr, column, columns, dtype, BLOCKS)
    tl.store(words_ptr + word, new, mask=word < words)


@triton.jit
def prox_program(
    words_ptr, words, start, scale_ptr, column, columns, reg_lambda, gain,
    N: tl.constexpr, BLOCKS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The prox of the BLOCKS blocks from word `start` on, as far as there are `words`."""
    WORDS: tl.constexpr = words_in(BLOCKS, dtype)
    word = start + tl.arange(0, WORDS)
    old = tl.load(words_ptr + word, mask=word < words, other=0)
    v0, v1, v2, v3 = magnitudes(old, scale_ptr, column, columns, dtype, BLOCKS)
    largest = reg_lambda * largest_of(v0, v1, v2, v3)
    if (N == 2) & (largest <= CONVEX_UP_TO):
        w0, w1, w2, w3 = descend_24(v0, v1, v2, v3, reg_lambda, largest, is_half(dtype))
        new = packed(old, v0, v1, v2, v3, w0, w1, w2, w3, scale_ptr, column, columns, dtype, BLOCKS)
        tl.store(words_ptr + word, new, mask=word < words)
    else:
        if largest != largest or largest == float("inf"):
            largest = reg_lambda * largest_finite(v0, v1, v2, v3)
        for part in range(PARTS):  # again from the cache: fewer blocks at once leave more registers for each
            first, place = start + part * (WORDS // PARTS), column + part * (4 * BLOCKS // PARTS)
            prox_part(
                words_ptr, words, first, scale_ptr, place, columns, reg_lambda, gain, largest, N, BLOCKS // PARTS, dtype
            )


@triton.jit
def prox_n4_kernel(
    weight_ptr,  # [numel], contiguous, at a multiple of 16 bytes; changed in place
    scale_ptr,  # [columns] or None
    columns,  # in_features; without a scale all of the weight is one row
    pieces,  # programs a row
    reg_lambda: tl.float64,  # > 0; the annotation keeps Triton from passing it as fp32
    gain: tl.float64,  # 1 / (1 - lambda), or 0 from lambda = 1 on: the launcher's double tells 0.99999999 from 1
    N: tl.constexpr,  # weights kept of every 4: 1 or 2
    BLOCKS: tl.constexpr,  # blocks a program, all of one row
):
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    arithmetic: tl.constexpr = arithmetic_of(dtype)
    words = columns // (4 * BLOCKS // words_in(BLOCKS, dtype))  # a row
    row_ptr = weight_ptr.to(tl.pointer_type(word_of(dtype)), bitcast=True)
    piece = tl.program_id(0)
    if scale_ptr is not None:
        row = piece // pieces
        piece -= row * pieces
        row_ptr += row.to(tl.int64) * words  # a weight may have more than 2^31 elements
    start = piece.to(tl.int64) * words_in(BLOCKS, dtype)
    column = piece * (4 * BLOCKS)
    reg_lambda, gain = tl.full((), reg_lambda, arithmetic), tl.full((), gain, arithmetic)
    prox_program(row_ptr + start, words - start, 0, scale_ptr, column, columns, reg_lambda, gain, N, BLOCKS, dtype)


@triton.jit
def prox_list_kernel(
    table_ptr,  # int64 [rows, 4]: address of the first weight, their number (a multiple of 16), bits of lambda and gain
    PROGRAMS: tl.constexpr,  # programs a row of the table
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    dtype: tl.constexpr,  # of all weights
):
    arithmetic: tl.constexpr = arithmetic_of(dtype)
    row_ptr = table_ptr + tl.program_id(0) // PROGRAMS * 4
    words_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(word_of(dtype))), 16)
    words = tl.multiple_of(tl.load(row_ptr + 1).to(tl.int32), 16) // (4 * BLOCKS // words_in(BLOCKS, dtype))
    reg_lambda = tl.load(row_ptr + 2).to(tl.float64, bitcast=True).to(arithmetic)
    gain = tl.load(row_ptr + 3).to(tl.float64, bitcast=True).to(arithmetic)
    start = tl.program_id(0) % PROGRAMS * words_in(BLOCKS, dtype)
    prox_program(words_ptr, words, start, None, 0, 0, reg_lambda, gain, N, BLOCKS, dtype)


# ---------------------------------------------------------------------------------------------- the launchers


def check_weight(weight: torch.Tensor, n: int) -> None:
    """Raises ValueError for what these kernels cannot serve."""
    if n not in (1, 2):
        raise ValueError(f"n={n}: these kernels serve 2:4 and 1:4; use the reference backend for other patterns")
    if weight.ndim == 0 or weight.shape[-1] % 4 or not weight.is_contiguous():
        raise ValueError(
            f"weight of shape {list(weight.shape)}, strides {list(weight.stride())}: it must be contiguous with a last "
            "dimension that is a multiple of 4; call weight.contiguous() or exclude this layer"
        )


def gain_of(reg_lambda: float) -> float:
    """1 / (1 - lambda), which 1:4 needs in the launcher's double; 0 from lambda = 1 on, where one weight stays."""
    return 1 / (1 - reg_lambda) if reg_lambda < 1 else 0.0


def blocks_per_program(weight: torch.Tensor, blocks: int) -> int:
    """For a weight with `blocks` blocks in a row; half as many in float64, which takes twice the registers."""
    if INTERPRETED:
        return max(PARTS.value * BLOCKS_PER_LANE.value, min(triton.next_power_of_2(blocks), BLOCKS_IN_INTERPRETER))
    return BLOCKS_PER_PROGRAM // 2 if weight.dtype == torch.float64 else BLOCKS_PER_PROGRAM


def prox_n4_(weight: torch.Tensor, reg_lambda: float, n: int, scale: torch.Tensor | None = None) -> None:
    """W <- argmin_V 1/2 ||V - c * W||_F^2 + lambda * Reg_{n:4}(V), divided back by c, in place; n is 1 or 2.

    Reg_{n:4}(V) sums e_{n+1}(|v|) over the blocks of 4 (ProxSparse, equations 4 and 7); the minimiser is global.
    Arithmetic is fp64 for float64 and fp32 otherwise, rounded once to the dtype of the weight.

    Args:
        weight: [..., in_features], contiguous; float32, bfloat16, float16 or float64; on a CUDA GPU, or on the CPU if
            the environment had TRITON_INTERPRET=1 when triton was imported. Changed in place. May be empty.
        reg_lambda: lambda_1 >= 0, in units of 1 / |c * w|^(n-1); 0 is the identity.
        scale: c, [in_features], positive (only |c| counts), floating point, on the device of `weight`; None means 1.
    Raises:
        ValueError: n is neither 1 nor 2, in_features is no multiple of 4, or the weight is not contiguous.
    """
    check_weight(weight, n)
    if reg_lambda == 0 or weight.numel() == 0:
        return
    if weight.data_ptr() % 16:  # a view that starts anywhere: the kernel loads 16 bytes at once
        aligned = weight.clone()
        prox_n4_(aligned, reg_lambda, n, scale)
        weight.copy_(aligned)
        return
    columns = weight.numel() if scale is None else weight.shape[-1]
    blocks = blocks_per_program(weight, columns // 4)
    pieces = triton.cdiv(columns, 4 * blocks)
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        prox_n4_kernel[(weight.numel() // columns * pieces,)](
            weight,
            None if scale is None else scale.contiguous(),
            columns,
            pieces,
            float(reg_lambda),
            gain_of(reg_lambda),
            N=n,
            BLOCKS=blocks,
            num_warps=NUM_WARPS,
        )


def prox_list_n4_(weights: Sequence[torch.Tensor], reg_lambdas: Sequence[float], n: int) -> None:
    """`prox_n4_` for each weight with its own lambda, in one launch, in place.

    The launch reads a table of addresses, sizes and lambdas. It is copied to the GPU from pinned memory without waiting
    for the GPU (32 bytes for 2^18 weights: 0.8 MB for 6.5 billion), and kept as long as nothing in it changes.
    A weight whose size or address is no multiple of 16 gets a launch of its own.

    Args:
        weights: as for `prox_n4_`, all of one dtype and on one device; they must not overlap.
        reg_lambdas: one a weight.
    Raises:
        ValueError: as `prox_n4_`, or the weights differ in dtype or device.
    """
    entries = []
    for weight, reg_lambda in zip(weights, reg_lambdas, strict=True):
        check_weight(weight, n)
        if (weight.dtype, weight.device) != (weights[0].dtype, weights[0].device):
            raise ValueError(
                f"a {weight.dtype} weight on {weight.device} in a list of {weights[0].dtype} on {weights[0].device}: "
                "one launch serves one dtype and one device; make several lists"
            )
        if weight.numel() % 16 or weight.data_ptr() % 16:
            prox_n4_(weight, reg_lambda, n)
        elif reg_lambda != 0 and weight.numel() != 0:
            entries.append((weight.data_ptr(), weight.numel(), float(reg_lambda)))
    if not entries:
        return
    device, dtype = weights[0].device, weights[0].dtype
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    table = table_of(tuple(entries), dtype.itemsize, device, stream)
    blocks = blocks_per_program(weights[0], WEIGHTS_PER_ROW // 4)
    programs = WEIGHTS_PER_ROW // (4 * blocks)
    with torch.cuda.device_of(weights[0]):
        prox_list_kernel[(len(table) * programs,)](
            table, PROGRAMS=programs, N=n, BLOCKS=blocks, dtype=TRITON_DTYPE[dtype], num_warps=NUM_WARPS
        )


@functools.lru_cache(maxsize=8)
def table_of(entries: tuple, itemsize: int, device: torch.device, stream: int) -> torch.Tensor:
    """What prox_list_kernel reads, int64 [rows, 4]: WEIGHTS_PER_ROW weights of one tensor a row, fewer in its last.

    Args:
        entries: (address, number of weights, lambda) of every weight.
        itemsize: bytes of a weight.
        stream: that the table is made and read on; on another one it might not have arrived yet.
    """
    addresses, sizes, reg_lambdas = zip(*entries, strict=True)
    addresses, sizes = torch.tensor(addresses), torch.tensor(sizes)
    gains = torch.tensor([gain_of(reg_lambda) for reg_lambda in reg_lambdas], dtype=torch.float64)
    reg_lambdas = torch.tensor(reg_lambdas, dtype=torch.float64)
    rows = (sizes + WEIGHTS_PER_ROW - 1) // WEIGHTS_PER_ROW
    entry = torch.repeat_interleave(torch.arange(len(entries)), rows)
    first = (torch.arange(len(entry)) - (rows.cumsum(0) - rows)[entry]) * WEIGHTS_PER_ROW
    columns = (
        addresses[entry] + first * itemsize,
        (sizes[entry] - first).clamp_max(WEIGHTS_PER_ROW),
        reg_lambdas[entry].view(torch.int64),
        gains[entry].view(torch.int64),
    )
    table = torch.stack(columns, dim=1)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
