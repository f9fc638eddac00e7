"""Measures how fast each inference backend multiplies by a packed 2:4 weight, compared with torch's dense matmul.

    python benchmarks/linear_speed.py                                          # this machine; a few minutes on a CPU
    python benchmarks/linear_speed.py --shapes 4096x4096 --rows 1 16 512 --dtypes bfloat16
    python benchmarks/linear_speed.py --update_choice     # no measurement: the table of `auto` from the saved rows

All backends and `dense` (F.linear) multiply by the same random 2:4 weight. A backend whose error against float64 is
more than twice that of dense plus a rounding gets a note instead of a time, and the exit code is 1. A run reads equal
weights from memory, one after the other, as a model does; on a GPU it is one CUDA graph. benchmarks/README.md describes
the columns.

Rows are appended to results/linear_speed.jsonl after each shape; results/linear_speed_<device>.png shows them. After an
illegal access in a kernel every later call of its process fails: --backends NAME measures only one backend and dense.
Processes with the same PROXSPARSE_WHEN (a time) count as one measurement.
"""

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from lib import common, plots
from lib.codes import Contender, contenders, cusparselt
from lib.common import Results, dtype_name, error_note
from lib.decode import capture_graph
from lib.measure import COPY_BYTES, LinearWeights, interleaved
from lib.shapes import PAPER, Shape, layer_shapes
from torch import Tensor
from torch.nn import functional

from proxsparse.errors import InputError, run_command
from proxsparse.ops import choice, sparse_linear
from proxsparse.ops.registry import Kernel, get_kernel, list_backends
from proxsparse.runtime.device import choose_device

OP, DENSE = "sparse_linear", "dense"
PREPARED = ":prepared"  # after the name of a backend, with its own format
DEFAULTS = {
    "cpu": {
        "bits": [16, 8, 4],
        "shapes": [*layer_shapes(["smollm2-135m"]), (4096, 4096), (4096, 14336), (14336, 4096)],
        "dtypes": ["bfloat16", "float32"],
        "rows": [1, 2, 4, 8, 16, 32, 64, 128, 512],
        "repetitions": 5,
        "seconds": 0.05,
    },
    "cuda": {
        "bits": [16],
        "shapes": layer_shapes(PAPER),
        "dtypes": ["bfloat16"],
        "rows": [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 4096, 8192],
        "repetitions": 20,
        "seconds": 0.0,
    },
}
PEAK_ROWS = 512  # from this number of rows the dense matmul is at its best
COLUMNS = {
    "weight": "{weights}",
    "dtype": "{dtype}",
    "rows": "{rows}",
    "backend": "{backend}",
    "ms": "{p50_ms:.4f}",
    "GB/s": "{gb_per_s:.1f}",
    "TFLOP/s": "{tflop_per_s:.3g}",
    "share": "{share_of_limit:.0%}",
    "of": "{limit}",
    "x dense": "{times_dense:.2f}",
    "auto": "{auto}",
    "note": "{note}",
}
ORIGIN = ("device", "torch", "commit", "command")  # what the table of `auto` says about its rows


def main(arguments: list[str] | None = None) -> int:
    """Measures every shape, or with --update_choice writes the table of `auto`."""
    args = parse_arguments(arguments)
    if args.update_choice:
        update_choice(common.results_file("linear_speed"))
        return 0
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        chosen = common.with_defaults(args, DEFAULTS, device)
        when = os.environ.get("PROXSPARSE_WHEN") or datetime.now(UTC).isoformat(timespec="seconds")
        fields = {"when": when, "device_kind": choice.device_kind(device)}
        results = Results("linear_speed", device, not args.no_save, arguments, **fields)
        for dtype in chosen.dtypes:
            for shape in chosen.shapes:
                rows = results.add(benchmark(shape, getattr(torch, dtype), device, chosen))
                failed |= any("note" in row for row in rows)
                print(f"measured {shape[0]}x{shape[1]} in {dtype}", flush=True)
        results.show(COLUMNS)
        if results.save:
            same = {name: results.where[name] for name in ("when", "device")}
            rows = [row for row in common.read_rows(results.file) if same.items() <= row.items()]  # of all processes
            plots.draw(results.picture(device), partial(plots.linear_speed, rows))
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.command_line(__doc__)
    shape_help = "out_features x in_features"
    parser.add_argument("--shapes", type=common.matrix_shape, nargs="+", metavar="OUTxIN", help=shape_help)
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows of x")
    backends_help = "default: all that support the call; no name: only dense; also cusparselt, NVIDIA's library"
    names = [*list_backends(OP), "cusparselt"]
    parser.add_argument("--backends", nargs="*", choices=names, default=names, metavar="NAME", help=backends_help)
    bits_help = "8, 4: also codes, such as cpp:8 or gemv:4, and torch's dense layers, such as torch:8"
    parser.add_argument("--bits", type=int, nargs="+", choices=[16, 8, 4], help=bits_help)
    parser.add_argument("--repetitions", type=int, help="minimum number of rounds")
    parser.add_argument("--seconds", type=float, help="minimum total time of each backend")
    parser.add_argument("--update_choice", action="store_true", help=f"write {choice.MEASURED.name} from the rows")
    parser.set_defaults(dtypes=None)
    return parser.parse_args(arguments)


