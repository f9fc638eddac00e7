"""Products of codes of 8 bits with a packed 2:4 weight, for many rows on CUDA GPUs: CUTLASS (csrc/cutlass).

Sparse tensor cores multiply numbers of 8 bits, int8 or fp8 (e4m3), at twice the rate of bfloat16. x is rounded to codes
as well, with a scale for each row. This changes the result by more than a rounding, so these are not backends of
`sparse_linear`, and nothing uses them unless they are called.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse.ops.backends import cutlass
from proxsparse.ops.sparse_linear import pad_rows
from proxsparse.reference.quantize import LARGEST, dequantize


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of codes."""

    name: str
    dtype: torch.dtype
    largest: int
    scales: torch.dtype  # of the weight
    # architecture -> [(most rows, tile)], as in cutlass.py; not measured
    tiles: dict[int, list[tuple[int | None, str]]]


INT8_TILES = {90: [(256, "64x64"), (None, "128x256")], 80: [(128, "64x64"), (None, "128x128")]}
INT8 = Kind("int8", torch.int8, LARGEST, torch.bfloat16, INT8_TILES)
FP8 = Kind("fp8", torch.float8_e4m3fn, 448, torch.float32, {90: [(256, "64x64"), (None, "128x128")]})
# architecture -> steps of out_features and in_features: sm_80 groups metadata, sm_90 loads 16 bytes of values and of y
STEPS = {90: (8, 32), 80: (32, 128)}


