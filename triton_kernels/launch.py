"""How a kernel is launched: the number of programs that run at once, and their registers."""

import functools

import torch
import triton
import triton.language as tl

from .formats import PTX
from .wide_block import places

LANES = 32 if torch.version.hip is None else 64  # per warp
REGISTERS_PER_MULTIPROCESSOR = 65536
PROGRAMS_IN_INTERPRETER = 2


def registers_for(weight: torch.Tensor) -> int:
    """The most registers per thread for the prox: the smallest limit without spilling, so that more warps run at once.

    With 128 registers, 16 warps run at once on a multiprocessor; with 255, 8 warps.
    """
    return 255 if weight.dtype == torch.float64 else 128


def programs_for(device: torch.device, pieces: int, registers: int) -> int:
    """The number of programs of one warp that share the pieces: as many as run at once, at most `pieces`."""
    if device.type != "cuda":
        return min(pieces, PROGRAMS_IN_INTERPRETER)
    return min(pieces, multiprocessors(device) * (REGISTERS_PER_MULTIPROCESSOR // (registers * 32)))


def compiler_options(registers: int) -> dict[str, int]:
    """Triton's options besides num_warps. Without a limit, its compiler uses 167 registers where 128 are enough."""
    return {"maxnreg": registers} if PTX else {}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def weights_of_piece(piece, columns, pieces, SCALED: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr):
    """(index, column, whether it exists) of the weights of a piece, of which a row has `pieces`.

    Without a scale, the whole weight is one row if M = 4. The padding of other blocks does not exist.
    """
    row = 0
    if SCALED | (M > 4):
        row = piece // pieces
        piece -= row * pieces
    place = tl.arange(0, places(M) * BLOCKS)
    column = piece.to(tl.int64) * (M * BLOCKS) + place
    if places(M) != M:
        column -= place // places(M) * (places(M) - M)
    inside = column < columns
    if places(M) != M:
        inside = inside & (place % places(M) < M)
    index = column + (row + tl.zeros((), tl.int64)) * columns  # a weight may have more than 2^31 elements
    return index, column, inside