@torch.no_grad()
def benchmark(shape: Shape, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> list[dict]:
    """One row for dense and each backend, for every number of rows."""
    weights = LinearWeights.random(shape, dtype, device, args.sigma, args.rows)
    others = contenders(weights, args.bits)
    others |= cusparselt(weights) if "cusparselt" in args.backends else {}
    rows, source = [], torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)  # empties the caches
    for count in args.rows:
        case = {"weights": "{}x{}".format(*shape), "dtype": dtype_name(dtype)}
        case |= {"rows": count, "state": "cold", "sigma": args.sigma}
        rows += [case | row for row in times(weights, others, count, copy, args)]
    return [row | shares(row, rows) for row in rows]


def times(
    weights: LinearWeights,
    others: dict[str, Contender],
    rows: int,
    copy: Callable[[], object],
    args: argparse.Namespace,
) -> list[dict]:
    """The rows of dense, of every backend that supports the call, and of the others; what fails has only a note."""
    x = weights.x[:rows]
    calls = {DENSE: lambda place: functional.linear(x, weights.dense[place])}
    for kernel in (get_kernel(OP, name) for name in list_backends(OP) if name in args.backends):
        if kernel.supports(x, weights.packed[0][0]) is None:
            calls |= sparse_calls(kernel, weights, x)
    calls |= {name: other.call(x) for name, other in others.items() if other.serves(x)}
    errors, numbers, runs, notes = {}, {}, {}, {}
    for name, call in calls.items():
        try:
            errors[name] = weights.error_of(call, rows, others[name].weight if name in others else None)
            numbers[name] = weights.visits(call)
            runs[name] = one_call_each(call, numbers[name], x.device)
        except Exception as error:  # whatever a kernel does, the others are measured
            notes[name] = error_note(error)
    of_dense = errors.get(DENSE, math.inf)
    wrong = [name for name in runs if not errors[name] <= weights.tolerance(of_dense)]
    notes |= {name: f"wrong: its error is {errors[name]:.2g}, that of dense {of_dense:.2g}" for name in wrong}
    runs = {name: run for name, run in runs.items() if name not in notes}
    measured = {}
    try:
        if DENSE in runs:
            measured = interleaved(runs, copy, x.device, args.repetitions, args.seconds, calls=numbers)
    except Exception as error:  # an earlier call has ended the CUDA context: the rows of other sizes are kept
        notes |= {name: error_note(error) for name in runs}
    found = [{"backend": name, "note": note} for name, note in notes.items()]
    auto = choice.choose(x, weights.packed[0][0]).backend
    for name in runs if measured else ():
        row = {"backend": name, "calls_a_run": numbers[name], "error": errors[name], "auto": name == auto}
        row |= {key: value for key, value in measured[name].items() if key != "share_of_copy"}
        row |= {"copy_gb_per_s": 2 * COPY_BYTES[x.device.type] / measured["copy"]["p50_ms"] / 1e6}
        weight = others[name].nbytes if name in others else sum(part.nbytes for part in weights.packed[0])
        moved = weights.dense[0].nbytes if name == DENSE else weight
        moved += x.nbytes + rows * weights.shape[0] * x.element_size()
        operations = 2 * rows * math.prod(weights.shape)  # of the dense matmul
        speeds = {"gb_per_s": moved / row["p50_ms"] / 1e6, "tflop_per_s": operations / row["p50_ms"] / 1e9}
        found.append(row | {"bytes": moved} | speeds)
    return found


