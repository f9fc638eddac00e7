"""Anywhere, any dtype: unpack the weight, then the dense matmul of torch. Also what is fastest for many rows."""

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse.inference.backends import register_backend


@register_backend("reference", supports=lambda x, values: None)
def _linear(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, prepared: None) -> Tensor:
    return functional.linear(x, torch.ops.proxsparse.unpack_nm(values, indices, 2, 4), bias)
