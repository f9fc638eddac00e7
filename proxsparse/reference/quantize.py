"""Quantized values of a packed 2:4 weight, in plain torch: integer codes and scales, independent of the hardware.

A row of k kept values (`reference.pack`) becomes codes and scales, pruned weights staying 0:

- 8 bits, value = code * scale: int8 codes [..., k] from -127 to 127, and one scale for the row, [..., 1], which is not
  negative.
- 4 bits, value = code * scale: codes from -8 to 7 in two's complement, uint8 [..., k / 2], of each pair the first in
  the lower bits, so that one byte is a block; and one scale for every 32 kept values, which are 64 columns,
  [..., ceil(k / 32)]. A scale may be negative.

Scales have the dtype of the values. With the places, and scales in bfloat16, a weight takes 5 bits or 3.25 bits.
"""

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse.patterns import check_dtype

CODES = {8: torch.int8, 4: torch.uint8}  # bits -> dtype of the codes
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
GROUP = 32  # kept values that share a scale of 4 bits
LARGEST = 127  # code of 8 bits
# Codes that the value of largest magnitude in a group may get; below -8 it is clipped. All are tried, and the one with
# the least squared error is taken: 15% less than with -8 alone for SmolLM2-135M. Values that are exactly a code times a
# scale of this dtype are found again, because one of the integers gives their scale.
EXTREMES = (-8, -7, -6, -5, -4, -3, -2, -1, -9, -8.5, -7.5, -6.5)


