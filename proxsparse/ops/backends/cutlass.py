"""`sparse_linear` for many rows on CUDA GPUs: the sparse matrix multiplications of CUTLASS (csrc/cutlass).

They read the packed values directly, and the indices in another order, the "metadata" (E in CUTLASS). A small kernel
computes the metadata from the indices: it reads in_features * out_features / 8 bytes and writes as many. `prepare` does
this once; a layer with backend="cutlass" then holds the metadata, 1/8 byte per weight, 11% of the packed weight in
bfloat16. A layer with backend="auto" computes it in every call. tests/ops/test_cutlass.py has the equations of these
orders; csrc/cuda/metadata.cu implements them.

A tile is the part of y that a thread block computes. TILES has the tile for each number of rows.
"""

import torch
from torch import Tensor

from proxsparse.ops.backends import cuda
from proxsparse.ops.registry import import_extension, register_kernel
from proxsparse.ops.sparse_linear import pad_rows

_C, _missing = import_extension(
    "proxsparse._C_cutlass",
    "gemm",
    "pip install nvidia-cutlass --no-deps, then with a CUDA build of torch and nvcc, reinstall proxsparse",
)

# architecture -> [(most rows, tile)], with as few idle rows as possible; others not measured
TILES = {
    90: [(32, "64x32"), (128, "64x64"), (512, "128x128"), (None, "128x256")],
    80: [(128, "64x64"), (None, "128x128")],
}


def metadata_bytes(out_features: int, in_features: int, architecture: int) -> int:
    if architecture == 80:
        return out_features * in_features // 8
    return -(-out_features // 64) * 64 * -(-in_features // 128) * 16


def architecture_of(device: torch.device) -> int:
    """90 for Hopper, else 80."""
    return 90 if torch.cuda.get_device_capability(device)[0] == 9 else 80


def tile_for(device: torch.device, rows: int) -> str:
    """The tile in TILES for this GPU and number of rows."""
    return next(tile for most, tile in TILES[architecture_of(device)] if most is None or rows <= most)


def built_tiles(device: torch.device) -> list[str]:
    """The names of the tiles that were built for this GPU."""
    return sorted(name for architecture, name in _C.tiles() if architecture == architecture_of(device)) if _C else []


def _supports(x: Tensor, values: Tensor, scales: Tensor | None = None) -> str | None:
    if reason := cuda.unusable(x, values) or _missing:
        return reason
    if x.dtype != torch.bfloat16 or values.dtype != torch.bfloat16:
        return f"supports bfloat16, not x of {x.dtype} with a weight of {values.dtype}"
    if reason := shape_reason(len(x), *values.shape, architecture_of(x.device)):
        return reason
    if (tile := tile_for(x.device, len(x))) not in built_tiles(x.device):
        return f"its tile {tile} was not built for this GPU; remedy: reinstall proxsparse without TORCH_CUDA_ARCH_LIST"
    return None


def shape_reason(rows: int, out_features: int, k: int, architecture: int) -> str | None:
    """Why CUTLASS does not support the shape, or None. It loads 16 bytes; sm_80 groups the metadata of 32 rows."""
    out_step, in_step = (8, 16) if architecture == 90 else (32, 64)
    if rows == 0:
        return "x has no rows"
    if out_features % out_step:
        return f"out_features={out_features} must be a multiple of {out_step}"
    if 2 * k % in_step:
        return f"in_features={2 * k} must be a multiple of {in_step}"
    return None


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its address is not a multiple of 16 bytes, as in some views."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _prepare(values: Tensor, indices: Tensor) -> Tensor:
    """The metadata of a weight for its GPU."""
    architecture = architecture_of(indices.device)
    size = metadata_bytes(len(values), 2 * values.shape[1], architecture)
    metadata = torch.empty(size, dtype=torch.uint8, device=indices.device)
    cuda.cutlass_metadata_(aligned(indices), metadata, architecture)
    return metadata


@register_kernel("sparse_linear", "cutlass", supports=_supports, prepare=_prepare)
def _sparse_linear(x, values, indices, bias, prepared, scales=None) -> Tensor:
    rows, architecture = len(x), architecture_of(x.device)
    metadata = _prepare(values, indices) if prepared is None else prepared
    tile = tile_for(x.device, rows)
    x, values = aligned(x), aligned(values)
    if architecture == 90:
        bias = None if bias is None else aligned(bias)
        return _gemm(architecture, tile, values, metadata, x, bias, x.new_empty(rows, len(values)))
    # the kernel computes y^T for a multiple of 8 rows; the bias is added after y was rounded to bfloat16
    x = pad_rows(x)
    y = _gemm(architecture, tile, values, metadata, x, None, x.new_empty(len(values), len(x)))[:, :rows].t()
    return y.contiguous() if bias is None else torch.add(y, bias, out=x.new_empty(rows, len(values)))


def _gemm(
    architecture: int, tile: str, values: Tensor, metadata: Tensor, x: Tensor, bias: Tensor | None, y: Tensor
) -> Tensor:
    with torch.cuda.device_of(x):
        size = _C.workspace_bytes(architecture, tile, values, x)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        stream = torch.cuda.current_stream().cuda_stream
        _C.gemm(architecture, tile, values, metadata, x, bias, y, workspace, stream)
    return y
