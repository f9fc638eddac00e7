"""`SparseLinear`: an nn.Linear with a packed weight (2:4, 4:6, 6:8, ...), in floating point or with codes."""

import torch
from torch import Tensor, nn

from proxsparse.ops import pack_nm, quantize_nm, sparse_linear
from proxsparse.ops.registry import AUTO, Kernel, get_kernel
from proxsparse.ops.sparse_linear import dense_weight, direct
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.reference.pack import check_packed
from proxsparse.reference.quantize import CODES, packed_shapes
from proxsparse.reference.windows import expanded_features

BITS = (16, *CODES)  # 16: the dtype of the layer, whatever its size
MANY_ROWS = 64  # a typical number of rows for backends with `prepare`


def autocast_to(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    """Casts a tensor as autocast does for a matmul: to `dtype`, except float64."""
    return tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype)


class SparseLinear(nn.Module):
    """y = x W^T + b with a packed 2:4, 4:6, 6:8, ... weight W [out_features, in_features], for inference.

    In bf16 a 2:4 weight takes 9/16 of the memory of the dense one, with 8 bits 5/16, with 4 bits 0.2 of it; other
    patterns are packed as 2:4 over c columns, c = `expanded_features` (`reference.windows`), so these and the
    arithmetic are c / in_features times as much: 1.33 for 4:6, 1.5 for 6:8, 1.6 for 8:10. 2:4 has c = in_features if
    that is a multiple of 4.

    The state is `values` [out_features, c / 2] and `indices` uint8 [out_features, ceil(c / 8)], in
    the format of `reference.pack`, and `weight` without elements, see `empty_weight`. With 8 or 4 bits `values` holds
    codes, and `scales` is added, see `reference.quantize`. x [..., in_features] must have the dtype of the layer, which
    is that of `weight`, unless torch.autocast is on. (To float16, it also rounds the scales, which loses precision in
    rows whose weights are all below 1e-3.) The layer is frozen, but dL/dx is computed, so that adapters
    and layers before it can be trained.

    A layer with the backend "cutlass" computes the metadata of CUTLASS in the first call and holds it. The metadata is
    not part of the state, and it is dropped when the layer is moved, cast or loaded. If a CUDA graph is captured before
    the first call, every replay computes the metadata; so does torch.compile. To avoid this, call the layer once
    before, or call `prepare_`.

    For infinities, NaN and subnormal numbers see `ops.sparse_linear`.

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear; in_features is even.
        backend: one of `list_backends("sparse_linear")`, which runs every call or raises; or "auto": the fastest
            measured backend for the rows of each call, unless `use_backend` or PROXSPARSE_BACKEND chooses one.
        bits: 16, 8 or 4; 16 keeps the values in the dtype of the layer.
        pattern: (m - 2):m with an even m.
    Raises:
        ValueError: in_features does not split into blocks, or the pattern, the backend or the bits are unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        backend: str = AUTO,
        bits: int = 16,
        pattern: PatternLike = "2:4",
    ):
        super().__init__()
        self.pattern = NMPattern.parse_windowed(pattern)
        self.pattern.check_blocks((out_features, in_features))
        check_bits(bits)
        if backend != AUTO:
            get_kernel("sparse_linear", backend)
        self.in_features, self.out_features, self.backend, self.bits = in_features, out_features, backend, bits
        shapes = packed_shapes(out_features, expanded_features(in_features, self.pattern.m), bits)
        self.values = frozen(torch.empty(shapes["values"], device=device, dtype=CODES.get(bits, dtype)))
        self.scales = frozen(torch.empty(shapes["scales"], device=device, dtype=dtype)) if bits in CODES else None
        self.register_buffer("indices", torch.empty(shapes["indices"], device=device, dtype=torch.uint8))
        self.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        self.bias = frozen(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.prepared: tuple[str, torch.dtype, Tensor] | None = None  # backend, dtype of values, weight

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, backend: str = AUTO, bits: int = 16, pattern: PatternLike = "2:4"
    ) -> "SparseLinear":
        """Packs an nn.Linear, on its device, and rounds it to `bits`. Raises ValueError if it has another pattern."""
        sizes = linear.in_features, linear.out_features
        layer = cls(*sizes, False, "meta", linear.weight.dtype, backend, pattern=pattern)
        values, layer.indices = pack_nm(linear.weight.detach(), layer.pattern)
        layer.values, layer.weight = frozen(values), empty_weight(values)
        layer.bias = None if linear.bias is None else frozen(linear.bias.detach().clone())
        return layer.train(linear.training).quantized(bits)

    def quantized(self, bits: int) -> "SparseLinear":
        """This layer, of 16 bits, with `bits`, see `quantize_nm`; it shares the tensors that stay the same.

        Raises ValueError if it has been rounded to other bits.
        """
        if bits == self.bits:
            return self
        if self.scales is not None:
            raise ValueError(f"bits={bits}: the layer has been rounded to {self.bits} bits; pack the unrounded weight")
        codes, scales = quantize_nm(self.values, bits)
        sizes = self.in_features, self.out_features
        layer = SparseLinear(*sizes, False, "meta", self.values.dtype, self.backend, bits, self.pattern)
        layer.values, layer.scales = frozen(codes), frozen(scales)
        layer.indices, layer.weight, layer.bias = self.indices, self.weight, self.bias
        return layer.train(self.training)

    @property
    def dtype(self) -> torch.dtype:
        """That of x: of `values`, or of `scales` if these are codes."""
        return (self.values if self.scales is None else self.scales).dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 0 or x.shape[-1] != self.in_features:  # the op knows only the padded width
            raise ValueError(
                f"SparseLinear: x of shape {list(x.shape)}: the last dimension must be in_features={self.in_features}"
            )
        values, indices, scales, bias = self.values, self.indices, self.scales, self.bias
        if not torch.compiler.is_compiling():
            y = direct(x, values, indices, bias, self.backend, scales, self.pattern.m)
            if y is not None:
                return y
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # it raises for "meta"
            dtype = torch.get_autocast_dtype(device)
            values = autocast_to(dtype, values) if scales is None else values
            x, scales, bias = (autocast_to(dtype, tensor) for tensor in (x, scales, bias))
        prepared = self.prepared_weight(values)
        return sparse_linear(x, values, indices, bias, prepared, self.backend, scales, self.pattern)

    def prepared_weight(self, values: Tensor) -> Tensor | None:
        """What `prepare` of the backend returns; None if it has none, computes it in the call, or refuses the layer.

        Computed once for each dtype of `values`, but not in a capture: that memory would belong to the graph.
        """
        if self.prepared is not None and self.prepared[:2] == (self.backend, values.dtype):
            return self.prepared[2]
        if self.backend == AUTO or (kernel := get_kernel("sparse_linear", self.backend)).prepare is None:
            return None
        if torch.compiler.is_compiling() or is_capturing(values) or self.unsupported(kernel, values):
            return None
        self.prepared = self.backend, values.dtype, kernel.prepare(values.detach(), self.indices)
        return self.prepared[2]

    def prepare_(self, backend: str) -> "SparseLinear":
        """Computes what `backend` prepares from the weight; kept until the layer is moved, cast or loaded.

        A layer with this backend does this in its first call; a layer with "auto" only here. "cutlass" takes 1/8 byte
        more per weight and saves a kernel in each call with many rows.

        Raises:
            ValueError: the backend prepares nothing, or the layer has another backend.
            RuntimeError: the backend does not support this weight, or a CUDA graph is being captured.
        """
        kernel, values = get_kernel("sparse_linear", backend), self.values
        if kernel.prepare is None:
            raise ValueError(f"prepare_: backend {backend!r} reads the packed format; no prepare_ is needed")
        if self.backend not in (backend, AUTO):
            raise ValueError(
                f"prepare_: a layer with backend={self.backend!r} never calls {backend!r}; create it with "
                f"backend={backend!r}"
            )
        if reason := self.unsupported(kernel, values):
            raise RuntimeError(f"prepare_: backend {backend!r} does not support this layer: {reason}")
        if is_capturing(values):
            raise RuntimeError("prepare_: a CUDA graph is being captured; call prepare_ before the capture")
        self.prepared = self.backend, values.dtype, kernel.prepare(values.detach(), self.indices)
        return self

    def unsupported(self, kernel: Kernel, values: Tensor) -> str | None:
        """Why the kernel does not support this layer, for x with many rows; None if it does."""
        x = values.new_empty(1, 1).expand(MANY_ROWS, expanded_features(self.in_features, self.pattern.m))
        return kernel.supports(x, values, self.scales)

    def dense_weight(self) -> Tensor:
        """The unpacked weight, [out_features, in_features], in the dtype of the layer.

        Raises ValueError if the packed tensors are damaged.
        """
        check_packed(self.values, self.indices, scales=self.scales)
        return dense_weight(self.values, self.indices, self.scales, self.pattern.m, self.in_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"pattern={self.pattern}, backend={self.backend}, bits={self.bits}"
        )

    def _apply(self, fn, recurse: bool = True) -> "SparseLinear":
        self.prepared = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "prepared": None}

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *arguments) -> None:
        """Loads the state. If it is damaged, load_state_dict raises an error with the name of the layer."""
        self.prepared = None
        *_others, errors = arguments
        parts = "values", "indices", "scales"
        values, indices, scales = (state.get(prefix + name, getattr(self, name)) for name in parts)
        given = any(prefix + name in state for name in parts)
        if given and not indices.is_meta and not values.is_meta:
            try:
                both_float = values.is_floating_point() and self.values.is_floating_point()
                if values.dtype != self.values.dtype and not both_float:  # copying would convert it to wrong weights
                    needed = f"a layer with {self.bits} bits needs {self.values.dtype}"
                    raise ValueError(f"values are {values.dtype}, but {needed}")
                check_packed(values, indices, scales=scales)
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.') or 'SparseLinear'}: {error}")
                return
        super()._load_from_state_dict(state, prefix, *arguments)


def check_bits(bits: int) -> None:
    """Raises ValueError for a number of bits that no layer has."""
    if bits not in BITS or not isinstance(bits, int):
        raise ValueError(f"bits={bits!r}: packed weights have {', '.join(map(str, BITS[:-1]))} or {BITS[-1]} bits")


def empty_weight(values: Tensor) -> Tensor:
    """What is saved as the dense weight of a packed layer.

    A program that does not know the packed format would create a random weight for one that is missing. One of the
    wrong shape stops it.
    """
    return values.new_empty(0)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
