"""`SparseLinear`: nn.Linear on a packed 2:4 weight, and its op `proxsparse::sparse_linear`."""

import math

import torch
from torch import Tensor, nn

from proxsparse.inference.backends import backend as backend_named
from proxsparse.inference.backends import backends
from proxsparse.inference.choice import choose
from proxsparse.ops import pack_nm, unpack_nm
from proxsparse.ops.registry import chosen_backend
from proxsparse.patterns import NMPattern
from proxsparse.reference.pack import check_packed

AUTO = "auto"
MANY_ROWS = 64  # an example of a call that backends with a form of their own are made for
PATTERN = NMPattern(2, 4)
# Device types without autocast, for which torch.is_autocast_enabled raises. Computed at import, because Dynamo of torch
# 2.11 cannot trace is_autocast_available. Every other device type has it, also a renamed PrivateUse1 ("npu").
NO_AUTOCAST = frozenset(kind for kind in ("meta", "lazy", "vulkan") if not torch.amp.is_autocast_available(kind))

torch.library.define(
    "proxsparse::sparse_linear",
    "(Tensor x, Tensor values, Tensor indices, Tensor? bias, Tensor? prepared, str backend) -> Tensor",
)


@torch.library.impl("proxsparse::sparse_linear", "CompositeExplicitAutograd")
def _sparse_linear(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, prepared: Tensor | None, backend: str
) -> Tensor:
    check_call(x, values, indices, bias)
    rows = as_rows(x)
    backend = explicit(backend)
    chosen = choose(rows, values) if backend == AUTO else backend_named(backend)
    if backend != AUTO and (reason := chosen.supports(rows, values)):
        raise RuntimeError(
            f"sparse_linear: backend {backend!r} was chosen explicitly but cannot serve this call: {reason}; choose "
            "backend='auto', without PROXSPARSE_BACKEND or use_backend"
        )
    if chosen.needs_prepared and prepared is None:
        raise RuntimeError(
            f"sparse_linear: backend {backend!r} reads a form of its own; pass its prepare(values, indices) as "
            "`prepared`, or call a SparseLinear, which holds it"
        )
    return chosen.linear(rows, values, indices, bias, prepared).view(*x.shape[:-1], values.shape[0])


def as_rows(x: Tensor) -> Tensor:
    """x [..., in_features] -> [rows, in_features], contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def explicit(backend: str) -> str:
    """The backend to insist on: the call's own, else that of `use_backend` if it is one of packed layers; or "auto"."""
    everywhere = chosen_backend() if backend == AUTO else None
    return everywhere if everywhere and everywhere in backends() else backend


@torch.library.register_fake("proxsparse::sparse_linear")
def _sparse_linear_fake(x, values, indices, bias, prepared, backend):
    check_call(x, values, indices, bias)
    return x.new_empty((*x.shape[:-1], values.shape[0]))


