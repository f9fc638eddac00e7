"""Launch parameters of the GPU kernels, from a table of measurements.

tuned.json contains, for each kind of device and each kernel, the fastest parameters that `benchmarks/tune.py` measured:

    {"sm_90": {"gemv bfloat16": {"measured": {...}, "fastest": {"4096x4096x1": {"warps": 8, "splits": 4, "tiles": 4}}}}}

The keys of "fastest" are sizes, defined by the kernel (gemv: out_features x in_features x rows). A call uses the
parameters of the nearest size. Without measurements the kernel uses its defaults. Parameters change the speed of a
kernel, not its results.
"""

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

import torch

TUNED = Path(__file__).with_name("tuned.json")
NOTHING = MappingProxyType({})
_forced: ContextVar[dict[str, dict]] = ContextVar("proxsparse_launch_parameters", default=NOTHING)


def launch_parameters(
    kernel: str, dtype: torch.dtype, device: torch.device, size: tuple[int, ...]
) -> dict[str, object]:
    """The fastest measured parameters of a kernel for this size, by name; {} if nothing was measured.

    Args:
        kernel: a name in tuned.json without its dtype, such as "gemv".
        size: positive numbers, as in the keys of this kernel; the nearest key is used.
    """
    forced = _forced.get().get(kernel)
    return forced if forced is not None else measured_parameters(kernel, dtype, device, size)


@contextlib.contextmanager
def use_launch_parameters(kernel: str, **parameters: object) -> Iterator[None]:
    """Within the block every call of `kernel` in this thread uses these parameters; for measurements."""
    token = _forced.set({**_forced.get(), kernel: parameters})
    try:
        yield
    finally:
        _forced.reset(token)


@functools.lru_cache(maxsize=10_000)
def measured_parameters(kernel: str, dtype: torch.dtype, device: torch.device, size: tuple[int, ...]) -> dict:
    """`launch_parameters` from the table."""
    name = f"{kernel} {str(dtype).removeprefix('torch.')}"
    fastest = tuned(TUNED).get((device_kind(device), name))
    return fastest[nearest(fastest, size)] if fastest else NOTHING


def forget() -> None:
    """Empties the caches, so that the table is read again."""
    tuned.cache_clear()
    measured_parameters.cache_clear()


@functools.cache
def tuned(file: Path) -> dict[tuple[str, str], dict[tuple[int, ...], dict]]:
    """(device kind, kernel and dtype) -> size -> parameters; {} if the file is missing."""
    if not file.is_file():
        return {}
    kinds = json.loads(file.read_text(encoding="utf-8"))
    return {
        (kind, kernel): {tuple(map(int, size.split("x"))): found for size, found in entry["fastest"].items()}
        for kind, kernels in kinds.items()
        for kernel, entry in kernels.items()
    }


def nearest(table: dict[tuple[int, ...], object], size: tuple[int, ...]) -> tuple[int, ...]:
    """The key with the smallest product of ratios (each >= 1) between its numbers and those of `size`."""

    def distance(key: tuple[int, ...]) -> float:
        return sum(abs(math.log(max(number, 1) / max(own, 1))) for number, own in zip(key, size, strict=True))

    return min(table, key=distance)


@functools.cache
def device_kind(device: torch.device) -> str:
    """The name of a device in the tables: "sm_90" for an H100; for a CPU, its widest vector instructions."""
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        known = [name for name in ("avx512_bf16", "avx512_f", "avx2") if capabilities.get(name)]
        return " ".join(["cpu", *known[:1]])
    return device.type
