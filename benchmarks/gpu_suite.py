"""Everything that needs a GPU, in three commands of at most nine minutes each.

    python3 benchmarks/gpu_suite.py first         # smoke tests, the headline ratios, launch parameters, checks
    python3 benchmarks/gpu_suite.py second        # every shape and model, with the launch parameters of `first`
    python3 benchmarks/gpu_suite.py third         # sanitizers, tests, profiles
    python3 benchmarks/gpu_suite.py checks tune   # some parts
    python3 benchmarks/gpu_suite.py first --device cpu              # rehearsal: small, nothing is saved
    python3 benchmarks/gpu_suite.py --take gpu_suite_first.tar.gz   # adds the rows of another machine to this checkout

It needs a checkout, a CUDA build of torch and no network; nothing is written outside the checkout. Each part is a
process with a limit of its own, so a part that hangs or crashes costs its own time and nothing else. The parts run in
the order of their importance (gpu_parts.py), and benchmarks append each row when it is measured.

With $OUT set, gpu_suite_NAME.md (the outcome of every part), gpu_suite_NAME.tar.gz (new rows, tables, pictures, launch
parameters, the whole output of every part) and tuned.json are written there after each part and every half minute.
Exit code: 0 if no part failed, 1 if one did, 2 without a GPU. PROXSPARSE_COMMIT names the commit for the rows where the
checkout has no git.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare machine has not installed the package

import torch
from common import append_rows, provenance, results_file, table
from gpu_parts import GROUPS, PARTS, PYTHON

from proxsparse.ops.tuning import TUNED

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "gpu_suite"  # what each part prints
LIMIT_S = 530  # of all parts together: under nine minutes with the start of Python
SAVE_EVERY_S = 30
HEADER = ["part", "outcome", "seconds", "last line"]


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.take:
        return take(args.take)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_suite: torch sees no CUDA GPU here; rehearse with --device cpu", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # one time for all processes: rows with the same `when` are compared with each other
    os.environ["PROXSPARSE_WHEN"] = datetime.now(UTC).isoformat(timespec="seconds")
    suite = Suite(args)
    names = parts(args.parts)
    try:
        for name in names:
            suite.run(name, is_last=name == names[-1])
        suite.finish_background()
    finally:
        suite.stop()
    print(f"\n{suite.summary()}")
    return 1 if any(outcome["outcome"] == "failed" for outcome in suite.outcomes) else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*GROUPS, *PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {' '.join(known)}; default: first")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts together")
    parser.add_argument("--take", type=Path, metavar="FILE", help="a gpu_suite_NAME.tar.gz, whose rows are added here")
    args = parser.parse_args(arguments)
    for part in args.parts:  # `choices` does not allow an empty list
        if part not in known:
            parser.error(f"there is no part {part!r}; choose from {', '.join(known)}")
    args.parts = args.parts or ["first"]
    return args


def parts(names: list[str]) -> list[str]:
    """The parts that these names of parts and groups mean, each once, in the order in which they are given."""
    return list(dict.fromkeys(part for name in names for part in GROUPS.get(name, [name])))


# ---------------------------------------------------------------------------------------------- running


@dataclass
class Running:
    """A process, the file that it prints to, and when its time is over."""

    name: str
    process: subprocess.Popen
    output: Path
    started: float
    limit_s: float

    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.started

    def stop(self) -> None:
        """Ends it with whatever it has started: its process group, and its descendants in groups of their own."""
        descendants = descendants_of(self.process.pid)
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Suite:
    """The run of a list of parts: what is running, what came out, and where it is saved."""

    def __init__(self, args: argparse.Namespace):
        self.device, self.limit_s = args.device, args.limit
        self.name = args.parts[0] if len(args.parts) == 1 else "parts"
        self.started = self.saved = time.monotonic()
        self.outcomes: list[dict] = []
        self.running: dict[str, Running] = {}
        self.where = provenance(torch.device(args.device))
        self.before = {file: file.stat() for file in files()}
        shutil.rmtree(OUTPUT, ignore_errors=True)
        OUTPUT.mkdir(parents=True)

    def seconds_left(self) -> float:
        """Of all parts together."""
        return self.limit_s - (time.monotonic() - self.started)

    def run(self, name: str, is_last: bool) -> None:
        """Runs a part to its end, or starts it if it belongs in the background."""
        part = PARTS[name]
        if part.waits_for in self.running:
            self.finish(self.running[part.waits_for])
        if reason := self.reason_to_skip(name):
            self.note(name, "skipped", 0.0, reason)
            return
        limit = self.seconds_left() if is_last else min(part.limit_s, self.seconds_left())
        command = part.cuda if self.device == "cuda" else part.cpu
        print(f"\n===== {name} (at most {limit:.0f} s)", flush=True)
        self.running[name] = start(name, command, dict(part.environment), limit)
        if not part.background:
            self.finish(self.running[name])

    def reason_to_skip(self, name: str) -> str | None:
        """None, or why this part does not run."""
        part = PARTS[name]
        command = part.cuda if self.device == "cuda" else part.cpu
        if command is None:
            return "there is nothing to rehearse on a CPU"
        if find(command[0]) is None:
            return f"{command[0]} is not installed here"
        if part.needless_if and succeeds(part.needless_if):
            return "needless: what it builds is here and can be imported"
        return "no time was left" if self.seconds_left() <= 1 else None

    def finish_background(self) -> None:
        """Waits for what is still running."""
        for running in list(self.running.values()):
            self.finish(running)

    def finish(self, running: Running) -> None:
        """Follows a process to its end or to its limit, and notes how it went."""
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
        self.note(running.name, outcome, running.seconds(), last)

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
        """Ends every process; what they have written is saved."""
        for running in self.running.values():
            running.stop()
        self.running.clear()
        self.save()

    # ------------------------------------------------------------------------------------------ saving

    def note(self, name: str, outcome: str, seconds: float, last_line: str) -> None:
        """Adds the outcome of a part, and saves."""
        print(f"===== {name}: {outcome}, {seconds:.1f} s", flush=True)
        self.outcomes.append({"part": name, "outcome": outcome, "seconds": seconds, "last_line": last_line})
        if self.is_saved():
            append_rows(results_file("gpu_suite"), [self.where | self.outcomes[-1]])
        self.save()

    def is_saved(self) -> bool:
        """A rehearsal is not."""
        return self.device == "cuda"

    def save(self) -> None:
        """Writes the summary, and to $OUT all that is new, in few files: a lent machine gives back eight at most."""
        self.saved = time.monotonic()
        if not self.is_saved():
            return
        page = results_file("gpu_suite").with_name(f"gpu_suite_{self.name}.md")
        page.write_text(self.summary() + "\n", encoding="utf-8")
        if os.environ.get("OUT"):
            out = Path(os.environ["OUT"])
            partial = OUTPUT / "partial.tar.gz"
            self.pack(partial)
            shutil.copy(partial, out)
            os.replace(out / partial.name, out / f"gpu_suite_{self.name}.tar.gz")  # whole at any time
            shutil.copy(page, out)
            if is_new(TUNED, self.before):
                shutil.copy(TUNED, out)

    def pack(self, archive: Path) -> None:
        """All that this run has written: files by their path in the checkout, of rows those that are new; output/."""
        with tarfile.open(archive, "w:gz") as tar:
            for file in files():
                if is_new(file, self.before):
                    old = self.before[file].st_size if file in self.before and file.suffix == ".jsonl" else 0
                    add(tar, name_of(file), file.read_bytes()[old:])
            for file in OUTPUT.glob("*.txt"):
                add(tar, f"output/{file.name}", file.read_bytes())

    def summary(self) -> str:
        """A table of the parts, under a line that tells where they ran, and on what."""
        rows = [
            [row["part"], row["outcome"], f"{row['seconds']:.0f}", row["last_line"].replace("|", "/")]
            for row in self.outcomes
        ]
        title = f"gpu_suite {self.name} on {self.where['device']}, torch {self.where['torch']}, "
        return f"{title}commit {self.where['commit']}\n\n{table(HEADER, rows)}"


def find(program: str) -> str | None:
    """Its path: on PATH, or among the programs of the CUDA toolkit."""
    return shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")


def descendants_of(pid: int) -> list[int]:
    """The processes that a process has started, those that they have started, and so on; read from /proc."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
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
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {f"{name}_CACHE_DIR": str(ROOT / "build" / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": places} | caches | environment
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


# ---------------------------------------------------------------------------------------------- results


def files() -> list[Path]:
    """What a part may write: rows, tables and pictures, and the launch parameters."""
    folder = results_file("gpu_suite").parent
    return [*(file for file in sorted(folder.glob("*")) if file.is_file()), *([TUNED] if TUNED.is_file() else [])]


def is_new(file: Path, before: dict[Path, os.stat_result]) -> bool:
    """Whether it was written since `before`."""
    return file.is_file() and (file not in before or file.stat().st_mtime_ns != before[file].st_mtime_ns)


def name_of(file: Path) -> str:
    """Its path in the archive."""
    return "tuned.json" if file == TUNED else f"results/{file.name}"


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file with this content."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    tar.addfile(entry, io.BytesIO(content))


def take(archive: Path) -> int:
    """Adds what another machine has measured to this checkout: rows that are not here yet; other files replace."""
    folder = results_file("gpu_suite").parent
    with tarfile.open(archive) as tar:
        for entry in tar.getmembers():
            target = TUNED if entry.name == "tuned.json" else folder / Path(entry.name).name
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
