"""Products of 8-bit codes with a packed 2:4 weight, for many rows on CUDA GPUs: csrc/cutlass/int8.h.

Sparse tensor cores multiply codes of 8 bits at twice the rate of bfloat16. x is rounded to codes as well, with a scale
for each row. This changes the result by more than a rounding, so it is not a backend of `sparse_linear`, and nothing
uses it unless it is called.
"""

import torch
from torch import Tensor

from proxsparse.ops.backends import cutlass
from proxsparse.ops.sparse_linear import pad_rows
from proxsparse.reference.quantize import LARGEST, rounded

TILES = [(128, "64x64"), (None, "128x128")]  # [(most rows, tile)], as in cutlass.py; not measured
OUT_STEP, IN_STEP = 32, 128  # out_features and in_features are multiples of these


def metadata_int8(indices: Tensor) -> Tensor:
    """uint8 indices [out_features, in_features / 8] -> the metadata of CUTLASS's kernels for 8 bits, in bytes, flat.

    out_features is a multiple of 16, in_features of 64. For the byte 8 c + 4 k + b of the row 16 t + 8 h + g, the order
    from the slowest to the fastest index is c, t, g, k, h, b. (In CUTLASS this is done in two steps, `reorder_meta` and
    the layout ColumnMajorInterleaved<2>, of 32-bit elements.)
    """
    t, h, g, c, k, b = range(6)
    return indices.view(-1, 2, 8, indices.shape[1] // 8, 2, 4).permute(c, t, g, k, h, b).flatten()


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in_features] -> int8 codes and fp32 scales [rows], with scale = max |x| / 127 of a row."""
    exact = x.float()
    scales = exact.abs().amax(-1) / LARGEST
    return rounded(exact, scales.unsqueeze(-1), -LARGEST, LARGEST).to(torch.int8), scales


def missing(x: Tensor, values: Tensor) -> str | None:
    """The reason why `sparse_linear_int8` does not support x [rows, in_features] and int8 codes, or None."""
    if x.device.type != "cuda" or values.device != x.device:
        return f"supports only CUDA GPUs, but x is on {x.device} and the weight on {values.device}"
    if reason := cutlass.missing():
        return reason
    if not hasattr(cutlass._C, "gemm_int8"):
        return "the CUTLASS extension belongs to another version of proxsparse; remedy: reinstall proxsparse"
    if x.dtype != torch.bfloat16 or values.dtype != torch.int8:
        return f"supports bfloat16 with codes of torch.int8, not x of {x.dtype} with a weight of {values.dtype}"
    if not len(x) or len(values) % OUT_STEP or x.shape[1] % IN_STEP:
        return (
            f"supports multiples of {OUT_STEP} output features and {IN_STEP} input features, and at least one row, not "
            f"x of shape {list(x.shape)} and {len(values)} output features"
        )
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
        metadata: `metadata_int8(indices)`; None: it is computed in this call.
    Returns:
        y, [rows, out_features], bfloat16.
    Raises:
        RuntimeError: the GPU, a dtype or a shape is not supported, or the extension is missing.
    """
    if reason := missing(x, values):
        raise RuntimeError(f"sparse_linear_int8: {reason}")
    rows, tile = len(x), next(tile for most, tile in TILES if most is None or len(x) <= most)
    codes, x_scales = quantize_rows(pad_rows(x, 8))
    metadata = metadata_int8(indices) if metadata is None else metadata
    y = x.new_empty(len(values), len(codes))  # the kernel computes y^T
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream().cuda_stream
        tensors = (cutlass.aligned(values), metadata, cutlass.aligned(scales), codes, x_scales)
        cutlass._C.gemm_int8(tile, *tensors, None if bias is None else cutlass.aligned(bias), y, stream)
    return y[:, :rows].t().contiguous()
