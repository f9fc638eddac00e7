"""The ops `proxsparse::pack_nm` and `proxsparse::unpack_nm`: 2:4 weights <-> kept values and 2-bit indices."""

import torch
from torch import Tensor

from proxsparse.ops.registry import define_op, register_kernel, select
from proxsparse.patterns import NMPattern, PatternLike, check_dtype
from proxsparse.reference import pack, windows


@define_op("pack_nm", "(Tensor weight) -> (Tensor, Tensor)", pack.empty)
def _pack_nm(weight: Tensor) -> tuple[Tensor, Tensor]:
    dense = weight.contiguous()
    return select("pack_nm", dense).run(dense)


@define_op("unpack_nm", "(Tensor values, Tensor indices) -> Tensor", lambda values, indices: pack.empty_weight(values))
def _unpack_nm(values: Tensor, indices: Tensor) -> Tensor:
    values, indices = values.contiguous(), indices.contiguous()
    return select("unpack_nm", values, indices).run(values, indices)


register_kernel("pack_nm", "reference")(pack.pack_nm)
register_kernel("unpack_nm", "reference")(pack.unpack_nm)


@torch.no_grad()
def pack_nm(weight: Tensor, pattern: PatternLike = "2:4") -> tuple[Tensor, Tensor]:
    """Packs an (m-2):m weight. The format is described in `reference.pack`.

    Args:
        weight: [..., in_features], floating point.
        pattern: "2:4"; or "4:6", "6:8", ..., which are packed as 2:4 over more columns, as 2:4 itself is if in_features
            is not a multiple of 4 (`reference.windows`).
    Returns:
        values [..., k] with k = columns / 2, and indices uint8 [..., ceil(k / 4)], two bits per value.
    Raises:
        ValueError: another pattern, in_features does not split into blocks, the dtype is not floating point, or a block
            has more than m - 2 nonzeros.
    """
    pattern = NMPattern.parse_windowed(pattern)
    check_dtype(weight, "weight")
    pattern.check_blocks(weight.shape)
    return torch.ops.proxsparse.pack_nm(windows.deal(weight, pattern.m))


@torch.no_grad()
def unpack_nm(values: Tensor, indices: Tensor, pattern: PatternLike = "2:4", in_features: int | None = None) -> Tensor:
    """The inverse of `pack_nm`: returns the weight [..., in_features] with +0.0 in the pruned places.

    Args:
        values, indices, pattern: as returned by, and passed to, `pack_nm`.
        in_features: the width of the weight, needed if it is not that of the packed columns.
    Raises:
        ValueError: shapes, dtypes or indices that `pack_nm` never returns; under torch.compile the content of
            `indices` is not checked.
    """
    pattern = NMPattern.parse_windowed(pattern)
    pack.check_packed(values, indices)
    weight = torch.ops.proxsparse.unpack_nm(values, indices)
    if pattern.m > 4 and in_features is None:
        raise ValueError(f"unpack_nm: {pattern} needs in_features, which packed columns do not tell")
    if in_features is not None:
        pattern.check_blocks((in_features,), "in_features")
        if windows.expanded_features(in_features, pattern.m) != weight.shape[-1]:
            raise ValueError(f"unpack_nm: {weight.shape[-1]} packed columns are not those of in_features={in_features}")
    return windows.fold(weight, in_features or weight.shape[-1], pattern.m)
