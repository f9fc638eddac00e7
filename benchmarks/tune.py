"""Measures the launch parameters of the GPU kernels, and writes the fastest into proxsparse/ops/tuned.json.

    python3 benchmarks/tune.py                          # all kernels, at most 80 seconds on a GPU
    python3 benchmarks/tune.py --kernels gemv --limit 300
    python3 benchmarks/tune.py --device cpu             # rehearsal with Triton's interpreter: nothing is saved

Every choice of parameters is checked against float64 before its time counts. Then it is timed by a CUDA graph that goes
over equal weights, so that each is read from memory and not from a cache. A wrong result or a crash is a row with a
note, is never chosen, and makes the exit code 1. The defaults of a kernel are timed first and last; their
spread is the noise, and parameters replace them only if they are faster by more than that (tune_choice.py has the
rules).

Each kernel is measured in a process of its own, in the order of importance; all of them start at once, and compile,
while the first one measures. One that crashes or stalls is started again without the parameters that it was measuring.
Rows are appended to results/tune.jsonl as they are measured. tuned.json is written after each kernel; an entry of it is
replaced as a whole, entries of other kernels and other kinds of device stay.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare machine has not installed the package

import torch
from common import append_rows, interleaved, note_of, provenance, results_file, table, typed
from predictions import predictions_for
from tune_choice import chosen_parameters, cuda_from, key, write_tuned
from tune_kernels import DTYPE, KERNELS, TINY, Case, Kernel

from proxsparse.errors import run_command
from proxsparse.inference.generate import capture_graph
from proxsparse.ops import tuning
from proxsparse.runtime.device import device_name

WORKER = [sys.executable, str(Path(__file__).resolve())]
LIMIT_S = {"cuda": 80.0, "cpu": 20.0}
STALL_S = {"cuda": 20.0, "cpu": 60.0}  # limit of one row, which takes a tenth of a second, or a few for a first one
LAST_S = 2.0  # a kernel is not started with less time left
ROUNDS = {"cuda": 5, "cpu": 1}
BROKEN = 3  # exit code of a worker whose CUDA context has ended
HEADER = ["kernel", "size", "", "parameters", "ms", "copy", "predicted", "note"]


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.worker:
        return work(KERNELS[args.worker], args)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("tune: torch has no CUDA GPU here; rehearse with --device cpu", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    args.limit = args.limit or LIMIT_S[device.type]
    where = provenance(device) | {"device_kind": tuning.device_kind(device), "command": typed("tune", arguments)}
    where |= {"when": datetime.now(UTC).isoformat(timespec="seconds"), "dtype": str(DTYPE).removeprefix("torch.")}
    with tempfile.TemporaryDirectory() as folder:
        return sweep(args, where, device, Path(folder))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS], metavar="NAME", help=", ".join(KERNELS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, help=f"seconds for everything; default: {LIMIT_S['cuda']:.0f}")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--worker", choices=[*KERNELS], help=argparse.SUPPRESS)  # measures this kernel, then ends
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)  # before it waits for the start
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)  # what has been started and measured
    args = parser.parse_args(arguments)
    args.no_save = args.no_save or args.device == "cpu"  # times of an interpreter are not worth keeping
    return args


# ---------------------------------------------------------------------------------------------- the sweep


def sweep(args: argparse.Namespace, where: dict, device: torch.device, folder: Path) -> int:
    """Lets a process measure each kernel, and writes what was found after each."""
    start = time.monotonic()
    names = [name for name in args.kernels or KERNELS if device.type == "cuda" or KERNELS[name].in_triton]
    for name in args.kernels or KERNELS:
        if name not in names:
            print(f"{name}: it has no rehearsal on a CPU", flush=True)
    processes = {name: start_worker(name, args, folder, compiles=KERNELS[name].in_triton) for name in names}
    found = []
    try:
        for place, name in enumerate(names):
            left = args.limit - (time.monotonic() - start)
            share = KERNELS[name].share / sum(KERNELS[other].share for other in names[place:])
            if left * share < LAST_S:
                print(f"{name}: no time is left", flush=True)
                continue
            rows = measure_in(processes, name, left * share, args, where, folder)
            found += rows
            if rows and not args.no_save:
                save(name, rows, where)
    finally:
        for process in processes.values():
            end(process)
    print(table(HEADER, [cells(row) for row in found]))
    return 1 if any("note" in row for row in found) else 0


def start_worker(name: str, args: argparse.Namespace, folder: Path, compiles: bool) -> subprocess.Popen:
    """A process that gets ready to measure a kernel, and waits until its input gives it a deadline."""
    command = [*WORKER, "--worker", name, "--device", args.device, "--journal", str(folder / f"{name}.jsonl")]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if args.device == "cpu" else {})
    return subprocess.Popen(command + ["--compile"] * compiles, env=environment, stdin=subprocess.PIPE, text=True)


def measure_in(processes: dict, name: str, seconds: float, args: argparse.Namespace, where: dict, folder: Path) -> list:
    """The rows of a kernel; its process is started again for as long as it fails and there is time.

    Rows are saved here as they appear, so that what a process did before it failed is kept.
    """
    journal, deadline, rows, shown = folder / f"{name}.jsonl", time.monotonic() + seconds, [], 0
    compiles = KERNELS[name].in_triton
    while True:
        process, last, progress = processes[name], {}, time.monotonic()
        go(process, deadline)
        while True:
            ended = process.poll()
            for entry in read_journal(journal)[shown:]:
                shown, last, progress = shown + 1, entry, time.monotonic()
                if "started" not in entry:
                    rows.append(keep(where | {"kernel": name} | entry, args))
            stalled = "started" in last and time.monotonic() - progress > STALL_S[args.device]
            if ended is not None or stalled or time.monotonic() > deadline + STALL_S[args.device]:
                break
            time.sleep(0.02)
        end(process)
        if ended == 0:
            return rows
        reason = "stalled" if ended is None else f"ended with exit code {ended}"
        if "started" in last:  # so that the next process leaves it out
            append_rows(journal, [last["started"] | {"note": f"crashed: its process {reason}"}])
        elif ended != BROKEN and not compiles:
            return [*rows, keep(where | {"kernel": name, "note": f"its process {reason} outside a measurement"}, args)]
        if deadline - time.monotonic() < LAST_S:
            return rows + [keep(where | {"kernel": name} | entry, args) for entry in read_journal(journal)[shown:]]
        compiles = False  # a crash in `compile_all` would repeat in the new process
        processes[name] = start_worker(name, args, folder, compiles)


def go(process: subprocess.Popen, deadline: float) -> None:
    """Lets a process measure until the deadline, a value of time.monotonic()."""
    with contextlib.suppress(OSError):  # it has ended: its exit code is reported
        process.stdin.write(f"{deadline}\n")
        process.stdin.flush()


def keep(row: dict, args: argparse.Namespace) -> dict:
    """Prints and saves the row, and returns it."""
    print(" ".join(filter(None, cells(row))), flush=True)
    if not args.no_save:
        append_rows(results_file("tune"), [row])
    return row


def end(process: subprocess.Popen) -> None:
    """Ends a process if it is still running."""
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        process.stdin.close()


def read_journal(journal: Path) -> list[dict]:
    """Its lines, except one that is being written."""
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True) if journal.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def save(name: str, rows: list[dict], where: dict) -> None:
    """The entry of a kernel in tuned.json, from the rows of this sweep."""
    choose: Callable = cuda_from if name == "prox_backend" else chosen_parameters
    sizes: dict[str, list[dict]] = {}
    for row in rows:
        if "size" in row:
            sizes.setdefault(row["size"], []).append(row)
    fastest = {size: choose(of_size) for size, of_size in sizes.items()}
    fastest = {size: parameters for size, parameters in fastest.items() if parameters is not None}
    if not fastest:
        print(f"{name}: too little was measured to choose", flush=True)
        return
    measured = {word: where[word] for word in ("device", "torch", "commit", "command")} | {"date": where["when"]}
    write_tuned(where["device_kind"], f"{name} {where['dtype']}", measured, fastest)
    print(f"{name}: written to {tuning.TUNED}: {json.dumps(fastest)}", flush=True)


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    numbers = [f"{row['p50_ms']:.4f}", f"{row['share_of_copy']:.0%}"] if "p50_ms" in row else ["", ""]
    expected = f"{row['predicted_share']:.0%}" if "predicted_share" in row else ""
    parameters = key(row["parameters"]) if row.get("parameters") else "defaults" if "parameters" in row else ""
    case = [row["kernel"], row.get("size", ""), row.get("condition", ""), parameters]
    return [*case, *numbers, expected, row.get("note", "")]


# ---------------------------------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Item:
    """A case with parameters; the defaults have several turns."""

    case: Case
    parameters: dict
    turn: int = 0

    def identity(self) -> dict:
        """The first fields of its row, which no other item has."""
        place = {"size": self.case.name, "condition": self.case.condition, "parameters": self.parameters}
        return place | {"turn": self.turn} | self.case.row


def work(kernel: Kernel, args: argparse.Namespace) -> int:
    """Measures one kernel until it is done or its time is over; every row goes to the journal at once."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    if args.compile and device.type == "cuda" and not compile_all(kernel, device):
        return BROKEN
    deadline, current = float(sys.stdin.readline() or 0), None
    done = {key(identity) for identity in map(identity_in, read_journal(args.journal)) if identity}
    for item in items(kernel, device):
        if time.monotonic() > deadline and item.case != current:
            return 0
        if time.monotonic() > deadline and item.parameters != kernel.default:
            continue  # the defaults are measured a last time: nothing can be chosen without their spread
        current, identity = item.case, item.identity()
        if key(identity) in done:
            continue
        append_rows(args.journal, [{"started": identity}])
        try:
            row = measured(kernel, item, device)
        except Exception as error:  # whatever a kernel does, the others are wanted
            row = {"note": f"failed: {note_of(error)}"}
        append_rows(args.journal, [identity | row])
        if "note" in row and not is_alive(device):
            return BROKEN
    return 0


