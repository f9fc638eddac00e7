"""`SparseLinear`: nn.Linear on a packed 2:4 weight, and its op `proxsparse::sparse_linear`."""

import torch
from torch import Tensor, nn

from proxsparse.inference.backends import backend as backend_named
from proxsparse.inference.choice import choose
from proxsparse.ops import pack_nm, unpack_nm

AUTO = "auto"

torch.library.define(
    "proxsparse::sparse_linear",
    "(Tensor x, Tensor values, Tensor indices, Tensor? bias, Tensor? prepared, str backend) -> Tensor",
)


@torch.library.impl("proxsparse::sparse_linear", "CompositeExplicitAutograd")
def _sparse_linear(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, prepared: Tensor | None, backend: str
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    chosen = choose(rows, values) if backend == AUTO else backend_named(backend)
    if backend != AUTO and (reason := chosen.supports(rows, values)):
        raise RuntimeError(
            f"sparse_linear: backend {backend!r} cannot serve this call: {reason}; choose backend='auto'"
        )
    return chosen.linear(rows, values, indices, bias, prepared).view(*x.shape[:-1], values.shape[0])


@torch.library.register_fake("proxsparse::sparse_linear")
def _sparse_linear_fake(x, values, indices, bias, prepared, backend):
    return x.new_empty((*x.shape[:-1], values.shape[0]))


class SparseLinear(nn.Module):
    """y = x W^T + b with W [out_features, in_features] 2:4 and packed: 9/16 of the memory in bf16. For inference.

    `values` [out_features, in_features / 2] and `indices` uint8 [out_features, ceil(in_features / 8)] are its state;
    the form is that of `proxsparse.packed`.

    Args:
        backend: a name of `proxsparse.inference.backends`, or "auto": the fastest for the rows of each call.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, backend=AUTO):
        super().__init__()
        self.in_features, self.out_features, self.backend = in_features, out_features, backend
        values = torch.empty(out_features, in_features // 2, device=device, dtype=dtype)
        self.values = nn.Parameter(values, requires_grad=False)
        self.register_buffer(
            "indices", torch.empty(out_features, -(-in_features // 8), device=device, dtype=torch.uint8)
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype), requires_grad=False) if bias else None
        )
        self.prepared = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, backend: str = AUTO) -> "SparseLinear":
        """The packed layer of a 2:4 nn.Linear. Raises ValueError if it is not 2:4."""
        values, indices = pack_nm(linear.weight.detach())
        layer = cls(linear.in_features, linear.out_features, False, "meta", linear.weight.dtype, backend)
        layer.values = nn.Parameter(values, requires_grad=False)
        layer.indices = indices
        layer.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.proxsparse.sparse_linear(x, self.values, self.indices, self.bias, self.prepared, self.backend)

    def dense_weight(self) -> Tensor:
        """W, unpacked: [out_features, in_features]."""
        return unpack_nm(self.values, self.indices)
