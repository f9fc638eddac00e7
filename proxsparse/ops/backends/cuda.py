"""The CUDA kernels: the only file that imports proxsparse._C_cuda."""

import torch
from torch import Tensor

from proxsparse.ops.adamw_prox import pattern_of
from proxsparse.ops.registry import import_extension, register_kernel
from proxsparse.reference import pack, windows
from proxsparse.reference.quantize import columns

_C, _missing = import_extension(
    "proxsparse._C_cuda", "masked_weight_24_", "with a CUDA build of torch and nvcc, reinstall proxsparse"
)


def _supports(tensor: Tensor, n: int, m: int) -> str | None:
    if tensor.device.type != "cuda":
        return f"supports only CUDA GPUs, but the tensor is on {tensor.device}"
    if reason := missing() or too_old(tensor.device):
        return reason
    return None if (n, m) == (2, 4) else f"supports the pattern 2:4, not {n}:{m}"


@register_kernel("prox_nm_", "cuda", supports=lambda weight, reg_lambda, n, m: _supports(weight, n, m))
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int) -> None:
    _call("prox_24_", weight, reg_lambda)


@register_kernel("adamw_prox_", "cuda", supports=lambda weight, *others: _supports(weight, *pattern_of(others)))
def _adamw_prox_(weight: Tensor, grad: Tensor, *arguments) -> None:
    *head, _n, _m, seed = arguments
    _call("adamw_prox_", weight, grad.to(weight.dtype), *head, seed)


@register_kernel("masked_weight_", "cuda", supports=lambda out, weight, pretrained, scale, n, m: _supports(out, n, m))
def _masked_weight_(out: Tensor, weight: Tensor, pretrained: Tensor, scale: Tensor | None, n: int, m: int) -> None:
    _call("masked_weight_24_", out, weight, pretrained, scale)


# ------------------------------------------------------------------------------------------ packed 2:4 weights


def _supports_packed(tensor: Tensor, *others) -> str | None:
    if reason := _supports(tensor, 2, 4):
        return reason
    if tensor.element_size() not in (2, 4):
        return f"packs weights of 2 or 4 bytes, not {tensor.dtype}"
    if tensor.data_ptr() % 16:
        return "the address of the tensor must be a multiple of 16 bytes"
    return None


@register_kernel("pack_nm", "cuda", supports=_supports_packed)
def _pack_nm(weight: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = pack.empty(weight)
    infeasible = weight.new_zeros(1, dtype=torch.int32)
    _call("pack_24", weight, values, indices, infeasible)
    if infeasible.item():
        pack.refuse_infeasible(weight, pack.PATTERN)
    return values, indices


@register_kernel("unpack_nm", "cuda", supports=_supports_packed)
def _unpack_nm(values: Tensor, indices: Tensor) -> Tensor:
    weight = pack.empty_weight(values)
    _call("unpack_24", values, indices, weight)
    return weight


def missing() -> str | None:
    """The reason why these kernels cannot be used, or None. On ROCm, AMD GPUs also have the device type "cuda"."""
    version = torch.version.hip
    return f"supports NVIDIA GPUs, but this torch is built for AMD GPUs (ROCm {version})" if version else _missing


def too_old(device: torch.device) -> str | None:
    """The reason why no kernel can run on this GPU, or None."""
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return None
    return f"supports GPUs of compute capability 8.0 or newer, not {torch.cuda.get_device_name(device)}"


def unusable(x: Tensor, values: Tensor) -> str | None:
    """The reason why no kernel of a packed layer (gemv.py, cutlass.py) can use these tensors, or None."""
    if x.device.type != "cuda" or values.device != x.device:
        return f"supports only CUDA GPUs, but x is on {x.device} and the weight on {values.device}"
    return missing() or too_old(x.device)


def gemv(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, scales: Tensor | None = None, m: int = 4
) -> Tensor:
    """x W^T + bias for 1 to 16 rows of x; bfloat16 or float16, W (m-2):m and packed: csrc/cuda/gemv.cu.

    Values with scales are codes of 8 or 4 bits.
    """
    aligned = columns(values) % 64 == 0 and values.data_ptr() % 16 == 0 and indices.data_ptr() % 16 == 0
    if x.shape[-1] != columns(values) and not aligned:  # the kernel finds windows only for rows of W that are aligned
        x, m = windows.expand(x, m), 4
    if x.data_ptr() % 8:  # the kernel reads 8 bytes of x at a time; the copy of a few KB can be captured
        x = x.clone()
    y = x.new_empty(len(x), len(values))
    _call("gemv", x, values, indices, scales, bias, y, m)
    return y


def cutlass_metadata_(indices: Tensor, metadata: Tensor, architecture: int) -> None:
    """Writes the indices of a packed weight in the order of the CUTLASS kernels; see cutlass.py."""
    _call("cutlass_metadata_", indices, metadata, architecture)


def _call(name: str, tensor: Tensor, *arguments) -> None:
    with torch.cuda.device_of(tensor):  # a launch goes to the current device
        getattr(_C, name)(tensor, *arguments, torch.cuda.current_stream().cuda_stream)
