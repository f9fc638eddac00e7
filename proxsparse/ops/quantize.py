"""The ops `proxsparse::quantize_nm` and `proxsparse::dequantize_nm`: values of a packed weight <-> codes and scales."""

import torch
from torch import Tensor

from proxsparse.ops.registry import define_op, register_kernel, select
from proxsparse.reference import quantize


@define_op("quantize_nm", "(Tensor values, int bits) -> (Tensor, Tensor)", quantize.empty)
def _quantize_nm(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    return select("quantize_nm", values, bits).run(values, bits)


@define_op("dequantize_nm", "(Tensor codes, Tensor scales) -> Tensor", quantize.empty_values)
def _dequantize_nm(codes: Tensor, scales: Tensor) -> Tensor:
    codes, scales = codes.contiguous(), scales.contiguous()
    return select("dequantize_nm", codes, scales).run(codes, scales)


register_kernel("quantize_nm", "reference")(quantize.quantize)
register_kernel("dequantize_nm", "reference")(quantize.dequantize)


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
def dequantize_nm(codes: Tensor, scales: Tensor) -> Tensor:
    """The values [..., k] = code * scale of codes and scales from `quantize_nm`, in the dtype of the scales.

    Raises:
        ValueError: dtypes or shapes that `quantize_nm` never returns, or a scale or a value is not finite.
    """
    quantize.check_quantized(codes, scales)
    return torch.ops.proxsparse.dequantize_nm(codes, scales)
