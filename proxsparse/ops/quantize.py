"""The ops `proxsparse::quantize_nm` and `proxsparse::dequantize_nm`: values of a packed weight <-> codes and scales."""

import torch
from torch import Tensor

from proxsparse.ops.registry import register_kernel, select
from proxsparse.reference import quantize
from proxsparse.reference.grid import find_grid

torch.library.define("proxsparse::quantize_nm", "(Tensor values, int bits) -> (Tensor, Tensor)")
torch.library.define("proxsparse::dequantize_nm", "(Tensor codes, Tensor scales, ScalarType? dtype=None) -> Tensor")


@torch.library.impl("proxsparse::quantize_nm", "CompositeExplicitAutograd")
def _quantize_nm(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    return select("quantize_nm", values, bits).run(values, bits)


@torch.library.register_fake("proxsparse::quantize_nm")
def _quantize_nm_fake(values, bits):
    k = values.shape[-1]
    codes = values.new_empty((*values.shape[:-1], k * bits // 8), dtype=quantize.CODES[bits])
    return codes, values.new_empty(quantize.shape_of_scales(codes))


@torch.library.impl("proxsparse::dequantize_nm", "CompositeExplicitAutograd")
def _dequantize_nm(codes: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    codes, scales, dtype = codes.contiguous(), scales.contiguous(), dtype_of_values(codes, scales, dtype)
    return select("dequantize_nm", codes, scales, dtype).run(codes, scales, dtype)


@torch.library.register_fake("proxsparse::dequantize_nm")
def _dequantize_nm_fake(codes, scales, dtype=None):
    dtype = dtype_of_values(codes, scales, dtype)
    return scales.new_empty((*codes.shape[:-1], quantize.columns(codes) // 2), dtype=dtype)


def dtype_of_values(codes: Tensor, scales: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """That of scales that are factors; on a grid the given one, or float32."""
    return (dtype or torch.float32) if quantize.is_grid(codes, scales) else scales.dtype


@register_kernel("quantize_nm", "reference", supports=lambda *args: None)
def _reference_quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return quantize.quantize(values, bits)


@register_kernel("dequantize_nm", "reference", supports=lambda *args: None)
def _reference_dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return quantize.dequantize(codes, scales, dtype)


@torch.no_grad()
def quantize_nm(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rounds the values of a packed weight to codes of 8 or 4 bits. `reference.quantize` describes the format.

    Args:
        values: [..., k], from `pack_nm`, floating point.
        bits: 8 or 4.
    Returns:
        codes int8 [..., k] and scales [..., 1]; or codes uint8 [..., k / 2] and scales [..., ceil(k / 32)]. Scales have
        the dtype of the values.
    Raises:
        ValueError: other bits, a dtype that is not floating point, an odd k with 4 bits, or a value that is not finite
            or above half of the largest number of its dtype.
    """
    quantize.check_values(values, bits)
    return torch.ops.proxsparse.quantize_nm(values, bits)


@torch.no_grad()
def encode_nm(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The values of a packed weight as codes of 8 or 4 bits, without loss if 4 bits allow it, else `quantize_nm`.

    4 bits allow it if the values were rounded to GGUF's Q4_0 or Q4_1 before, see `reference.grid`: the scales are then
    int32 [..., ceil(k / 16)]. Arguments and errors are those of `quantize_nm`.
    """
    quantize.check_values(values, bits)
    on_grid = find_grid(values) if bits == 4 else None
    return torch.ops.proxsparse.quantize_nm(values, bits) if on_grid is None else on_grid


@torch.no_grad()
def dequantize_nm(codes: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values [..., k] of codes and scales from `quantize_nm` or `encode_nm`.

    Args:
        dtype: of values on a grid, floating point; None means float32. Other values have the dtype of the scales.
    Raises:
        ValueError: dtypes or shapes that these functions never return, or a scale or a value is not finite.
    """
    dtype = dtype_of_values(codes, scales, dtype)
    quantize.check_quantized(codes, scales, dtype)
    return torch.ops.proxsparse.dequantize_nm(codes, scales, dtype)
