"""`sparse_linear` for many rows on CUDA GPUs, with cuSPARSELt of torch. A layer holds the weight in both formats.

`prepare` unpacks the weight temporarily (16/9 of the packed memory in bfloat16), and cuSPARSELt compresses it again.
The layer then takes twice the memory of the packed format, 9/8 of the dense weight in bfloat16.

torch 2.11 to 2.13 creates descriptors and the plan of a multiplication on the host in every call (ATen,
cuSPARSELtOps.cpp). A captured CUDA graph contains only the kernels, so measure the speed of graphs. The first call of
each shape runs all algorithms to find the fastest, and synchronizes. This is not possible in a capture: a shape that
first occurs in a capture uses the default algorithm, so call the layer once before.
"""

import torch
from torch import Tensor

from proxsparse.ops.backends import cuda
from proxsparse.ops.registry import register_kernel
from proxsparse.ops.sparse_linear import pad_rows

DTYPES = (torch.bfloat16, torch.float16)
WEIGHT_STEP, ROW_STEP = 16, 8  # torch.sparse.SparseSemiStructuredTensorCUSPARSELT: of out_ and in_features; of rows
DEFAULT = {"alg_id": 0, "split_k": 1, "split_k_mode": -1}
# (device, dtype, out_features, in_features, rows, with a bias) -> arguments of torch._cslt_sparse_mm
_algorithms: dict[tuple, dict[str, int]] = {}


def _supports(x: Tensor, values: Tensor, scales: Tensor | None = None) -> str | None:
    if x.device.type != "cuda" or values.device != x.device:
        return f"supports only CUDA GPUs, but x is on {x.device} and the weight on {values.device}"
    if reason := cuda.rocm():
        return reason
    if x.dtype not in DTYPES or values.dtype != x.dtype:
        return f"supports bfloat16 and float16, not x of {x.dtype} with a weight of {values.dtype}"
    for name, size in (("out_features", len(values)), ("in_features", 2 * values.shape[1])):
        if size % WEIGHT_STEP:
            return f"{name}={size} must be a multiple of {WEIGHT_STEP}"
    if len(x) == 0:
        return "x has no rows"
    if not torch.backends.cusparselt.is_available():
        return "this torch has no cuSPARSELt; remedy: install a CUDA build of torch"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return f"supports GPUs of compute capability 8.0 or newer, not {torch.cuda.get_device_name(x.device)}"
    return None


def _prepare(values: Tensor, indices: Tensor) -> Tensor:
    return torch._cslt_compress(torch.ops.proxsparse.unpack_nm(values, indices, 2, 4))


@register_kernel("sparse_linear", "cusparselt", supports=_supports, prepare=_prepare)
def _sparse_linear(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, prepared: Tensor) -> Tensor:
    columns = pad_rows(x, ROW_STEP).t()
    chosen = algorithm(prepared, columns, bias, len(values))
    return torch._cslt_sparse_mm(prepared, columns, bias, transpose_result=True, **chosen)[: len(x)]


def algorithm(prepared: Tensor, columns: Tensor, bias: Tensor | None, out_features: int) -> dict[str, int]:
    """The fastest algorithm for a weight times columns [in_features, rows], as arguments of torch._cslt_sparse_mm."""
    key = (columns.device, columns.dtype, out_features, *columns.shape, bias is not None)
    if key not in _algorithms:
        if torch.cuda.is_current_stream_capturing():
            return DEFAULT
        _algorithms[key] = search(prepared, columns, bias)
    return _algorithms[key]


def search(prepared: Tensor, columns: Tensor, bias: Tensor | None) -> dict[str, int]:
    """Runs all algorithms and returns the fastest. The public op of torch is deprecated and returns only its number."""
    library = getattr(torch._C, "_cusparselt", None)
    if not hasattr(library, "mm_search"):
        number = torch._cslt_sparse_mm_search(prepared, columns, bias, transpose_result=True)
        return DEFAULT | {"alg_id": int(number)}
    number, split_k, split_k_mode, _most = library.mm_search(prepared, columns, bias, None, None, True)
    return {"alg_id": number, "split_k": split_k, "split_k_mode": split_k_mode}
