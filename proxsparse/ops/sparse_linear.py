"""The op `proxsparse::sparse_linear`: y = x W^T + b with a packed 2:4 weight W.

All kernels read the packed format (`reference.pack`), so that a layer can use different backends for different numbers
of rows, and checkpoints need no conversion. A kernel with `prepare` computes something from the packed weight in every
call, unless the layer holds it. The interface of a kernel, with rows = the product of the leading dimensions of x:

    supports(x, values, scales)   None or the reason why not, for x [rows, in_features]; depends only on dtypes, devices
                                  and shapes: the tensors may be meta tensors. Of the scales only the dtype counts
    run(x, values, indices, bias, prepared, scales) -> y
                                  [rows, out_features] in the dtype of x, summed at least in fp32; x is contiguous;
                                  values, bias and x have the same dtype
    prepare(values, indices)      -> prepared, one tensor, optional for `run`

The scales are None, or in the dtype of x: then the values are codes of 8 or 4 bits (`reference.quantize`).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from proxsparse.ops import choice
from proxsparse.ops.registry import (
    AUTO,
    Kernel,
    chosen_backend,
    define_op,
    explicit_kernel,
    find_kernel,
    register_kernel,
)
from proxsparse.patterns import FLOAT_DTYPES, NMPattern, PatternLike
from proxsparse.reference import windows
from proxsparse.reference.quantize import columns, shape_of_scales


def _fake(x, values, indices, bias, prepared, backend, scales=None, m=4) -> Tensor:
    check_sparse_linear(x, values, indices, bias, scales, m)
    return x.new_empty((*x.shape[:-1], values.shape[0]))


@define_op(
    "sparse_linear",
    "(Tensor x, Tensor values, Tensor indices, Tensor? bias, Tensor? prepared, str backend, "
    "Tensor? scales=None, int m=4) -> Tensor",
    _fake,
)
def _sparse_linear(x, values, indices, bias, prepared, backend, scales=None, m=4) -> Tensor:
    check_sparse_linear(x, values, indices, bias, scales, m)
    if (y := direct(x, values, indices, bias, backend, scales, m)) is not None:
        return y
    rows = as_rows(x)
    kernel = select_kernel(rows, values, backend, scales)
    if kernel.windows:
        y = kernel.run(rows, values, indices, bias, prepared, scales, m)
    else:
        y = kernel.run(windows.expand(rows, m), values, indices, bias, prepared, scales)
    # not `view`: autograd forbids in-place operations (`y += 1`, ReLU(inplace=True)) on a view that a custom op returns
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], values.shape[0]])


def _save_weight(ctx, inputs: tuple, output: Tensor) -> None:
    x, values, indices, _bias, _prepared, _backend, scales, ctx.m = inputs
    ctx.in_features = x.shape[-1]
    if values.is_inference():
        raise RuntimeError(
            "sparse_linear: no dL/dx for a weight that was packed or loaded under torch.inference_mode(); "
            "use torch.no_grad() instead"
        )
    ctx.save_for_backward(values, indices, scales)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dL/dx = dL/dy W, for training adapters and layers before a packed layer. The packed weight has no gradient."""
    if any(ctx.needs_input_grad[1:]):
        raise RuntimeError(
            "sparse_linear: packed weights and their biases have no gradient; freeze them with requires_grad_(False), "
            "or train the dense layer (proxsparse.inference.convert.unsparsify_)"
        )
    values, indices, scales = ctx.saved_tensors
    return grad @ dense_weight(values, indices, scales, ctx.m, ctx.in_features), *[None] * 7


torch.library.register_autograd("proxsparse::sparse_linear", _backward, setup_context=_save_weight)


@register_kernel("sparse_linear", "reference")
def _reference(x, values, indices, bias, prepared, scales=None) -> Tensor:
    """Unpacks the weight and calls torch's dense matmul: any device and dtype, often the fastest for many rows."""
    return functional.linear(x, dense_weight(values, indices, scales), bias)


def dense_weight(
    values: Tensor, indices: Tensor, scales: Tensor | None = None, m: int = 4, in_features: int | None = None
) -> Tensor:
    """The weight [out_features, in_features] of a packed layer; None for in_features: its packed columns.

    The content of `indices` is not checked.
    """
    if scales is not None:
        values = torch.ops.proxsparse.dequantize_nm(values, scales)
    weight = torch.ops.proxsparse.unpack_nm(values, indices)
    return windows.fold(weight, in_features or weight.shape[-1], m)


def direct(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    bias: Tensor | None,
    backend: str = AUTO,
    scales: Tensor | None = None,
    m: int = 4,
) -> Tensor | None:
    """`sparse_linear` without the dispatcher of torch, which takes longer than the product of a small layer.

    None if the chosen kernel cannot do this, or if the call needs the dispatcher: for autograd, autocast, a subclass of
    Tensor, a mode (fake tensors, tracing, vmap), a conversion to contiguous memory, or an error message. Not for code
    that torch.compile traces.
    """
    if type(x) is not Tensor or not x.is_cpu or x.dtype != (values if scales is None else scales).dtype:
        return None
    if backend == AUTO and (backend := chosen_backend()) is None:
        kernel = choice.choose(x, values, scales)
    else:
        kernel = find_kernel("sparse_linear", backend)
    return kernel.direct(x, values, indices, scales, bias, m) if kernel and kernel.direct else None


