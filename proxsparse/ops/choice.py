"""The automatic choice of a backend for `sparse_linear`, from a table of what was fastest where it was measured.

measured.json holds, for each kind of device and each dtype, the result of

    python benchmarks/linear_speed.py --update_choice

on the rows of benchmarks/results/linear_speed.jsonl, and the device, torch and commit of these rows:

    {"cpu avx512_bf16": {"bfloat16": {"measured": {...}, "fastest": {"4096x4096": {"1": "cpp > reference", ...}}}}}

that is, shape of the weight (out_features x in_features) -> rows of x -> backends, fastest first. A call takes the
nearest shape, the nearest number of rows, and the first backend there that supports it. `reference`, which unpacks the
weight and calls torch's dense matmul, supports everything; it comes first where sparse kernels are slower. A backend
that needs a prepared form (`needs_prepared`) is never chosen, because the layer may not hold that form. A backend that
is passed over is announced, once for each reason, if it multiplies by no weight of this dtype on this device.
"""

import functools
import json
from pathlib import Path

import torch
from torch import Tensor

from proxsparse.ops.registry import Kernel, announce, get_kernel, list_backends
from proxsparse.ops.tuning import device_kind, nearest

MEASURED = Path(__file__).with_name("measured.json")
REFERENCE, ORDER = "reference", " > "
# Where nothing was measured: (rows,) -> backends. Few rows are bound by memory, and every sparse kernel reads less of
# it. For many rows cpp does what the reference does, a slab at a time.
UNMEASURED = {
    "cpu": {(1,): "cpp > reference"},
    "cuda": {(1,): "gemv > cutlass > reference", (16,): "gemv > cutlass > reference", (64,): "cutlass > reference"},
}
EASY_ROWS, EASY_SIZE = 8, 4096  # of x, and of a square weight: a backend that cannot multiply these never can
MAX_CHOICES = 10_000  # of the cache: a server meets many numbers of rows
_choices: dict[tuple, Kernel] = {}


def choose(x: Tensor, values: Tensor) -> Kernel:
    """The kernel for x [rows, in_features] and packed values [out_features, in_features / 2].

    The choice depends only on devices, dtypes and shapes, and is cached: a repeated call takes less than a microsecond.
    """
    key = (x.device, x.dtype, values.dtype, x.shape[0], values.shape)
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        found = _choices[key] = first_that_serves(x, values)
    return found


def forget() -> None:
    """Empty the caches: read the table and choose again."""
    measured.cache_clear()
    _choices.clear()


def first_that_serves(x: Tensor, values: Tensor) -> Kernel:
    """The first kernel of the order that is registered, needs no prepared form and supports the call."""
    rows, (out_features, k) = x.shape[0], values.shape
    for backend in order(x.device, x.dtype, rows, (out_features, 2 * k)):
        if backend not in list_backends("sparse_linear"):
            continue
        kernel = get_kernel("sparse_linear", backend)
        if kernel.needs_prepared:
            continue
        if kernel.supports(x, values) is None:
            return kernel
        if reason := why_never(kernel, x, values):
            announce("sparse_linear", backend, reason)
    return get_kernel("sparse_linear", REFERENCE)


def why_never(kernel: Kernel, x: Tensor, values: Tensor) -> str | None:
    """Why the kernel refuses even an easy size; None if it refuses only this one, which the order allows for."""
    easy_x = x.new_empty(1, 1).expand(EASY_ROWS, EASY_SIZE)
    return kernel.supports(easy_x, values.new_empty(1, 1).expand(EASY_SIZE, EASY_SIZE // 2))


def order(device: torch.device, dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> list[str]:
    """The names of backends, fastest first, for x with so many rows and a weight of [out_features, in_features]."""
    fastest = measured(str(MEASURED)).get((device_kind(device), str(dtype).removeprefix("torch.")))
    by_rows = fastest[nearest(fastest, shape)] if fastest else UNMEASURED.get(device.type, {(1,): REFERENCE})
    return by_rows[nearest(by_rows, (rows,))].split(ORDER)


@functools.cache
def measured(file: str) -> dict[tuple[str, str], dict[tuple[int, ...], dict[tuple[int, ...], str]]]:
    """(device kind, dtype) -> (out_features, in_features) -> (rows,) -> backends; {} without a file."""
    if not Path(file).is_file():
        return {}
    kinds = json.loads(Path(file).read_text(encoding="utf-8"))
    return {
        (kind, dtype): {
            tuple(map(int, shape.split("x"))): {(int(rows),): names for rows, names in by_rows.items()}
            for shape, by_rows in entry["fastest"].items()
        }
        for kind, dtypes in kinds.items()
        for dtype, entry in dtypes.items()
    }
