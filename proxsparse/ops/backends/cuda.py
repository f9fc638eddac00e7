"""The CUDA kernels: the only file that imports proxsparse._C_cuda. They serve where Triton is missing."""

import importlib

import torch
from torch import Tensor

from proxsparse.ops.registry import register_kernel

try:
    _C, _missing = importlib.import_module("proxsparse._C_cuda"), None
except ImportError as error:
    _C = None
    _missing = (
        f"the compiled CUDA extension is missing ({error}); remedy: with a CUDA build of torch and nvcc, install again"
    )


def _supports(tensor: Tensor, n: int, m: int) -> str | None:
    if tensor.device.type != "cuda":
        return f"it serves CUDA GPUs, the tensor is on {tensor.device}"
    if _missing:
        return _missing
    if m != 4 or n not in (1, 2):
        return f"it serves the patterns 2:4 and 1:4, not {n}:{m}"
    if torch.cuda.get_device_capability(tensor.device) < (8, 0):
        return f"it serves GPUs of compute capability 8.0 or newer, not {torch.cuda.get_device_name(tensor.device)}"
    return None


def _supports_prox(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> str | None:
    return _supports(weight, n, m)


def _supports_adamw_prox(weight: Tensor, *arguments) -> str | None:
    *_, reg_lambda, n, m, _frozen_lambda, _frozen_eps, _seed = arguments
    return _supports(weight, n, m) if reg_lambda > 0 else _supports(weight, 2, 4)  # AdamW alone knows no pattern


@register_kernel("prox_nm_", "cuda", supports=_supports_prox)
def _prox_nm_(weight: Tensor, reg_lambda: float, n: int, m: int, scale: Tensor | None) -> None:
    if scale is not None:  # in the kernel's arithmetic: fp64 for fp64, fp32 otherwise
        scale = scale.to(torch.float64 if weight.dtype == torch.float64 else torch.float32).contiguous()
    with torch.cuda.device_of(weight):  # a launch goes to the current device
        _C.prox_n4_(weight, reg_lambda, n, scale, torch.cuda.current_stream().cuda_stream)


@register_kernel("adamw_prox_", "cuda", supports=_supports_adamw_prox)
def _adamw_prox_(weight: Tensor, *arguments) -> None:
    *head, n, _m, frozen_lambda, frozen_eps, seed = arguments
    with torch.cuda.device_of(weight):
        stream = torch.cuda.current_stream().cuda_stream
        _C.adamw_prox_(weight, *head, n, frozen_lambda, frozen_eps, seed, stream)
