"""Measures the launch parameters of the GPU kernels, and writes the fastest into proxsparse/ops/tuned.json.

    python3 benchmarks/tune.py                          # all kernels, at most 80 seconds on a GPU
    python3 benchmarks/tune.py --kernels gemv --limit 300
    python3 benchmarks/tune.py --device cpu             # rehearsal with Triton's interpreter: nothing is saved

The result of every choice of parameters is compared with float64 before its time counts. A wrong result or an error is
a row with a note, is never chosen, and makes the exit code 1. The defaults of a kernel are timed first and last; their
spread is the noise. Parameters replace the defaults only where they are faster by more than that.

Rows are appended to results/tune.jsonl as they are measured. tuned.json is written after each kernel: the entry of the
kernel is replaced, other entries stay. An illegal memory access ends the sweep; gpu_suite.py runs a process for each
kernel.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime

import torch
from lib.common import Results, dtype_name, error_note, new_parser
from lib.measure import interleaved
from lib.tune_kernels import DTYPE, KERNELS, Case, Kernel

from proxsparse.errors import run_command
from proxsparse.inference.generate import capture_graph
from proxsparse.ops import tuning

LIMIT_S = {"cuda": 80.0, "cpu": 20.0}
LAST_S = 2.0  # a kernel is not started with less time left
ROUNDS = {"cuda": 5, "cpu": 1}
LEAST_NOISE = 0.01  # two equal times may agree by chance
DEFAULT = "{}"  # the defaults of a kernel, as text
HEADER = ["kernel", "size", "lambda", "parameters", "ms", "copy", "note"]


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes tuned.json; the exit code is 1 if a choice of parameters failed."""
    args = parse_arguments(arguments)
    device = torch.device(args.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if args.device == "cuda" and not torch.cuda.is_available():
        print("tune: torch has no CUDA GPU here; rehearse with --device cpu", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    fields = {"device_kind": tuning.device_kind(device), "dtype": dtype_name(DTYPE)}
    fields |= {"when": datetime.now(UTC).isoformat(timespec="seconds")}
    results = Results("tune", device, not args.no_save, arguments, **fields)
    deadline = time.monotonic() + args.limit
    for place, name in enumerate(args.kernels):
        now = time.monotonic()
        share = KERNELS[name].share / sum(KERNELS[other].share for other in args.kernels[place:])
        until = now + (deadline - now) * share
        if until - now < LAST_S:
            print(f"{name}: no time is left", flush=True)
            continue
        rows = [results.add([row])[0] for row in sweep(name, until, device)]
        if results.save:
            save(name, rows)
        if not is_alive(device):
            break
    results.show(HEADER, cells, "copy: the share of the speed of a copy")
    return 1 if any("note" in row for row in results.rows) else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = new_parser(__doc__)
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS], metavar="NAME", help=", ".join(KERNELS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, help=f"seconds in total; default: {LIMIT_S['cuda']:.0f}")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    args.no_save = args.no_save or args.device == "cpu"  # times of an interpreter are not worth keeping
    args.limit = args.limit or LIMIT_S[args.device]
    names = args.kernels or [*KERNELS]
    args.kernels = [name for name in names if args.device == "cuda" or KERNELS[name].in_triton]
    return args


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    numbers = [f"{row['p50_ms']:.4f}", f"{row['share_of_copy']:.0%}"] if "p50_ms" in row else ["", ""]
    parameters = "defaults" if row["parameters"] == {} else as_text(row["parameters"])
    strength = f"{row['lambda']:g}" if "lambda" in row else ""
    return [row["kernel"], row["size"], strength, parameters, *numbers, row.get("note", "")]


def as_text(parameters: dict[str, object]) -> str:
    """Parameters as text, to compare them."""
    return json.dumps(parameters, sort_keys=True)


def sweep(name: str, until: float, device: torch.device) -> Iterator[dict]:
    """The rows of a kernel as they are measured, until a value of time.monotonic()."""
    kernel, current = KERNELS[name], None
    for case, parameters in measurements(kernel, device):
        # when the time is over, only the defaults of the current case: nothing can be chosen without their spread
        if time.monotonic() > until and (case is not current or parameters != kernel.default):
            continue
        current = case
        try:
            row = measure(kernel, case, parameters, device)
        except Exception as error:  # whatever a kernel does, the others are measured
            row = {"note": f"failed: {error_note(error)}"}
        row = {"kernel": name} | case.fields() | {"parameters": parameters} | row
        print("  ".join(filter(None, cells(row))), flush=True)
        yield row
        if "note" in row and not is_alive(device):
            return


def measurements(kernel: Kernel, device: torch.device) -> Iterator[tuple[Case, dict]]:
    """All measurements in order: every case with the coarse parameters, then with the others.

    Within a case, the defaults come first and last.
    """
    every, cases = [one for one in kernel.parameters(device) if one != kernel.default], kernel.cases(device)
    for some in [every[: kernel.coarse], every[kernel.coarse :]] if kernel.coarse else [every]:
        for case in cases:
            for parameters in (kernel.default, *some, kernel.default):
                yield case, parameters


def measure(kernel: Kernel, case: Case, parameters: dict, device: torch.device) -> dict[str, object]:
    """The times of one call and its share of the copy's speed, or a note if its result is wrong."""
    with torch.no_grad(), kernel.force(parameters):
        trial = kernel.trial(case, device)
        if problem := trial.problem():
            return {"note": f"wrong: {problem}"}
        run = capture_graph(trial.run) if device.type == "cuda" else trial.run
        samples = interleaved({"run": run}, trial.renew, device, ROUNDS[device.type], 0.0, trial.copies)
    copy_ms = samples["copy"].row()["p50_ms"]
    samples["run"].ms = [ms / trial.calls for ms in samples["run"].ms]
    row = samples["run"].row()
    row |= {"gb_per_s": trial.moved / trial.calls / row["p50_ms"] / 1e6, "copy_gb_per_s": trial.copied / copy_ms / 1e6}
    return row | {"share_of_copy": row["gb_per_s"] / row["copy_gb_per_s"]}


def is_alive(device: torch.device) -> bool:
    """Whether the CUDA context still works: after an illegal access every call fails."""
    try:
        return device.type != "cuda" or torch.ones(1, device=device).item() == 1
    except Exception:
        return False


def save(name: str, rows: list[dict]) -> None:
    """Writes the entry of a kernel in tuned.json. {} is a size where the defaults are the fastest."""
    sizes: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        sizes[row["size"]].append(row)
    choose = cuda_from if name == "prox_backend" else fastest_parameters
    fastest = {size: choose(of_size) for size, of_size in sizes.items()}
    fastest = {size: parameters for size, parameters in fastest.items() if parameters is not None}
    if not fastest:
        print(f"{name}: too few measurements to choose", flush=True)
        return
    where, file = rows[0], tuning.TUNED
    measured = {field: where[field] for field in ("device", "torch", "commit", "command")} | {"date": where["when"]}
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    entry = {"measured": measured, "fastest": fastest}
    table.setdefault(where["device_kind"], {})[f"{name} {where['dtype']}"] = entry
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    new.replace(file)  # a reader sees the old file or the new one
    tuning.forget()
    print(f"{name}: written to {file}: {json.dumps(fastest)}", flush=True)


def times(rows: list[dict]) -> dict[float | None, dict[str, list[float]]]:
    """lambda (None where a kernel has none) -> parameters as text -> times in ms, of the rows that have one."""
    found: dict[float | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "p50_ms" in row:
            found[row.get("lambda")][as_text(row["parameters"])].append(row["p50_ms"])
    return found


def noise(ms: list[float]) -> float:
    """The relative difference that two times may have by chance: the spread of equal measurements."""
    return max(LEAST_NOISE, max(ms) / min(ms) - 1) if len(ms) > 1 else math.inf


def fastest_parameters(rows: list[dict]) -> dict[str, object] | None:
    """The parameters for one kernel and size; {}: its defaults; None: too few measurements to choose.

    The fastest over all lambdas together, of those that nowhere failed, are nowhere slower than the defaults and
    somewhere faster, both by more than the noise.
    """
    failed = {as_text(row["parameters"]) for row in rows if "note" in row}
    found = {x: of for x, of in times(rows).items() if len(of[DEFAULT]) > 1}
    if not found or DEFAULT in failed:
        return None
    names = set.intersection(*(set(of) for of in found.values())) - failed
    gains = {name: [min(of[DEFAULT]) / min(of[name]) - 1 for of in found.values()] for name in names}
    limits = [noise(of[DEFAULT]) for of in found.values()]

    def is_better(name: str) -> bool:
        pairs = list(zip(gains[name], limits, strict=True))
        return all(gain >= -limit for gain, limit in pairs) and any(gain > limit for gain, limit in pairs)

    best = max(filter(is_better, names), key=lambda name: math.prod(1 + gain for gain in gains[name]), default=DEFAULT)
    return json.loads(best)


def cuda_from(rows: list[dict]) -> dict[str, float] | None:
    """{"cuda_from": x}: CUDA is faster than Triton from lambda * mean|w| = x on; {}: nowhere; None: too few rows.

    Faster means: at every measured lambda from there on, by more than the noise of Triton's times.
    """
    triton, cuda = as_text({"backend": "triton"}), as_text({"backend": "cuda"})
    means = {row["lambda"]: row["lambda_mean"] for row in rows if "p50_ms" in row}
    found, threshold = times(rows), {}
    if any("note" in row for row in rows) or not means or not all(found[x][triton] and found[x][cuda] for x in means):
        return None  # a backend that fails somewhere is not chosen
    for x in sorted(means, reverse=True):
        if min(found[x][triton]) / min(found[x][cuda]) - 1 <= noise(found[x][triton]):
            break
        threshold = {"cuda_from": means[x]}
    return threshold


if __name__ == "__main__":
    sys.exit(run_command(main))
