"""`sparse_linear` for few rows on CUDA GPUs, with values of 16 bits or codes of 8 and 4 bits: csrc/cuda/gemv.cu.

It reads the packed weight once; the sparse instructions of the tensor cores select the elements of x.
"""

import torch
from torch import Tensor

from proxsparse.ops.backends import cuda
from proxsparse.ops.registry import register_kernel
from proxsparse.reference.quantize import CODES

MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)


def _supports(x: Tensor, values: Tensor, scales: Tensor | None = None) -> str | None:
    if reason := cuda.unusable(x, values):
        return reason
    if not 1 <= len(x) <= MAX_ROWS:
        return f"supports 1 to {MAX_ROWS} rows, not {len(x)}"
    if not x.shape[1]:
        return "needs at least 4 input features"
    if x.dtype not in DTYPES or values.dtype not in (x.dtype, *CODES.values()):
        return f"supports bfloat16 and float16, not x of {x.dtype} with a weight of {values.dtype}"
    return None


@register_kernel("sparse_linear", "gemv", supports=_supports, windows=True)
def _sparse_linear(x, values, indices, bias, prepared, scales=None, m=4) -> Tensor:
    return cuda.gemv(x, values, indices, bias, scales, m)
