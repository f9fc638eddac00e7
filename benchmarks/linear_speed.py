"""How fast each inference backend multiplies by a packed 2:4 weight, against the dense matmul of torch.

    python benchmarks/linear_speed.py                                          # this machine; a few minutes on a CPU
    python benchmarks/linear_speed.py --shapes 4096x4096 --rows 1 16 512 --dtypes bfloat16
    python benchmarks/linear_speed.py --update_choice     # no measurement: the table of `auto` from the saved rows

Weights are random, and their 2:4 form is what every backend and `dense`, F.linear on cuBLAS or oneDNN, multiply by.
The result of each is compared with float64 at the first, middle and last row of x: a backend whose error is more than
twice that of dense, plus a rounding, gets no time but a note, and the exit code is 1.

State cold: before each run a copy of 64 MB (GPU: 256 MB) empties the caches, and a run visits so many equal weights one
after the other, each once, so that all come from memory, as in a model. State warm (--states warm): always the same
weight. On a GPU a run is one CUDA graph.

GB/s counts the weight (packed where it is), x and y; TFLOP/s counts those of the dense matmul for all. `limit` is the
share of what the machine allows: bytes at the copy's speed, measured before each run, or operations at the best speed
of the dense matmul for this shape (if some call has 512 rows), whichever takes longer. Copying reads as much as it
writes; reading alone can be faster. `auto` marks what SparseLinear takes by itself at present.

A backend is measured as `auto` calls it; `cutlass:prepared` is a layer that holds the metadata, which `auto` never
chooses. CUTLASS takes the tiles of proxsparse/ops/tuned.json, which tune.py measures.

Rows are appended to results/linear_speed.jsonl after each shape, and results/linear_speed_<device>.png shows them.
After an illegal access in a kernel every later call of its process fails: --backends NAME measures only one backend and
dense. Processes with the same PROXSPARSE_WHEN, a time, count as one measurement.
"""

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from choice_table import update_choice
from common import (
    FOLDER,
    append_rows,
    command_line,
    elapsed_ms,
    filled,
    interleaved,
    note_of,
    packed_weight,
    percentiles,
    provenance,
    results_file,
    show,
    typed,
    write_table,
)
from linear_plot import plot
from shapes import PAPER, Shape, layer_shapes
from torch import Tensor
from torch.nn import functional

from proxsparse.errors import run_command
from proxsparse.inference.generate import capture_graph
from proxsparse.ops import choice, sparse_linear, unpack_nm
from proxsparse.ops.registry import Kernel, get_kernel, list_backends
from proxsparse.ops.tuning import device_kind
from proxsparse.runtime.device import choose_device

DENSE = "dense"
PREPARED = ":prepared"  # after the name of a backend that also works without its own form
DEFAULTS = {  # device -> flag -> value, for flags that are not given
    "cpu": {
        "shapes": [*layer_shapes(["smollm2-135m"]), (4096, 4096), (4096, 14336), (14336, 4096)],
        "dtypes": ["bfloat16", "float32"],
        "rows": [1, 2, 4, 8, 16, 32, 64, 128, 512],
        "repetitions": 5,
        "seconds": 0.05,
    },
    "cuda": {
        "shapes": layer_shapes(PAPER),
        "dtypes": ["bfloat16"],
        "rows": [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 4096, 8192],
        "repetitions": 20,
        "seconds": 0.0,
    },
}
MAX_SETS = 256  # equal weights a run visits at most
COPY_BYTES = {"cpu": 2**26, "cuda": 2**28}  # that and its copy are several times the L3 of a CPU, the L2 of a GPU
RUN_MS = {"cpu": 5.0, "cuda": 0.5}  # least time of one run, far above that of reading a clock
PEAK_ROWS = 512  # from here on the dense matmul is at its best
HEADER = ["weight", "dtype", "rows", "state", "backend", "ms", "speed", "limit", "x dense", "auto", "note"]


