"""The C++ kernels for the CPU: the only file that imports proxsparse._C."""

import torch
from torch import Tensor

from proxsparse.ops.adamw_prox import pattern_of
from proxsparse.ops.registry import import_extension, register_kernel
from proxsparse.patterns import WINDOWED, NMPattern
from proxsparse.reference import pack, quantize

_C, _missing = import_extension("proxsparse._C", "pack_24", "apt install g++ python3-dev, then reinstall proxsparse")


def _supports(tensor: Tensor, n: int, m: int) -> str | None:
    if _missing:
        return _missing
    if tensor.device.type != "cpu":
        return f"supports only the CPU, but the tensor is on {tensor.device}"
    if NMPattern(n, m) not in WINDOWED:
        return f"supports the patterns {', '.join(map(str, WINDOWED))}, not {n}:{m}"
    return None


@register_kernel("prox_nm_", "cpp", supports=lambda weight, reg_lambda, n, m: _supports(weight, n, m))
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int) -> None:
    _C.prox_nm_(weight, reg_lambda, m)


@register_kernel("nm_mask", "cpp", supports=_supports)
def _nm_mask(score: Tensor, n: int, m: int) -> Tensor:
    mask = torch.empty(score.shape, dtype=torch.bool)
    _C.mask_nm(score, m, mask)
    return mask


@register_kernel("masked_weight_", "cpp", supports=lambda out, weight, pretrained, scale, n, m: _supports(out, n, m))
def _masked_weight_(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    _C.masked_weight_nm_(out, weight, pretrained, scale, m)


@register_kernel("adamw_prox_", "cpp", supports=lambda weight, *others: _supports(weight, *pattern_of(others)))
def _adamw_prox_(weight: Tensor, grad: Tensor, *arguments) -> None:
    *head, _n, m, seed = arguments
    grad = grad.to(weight.dtype)  # a copy only of a bf16 gradient of a float32 weight
    _C.adamw_prox_(weight, grad, *head, m, seed)


def _supports_packed(tensor: Tensor, *arguments) -> str | None:
    """For a weight, values or codes."""
    return _supports(tensor, 2, 4)


@register_kernel("pack_nm", "cpp", supports=_supports_packed)
def _pack_nm(weight: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = pack.empty(weight)
    if not _C.pack_24(weight, values, indices):
        pack.refuse_infeasible(weight, pack.PATTERN)
    return values, indices


@register_kernel("unpack_nm", "cpp", supports=_supports_packed)
def _unpack_nm(values: Tensor, indices: Tensor) -> Tensor:
    weight = pack.empty_weight(values)
    _C.unpack_24(values, indices, weight)
    return weight


@register_kernel("quantize_nm", "cpp", supports=_supports_packed)
def _quantize_nm(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    codes, scales = quantize.empty(values, bits)
    _C.quantize_nm(values, codes, scales)
    return codes, scales


@register_kernel("dequantize_nm", "cpp", supports=_supports_packed)
def _dequantize_nm(codes: Tensor, scales: Tensor) -> Tensor:
    values = quantize.empty_values(codes, scales)
    _C.dequantize_nm(codes, scales, values)
    return values


def _supports_sparse_linear(x: Tensor, values: Tensor, scales: Tensor | None = None) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16) or values.dtype not in (x.dtype, *quantize.CODES.values()):
        return f"supports float32 or bfloat16, not {x.dtype} times {values.dtype}"
    return _supports_packed(x) or _supports_packed(values)


@register_kernel(
    "sparse_linear",
    "cpp",
    supports=_supports_sparse_linear,
    direct=getattr(_C, "sparse_linear_direct", None),
    windows=True,
)
def _sparse_linear(x, values, indices, bias, prepared, scales=None, m=4) -> Tensor:
    y = x.new_empty((len(x), len(values)))
    scales, bias = (None if tensor is None else tensor.contiguous() for tensor in (scales, bias))
    _C.sparse_linear(x.contiguous(), values.contiguous(), indices.contiguous(), scales, bias, y, m)
    return y