def identity_in(entry: dict) -> dict | None:
    """`Item.identity` of a journal line with a result; None for a line that marks a start."""
    names = ("size", "condition", "parameters", "turn", "lambda", "lambda_mean")
    return {name: entry[name] for name in names if name in entry} if "started" not in entry else None


def compile_all(kernel: Kernel, device: torch.device) -> bool:
    """Lets Triton compile the kernel for a tiny weight, while another process measures; False: the GPU has failed."""
    for case in {case.condition: case for case in kernel.cases(device)}.values():
        tiny = Case((TINY[0] * TINY[1],), case.condition, case.row)
        for parameters in [{}, *kernel.parameters(device)]:
            with contextlib.suppress(Exception), kernel.force(parameters):  # it is reported when it is measured
                kernel.trial(tiny, device).run()
    return is_alive(device)


def items(kernel: Kernel, device: torch.device) -> Iterator[Item]:
    """All measurements in order: every case with the coarse parameters, then with the others.

    Within a case, the defaults come first and last.
    """
    every = kernel.parameters(device)
    passes = [every[: kernel.coarse], every[kernel.coarse :]] if kernel.coarse else [every]
    for number, some in enumerate(passes):
        for case in kernel.cases(device):
            yield Item(case, kernel.default, 2 * number)
            yield from (Item(case, parameters) for parameters in some if parameters != kernel.default)
            yield Item(case, kernel.default, 2 * number + 1)