def metadata_sm80(indices: Tensor) -> Tensor:
    """uint8 indices [out_features, in_features / 8] -> the metadata of CUTLASS's kernels for 8 bits, in bytes, flat.

    out_features is a multiple of 16, in_features of 64. For the byte 8 c + 4 k + b of the row 16 t + 8 h + g, the order
    from the slowest to the fastest index is c, t, g, k, h, b. (In CUTLASS this is done in two steps, `reorder_meta` and
    the layout ColumnMajorInterleaved<2>, of 32-bit elements.)
    """
    t, h, g, c, k, b = range(6)
    return indices.view(-1, 2, 8, indices.shape[1] // 8, 2, 4).permute(c, t, g, k, h, b).flatten()


def metadata_sm90(indices: Tensor) -> Tensor:
    """The same for sm_90a: padded to multiples of 64 rows and 128 columns; pieces of 128 columns, by row within each.

    CUTLASS's `Sm90GemmSparseConfig` calls a piece of 64 rows an atom.
    """
    padded = functional.pad(indices, (0, -indices.shape[1] % 16, 0, -len(indices) % 64), value=cutlass.ANY_PLACES)
    return padded.view(len(padded), -1, 16).transpose(0, 1).flatten()


def metadata_of(indices: Tensor) -> Tensor:
    """The metadata of a weight for its GPU."""
    return (metadata_sm90 if cutlass.architecture_of(indices.device) == 90 else metadata_sm80)(indices)


def quantize_rows(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """x [rows, k] -> codes nearest to x / scale and fp32 scales [rows], with scale = max |x| / largest of a row."""
    exact = x.float()
    scales = exact.abs().amax(-1) / kind.largest
    numbers = exact / torch.where(scales == 0, torch.inf, scales).unsqueeze(-1)
    numbers = numbers if kind.dtype.is_floating_point else numbers.round()
    return numbers.clamp(-kind.largest, kind.largest).to(kind.dtype), scales


def fp8_weight(values: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The values of a packed weight, or its codes and scales -> values and scales for `sparse_linear_fp8`."""
    codes, of_rows = quantize_rows(values if scales is None else dequantize(values, scales), FP8)
    return codes, of_rows.unsqueeze(-1)


def tile_for(kind: Kind, architecture: int, rows: int) -> str:
    """The tile in the table of the kind."""
    return next(tile for most, tile in kind.tiles[architecture] if most is None or rows <= most)


def missing(kind: Kind, x: Tensor, values: Tensor) -> str | None:
    """The reason why codes of this kind cannot be multiplied by x [rows, in_features], or None."""
    if x.device.type != "cuda" or values.device != x.device:
        return f"supports only CUDA GPUs, but x is on {x.device} and the weight on {values.device}"
    if reason := cutlass.missing():
        return reason
    if not hasattr(cutlass._C, "gemm_codes"):
        return "the CUTLASS extension belongs to another version of proxsparse; remedy: reinstall proxsparse"
    architecture, gpu = cutlass.architecture_of(x.device), torch.cuda.get_device_name(x.device)
    if architecture not in kind.tiles or torch.cuda.get_device_capability(x.device) < (8, 0):
        supported = "8.0 or newer" if 80 in kind.tiles else "9.0"
        return f"supports GPUs of compute capability {supported}, not {gpu}"
    if x.dtype != torch.bfloat16 or values.dtype != kind.dtype:
        return f"supports bfloat16 with codes of {kind.dtype}, not x of {x.dtype} with a weight of {values.dtype}"
    out_step, in_step = STEPS[architecture]
    if not len(x) or len(values) % out_step or x.shape[1] % in_step:
        return (
            f"supports multiples of {out_step} output features and {in_step} input features, and at least one row, not "
            f"x of shape {list(x.shape)} and {len(values)} output features"
        )
    if (architecture, f"{kind.name}_{tile_for(kind, architecture, len(x))}") not in cutlass._C.tiles_codes():
        return f"its tile was not built for {gpu}; remedy: reinstall proxsparse without TORCH_CUDA_ARCH_LIST"
    return None


def sparse_linear_int8(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    metadata: Tensor | None = None,
) -> Tensor:
    """y = x W^T + bias with x and W rounded to 8 bits: the sums of codes are exact, and y is rounded once.

    Args:
        x: bfloat16 [rows, in_features], which `quantize_rows` rounds.
        values, indices, scales: a packed weight with 8 bits, as for `sparse_linear`.
        bias: bfloat16 [out_features]; None means 0.
        metadata: `metadata_of(indices)`; None: it is computed in this call.
    Returns:
        y, [rows, out_features], bfloat16.
    Raises:
        RuntimeError: the GPU, a dtype or a shape is not supported, or the extension is missing.
    """
    return _sparse_linear(INT8, x, values, indices, scales, bias, metadata)


def sparse_linear_fp8(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    metadata: Tensor | None = None,
) -> Tensor:
    """y = x W^T + bias with x and W rounded to e4m3, products added in fp32: `sparse_linear_int8` with other codes.

    Args:
        values, scales: of `fp8_weight`: float8_e4m3fn [out_features, in_features / 2], fp32 [out_features, 1].
    """
    return _sparse_linear(FP8, x, values, indices, scales, bias, metadata)


def _sparse_linear(
    kind: Kind, x: Tensor, values: Tensor, indices: Tensor, scales: Tensor, bias: Tensor | None, order: Tensor | None
) -> Tensor:
    if reason := missing(kind, x, values):
        raise RuntimeError(f"sparse_linear_{kind.name}: {reason}")
    rows, architecture = len(x), cutlass.architecture_of(x.device)
    transposed = architecture == 80  # the kernel computes y^T for a multiple of 16 rows: CUTLASS's `can_implement`
    codes, x_scales = quantize_rows(pad_rows(x, 16) if transposed else x, kind)
    y = x.new_empty((len(values), len(codes)) if transposed else (rows, len(values)))
    order = metadata_of(indices) if order is None else order
    bias = None if bias is None else cutlass.aligned(bias)
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        tensors = (cutlass.aligned(values), order, cutlass.aligned(scales), codes, x_scales, bias, y)
        cutlass._C.gemm_codes(architecture, tile_for(kind, architecture, rows), *tensors, stream)
    return y[:, :rows].t().contiguous() if transposed else y