def _keep_weight(ctx, inputs: tuple, output: Tensor) -> None:
    _x, values, indices, *_others = inputs
    if values.is_inference():
        raise RuntimeError(
            "sparse_linear: no dL/dx through a weight that was packed or loaded under torch.inference_mode(): "
            "do that under torch.no_grad()"
        )
    ctx.save_for_backward(values, indices)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dL/dx = dL/dy W, what an adapter beside a packed layer needs; the packed weight itself cannot learn."""
    if any(ctx.needs_input_grad[1:4]):
        raise RuntimeError(
            "sparse_linear: a packed weight and its bias have no gradient; freeze them with requires_grad_(False), "
            "or train the dense layer (proxsparse.inference.convert.unsparsify_)"
        )
    values, indices = ctx.saved_tensors
    grad_x = grad @ torch.ops.proxsparse.unpack_nm(values, indices, PATTERN.n, PATTERN.m)
    return grad_x, None, None, None, None, None


torch.library.register_autograd("proxsparse::sparse_linear", _backward, setup_context=_keep_weight)


def check_call(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError, before any kernel reads, unless shapes, dtypes and devices fit; the places are not read."""
    if values.ndim != 2:
        raise ValueError(
            f"sparse_linear: values of shape {list(values.shape)} must be a matrix, [out_features, in_features / 2]"
        )
    out_features, k = values.shape
    if x.ndim == 0 or x.shape[-1] != 2 * k:
        raise ValueError(f"sparse_linear: x of shape {list(x.shape)}: the last dimension must be in_features={2 * k}")
    if indices.dtype != torch.uint8 or tuple(indices.shape) != (out_features, -(-k // 4)):
        raise ValueError(
            f"sparse_linear: indices are {indices.dtype} {list(indices.shape)}: values of shape {list(values.shape)} "
            f"need torch.uint8 {[out_features, -(-k // 4)]}; pack the weight anew"
        )
    if bias is not None and tuple(bias.shape) != (out_features,):
        raise ValueError(f"sparse_linear: bias of shape {list(bias.shape)} must be [{out_features}]")
    for what, tensor in (("values", values), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(
                f"sparse_linear: x is {x.dtype}, {what} {tensor.dtype}: convert one of them, or use torch.autocast"
            )
    for what, tensor in (("values", values), ("indices", indices), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"sparse_linear: x is on {x.device}, {what} on {tensor.device}: move one of them")


def autocast_to(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    """The tensor as autocast hands it to a matmul: in `dtype`, float64 as it is."""
    return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)


class SparseLinear(nn.Module):
    """y = x W^T + b with W [out_features, in_features] 2:4 and packed: 9/16 of the memory in bf16. For inference.

    `values` [out_features, in_features / 2] and `indices` uint8 [out_features, ceil(in_features / 8)] are its state;
    the form is that of `reference.pack`. x [..., in_features] has their dtype, or torch.autocast is on. The layer is
    frozen; dL/dx is there, so that an adapter beside it or a layer before it can learn.

    A layer of a backend with a form of its own ("cusparselt", "cutlass") prepares it once, in the first call, and holds
    it with the packed one: more memory, no state. It is dropped whenever the weight moves, is cast, or is loaded. A
    CUDA graph that is captured before there is such a form makes its own in every replay, and so does torch.compile
    with "cutlass": call the layer once before, or use `prepare_`.

    Where W keeps no weight, an infinity or NaN in x makes y NaN or has no influence, as the backend and the number of
    rows have it; subnormal bfloat16 weights count as 0 on CPUs that multiply bfloat16 (AVX512-BF16).

    Args:
        backend: a name of `proxsparse.inference.backends`, which serves every call or raises; or "auto": the fastest
            for the rows of each call, unless `use_backend` or PROXSPARSE_BACKEND insist on "cpp" or "reference".
    Raises:
        ValueError: in_features is no multiple of 4, or there is no such backend.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None, backend: str = AUTO
    ):
        super().__init__()
        PATTERN.check_blocks((out_features, in_features))
        if backend != AUTO:
            backend_named(backend)
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
        return torch.ops.proxsparse.sparse_linear(x, values, self.indices, bias, prepared, self.backend)

    def own_form(self, x: Tensor, values: Tensor) -> Tensor | None:
        """The backend's own form of the weight; None if it has none, derives it in the call, or refuses the call.

        Made once for each dtype of `values`, then held. A form made in a capture is not held: its memory belongs to the
        graph and is filled in a replay.
        """
        if self.prepared is not None and self.prepared[:2] == (self.backend, values.dtype):
            return self.prepared[2]
        if self.backend == AUTO or (chosen := backend_named(self.backend)).prepare is None:
            return None
        compiling, capturing = torch.compiler.is_compiling(), is_capturing(values)
        if chosen.prepare_is_optional and (compiling or capturing):
            return None
        if not compiling:
            check_call(x, values, self.indices, None)
            if chosen.supports(as_rows(x), values):
                return None
        form = chosen.prepare(values.detach(), self.indices)
        if not capturing:
            self.prepared = self.backend, values.dtype, form
        return form

    def prepare_(self, backend: str) -> "SparseLinear":
        """Makes the form of the weight that `backend` reads, and holds it until the weight moves, is cast or is loaded.

        A layer of that backend does so in its first call, a layer of "auto" only here. With "cutlass" it holds 1/8 byte
        a weight more, and saves a kernel in each call of many rows.

        Raises:
            ValueError: the layer is of another backend, or it is "auto", which never calls a backend that needs a form
                of its own; or the backend has none.
            RuntimeError: the backend cannot serve this weight where it is, or a CUDA graph is being captured.
        """
        chosen, values = backend_named(backend), self.values
        if chosen.prepare is None:
            raise ValueError(f"prepare_: backend {backend!r} reads the packed form; there is nothing to prepare")
        if self.backend != backend and (self.backend != AUTO or chosen.needs_prepared):
            raise ValueError(f"prepare_: a layer of backend {self.backend!r} never calls {backend!r}; choose it first")
        if reason := chosen.supports(values.new_empty(1, 1).expand(MANY_ROWS, self.in_features), values):
            raise RuntimeError(f"prepare_: backend {backend!r} cannot serve this layer: {reason}")
        if is_capturing(values):
            raise RuntimeError("prepare_: memory of a CUDA graph cannot be held; call it before the capture")
        self.prepared = self.backend, values.dtype, chosen.prepare(values.detach(), self.indices)
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
        """Loads, unless what is there is damaged: then load_state_dict raises with the name of the layer."""
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
    """Whether what is computed on this tensor's device is being captured in a CUDA graph."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that does not learn."""
    return nn.Parameter(tensor, requires_grad=False)
