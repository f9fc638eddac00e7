"""Everything that needs a GPU, in commands of at most nine minutes: build, checks, sanitizer, tests, benchmarks.

    python benchmarks/gpu_suite.py pruning                  # run it where there is a GPU and commit the rows
    python benchmarks/gpu_suite.py layers                   # packed 2:4 layers
    python benchmarks/gpu_suite.py models                   # and models of them
    python benchmarks/gpu_suite.py training                 # learning the masks of a 7B shape
    python benchmarks/gpu_suite.py checks prox_speed        # some parts
    python benchmarks/gpu_suite.py --device cpu             # rehearsal: the same on a CPU, small, nothing is saved

It needs a checkout, a CUDA build of torch and no network; nothing is written outside the checkout. Each part is a
process with a limit of its own, so one that hangs does not eat the others. The summary is printed and written to
results/gpu_suite.md and .jsonl, the whole output to gpu_suite.log beside them; with $OUT set, these files and the rows
and pictures of the benchmarks are copied there after every part. Exit code: 0 if no part failed, 1 if one did, 2
without a GPU. Where the checkout has no git, PROXSPARSE_COMMIT names the commit for the rows.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare machine has not installed the package

import torch
from common import append_rows, provenance, results_file, table

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 530  # of all parts together: under nine minutes with the start of Python
PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider"]
NO_TESTS = 5  # pytest's exit code if nothing was selected
TINY = ["--seconds", "0", "--repetitions", "1", "--no-save"]
GENERATE_TINY = [PYTHON, "benchmarks/generate_speed.py", "--models", "tiny", "--prompt", "4", "--new_tokens", "3"]
TRAINING_TINY = [PYTHON, "benchmarks/training_speed.py", "--model", "tiny", "--steps", "3", "--flags", "--seq_len 32"]
KERNELS = "triton or cuda or gemv or cutlass or cusparselt"  # in the names of their tests
HEADER = ["part", "outcome", "seconds", "what it said"]


@dataclass(frozen=True)
class Part:
    """A command for the GPU, one for the rehearsal on a CPU (None: there is nothing to rehearse), and limits.

    `skipped_if` is text in the output that says the machine cannot do this, `skipped_codes` exit codes that do.
    """

    cuda: list[str]
    cpu: list[str] | None
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()
    skipped_if: str | None = None
    skipped_codes: tuple[int, ...] = ()


def sanitizer(tool: str, limit_s: float, *flags: str) -> Part:
    """compute-sanitizer on the small checks of the compiled and the Triton kernels."""
    checks = [PYTHON, "benchmarks/gpu_checks.py", "--small", "--backends", "triton", "cuda"]
    return Part(
        cuda=["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *flags, *checks],
        cpu=None,
        limit_s=limit_s,
        # Memory straight from the driver: in torch's pool an access beyond a tensor hits the next one.
        environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        skipped_if="Device not supported",
    )


BUILD = (("PROXSPARSE_EXTENSION", "1"), ("PROXSPARSE_CUDA", "1"), ("MAX_JOBS", str(os.cpu_count())))
PARTS = {
    "build": Part(
        cuda=[PYTHON, "setup.py", "build_ext", "--inplace"],
        cpu=None,
        limit_s=150,
        environment=(*BUILD, ("PROXSPARSE_CUTLASS", "0")),
    ),
    "build_cutlass": Part(  # apart: setuptools keeps nothing of a build of which one file fails or is too slow
        cuda=[PYTHON, "setup.py", "build_ext", "--inplace"],
        cpu=None,
        limit_s=300,  # a tile compiles for a minute or two
        environment=(*BUILD, ("PROXSPARSE_CUTLASS", "1")),
        skipped_if="nvidia-cutlass is not installed",
    ),
    "env": Part(cuda=[PYTHON, "-m", "proxsparse.env"], cpu=[PYTHON, "-m", "proxsparse.env"], limit_s=30),
    "checks": Part(
        cuda=[PYTHON, "benchmarks/gpu_checks.py", "--jobs", "8"],
        cpu=[PYTHON, "benchmarks/gpu_checks.py", "--device", "cpu", "--small"],
        limit_s=150,
    ),
    "prox_speed": Part(
        cuda=[PYTHON, "benchmarks/prox_speed.py"],
        cpu=[PYTHON, "benchmarks/prox_speed.py", "--shapes", "64x64", "--models", "--devices", "cpu", *TINY],
        limit_s=150,
    ),
    "optimizer_step": Part(
        cuda=[PYTHON, "benchmarks/optimizer_step.py"],
        cpu=[PYTHON, "benchmarks/optimizer_step.py", "--blocks", "1", "--no-slow", "--devices", "cpu", *TINY],
        limit_s=60,
    ),
    "memcheck": sanitizer("memcheck", 60),
    "tests": Part(
        cuda=[*PYTEST, "-m", "gpu", "tests/ops", "tests/optim", "tests/inference"],
        cpu=None,
        limit_s=90,
        skipped_codes=(NO_TESTS,),
    ),
    "parity": Part(
        cuda=[*PYTEST, "-k", KERNELS, "tests/ops", "tests/inference"],
        cpu=None,
        limit_s=90,
        skipped_codes=(NO_TESTS,),
    ),
    "racecheck": sanitizer("racecheck", 45),
    "initcheck": sanitizer("initcheck", 45),
    "linear_speed": Part(
        cuda=[PYTHON, "benchmarks/linear_speed.py"],
        cpu=[PYTHON, "benchmarks/linear_speed.py", "--shapes", "64x64", "--rows", "1", "3", "--devices", "cpu", *TINY],
        limit_s=200,
    ),
    "generate_speed": Part(
        cuda=[PYTHON, "benchmarks/generate_speed.py"],
        cpu=[*GENERATE_TINY, "--devices", "cpu", "--modes", "eager", "--no-save"],
        limit_s=270,
    ),
    "training_speed": Part(
        cuda=[PYTHON, "benchmarks/training_speed.py"],
        cpu=[*TRAINING_TINY, "--devices", "cpu", "--no-save"],
        limit_s=360,
    ),
}
APART = ("build_cutlass", "linear_speed", "generate_speed", "training_speed")
# What fits into one command; each builds again only what has changed.
GROUPS = {
    "pruning": [
        name for name in PARTS if name not in ("build_cutlass", "linear_speed", "generate_speed", "training_speed")
    ],
    "layers": ["build", "build_cutlass", "env", "linear_speed"],
    "models": ["build", "generate_speed"],
    "training": ["build", "training_speed"],
}


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_suite: torch sees no CUDA GPU here; rehearse with --device cpu", file=sys.stderr)
        return 2
    device, started, start, outcomes = torch.device(args.device), time.time(), time.monotonic(), []
    log = results_file("gpu_suite").with_suffix(".log") if args.device == "cuda" else Path(os.devnull)
    log.write_bytes(b"")
    for name in parts(args.parts):
        left = args.limit - (time.monotonic() - start)
        outcomes.append({"part": name} | run(name, args.device, left, log))
        save(outcomes, device, started)
    print(f"\n{summary(outcomes, device)}")
    return 1 if any(outcome["outcome"] == "failed" for outcome in outcomes) else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*GROUPS, *PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {' '.join(known)}; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts together")
    args = parser.parse_args(arguments)
    for part in args.parts:  # `choices` cannot say that none is allowed too
        if part not in known:
            parser.error(f"there is no part {part!r}; choose from {', '.join(known)}")
    return args


def parts(names: list[str]) -> list[str]:
    """The parts that these names of parts and groups mean, each once, in the order of PARTS; no names: all."""
    wanted = {part for name in names or PARTS for part in GROUPS.get(name, [name])}
    return [part for part in PARTS if part in wanted]


# ---------------------------------------------------------------------------------------------- one part


def run(name: str, device: str, seconds_left: float, log: Path) -> dict[str, object]:
    """Runs a part, prints its output as it comes, and says how it went: outcome, seconds, said."""
    part = PARTS[name]
    command = part.cuda if device == "cuda" else part.cpu
    if command is None:
        return {"outcome": "skipped", "seconds": 0.0, "said": "there is nothing to rehearse on a CPU"}
    program = find(command[0])
    if program is None:
        return {"outcome": "skipped", "seconds": 0.0, "said": f"{command[0]} is not installed here"}
    limit = min(part.limit_s, seconds_left)
    if limit <= 1:
        return {"outcome": "skipped", "seconds": 0.0, "said": "no time was left"}
    print(f"\n===== {name} (at most {limit:.0f} s): {' '.join(command)}", flush=True)
    start = time.monotonic()
    code, output = run_for([program, *command[1:]], dict(part.environment), limit, log)
    seconds = time.monotonic() - start
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1][:120] if lines else ""
    if code is None:
        return {"outcome": "failed", "seconds": seconds, "said": f"stopped after {limit:.0f} s; last line: {last}"}
    if code in part.skipped_codes or (code and part.skipped_if and part.skipped_if in output):
        return {"outcome": "skipped", "seconds": seconds, "said": part.skipped_if or last}
    return {"outcome": "failed" if code else "passed", "seconds": seconds, "said": last}


def find(program: str) -> str | None:
    """Its path: on PATH, or among the programs of the CUDA toolkit."""
    return shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")


def run_for(command: list[str], environment: dict[str, str], limit_s: float, log: Path) -> tuple[int | None, str]:
    """Exit code, None if it had to be stopped, and output, which is printed and logged as it comes."""
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {f"{name}_CACHE_DIR": str(ROOT / "build" / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": places} | caches | environment
    with log.open("ab") as sink:
        sink.write(f"\n===== {' '.join(command)}\n".encode())
        sink.flush()
        # a session of its own, so that its compilers stop with it
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return follow(process, sink, limit_s)


def follow(process: subprocess.Popen, sink, limit_s: float) -> tuple[int | None, str]:
    """Copies the output of a process until it ends or its time is over."""
    deadline, pieces = time.monotonic() + limit_s, []
    os.set_blocking(process.stdout.fileno(), False)
    while True:
        ended = process.poll() is not None
        piece = process.stdout.read()
        if piece:
            pieces.append(piece)
            sink.write(piece)
            sink.flush()
            sys.stdout.write(piece.decode(errors="replace"))
            sys.stdout.flush()
        elif ended:
            break
        elif time.monotonic() > deadline:
            os.killpg(process.pid, 9)
            process.wait()
            return None, b"".join(pieces).decode(errors="replace")
        else:
            time.sleep(0.05)
    return process.returncode, b"".join(pieces).decode(errors="replace")


# ---------------------------------------------------------------------------------------------- the summary


def save(outcomes: list[dict], device: torch.device, started: float) -> None:
    """After each part, so that what was measured survives an end from outside; nothing for a rehearsal.

    $OUT gets what was written since the start: few files, for a lent machine may give back no more than eight.
    """
    if device.type != "cuda":
        return
    page = results_file("gpu_suite").with_suffix(".md")
    page.write_text(summary(outcomes, device) + "\n", encoding="utf-8")
    append_rows(results_file("gpu_suite"), [provenance(device) | outcomes[-1]])
    if os.environ.get("OUT"):
        for file in results_file("gpu_suite").parent.iterdir():
            if file.stat().st_mtime >= started:
                shutil.copy(file, os.environ["OUT"])


def summary(outcomes: list[dict], device: torch.device) -> str:
    """A table of the parts, under a line that says where and of what."""
    where = provenance(device)
    rows = [[row["part"], row["outcome"], f"{row['seconds']:.0f}", row["said"].replace("|", "/")] for row in outcomes]
    title = f"gpu_suite on {where['device']}, torch {where['torch']}, commit {where['commit']}"
    return f"{title}\n\n{table(HEADER, rows)}"


if __name__ == "__main__":
    sys.exit(main())
