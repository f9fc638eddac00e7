"""The CPU, fp32 and bf16: for few rows the packed weight is read once, as it is; for more it is unpacked in slabs."""

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse.inference.backends import register_backend
from proxsparse.ops.backends.cpp import sparse_linear, supports_sparse_linear, unpack_into

# Up to so many rows the packed weight wins over slabs: two cores of an EPYC 9005 (AVX-512 with BF16), torch 2.13,
# in_features 576 to 4096; the two meet between 32 and 64 rows in bf16, between 256 and 1024 in fp32. What comes of it:
# benchmarks/linear_speed.py, the rows of "cpp" in benchmarks/results/linear_speed.jsonl.
FEW_ROWS = {torch.bfloat16: 48, torch.float32: 256}
SLAB_BYTES = 4 << 20  # of dense weights: they stay in the cache of the cores


@register_backend("cpp", supports=supports_sparse_linear)
def _linear(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, prepared: None) -> Tensor:
    return (sparse_linear if len(x) <= FEW_ROWS[x.dtype] else linear_by_slabs)(x, values, indices, bias)


def linear_by_slabs(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None) -> Tensor:
    """The same, some output features at a time, whose dense weights stay in the cache and are no memory to speak of."""
    values, indices = values.contiguous(), indices.contiguous()
    height = max(64, SLAB_BYTES // max(1, x.shape[1] * x.element_size()))
    y, buffer = x.new_empty((len(x), len(values))), x.new_empty((min(height, len(values)), x.shape[1]))
    for begin in range(0, len(values), height):
        slab = slice(begin, min(begin + height, len(values)))
        weight = unpack_into(buffer[: slab.stop - begin], values[slab], indices[slab])
        y[:, slab] = functional.linear(x, weight, None if bias is None else bias[slab])
    return y
