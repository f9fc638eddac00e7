"""The ops `proxsparse::pack_nm` and `proxsparse::unpack_nm`: N:M weights <-> kept values and 2-bit indices."""

import torch
from torch import Tensor

from proxsparse.ops.registry import register_kernel, select
from proxsparse.patterns import NMPattern, PatternLike, check_dtype
from proxsparse.reference import pack, windows

torch.library.define("proxsparse::pack_nm", "(Tensor weight, int n, int m) -> (Tensor, Tensor)")
torch.library.define("proxsparse::unpack_nm", "(Tensor values, Tensor indices, int n, int m) -> Tensor")


@torch.library.impl("proxsparse::pack_nm", "CompositeExplicitAutograd")
def _pack_nm(weight: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    dense = weight.contiguous()
    return select("pack_nm", dense, n, m).run(dense, n, m)


@torch.library.register_fake("proxsparse::pack_nm")
def _pack_nm_fake(weight, n, m):
    k = weight.shape[-1] // m * n
    return weight.new_empty((*weight.shape[:-1], k)), weight.new_empty(
        (*weight.shape[:-1], -(-k // 4)), dtype=torch.uint8
    )


@torch.library.impl("proxsparse::unpack_nm", "CompositeExplicitAutograd")
def _unpack_nm(values: Tensor, indices: Tensor, n: int, m: int) -> Tensor:
    values, indices = values.contiguous(), indices.contiguous()
    return select("unpack_nm", values, indices, n, m).run(values, indices, n, m)


@torch.library.register_fake("proxsparse::unpack_nm")
def _unpack_nm_fake(values, indices, n, m):
    return values.new_empty((*values.shape[:-1], values.shape[-1] // n * m))


@register_kernel("pack_nm", "reference", supports=lambda *args: None)
def _reference_pack(weight: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    return pack.pack_nm(weight, NMPattern(n, m))


@register_kernel("unpack_nm", "reference", supports=lambda *args: None)
def _reference_unpack(values: Tensor, indices: Tensor, n: int, m: int) -> Tensor:
    return pack.unpack_nm(values, indices, NMPattern(n, m))


@torch.no_grad()
def pack_nm(weight: Tensor, pattern: PatternLike = "2:4") -> tuple[Tensor, Tensor]:
    """Packs a weight with at most n nonzeros in every block of m. The format is described in `reference.pack`.

    Args:
        weight: [..., in_features], floating point.
        pattern: "1:4", "2:4", "3:4"; or "4:6", "6:8", ..., which are packed as 2:4 over more columns, as 2:4 itself is
            if in_features is not a multiple of 4 (`reference.windows`).
    Returns:
        values [..., k] with k = columns * n / 4, and indices uint8 [..., ceil(k / 4)], two bits per value.
    Raises:
        ValueError: another pattern, in_features does not split into blocks, the dtype is not floating point, or a block
            has more than n nonzeros.
    """
    pattern = NMPattern.parse(pattern)
    check_dtype(weight, "weight")
    pattern.check_blocks(weight.shape)
    if pattern.has_windows:
        weight, pattern = windows.deal(weight, pattern.m), NMPattern(2, 4)
    return torch.ops.proxsparse.pack_nm(weight, pack.packable(pattern).n, pattern.m)


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
    pattern = NMPattern.parse(pattern)
    packed = NMPattern(2, 4) if pattern.has_windows else pack.packable(pattern)
    pack.check_packed(values, indices, packed)
    weight = torch.ops.proxsparse.unpack_nm(values, indices, packed.n, packed.m)
    if pattern.m > 4 and in_features is None:
        raise ValueError(f"unpack_nm: {pattern} needs in_features, which packed columns do not tell")
    if pattern.has_windows and in_features is not None:
        pattern.check_blocks((in_features,), "in_features")
        if windows.expanded_features(in_features, pattern.m) != weight.shape[-1]:
            raise ValueError(f"unpack_nm: {weight.shape[-1]} packed columns are not those of in_features={in_features}")
    return windows.fold(weight, in_features or weight.shape[-1], pattern.m)
