"""`SparseLinear`: nn.Linear with a packed 2:4 weight."""

import torch
from torch import Tensor, nn

from proxsparse.ops import pack_nm, sparse_linear, unpack_nm
from proxsparse.ops.registry import AUTO, get_kernel
from proxsparse.ops.sparse_linear import PATTERN, as_rows, check_sparse_linear
from proxsparse.reference.pack import check_packed

MANY_ROWS = 64  # a typical number of rows for backends that prepare the weight
# Device types without autocast, for which torch.is_autocast_enabled raises. Computed at import, because Dynamo of torch
# 2.11 cannot trace is_autocast_available. All other device types have it, also a renamed PrivateUse1 ("npu").
NO_AUTOCAST = frozenset(kind for kind in ("meta", "lazy", "vulkan") if not torch.amp.is_autocast_available(kind))


def autocast_to(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    """The tensor as autocast passes it to a matmul: in `dtype`, but float64 unchanged."""
    return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)


class SparseLinear(nn.Module):
    """y = x W^T + b with W [out_features, in_features] 2:4 and packed: 9/16 of the memory in bf16. For inference.

    `values` [out_features, in_features / 2] and `indices` uint8 [out_features, ceil(in_features / 8)] are its state, in
    the form of `reference.pack`. x [..., in_features] has the dtype of `values`, or torch.autocast is on. The layer is
    frozen. dL/dx is computed, so that an adapter next to it or a layer before it can learn.

    A backend with its own form of the weight ("cusparselt", "cutlass") prepares it once, in the first call. The layer
    then holds it next to the packed form: more memory, but not part of the state. It is dropped when the weight moves,
    is cast or is loaded. A CUDA graph that is captured before the form exists creates it in every replay, and so does
    torch.compile with "cutlass": call the layer once before, or use `prepare_`.

    For infinities, NaN and subnormal numbers see `ops.sparse_linear`.

    Args:
        backend: one of `list_backends("sparse_linear")`, which serves every call or raises; or "auto": the fastest
            measured one for the rows of each call, unless `use_backend` or PROXSPARSE_BACKEND chooses.
    Raises:
        ValueError: in_features is not a multiple of 4, or there is no such backend.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, backend: str = AUTO
    ):
        super().__init__()
        PATTERN.check_blocks((out_features, in_features))
        if backend != AUTO:
            get_kernel("sparse_linear", backend)
        self.in_features, self.out_features, self.backend = in_features, out_features, backend
        self.values = frozen(torch.empty(out_features, in_features // 2, device=device, dtype=dtype))
        indices = torch.empty(out_features, -(-in_features // 8), device=device, dtype=torch.uint8)
        self.register_buffer("indices", indices)
        self.bias = frozen(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.prepared: tuple[str, torch.dtype, Tensor] | None = None  # for which `backend` and dtype of values

    @classmethod
    def from_linear(cls, linear: nn.Linear, backend: str = AUTO) -> "SparseLinear":
        """The packed layer of a 2:4 nn.Linear, on its device. Raises ValueError if it is not 2:4."""
        layer = cls(linear.in_features, linear.out_features, False, "meta", linear.weight.dtype, backend)
        values, layer.indices = pack_nm(linear.weight.detach(), PATTERN)
        layer.values = frozen(values)
        layer.bias = None if linear.bias is None else frozen(linear.bias.detach())
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        values, bias, device = self.values, self.bias, x.device.type
        if device not in NO_AUTOCAST and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, values, bias = (autocast_to(dtype, tensor) for tensor in (x, values, bias))
        prepared = self.own_form(x, values)
        return sparse_linear(x, values, self.indices, bias, prepared, self.backend)

    def own_form(self, x: Tensor, values: Tensor) -> Tensor | None:
        """The backend's own form of the weight; None if it has none, derives it in the call, or refuses the call.

        It is prepared once for each dtype of `values`, then held. A form prepared in a capture is not held: its memory
        belongs to the graph and is filled by a replay.
        """
        if self.prepared is not None and self.prepared[:2] == (self.backend, values.dtype):
            return self.prepared[2]
        if self.backend == AUTO or (kernel := get_kernel("sparse_linear", self.backend)).prepare is None:
            return None
        compiling, capturing = torch.compiler.is_compiling(), is_capturing(values)
        if kernel.prepare_is_optional and (compiling or capturing):
            return None
        if not compiling:
            check_sparse_linear(x, values, self.indices, None)
            if kernel.supports(as_rows(x), values):
                return None
        form = kernel.prepare(values.detach(), self.indices)
        if not capturing:
            self.prepared = self.backend, values.dtype, form
        return form

    def prepare_(self, backend: str) -> "SparseLinear":
        """Prepares the form of the weight that `backend` reads; held until the weight moves, is cast or is loaded.

        A layer of that backend does this in its first call, a layer of "auto" only here. "cutlass" holds 1/8 byte more
        per weight, and saves a kernel in each call with many rows.

        Raises:
            ValueError: the backend has no form of its own; or the layer never calls it: the layer has another backend,
                or it has "auto" and `backend` requires its own form.
            RuntimeError: the backend cannot serve this weight on its device, or a CUDA graph is being captured.
        """
        kernel, values = get_kernel("sparse_linear", backend), self.values
        if kernel.prepare is None:
            raise ValueError(f"prepare_: backend {backend!r} reads the packed form; there is nothing to prepare")
        if self.backend != backend and (self.backend != AUTO or kernel.needs_prepared):
            raise ValueError(f"prepare_: a layer of backend {self.backend!r} never calls {backend!r}; choose it first")
        if reason := kernel.supports(values.new_empty(1, 1).expand(MANY_ROWS, self.in_features), values):
            raise RuntimeError(f"prepare_: backend {backend!r} cannot serve this layer: {reason}")
        if is_capturing(values):
            raise RuntimeError("prepare_: memory of a CUDA graph cannot be held; call prepare_ before the capture")
        self.prepared = self.backend, values.dtype, kernel.prepare(values.detach(), self.indices)
        return self

    def dense_weight(self) -> Tensor:
        """W, unpacked: [out_features, in_features]."""
        return unpack_nm(self.values, self.indices, PATTERN)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={PATTERN}, backend={self.backend}"
        )

    def _apply(self, fn, recurse: bool = True) -> "SparseLinear":
        self.prepared = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "prepared": None}

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *arguments) -> None:
        """Loads the state, unless it is damaged: then load_state_dict raises with the name of the layer."""
        self.prepared = None
        *_others, errors = arguments
        values, indices = (state.get(prefix + name) for name in ("values", "indices"))
        if values is not None and indices is not None and not indices.is_meta and not values.is_meta:
            try:
                check_packed(values, indices, PATTERN)
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.')}: {error}")
                return
        super()._load_from_state_dict(state, prefix, *arguments)


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on this tensor's device is being captured in a CUDA graph."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that does not learn."""
    return nn.Parameter(tensor, requires_grad=False)
