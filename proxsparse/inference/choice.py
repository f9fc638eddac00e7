"""Which backend multiplies: the `auto` of `SparseLinear`, from a table of what was fastest where it was measured.

measured.json holds, for each kind of device and each dtype, what

    python benchmarks/linear_speed.py --update_choice

makes of the rows of benchmarks/results/linear_speed.jsonl, and from which device, torch and commit they come:

    {"cpu avx512_bf16": {"bfloat16": {"measured": {...}, "fastest": {"4096x4096": {"1": "cpp > reference", ...}}}}}

that is, shape of the weight (out_features x in_features) -> rows of x -> backends, the fastest first. A call takes the
nearest shape and the nearest number of rows, and the first backend there that supports it. `reference`, which unpacks
the weight and leaves the rest to torch's dense matmul, supports everything: it stands first where sparse loses. A
backend that needs a form of its own (`needs_prepared`) is never chosen: the layer may not hold that form. One that is
passed over although it multiplies by no weight of this dtype on this device is announced, once for each reason.
"""

import functools
import json
from pathlib import Path

import torch
from torch import Tensor

from proxsparse.inference.backends import Backend, backend, backends
from proxsparse.ops.registry import announce
from proxsparse.ops.tuning import device_kind, nearest

MEASURED = Path(__file__).with_name("measured.json")
REFERENCE, ORDER = "reference", " > "
# Where nothing was measured: (rows,) -> backends. Few rows are bound by memory, of which every sparse kernel reads
# less; for many, cpp unpacks and multiplies as the reference does, a slab at a time.
UNMEASURED = {
    "cpu": {(1,): "cpp > reference"},
    "cuda": {(1,): "gemv > cutlass > reference", (16,): "gemv > cutlass > reference", (64,): "cutlass > reference"},
}
EASY_ROWS, EASY_SIZE = 8, 4096  # a backend that does not multiply so many rows by a square of that size never does
MAX_CHOICES = 10_000  # remembered: a server meets many numbers of rows
_choices: dict[tuple, Backend] = {}


def choose(x: Tensor, values: Tensor) -> Backend:
    """The backend for x [rows, in_features] and packed values [out_features, in_features / 2].

    Devices, dtypes and shapes decide alone, and are looked up the second time: under a microsecond.
    """
    key = (x.device, x.dtype, values.dtype, x.shape[0], values.shape)
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        found = _choices[key] = first_that_serves(x, values)
    return found


def forget() -> None:
    """Reads the table and chooses anew from now on."""
    measured.cache_clear()
    _choices.clear()


def first_that_serves(x: Tensor, values: Tensor) -> Backend:
    """The first of the order that is there, needs no form of its own and supports the call."""
    rows, (out_features, k) = x.shape[0], values.shape
    for name in order(x.device, x.dtype, rows, (out_features, 2 * k)):
        if name not in backends() or backend(name).needs_prepared:
            continue
        if backend(name).supports(x, values) is None:
            return backend(name)
        if reason := why_never(backend(name), x, values):
            announce("sparse_linear", name, reason)
    return backend(REFERENCE)


def why_never(refused: Backend, x: Tensor, values: Tensor) -> str | None:
    """None if the backend refuses only this size, which is what the order is for; else why it refuses an easy one."""
    easy_x = x.new_empty(1, 1).expand(EASY_ROWS, EASY_SIZE)
    return refused.supports(easy_x, values.new_empty(1, 1).expand(EASY_SIZE, EASY_SIZE // 2))


def order(device: torch.device, dtype: torch.dtype, rows: int, shape: tuple[int, int]) -> list[str]:
    """The names of backends, the fastest first, for so many rows and a weight [out_features, in_features]."""
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
