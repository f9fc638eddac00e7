"""AdamW, the scale and the exact prox in one pass over all tensors.

One launch serves many weights, and can also write W0 under the mask of the new weight. The equations are in
`proxsparse.reference.adamw_prox`; block.py has the prox of a block.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .block import largest_finite, shrink
from .formats import arithmetic_of, is_half, join4, round_stochastically, round_to_nearest, split4, widened
from .launch import LANES, weights_of_piece
from .masked_weight import under_mask
from .prox import TRITON_DTYPE, rows_and_blocks, unit_of
from .wide_block import prox_wide

# Two blocks per lane: a step reads and writes 40 to 110 bytes per block, so registers are scarce but time is not.
BLOCKS_PER_PROGRAM, NUM_WARPS = 2 * LANES, 1


@triton.jit
def mix(x):
    """A bijection of uint32 words after which every bit depends on all bits of x."""
    x ^= x >> 16
    x *= tl.full((), 0x7FEB352D, tl.uint32)
    x ^= x >> 15
    x *= tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def random_bits(index, seed_low, seed_high):
    """32 random bits for each flat position (int64); mix() of them gives 32 more."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    return mix(mix(low ^ seed_low.to(tl.uint32, bitcast=True)) ^ high ^ seed_high.to(tl.uint32, bitcast=True))


@triton.jit
def prox_scaled(w, c, reg_lambda, BLOCKS: tl.constexpr, PER_ACCESS: tl.constexpr):
    """[4 * BLOCKS] -> the prox of c * w, divided by c (None means 1); zeros are +0.0."""
    v = tl.abs(w if c is None else w * c)
    v0, v1, v2, v3 = split4(v, BLOCKS)
    largest = reg_lambda * largest_finite(v0, v1, v2, v3)
    x0, x1, x2, x3 = shrink(v0, v1, v2, v3, reg_lambda, largest, False, PER_ACCESS)
    shrunk = join4(x0, x1, x2, x3, BLOCKS)
    new = shrunk if c is None else shrunk / tl.abs(c)
    return tl.where(shrunk < v, tl.where((w < 0) & (new > 0), -new, new), w)


@triton.jit
def rounded(x, random, dtype: tl.constexpr):
    """x in `dtype`: rounded stochastically if `random` is given and dtype is bfloat16, else to nearest."""
    return (
        round_stochastically(x, random) if random is not None and dtype == tl.bfloat16 else round_to_nearest(x, dtype)
    )


# A row of the table is up to ROW_PIECES pieces of one weight: addresses, sizes, and the bits of float64 numbers.
ADDRESSES = ("weight", "grad", "exp_avg", "exp_avg_sq", "master", "scale", "out", "out_pretrained")
SIZES = ("columns", "pieces", "first", "total", "seed")
NUMBERS = ("decay", "rate", "root_factor", "unit")
ENTRIES = tl.constexpr(len(ADDRESSES + SIZES + NUMBERS))
FIRST = (ADDRESSES + SIZES).index("first")
ROW_PIECES = 1024  # long rows keep the table small: 136 bytes for 2^18 weights; short rows waste less work at the end


