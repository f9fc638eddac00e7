"""The automatic choice of a backend for `sparse_linear`, from a table of measurements.

measured.json contains, for each kind of device and each dtype, the result of

    python benchmarks/linear_speed.py --update_choice

on the rows of benchmarks/results/linear_speed.jsonl, with the device, torch version and commit of these rows:

    {"cpu avx512_bf16": {"bfloat16": {"measured": {...}, "fastest": {"4096x4096": {"1": "cpp > reference", ...}}}}}

that is, shape of the weight (out_features x in_features) -> rows of x -> backends, fastest first. A call takes the
nearest shape, the nearest number of rows, and the first backend in the list that supports the call. `reference` unpacks
the weight and calls torch's dense matmul; it supports every call, and is first where sparse kernels are slower. If a
backend supports no weight of this dtype on this device, skipping it gives one warning for each reason.
"""

import functools
import json
import math
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from proxsparse.ops.registry import Kernel, find_kernel, get_kernel, warn_fallback
from proxsparse.reference.quantize import columns

T = TypeVar("T")
MEASURED = Path(__file__).with_name("measured.json")
REFERENCE, ORDER = "reference", " > "
# Without measurements: rows -> backends. Few rows are memory-bound, and every sparse kernel reads less memory. For
# many rows cpp unpacks into the cache, the reference into memory.
UNMEASURED = {
    "cpu": {"1": "cpp > reference"},
    "cuda": {"1": "gemv > cutlass > reference", "16": "gemv > cutlass > reference", "64": "cutlass > reference"},
}
EASY_ROWS, EASY_SIZE = 8, 4096  # rows of x, size of a square weight; every usable backend supports these
MAX_CHOICES = 10_000  # limit of the cache: a server may see many different numbers of rows
_choices: dict[tuple, Kernel] = {}


def choose(x: Tensor, values: Tensor, scales: Tensor | None = None) -> Kernel:
    """The kernel for x [..., in_features] and the values, or their codes and scales, of a packed weight.

    It depends only on devices, dtypes and shapes, and is cached: a repeated call takes less than a microsecond.
    """
    key = (x.device, x.dtype, values.dtype, None if scales is None else scales.dtype, x.shape, values.shape)
    kernel = _choices.get(key)
    if kernel is None:
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        kernel = _choices[key] = supported_kernel(x.flatten(0, -2) if x.ndim > 1 else x[None], values, scales)
    return kernel


def clear_cache() -> None:
    """Empties the caches, so that the table is read again."""
    measured.cache_clear()
    _choices.clear()


def supported_kernel(x: Tensor, values: Tensor, scales: Tensor | None) -> Kernel:
    """The first kernel in the order that is registered and supports the call."""
    dtypes = x.dtype if values.dtype == x.dtype else f"{x.dtype} {values.dtype}"
    for backend in order(x.device, dtypes, x.shape[0], (values.shape[0], columns(values))):
        kernel = find_kernel("sparse_linear", backend)
        if kernel is None:
            continue
        if kernel.supports(x, values, scales) is None:
            return kernel
        easy_x = x.new_empty(1, 1).expand(EASY_ROWS, EASY_SIZE)
        easy_values = values.new_empty(1, 1).expand(EASY_SIZE, EASY_SIZE // 2)
        if reason := kernel.supports(easy_x, easy_values, scales):  # not only this size
            warn_fallback("sparse_linear", backend, reason)
    return get_kernel("sparse_linear", REFERENCE)


def order(device: torch.device, dtype: torch.dtype | str, rows: int, shape: tuple[int, int]) -> list[str]:
    """The backends, fastest first, for x with `rows` rows and a weight of shape [out_features, in_features].

    dtype: that of x and the values, or both as text if the values are codes, which have no measurements yet.
    """
    entry = measured(str(MEASURED)).get(device_kind(device), {}).get(str(dtype).replace("torch.", ""))
    by_rows = nearest(entry["fastest"], *shape) if entry else UNMEASURED.get(device.type, {"1": REFERENCE})
    return nearest(by_rows, rows).split(ORDER)


def nearest(table: dict[str, T], *size: int) -> T:
    """The entry whose key, such as "4096x4096", has the smallest product of ratios (each >= 1) to these numbers."""

    def distance(key: str) -> float:
        pairs = zip(map(int, key.split("x")), size, strict=True)
        return sum(abs(math.log(max(number, 1) / max(wanted, 1))) for number, wanted in pairs)

    return table[min(table, key=distance)]


@functools.cache
def device_kind(device: torch.device) -> str:
    """The name of a device in the table: "sm_90" for an H100; for a CPU, its fastest instructions."""
    if device.type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        known = [name for name in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if capabilities.get(name)]
        return " ".join(["cpu", *known[:1]])
    return device.type


@functools.cache
def measured(file: str) -> dict[str, dict[str, dict]]:
    """Device kind -> dtype -> entry of the table; {} if the file is missing."""
    return json.loads(Path(file).read_text(encoding="utf-8")) if Path(file).is_file() else {}