@dataclass
class Weights:
    """Equal copies of one random 2:4 weight in every form that somebody reads, and what the right results are."""

    shape: Shape
    dense: list[Tensor]
    packed: list[tuple[Tensor, Tensor]]
    x: Tensor  # [most rows, in_features]
    places: list[int]  # rows of x that are checked
    expected: Tensor  # float64, [places, out_features]
    largest: float  # the largest magnitude of `expected`
    prepared: dict[str, list[Tensor | None]] = field(default_factory=dict)  # backend -> its own forms

    def __len__(self) -> int:
        return len(self.dense)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.update_choice:
        update_choice(results_file("linear_speed"))
        return 0
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        chosen = filled(args, DEFAULTS[device.type])
        where = provenance(device) | {"device_kind": device_kind(device)}
        where |= {"command": typed("linear_speed", arguments)}
        where |= {"when": os.environ.get("PROXSPARSE_WHEN") or datetime.now(UTC).isoformat(timespec="seconds")}
        rows = []
        for shape in chosen.shapes:
            for dtype in chosen.dtypes:
                found = [where | row for row in benchmark(shape, getattr(torch, dtype), device, chosen)]
                rows += found
                if not args.no_save:
                    append_rows(results_file("linear_speed"), found)
                print(f"measured {'{}x{}'.format(*shape)} in {dtype}", flush=True)
        show(where, HEADER, [cells(row) for row in rows], in_short(rows))
        if not args.no_save:
            print(f"appended to {results_file('linear_speed')}")
            plot(same_measurement(where), FOLDER / "results" / f"linear_speed_{device.type}.png")
        if args.table:
            write_table(args.table, where, HEADER, [cells(row) for row in rows], in_short(rows))
        failed = failed or any("note" in row for row in rows)
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = command_line(__doc__)
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="OUTxIN", help="out_features x in_features")
    parser.add_argument("--rows", type=int, nargs="+", help="of x")
    names = list_backends("sparse_linear")
    parser.add_argument(
        "--backends",
        nargs="*",
        choices=names,
        metavar="NAME",
        help=f"of: {', '.join(names)}; default: all that support the call; no name: only dense",
    )
    parser.add_argument("--states", nargs="+", choices=["cold", "warm"], default=["cold"])
    parser.add_argument("--repetitions", type=int, help="least number of rounds")
    parser.add_argument("--seconds", type=float, help="least time of each backend in all rounds")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there, too, in Markdown")
    parser.add_argument(
        "--update_choice", action="store_true", help=f"write {choice.MEASURED.name} from the saved rows"
    )
    parser.set_defaults(dtypes=None)
    return parser.parse_args(arguments)


def same_measurement(where: dict) -> list[dict]:
    """The saved rows of this time and device, of all processes."""
    rows = map(json.loads, results_file("linear_speed").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if all(row.get(name) == where[name] for name in ("when", "device"))]


def shape(text: str) -> Shape:
    """ "4096x11008" -> (4096, 11008)."""
    out_features, _, in_features = text.partition("x")
    if not (out_features.isdecimal() and in_features.isdecimal()) or int(in_features) % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: write OUTxIN, in_features a multiple of 4, such as 4096x11008")
    return int(out_features), int(in_features)


# ---------------------------------------------------------------------------------------------- measuring