def sparse_calls(kernel: Kernel, weights: LinearWeights, x: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """The backend's name, with PREPARED if its own format is held -> (place -> x W^T by the op and that weight)."""
    packed, backend = weights.packed, kernel.backend
    calls = {backend: lambda place: sparse_linear(x, *packed[place], backend=backend)}
    if kernel.prepare:
        if backend not in weights.prepared:
            weights.prepared[backend] = [kernel.prepare(*one) for one in packed]
        own = weights.prepared[backend]
        calls[backend + PREPARED] = lambda place: sparse_linear(x, *packed[place], prepared=own[place], backend=backend)
    return calls


def one_call_each(call: Callable[[int], Tensor], number: int, device: torch.device) -> Callable[[], object]:
    """A run: `number` calls, each on another weight."""

    def run() -> None:
        for place in range(number):
            call(place)

    return capture_graph(run, device) if device.type == "cuda" else run


def shares(row: dict, rows: list[dict]) -> dict[str, object]:
    """The share of the limit, the limit, and the speedup over dense in the same call.

    The limit is whichever takes longer: the bytes at the speed of the copy, or the operations at the best speed of the
    dense matmul for this shape (if it was measured with at least PEAK_ROWS rows).
    """
    if "p50_ms" not in row:
        return {}
    dense = [other for other in rows if other["backend"] == DENSE]
    (same,) = (other for other in dense if other["rows"] == row["rows"])
    peaks = [other["tflop_per_s"] for other in dense if max(other["rows"] for other in dense) >= PEAK_ROWS]
    found = {"memory": row["gb_per_s"] / row["copy_gb_per_s"]}
    found["compute"] = row["tflop_per_s"] / max(peaks, default=math.inf)
    limit = max(found, key=found.get)
    return {"limit": limit, "share_of_limit": found[limit], "times_dense": same["p50_ms"] / row["p50_ms"]}


def update_choice(results: Path) -> None:
    """Writes proxsparse/ops/measured.json, the table of `auto`, from the saved rows."""
    if not results.is_file():
        raise InputError(f"--update_choice: there is no {results}; measure first, without the flag")
    choice.MEASURED.write_text(json.dumps(choice_table(common.read_rows(results)), indent=1) + "\n", encoding="utf-8")
    choice.clear_cache()
    print(f"written to {choice.MEASURED}")


def choice_table(rows: list[dict]) -> dict[str, dict]:
    """device kind -> dtype -> the origin of the rows, and shape -> rows of x -> backends, the fastest first.

    For each point the newest measurement of each backend counts; those of several runs are compared by their speedups
    over dense, which every run measures.
    """
    points = defaultdict(list)
    for row in rows:
        if row["state"] == "cold" and "p50_ms" in row:
            shape = tuple(map(int, row["weights"].split("x")))
            points[row["device_kind"], row["dtype"], shape, row["rows"]].append(row)
    table, origins = defaultdict(dict), defaultdict(list)
    for (kind, dtype, shape, count), found in sorted(points.items()):
        newest = {row["backend"]: row for row in sorted(found, key=itemgetter("when"))}.values()
        origins[kind, dtype] += newest
        measured = {name: "; ".join(sorted({row[name] for row in origins[kind, dtype]})) for name in ORIGIN}
        measured["results"] = "benchmarks/results/linear_speed.jsonl"
        fastest = table[kind].setdefault(dtype, {"measured": {}, "fastest": defaultdict(dict)})
        fastest["measured"] = measured
        fastest["fastest"]["{}x{}".format(*shape)][str(count)] = choice.ORDER.join(fastest_first(newest))
    return table


def fastest_first(rows: Iterable[dict]) -> list[str]:
    """The backends that `auto` may choose, up to the reference, which supports everything: slower ones are left out.

    Rows of "cutlass:prepared" do not count: `auto` calls a backend without its own format.
    """
    speedups = {row["backend"]: row["times_dense"] for row in rows if row["backend"] in list_backends(OP)}
    slowest = speedups.pop(choice.REFERENCE, 0)
    faster = (name for name in speedups if speedups[name] > slowest)
    return [*sorted(faster, key=speedups.get, reverse=True), choice.REFERENCE]


if __name__ == "__main__":
    sys.exit(run_command(main))
