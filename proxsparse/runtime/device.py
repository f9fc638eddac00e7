"""Device and precision of a run, and the description of the machine that is saved with every result."""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from proxsparse.errors import InputError

PRECISIONS = {  # --precision -> dtype of the weights, dtype of autocast or None
    "fp32": (torch.float32, None),
    "mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
}
# Errors of torch where a model combines a tensor that autocast has cast with one that it has not.
DIFFERENT_DTYPES = r"(same|different|expected) (dtype|scalar type)|self \(\w+\) and source \(\w+\)|dtypes? (mis)?match"


def choose_device(name: str) -> torch.device:
    """The device; `auto` is the GPU if there is one, else the CPU. Raises InputError for an unusable device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise InputError(f"--device {name}: not usable here ({reason}); try --device cpu") from error
    return device


def bf16_is_fast(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def choose_precision(precision: str, device: torch.device) -> tuple[torch.dtype, torch.dtype | None]:
    """--precision -> (dtype of the weights, dtype of autocast or None)."""
    return PRECISIONS[precision_name(precision, device)]


def precision_name(precision: str, device: torch.device) -> str:
    """The --precision that is used; auto: mixed where bf16 is fast, else fp32."""
    return {"auto": "mixed" if bf16_is_fast(device) else "fp32"}.get(precision, precision)


@contextlib.contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast to `dtype`, or nothing. Casts are not cached, because a method may change weights in the block.

    Raises InputError for a model that does not support autocast, which fails because two tensors differ in dtype.
    """
    if dtype is None:
        yield
        return
    try:
        with torch.autocast(device.type, dtype, cache_enabled=False):
            yield
    except RuntimeError as error:
        if not re.search(DIFFERENT_DTYPES, str(error)):
            raise
        raise InputError(
            f"the model does not support mixed precision ({' '.join(str(error).split())}); use --precision fp32"
        ) from error


def full_precision(tensor: torch.Tensor) -> torch.autocast:
    """Disables autocast on the tensor's device: a Hessian in bfloat16 would be too inaccurate."""
    return torch.autocast(tensor.device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on the device within `autocast`; None outside."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def version(package: str) -> str:
    """The installed version of a package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Not platform.processor(): it starts a process, which for a moment shares the lock of the output folder.
    return f"{torch.cpu.get_capabilities().get('cpu_name', platform.machine())}, {os.cpu_count()} cores"


def environment(device: torch.device) -> dict:
    """Versions, device and threads, which are saved with a result."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: on the device if it is a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(device: torch.device) -> dict[str, float]:
    """Free bytes of the device, if it is a GPU, and of the host; without an entry where they are unknown."""
    found = {"device": torch.cuda.mem_get_info(device)[0]} if device.type == "cuda" else {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        found["host"] = sizes["MemAvailable"] + sizes["SwapFree"]
    return found


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device; from the CPU to a GPU without waiting for the kernels that are queued there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