@torch.no_grad()
def benchmark(shape: Shape, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> list[dict]:
    """One row for dense and each backend, for every number of rows and state."""
    weights = random_weights(shape, dtype, device, args)
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
    target = source.clone()
    rows = []
    for count in args.rows:
        for state in args.states:
            found = times(weights, count, state, lambda: target.copy_(source), args)
            case = {"weights": "{}x{}".format(*shape), "dtype": str(dtype).removeprefix("torch.")}
            case |= {"rows": count, "state": state, "sigma": args.sigma}
            rows += [case | row for row in found]
    return [row | shares(row, rows) for row in rows]


def random_weights(shape: Shape, dtype: torch.dtype, device: torch.device, args: argparse.Namespace) -> Weights:
    """So many equal weights that those of one run are more than a cache holds."""
    values, indices = packed_weight(shape, dtype, device, args.sigma)
    sets = min(math.ceil(COPY_BYTES[device.type] / (values.nbytes + indices.nbytes)), MAX_SETS)
    weight = unpack_nm(values, indices)
    x = torch.randn(max(args.rows), shape[1], device=device).to(dtype)
    places = sorted({place for rows in args.rows for place in (0, rows // 2, rows - 1)})
    expected = x[places].double() @ weight.double().T
    return Weights(
        shape,
        dense=[weight.clone() for _ in range(sets)],
        packed=[(values.clone(), indices.clone()) for _ in range(sets)],
        x=x,
        places=places,
        expected=expected,
        largest=expected.abs().max().item(),
    )


def times(weights: Weights, rows: int, state: str, copy: Callable[[], object], args: argparse.Namespace) -> list[dict]:
    """The rows of dense and of every backend that supports so many rows; of one that fails there is a note alone."""
    x = weights.x[:rows]
    calls = {DENSE: lambda place: functional.linear(x, weights.dense[place])}
    for name in backends_for(x, weights, args.backends):
        calls |= sparse_calls(get_kernel("sparse_linear", name), weights, x)
    errors, numbers, runs, notes = {}, {}, {}, {}
    for name, call in calls.items():
        try:
            errors[name] = error_of(call, weights, rows)
            numbers[name] = visits(call, len(weights), x.device)
            runs[name] = repeated(call, numbers[name], state, x.device)
        except Exception as error:  # whatever a kernel does, the others are wanted
            notes[name] = note_of(error)
    of_dense = errors.get(DENSE, math.inf)
    allowed = 2 * of_dense + torch.finfo(x.dtype).eps * weights.largest
    wrong = [name for name in runs if not errors[name] <= allowed]
    notes |= {name: f"wrong: its error is {errors[name]:.2g}, that of dense {of_dense:.2g}" for name in wrong}
    runs = {name: run for name, run in runs.items() if name not in notes}
    try:
        samples = interleaved(runs, copy, x.device, args.repetitions, args.seconds) if DENSE in runs else {}
    except Exception as error:  # an earlier call has ended the CUDA context: rows of other sizes are kept
        samples, notes = {}, notes | {name: note_of(error) for name in runs}
    found = [{"backend": name, "note": note} for name, note in notes.items()]
    if not samples:
        return found
    copy_gb_per_s = 2 * COPY_BYTES[x.device.type] / samples["copy"].row()["p50_ms"] / 1e6
    auto = choice.choose(x, weights.packed[0][0]).backend
    for name in runs:
        row = percentiles([ms / numbers[name] for ms in samples[name].ms])
        row |= {"calls_a_run": numbers[name], "copy_gb_per_s": copy_gb_per_s, "error": errors[name]}
        found.append({"backend": name} | row | speeds(name, weights, x, row["p50_ms"]) | {"auto": name == auto})
    return found


def backends_for(x: Tensor, weights: Weights, names: list[str] | None) -> list[str]:
    """Those of `names` (None: all) that support the call."""
    values = weights.packed[0][0]
    names = list_backends("sparse_linear") if names is None else names
    return [name for name in names if get_kernel("sparse_linear", name).supports(x, values) is None]


def sparse_calls(kernel: Kernel, weights: Weights, x: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """The backend's name, with PREPARED if its own form is held -> (place -> x W^T, through the op, by that weight)."""
    packed, backend, calls = weights.packed, kernel.backend, {}
    if kernel.prepare and backend not in weights.prepared:
        weights.prepared[backend] = [kernel.prepare(*one) for one in packed]
    if not kernel.needs_prepared:
        calls[backend] = lambda place: sparse_linear(x, *packed[place], backend=backend)
    if kernel.prepare:
        own = weights.prepared[backend]
        name = backend if kernel.needs_prepared else backend + PREPARED
        calls[name] = lambda place: sparse_linear(x, *packed[place], prepared=own[place], backend=backend)
    return calls


def error_of(call: Callable[[int], Tensor], weights: Weights, rows: int) -> float:
    """The largest error of a first call against float64, among the rows that are checked."""
    known = [number for number, place in enumerate(weights.places) if place < rows]
    found = call(0)[[weights.places[number] for number in known]]
    return (found.double() - weights.expected[known]).abs().max().item()


def visits(call: Callable[[int], Tensor], sets: int, device: torch.device) -> int:
    """How many weights a run visits: all, or as many as give a time worth measuring."""
    one = elapsed_ms(lambda: call(0), device)
    return max(1, min(sets, math.ceil(RUN_MS[device.type] / max(one, 1e-4))))


def repeated(call: Callable[[int], Tensor], number: int, state: str, device: torch.device) -> Callable[[], object]:
    """A run: `number` calls, on so many weights or (warm) on one."""

    def run() -> None:
        for place in range(number):
            call(place if state == "cold" else 0)

    return capture_graph(run) if device.type == "cuda" else run


def speeds(name: str, weights: Weights, x: Tensor, ms: float) -> dict[str, float]:
    """GB/s of weight, x and y, and TFLOP/s of the dense matmul."""
    out_features, in_features = weights.shape
    read = weights.dense[0].nbytes if name == DENSE else sum(part.nbytes for part in weights.packed[0])
    moved = read + x.nbytes + x.shape[0] * out_features * x.element_size()
    operations = 2 * x.shape[0] * out_features * in_features
    return {"bytes": moved, "gb_per_s": moved / ms / 1e6, "tflop_per_s": operations / ms / 1e9}


def shares(row: dict, rows: list[dict]) -> dict[str, object]:
    """The share of the limit, what the limit is, and the ratio to dense in the same call."""
    if "p50_ms" not in row:
        return {}
    dense = [other for other in rows if other["backend"] == DENSE]
    (same,) = (other for other in dense if (other["rows"], other["state"]) == (row["rows"], row["state"]))
    peaks = [other["tflop_per_s"] for other in dense if max(other["rows"] for other in dense) >= PEAK_ROWS]
    found = {
        "memory": row["gb_per_s"] / row["copy_gb_per_s"],
        "compute": row["tflop_per_s"] / max(peaks, default=math.inf),
    }
    limit = max(found, key=found.get)
    return {"limit": limit, "share_of_limit": found[limit], "times_dense": same["p50_ms"] / row["p50_ms"]}


# ---------------------------------------------------------------------------------------------- showing


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    case = [row["weights"], row["dtype"], str(row["rows"]), row["state"], row["backend"]]
    if "p50_ms" not in row:
        return [*case, "", "", "", "", "", row["note"]]
    speed = f"{row['gb_per_s']:.1f} GB/s" if row["limit"] == "memory" else f"{row['tflop_per_s']:.3g} TFLOP/s"
    numbers = [f"{row['p50_ms']:.4f}", speed, f"{row['share_of_limit']:.0%}", f"{row['times_dense']:.2f}"]
    return [*case, *numbers, "<-" if row["auto"] else "", row.get("note", "")]


def in_short(rows: list[dict]) -> str:
    """What the fastest sparse backend is against dense, for the fewest and the most rows; PREPARED does not count."""
    said = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for count in sorted({min(row["rows"] for row in rows), max(row["rows"] for row in rows)}):
            of_case = [row for row in rows if (row["dtype"], row["rows"]) == (dtype, count) and "times_dense" in row]
            ratios = defaultdict(list)
            for row in of_case:
                if row["backend"] != DENSE and not row["backend"].endswith(PREPARED):
                    ratios[row["weights"], row["state"]].append(row["times_dense"])
            best = [max(found) for found in ratios.values()]
            if best:
                said.append(f"{dtype}, {count} rows: {min(best):.2f} to {max(best):.2f} times dense")
    return "the fastest sparse backend, by shape: " + "; ".join(said) if said else "no sparse backend was measured"


if __name__ == "__main__":
    sys.exit(run_command(main))