def measured(kernel: Kernel, item: Item, device: torch.device) -> dict[str, object]:
    """The times of one call, and its share of the copy's speed, if its result is right."""
    with torch.no_grad(), kernel.force(item.parameters):
        trial = kernel.trial(item.case, device)
        if problem := trial.problem():
            return {"note": f"wrong: {problem}"}
        run = capture_graph(trial.run) if device.type == "cuda" else trial.run
        samples = interleaved({"run": run}, trial.renew, device, ROUNDS[device.type], 0.0, trial.copies)
    copy_ms = samples["copy"].row()["p50_ms"]
    samples["run"].ms = [ms / trial.calls for ms in samples["run"].ms]
    row = {name: value for name, value in samples["run"].row().items() if name != "share_of_copy"}
    row |= {"gb_per_s": trial.moved / trial.calls / row["p50_ms"] / 1e6, "copy_gb_per_s": trial.copied / copy_ms / 1e6}
    row |= {"share_of_copy": row["gb_per_s"] / row["copy_gb_per_s"]}
    benchmark, like = item.case.like
    like = like | {"device": device_name(device)} | ({"kernel": item.parameters.get("backend", like.get("kernel"))})
    return row | predictions_for(benchmark, like)


def is_alive(device: torch.device) -> bool:
    """Whether the CUDA context still works: after an illegal access nothing does."""
    try:
        return device.type != "cuda" or torch.ones(1, device=device).item() == 1
    except Exception:
        return False


if __name__ == "__main__":
    sys.exit(run_command(main))