def quantize(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """values [..., k] -> codes and scales, with every value rounded to the nearest code.

    8 bits: scale = max |value| / 127 of a row, rounded up, so that no code is clipped even where float16 scales are
    subnormal. 4 bits: scale = value / e for the value of largest magnitude of a group and the e in `EXTREMES` with the
    least sum of (code * scale - value)^2. The caller has called `check_values`.
    """
    exact = values.double() if values.dtype == torch.float64 else values.float()
    if bits == 8:
        largest = functional.pad(exact.abs(), (0, 1)).amax(-1, keepdim=True)  # padded for k = 0
        scales = rounded_up(largest / LARGEST, values.dtype)
        return rounded(exact, scales.to(exact.dtype), -LARGEST, LARGEST).to(torch.int8), scales
    groups = in_groups(exact)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) if groups.numel() else groups[..., :1]
    best = torch.full_like(extreme, torch.inf, dtype=torch.float64)
    codes, scales = torch.zeros_like(groups), torch.zeros_like(extreme)
    for code in EXTREMES:
        scale = (extreme / code).to(values.dtype).to(exact.dtype)
        candidate = rounded(groups, scale, -8, 7)
        error = (candidate.double() * scale.double() - groups.double()).square().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes, scales = torch.where(better, candidate, codes), torch.where(better, scale, scales)
    return pack_codes(codes.flatten(-2)[..., : values.shape[-1]]), scales.squeeze(-1).to(values.dtype)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The values [..., k] that codes and scales stand for, rounded to the dtype of the scales.

    code * scale, in float64 for float64 scales and in float32 otherwise.
    """
    exact = scales.double() if scales.dtype == torch.float64 else scales.float()
    if codes.dtype == torch.int8:
        return (codes.to(exact.dtype) * exact).to(scales.dtype)
    unpacked = unpack_codes(codes)
    groups = in_groups(unpacked.to(exact.dtype)) * exact.unsqueeze(-1)
    return groups.flatten(-2)[..., : unpacked.shape[-1]].to(scales.dtype)


def empty(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Tensors for the results of `quantize`, whose content is arbitrary."""
    codes = values.new_empty((*values.shape[:-1], values.shape[-1] * bits // 8), dtype=CODES[bits])
    return codes, values.new_empty(shape_of_scales(codes))


def empty_values(codes: Tensor, scales: Tensor) -> Tensor:
    """A tensor for the result of `dequantize`, whose content is arbitrary."""
    return scales.new_empty((*codes.shape[:-1], columns(codes) // 2))


def rounded(values: Tensor, scales: Tensor, smallest: int, largest: int) -> Tensor:
    """The codes nearest to values / scales; 0 where the scale is 0."""
    return (values / torch.where(scales == 0, torch.inf, scales)).round().clamp(smallest, largest)


def rounded_up(positive: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest numbers of `dtype` that are at least `positive`: the next one has the next bit pattern."""
    nearest = positive.to(dtype)
    return (nearest.view(INTEGERS[dtype.itemsize]) + (nearest.to(positive.dtype) < positive)).view(dtype)


def in_groups(values: Tensor) -> Tensor:
    """[..., k] -> [..., ceil(k / GROUP), GROUP], padded with zeros."""
    return functional.pad(values, (0, -values.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def pack_codes(codes: Tensor) -> Tensor:
    """Codes from -8 to 7, [..., k] -> uint8 [..., k / 2]."""
    pairs = codes.to(torch.int16).unflatten(-1, (-1, 2)) & 15
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def unpack_codes(codes: Tensor) -> Tensor:
    """The inverse of `pack_codes`: uint8 [..., k / 2] -> int8 [..., k], -8 to 7."""
    return (torch.stack((codes & 15, codes >> 4), -1).flatten(-2).to(torch.int8) ^ 8) - 8


def columns(values: Tensor) -> int:
    """in_features of a packed 2:4 weight, from its values or their codes: there are two in every byte of uint8."""
    return values.shape[-1] * (4 if values.dtype == CODES[4] else 2)


def scales_of_row(in_features: int, bits: int) -> int:
    """The number of scales in a row of a packed 2:4 weight with codes of 8 or 4 bits."""
    return 1 if bits == 8 else -(-in_features // (2 * GROUP))


def shape_of_scales(codes: Tensor) -> tuple[int, ...]:
    """The shape of the scales that belong to these codes. Raises ValueError for a dtype that codes do not have."""
    bits = {dtype: bits for bits, dtype in CODES.items()}.get(codes.dtype)
    if bits is None:
        raise ValueError(f"codes are {codes.dtype}: they must be torch.int8 (8 bits) or torch.uint8 (4 bits)")
    return (*codes.shape[:-1], scales_of_row(columns(codes), bits))


def packed_shapes(rows: int, columns: int, bits: int) -> dict[str, tuple[int, int]]:
    """Name -> shape, for the tensors of a packed 2:4 weight [rows, columns] with 16, 8 or 4 bits."""
    shapes = {"values": (rows, columns // (4 if bits == 4 else 2)), "indices": (rows, -(-columns // 8))}
    return shapes if bits == 16 else shapes | {"scales": (rows, scales_of_row(columns, bits))}


def check_values(values: Tensor, bits: int) -> None:
    """Raises ValueError for values that have no codes."""
    if bits not in CODES:
        raise ValueError(f"bits={bits!r}: values can have 8 or 4 bits; 16 keeps them as they are")
    check_dtype(values, "values")
    if bits == 4 and values.shape[-1] % 2:
        raise ValueError(f"values of shape {list(values.shape)}: 4-bit codes need an even number of values in a row")
    most = torch.finfo(values.dtype).max / 2  # near the largest number a code times its scale overflows
    if not (values.abs() <= most).all():
        remedy = "keep 16 bits" + " or convert them to bfloat16" * (values.dtype == torch.float16)
        raise ValueError(f"values contain NaN, infinity or a magnitude above {most:.3g}, which have no code; {remedy}")


def check_quantized(codes: Tensor, scales: Tensor) -> None:
    """Raises ValueError for codes and scales that no values have, such as those of a damaged file."""
    check_dtype(scales, "scales")
    expected = shape_of_scales(codes) if codes.ndim else ()
    if not codes.ndim or tuple(scales.shape) != expected or scales.device != codes.device:
        raise ValueError(
            f"scales of shape {list(scales.shape)} on {scales.device} do not belong to codes of shape "
            f"{list(codes.shape)} on {codes.device}, which need the shape {list(expected)}"
        )
    if codes.dtype == torch.int8 and (codes < -LARGEST).any():
        raise ValueError("codes contain -128, which no value gets; the file is damaged")
    if not dequantize(codes, scales).isfinite().all():
        raise ValueError("codes times scales are NaN or infinite; the file is damaged")