@triton.jit
def load_piece(
    row_ptr, place: tl.constexpr, index, inside, other, dtype: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """The numbers at `index` of the tensor whose address is entry `place` of a row of the table."""
    return tl.load(address(row_ptr, place, dtype, ALIGNED) + index, mask=inside, other=other)


@triton.jit
def address(row_ptr, place: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Entry `place` of a row of the table as a pointer."""
    pointer = tl.load(row_ptr + place).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def number(row_ptr, place: tl.constexpr, arithmetic: tl.constexpr):
    """Entry `place` of a row of the table as a number."""
    return tl.load(row_ptr + place).to(tl.float64, bitcast=True).to(arithmetic)


@triton.jit(do_not_specialize=["row_pieces"])
def adamw_prox_kernel(
    table_ptr,  # int64 [rows, ENTRIES]; all tensors are contiguous
    row_pieces,  # pieces of a row of the table: this many programs
    beta1: tl.float64,  # without the annotations Triton would pass fp32
    beta2: tl.float64,
    eps: tl.float64,
    dtype: tl.constexpr,  # of the weights
    grad_dtype: tl.constexpr,  # that of the weight, or bfloat16 for a float32 weight
    moment: tl.constexpr,  # the arithmetic's dtype or bfloat16
    out_dtype: tl.constexpr,  # of `out` and its W0, or None: `out` is not written
    MASTER: tl.constexpr,  # whether there are float32 masters
    SCALED: tl.constexpr,  # whether there are scales, of the arithmetic's dtype
    STOCHASTIC: tl.constexpr,  # rounding
    ALIGNED: tl.constexpr,  # whether addresses and columns are multiples of 16
    PROX: tl.constexpr,
    M: tl.constexpr,  # M - 2 weights of every M are kept
    BLOCKS: tl.constexpr,  # blocks per piece, all in one row of the weight
):
    arithmetic: tl.constexpr = arithmetic_of(dtype)
    row_ptr = table_ptr + tl.program_id(0) // row_pieces * ENTRIES
    columns, pieces = tl.load(row_ptr + 8), tl.load(row_ptr + 9).to(tl.int32)
    piece, total = (tl.load(row_ptr + 10) + tl.program_id(0) % row_pieces).to(tl.int32), tl.load(row_ptr + 11)
    seed = tl.load(row_ptr + 12)
    decay, rate = number(row_ptr, 13, arithmetic), number(row_ptr, 14, arithmetic)
    root_factor, unit = number(row_ptr, 15, arithmetic), number(row_ptr, 16, arithmetic)
    if SCALED or M > 4:
        columns = columns.to(tl.int32)  # of a row; otherwise of the whole weight
    if ALIGNED and M == 4:  # for other blocks Triton fails, as in wide_prox.py
        columns = tl.multiple_of(columns, 16)

    one_minus_beta1, one_minus_beta2 = tl.full((), 1 - beta1, arithmetic), tl.full((), 1 - beta2, arithmetic)
    beta1, beta2, eps = tl.full((), beta1, arithmetic), tl.full((), beta2, arithmetic), tl.full((), eps, arithmetic)

    index, column, inside = weights_of_piece(piece, columns, pieces, SCALED, BLOCKS, M)
    inside = inside & (piece < total)
    w = widened(load_piece(row_ptr, 0, index, inside, 0.0, dtype, ALIGNED), arithmetic)
    g = widened(load_piece(row_ptr, 1, index, inside, 0.0, grad_dtype, ALIGNED), arithmetic)
    mean = widened(load_piece(row_ptr, 2, index, inside, 0.0, moment, ALIGNED), arithmetic)
    square = widened(load_piece(row_ptr, 3, index, inside, 0.0, moment, ALIGNED), arithmetic)
    if MASTER:
        w = load_piece(row_ptr, 4, index, inside, 0.0, tl.float32, ALIGNED)
    c = None
    if SCALED:
        c = load_piece(row_ptr, 5, column, inside, 1.0, arithmetic, ALIGNED)

    if c is not None:
        g = g / c
    mean = beta1 * mean + one_minus_beta1 * g
    square = beta2 * square + one_minus_beta2 * g * g
    step = rate * mean / (tl.sqrt(square) * root_factor + eps)
    if c is not None:
        step = step / c
    w = w * decay - step
    if PROX and M > 4:
        w = prox_wide(w, c, unit, M, BLOCKS, is_half(dtype) and not MASTER)
    elif PROX:
        w = prox_scaled(w, c, unit, BLOCKS, 2 if is_half(dtype) else 1)

    weight_bits, mean_bits, square_bits = None, None, None
    if STOCHASTIC:
        random = random_bits(index, seed.to(tl.int32), (seed >> 32).to(tl.int32))
        weight_bits, mean_bits, square_bits = random >> 16, random & 0xFFFF, mix(random) & 0xFFFF
    if MASTER:
        tl.store(address(row_ptr, 4, tl.float32, ALIGNED) + index, w, mask=inside)
        weight_bits = None
    new = rounded(w, weight_bits, dtype)
    tl.store(address(row_ptr, 0, dtype, ALIGNED) + index, new, mask=inside)
    tl.store(address(row_ptr, 2, moment, ALIGNED) + index, rounded(mean, mean_bits, moment), mask=inside)
    tl.store(address(row_ptr, 3, moment, ALIGNED) + index, rounded(square, square_bits, moment), mask=inside)
    if out_dtype is not None:
        pretrained = load_piece(row_ptr, 7, index, inside, 0.0, out_dtype, ALIGNED)
        result = under_mask(widened(new, arithmetic), pretrained, c, column, columns, BLOCKS, M)
        tl.store(address(row_ptr, 6, out_dtype, ALIGNED) + index, result, mask=inside)


class Step(NamedTuple):
    """Step t of AdamW on c * w, then the prox of n:m blocks, in place; the equations are in `reference.adamw_prox`.

    Shapes, dtypes and units are those of `proxsparse.ops.adamw_prox_`; all tensors are contiguous, on a CUDA GPU, or on
    the CPU if the environment had TRITON_INTERPRET=1 when triton was imported. n:m is 2:4, 4:6, 6:8 or 8:10.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None
    scale: torch.Tensor | None  # in float32 (float64 for a float64 weight)
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    reg_lambda: float
    n: int  # n and m are ignored if reg_lambda is 0 and `out` is None
    m: int
    seed: int | None  # in [-2^63, 2^63)
    out: torch.Tensor | None = None  # becomes W0 under the mask of the new weight, as in `masked_weight_nm_`
    out_pretrained: torch.Tensor | None = None  # W0 for `out`, of its dtype

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Those in ADDRESSES."""
        return {name: getattr(self, name) for name in ADDRESSES}

    @property
    def block(self) -> int:
        """Weights per block."""
        return self.m if self.reg_lambda > 0 or self.out is not None else 4

    def constants(self) -> dict[str, object]:
        """What is equal for all weights of a launch."""
        tensors = self.tensors()
        aligned = not any(t.data_ptr() % 16 for t in tensors.values() if t is not None)
        has = {name: tensors[name] is not None for name in ("master", "scale", "out")}
        return {
            **{name: float(getattr(self, name)) for name in ("beta1", "beta2", "eps")},
            "dtype": TRITON_DTYPE[self.weight.dtype],
            "grad_dtype": TRITON_DTYPE[self.grad.dtype],
            "moment": TRITON_DTYPE[self.exp_avg.dtype],
            "out_dtype": TRITON_DTYPE[self.out.dtype] if has["out"] else None,
            "MASTER": has["master"],
            "SCALED": has["scale"],
            "STOCHASTIC": self.seed is not None,
            "ALIGNED": aligned and self.weight.ndim > 0 and self.weight.shape[-1] % 16 == 0,
            "PROX": self.reg_lambda > 0,
            "M": self.block,
        }


def adamw_prox_list_(steps: Sequence[Step]) -> None:
    """Each of the steps, with one launch for all that have the same `constants` and device.

    The kernel reads a table of addresses, sizes and numbers, which is copied from pinned memory without waiting for the
    GPU.

    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would read a table that has been freed.
    """
    launches: dict[tuple, list[Step]] = {}
    for step in steps:
        if step.weight.numel():
            launches.setdefault((step.weight.device, *step.constants().items()), []).append(step)
    for (device, *constants), same in launches.items():
        with torch.cuda.device_of(same[0].weight):
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:
            raise RuntimeError("adamw_prox_ cannot be captured in a CUDA graph; capture the passes before it")
        launch(device, dict(constants), same)


def launch(device: torch.device, constants: dict[str, object], steps: list[Step]) -> None:
    """One launch for weights with the same constants."""
    sizes = [rows_and_blocks(step.weight, step.scale, step.block, BLOCKS_PER_PROGRAM) for step in steps]
    blocks = max(size[2] for size in sizes)  # equal, except in the interpreter
    integers, numbers, totals = [], [], []
    for step, (columns, _, _) in zip(steps, sizes, strict=True):
        pieces = triton.cdiv(columns, step.block * blocks)
        totals.append(step.weight.numel() // columns * pieces)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in step.tensors().values()]
        integers.append([*addresses, columns, pieces, 0, totals[-1], step.seed or 0])
        unit = step.reg_lambda if step.block == 4 else unit_of(step.reg_lambda, step.block)
        bias1, bias2 = 1 - step.beta1**step.step, 1 - step.beta2**step.step
        settings = 1 - step.lr * step.weight_decay, step.lr / bias1, 1 / math.sqrt(bias2), unit
        numbers.append(settings)
    row_pieces = min(ROW_PIECES, max(totals))
    rows = (torch.tensor(totals) + row_pieces - 1) // row_pieces
    bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    table = torch.cat([torch.tensor(integers), bits], 1).repeat_interleave(rows, 0)
    first = rows.cumsum(0) - rows
    table[:, FIRST] = (torch.arange(len(table)) - first.repeat_interleave(rows)) * row_pieces
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    with torch.cuda.device_of(steps[0].weight):  # Triton launches on the current device
        adamw_prox_kernel[(len(table) * row_pieces,)](
            table, row_pieces, **constants, BLOCKS=blocks, num_warps=NUM_WARPS
        )