def select_kernel(x: Tensor, values: Tensor, backend: str = AUTO, scales: Tensor | None = None) -> Kernel:
    """The kernel for x [rows, in_features] and the values, or their codes and scales, of a packed weight.

    That of the `explicit_kernel`, which raises if it does not support these tensors; else the fastest measured one.
    """
    return explicit_kernel("sparse_linear", x, values, scales, backend=backend) or choice.choose(x, values, scales)


def as_rows(x: Tensor) -> Tensor:
    """x [..., in_features] -> [rows, in_features], contiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def pad_rows(x: Tensor) -> Tensor:
    """Pads x with rows of zeros to a multiple of 8; returns x itself if no rows are missing."""
    missing = -len(x) % 8
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def check_sparse_linear(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, scales: Tensor | None = None, m: int = 4
) -> None:
    """Raises ValueError unless shapes, dtypes and devices fit. The content of `indices` is not read."""
    if values.ndim != 2:
        raise ValueError(
            f"sparse_linear: values of shape {list(values.shape)} must be a matrix, [out_features, in_features / 2]"
        )
    out_features, in_features = values.shape[0], columns(values)
    if m < 4 or m % 2:
        raise ValueError(f"sparse_linear: m={m}: packed weights have blocks of 4, 6, 8, ... columns")
    if x.ndim == 0 or x.shape[-1] % 2 or windows.expanded_features(x.shape[-1], m) != in_features:
        expected = f"in_features={in_features}" if m == 4 else f"packed in {in_features} columns for blocks of {m}"
        raise ValueError(f"sparse_linear: x of shape {list(x.shape)}: the last dimension must be {expected}")
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"sparse_linear: x is {x.dtype}, which must be floating point; convert it")
    for name, tensor, shape, dtype in (
        ("values", values, values.shape, x.dtype if scales is None else values.dtype),
        ("indices", indices, (out_features, -(-in_features // 8)), torch.uint8),
        ("scales", scales, () if scales is None else shape_of_scales(values), x.dtype),
        ("bias", bias, (out_features,), x.dtype),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            what = f"must be {list(shape)}, because values are {values.dtype} {list(values.shape)}"
            raise ValueError(f"sparse_linear: {name} of shape {list(tensor.shape)} {what}; pack the weight again")
        if tensor.dtype != dtype:
            what = f"x is {x.dtype}, {name} is {tensor.dtype}, but must be {dtype}"
            raise ValueError(f"sparse_linear: {what}; convert one of them, or use torch.autocast")
        if tensor.device != x.device:
            raise ValueError(f"sparse_linear: x is on {x.device}, {name} is on {tensor.device}; move one of them")


def sparse_linear(
    x: Tensor,
    values: Tensor,
    indices: Tensor,
    bias: Tensor | None = None,
    prepared: Tensor | None = None,
    backend: str = AUTO,
    scales: Tensor | None = None,
    pattern: PatternLike = "2:4",
) -> Tensor:
    """y = x W^T + b with a packed 2:4 weight W [out_features, in_features]; dL/dx = dL/dy W. W and b have no gradient.

    An infinity or NaN in x at a pruned weight makes y NaN or has no effect, depending on the backend and the number of
    rows. On CPUs with AVX512-BF16 subnormal bfloat16 weights count as 0.

    Args:
        x: [..., in_features], floating point, any strides.
        values: [out_features, in_features / 2], the kept weights from `pack_nm`, with the dtype and device of x; or
            their codes from `quantize_nm`, with `scales`.
        indices: uint8 [out_features, ceil(in_features / 8)], from `pack_nm`. Kernels do not check the content; use
            `reference.pack.check_packed` for indices from files.
        bias: b, [out_features], with the dtype and device of x; None means 0.
        prepared: for "cutlass", the only backend that reads it: prepare(values, indices) of its kernel, which is
            otherwise computed in every call. `SparseLinear` holds it.
        backend: one of `list_backends("sparse_linear")`, which runs the call or raises; or "auto": the fastest
            measured backend, unless `use_backend` or PROXSPARSE_BACKEND chooses one.
        scales: of codes, with the device and dtype of x. The weight that is multiplied is `dequantize_nm` of both; for
            bfloat16 its rounding to bfloat16 depends on the CPU.
        pattern: that of W: 2:4, 4:6, 6:8, ...; see `pack_nm`.
    Returns:
        y, [..., out_features], in the dtype of x; sums are at least in fp32.
    Raises:
        ValueError: shapes, dtypes or devices do not match, or the backend is unknown.
        RuntimeError: an explicitly chosen backend does not support the call.
    """
    m = NMPattern.parse(pattern).m
    return torch.ops.proxsparse.sparse_linear(x, values, indices, bias, prepared, backend, scales, m)
