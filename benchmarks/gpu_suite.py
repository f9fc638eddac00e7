"""Runs everything that needs a GPU, in three commands of at most nine minutes each.

    python3 benchmarks/gpu_suite.py first         # a first look, the headline ratios, tests
    python3 benchmarks/gpu_suite.py second        # every shape and model
    python3 benchmarks/gpu_suite.py third         # sanitizers, tests, profiles
    python3 benchmarks/gpu_suite.py smoke         # some parts
    python3 benchmarks/gpu_suite.py first --device cpu              # rehearsal: small, nothing is saved
    python3 benchmarks/gpu_suite.py --take gpu_suite_first.tar.gz   # adds the rows of another machine to this checkout

Each part (lib/gpu_parts.py) is a process with its own time limit, so a part that hangs or crashes costs only its own
time. With $OUT set, the outcomes and an archive of all results are written there after each part and every half
minute. Exit code: 0 if no part failed, 1 if one did, 2 without a GPU.
"""

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from lib.common import FOLDER, append_rows, markdown_table, new_parser, provenance, results_file
from lib.gpu_parts import GROUPS, PARTS, PYTHON

from proxsparse.io.text_table import text_table

ROOT = FOLDER.parent
OUTPUT = ROOT / "build" / "gpu_suite"  # the output of each part
LIMIT_S = 530  # of all parts together: under nine minutes with the start of Python
SLOWER_REHEARSAL = 3  # factor of all limits on a CPU: two cores start processes more slowly than sixteen
SAVE_EVERY_S = 30
HEADER = ["part", "outcome", "seconds", "last line"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts; the exit code is 1 if one failed."""
    args = parse_arguments(arguments)
    if args.take:
        return take(args.take)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_suite: torch finds no CUDA GPU; rehearse with --device cpu", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # one time for all processes: linear_speed compares rows with the same `when`
    os.environ["PROXSPARSE_WHEN"] = datetime.now(UTC).isoformat(timespec="seconds")
    suite = Suite(args)
    names = parts(args.parts)
    try:
        for name in names:
            suite.run(name, is_last=name == names[-1])
        for running in list(suite.running.values()):  # in the background
            suite.finish(running)
    finally:
        suite.stop()
    print(f"\n{suite.title()}\n\n{text_table(HEADER, suite.cells())}")
    return 1 if any(outcome["outcome"] == "failed" for outcome in suite.outcomes) else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = new_parser(__doc__)
    names = [*GROUPS, *PARTS]
    parts_help = f"of: {' '.join(names)}; default: first"
    parser.add_argument("parts", nargs="*", choices=names, default="first", metavar="PART", help=parts_help)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts together")
    parser.add_argument("--take", type=Path, metavar="FILE", help="add the results of a gpu_suite_NAME.tar.gz")
    args = parser.parse_args(arguments)
    args.parts = ["first"] if args.parts == "first" else args.parts
    return args


def parts(names: list[str]) -> list[str]:
    """Names of parts and groups -> names of parts, each once, in the given order."""
    return list(dict.fromkeys(part for name in names for part in GROUPS.get(name, [name])))


@dataclass
class Running:
    """A part that runs: its process, the file of its output, and its time limit."""

    name: str
    process: subprocess.Popen
    output: Path
    started: float
    limit_s: float

    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started

    def stop(self) -> None:
        """Kills it and all processes that it has started: its process group, and descendants in other groups."""
        descendants = descendants_of(self.process.pid)
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Suite:
    """A run of a list of parts: the running processes, the outcomes, and the files that are saved."""

    def __init__(self, args: argparse.Namespace):
        self.device, self.limit_s, self.saves = args.device, args.limit, args.device == "cuda"
        self.name = args.parts[0] if len(args.parts) == 1 else "parts"
        self.started = self.saved = time.monotonic()
        self.outcomes: list[dict] = []
        self.running: dict[str, Running] = {}
        self.where = provenance(torch.device(args.device))
        self.before = {file: file.stat() for file in result_files()}
        shutil.rmtree(OUTPUT, ignore_errors=True)
        OUTPUT.mkdir(parents=True)

    def seconds_left(self) -> float:
        """Seconds left for all parts together."""
        return self.limit_s - (time.monotonic() - self.started)

    def run(self, name: str, is_last: bool) -> None:
        """Runs a part to its end, or starts it if it belongs in the background."""
        part = PARTS[name]
        if part.waits_for in self.running:
            self.finish(self.running[part.waits_for])
        command = part.cuda if self.device == "cuda" else part.cpu
        if reason := self.reason_to_skip(name, command):
            self.record(name, "skipped", 0.0, reason)
            return
        own_limit = part.limit_s * (1 if self.device == "cuda" else SLOWER_REHEARSAL)
        limit = self.seconds_left() if is_last else min(own_limit, self.seconds_left())
        print(f"\n===== {name} (at most {limit:.0f} s)", flush=True)
        self.running[name] = start(name, command, dict(part.environment), limit)
        if not part.background:
            self.finish(self.running[name])

    def reason_to_skip(self, name: str, command: list[str] | None) -> str | None:
        """None, or why this part does not run."""
        if command is None:
            return "it has no rehearsal on a CPU"
        if find(command[0]) is None:
            return f"{command[0]} is not installed here"
        if PARTS[name].needless_if and succeeds(PARTS[name].needless_if):
            return "not needed: its result can already be imported"
        return "no time was left" if self.seconds_left() <= 1 else None

    def finish(self, running: Running) -> None:
        """Waits until a process ends or reaches its limit, and records its outcome."""
        in_time = self.follow(running)
        running.stop()
        del self.running[running.name]
        output = running.output.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in output.splitlines()[1:] if line.strip()]  # without the command
        last, part, code = lines[-1][:120] if lines else "", PARTS[running.name], running.process.returncode
        outcome = "failed" if code or not in_time else "passed"
        if not in_time:
            last = f"stopped after {running.seconds():.0f} s; last line: {last}"
        elif code in part.skipped_codes or (code and part.skipped_if and part.skipped_if in output):
            outcome, last = "skipped", part.skipped_if or last
        self.record(running.name, outcome, running.seconds(), last)

    def follow(self, running: Running) -> bool:
        """Prints the output of a process as it comes; False if the process reached its limit."""
        with running.output.open("rb") as output:
            while True:
                ended = running.process.poll() is not None
                if piece := output.read():
                    sys.stdout.write(piece.decode(errors="replace"))
                    sys.stdout.flush()
                elif ended:
                    return True
                elif running.seconds() > running.limit_s or self.seconds_left() < 0:
                    return False
                else:
                    time.sleep(0.05)
                if time.monotonic() - self.saved > SAVE_EVERY_S:
                    self.save()

    def stop(self) -> None:
        """Ends every process, and saves what they have written."""
        for running in self.running.values():
            running.stop()
        self.running.clear()
        self.save()

    def record(self, name: str, outcome: str, seconds: float, last_line: str) -> None:
        """Adds the outcome of a part, and saves."""
        print(f"===== {name}: {outcome}, {seconds:.1f} s", flush=True)
        self.outcomes.append({"part": name, "outcome": outcome, "seconds": seconds, "last_line": last_line})
        if self.saves:
            append_rows(results_file("gpu_suite"), [self.where | self.outcomes[-1]])
        self.save()

    def save(self) -> None:
        """Writes the page of outcomes; copies all new results to $OUT, in two files."""
        self.saved = time.monotonic()
        if not self.saves:
            return
        page = results_file("gpu_suite").with_name(f"gpu_suite_{self.name}.md")
        page.write_text(f"{self.title()}\n\n{markdown_table(HEADER, *self.cells())}\n", encoding="utf-8")
        if os.environ.get("OUT"):
            out = Path(os.environ["OUT"])
            partial = OUTPUT / "partial.tar.gz"
            self.pack(partial)
            shutil.copy(partial, out)
            os.replace(out / partial.name, out / f"gpu_suite_{self.name}.tar.gz")  # never half-written
            shutil.copy(page, out)

    def pack(self, archive: Path) -> None:
        """Archives what this run has written: new and changed files (only the new rows), and the output of parts."""
        with tarfile.open(archive, "w:gz") as tar:
            for file in filter(self.is_new, result_files()):
                old = self.before[file].st_size if file in self.before and file.suffix == ".jsonl" else 0
                content = file.read_bytes()[old:]
                entry = tarfile.TarInfo(f"results/{file.name}")
                entry.size, entry.mtime = len(content), int(time.time())
                tar.addfile(entry, io.BytesIO(content))
            for file in OUTPUT.glob("*.txt"):
                tar.add(file, f"output/{file.name}")

    def is_new(self, file: Path) -> bool:
        """Whether it was written in this run."""
        before = self.before.get(file)
        return file.is_file() and (before is None or file.stat().st_mtime_ns != before.st_mtime_ns)

    def title(self) -> str:
        """Device, version of torch and commit."""
        where = self.where
        return f"gpu_suite {self.name} on {where['device']}, torch {where['torch']}, commit {where['commit']}"

    def cells(self) -> list[list[str]]:
        """The rows of the table of outcomes."""
        return [[row["part"], row["outcome"], f"{row['seconds']:.0f}", row["last_line"]] for row in self.outcomes]


def find(program: str) -> str | None:
    """Its path: on PATH, or among the programs of the CUDA toolkit."""
    return shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")


def descendants_of(pid: int) -> list[int]:
    """The processes that a process has started, those that they have started, and so on, from /proc."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found[1:]


def succeeds(program: str) -> bool:
    """Whether a Python program runs to its end here within a minute."""
    try:
        done = subprocess.run([PYTHON, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def start(name: str, command: list[str], environment: dict[str, str], limit_s: float) -> Running:
    """Starts a part in a process group of its own, so that its compilers and workers end with it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {f"{name}_CACHE_DIR": str(ROOT / "build" / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | caches | environment
    output = OUTPUT / f"{name}.txt"
    with output.open("wb") as sink:
        sink.write(f"{' '.join(command)}\n".encode())
        sink.flush()
        process = subprocess.Popen(
            [find(command[0]), *command[1:]],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return Running(name, process, output, time.monotonic(), limit_s)


def result_files() -> list[Path]:
    """The files that a part may write: rows, tables and pictures."""
    folder = results_file("gpu_suite").parent
    return [file for file in sorted(folder.glob("*")) if file.is_file()]


def take(archive: Path) -> int:
    """Adds the results of another machine to this checkout: new rows are appended, other files are replaced."""
    folder = results_file("gpu_suite").parent
    with tarfile.open(archive) as tar:
        for entry in tar.getmembers():
            target = folder / Path(entry.name).name
            if entry.name.startswith("output/") or not entry.isfile():
                continue
            content = tar.extractfile(entry).read()
            if target.suffix == ".jsonl":
                known = set(target.read_bytes().splitlines()) if target.is_file() else set()
                lines = [line for line in content.splitlines() if line not in known]
                with target.open("ab") as rows:
                    rows.writelines(line + b"\n" for line in lines)
                print(f"{target}: {len(lines)} new rows")
            else:
                target.write_bytes(content)
                print(f"{target}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
