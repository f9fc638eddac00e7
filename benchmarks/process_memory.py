"""What each of N processes holds while it learns: torchrun with 1, 2 and 4 of them on a CPU, beside 1/N and `--plan`.

Measured is RssAnon, what a process has written, less that of the same run on a model of 29 thousand weights. malloc
gives every tensor a mapping of its own here, so that what is freed is gone at once, and no piece of the heap counts.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
from random_models import save_random_llama

from proxsparse.plan.memory import Shape, held, moments_of_a_run, on_host, shape_of, traced
from proxsparse.run.parse import parse_config

MB = 10**6
STEPS = 3  # the second has moments and gradients
SHORT = (
    f"--max_steps {STEPS} --num_samples 16 --seq_len 16 --packing --metric_samples 1 --eval_data none --save_steps 0 "
    "--device cpu --precision fp32 --max_grad_norm 0"
)
FORMS = {
    "paper, all weights": "--forward dense --metric none --update all",
    "masked": "--forward masked",
}
SIZES = {"model": (384, 28), "nothing": (32, 1)}  # hidden size, decoder blocks: 50 million weights, and 29 thousand
LEARNING, END = "learning", "end"  # the phases of a run: until its last step; masks, model and report


def main(arguments: list[str] | None = None) -> int:
    parser = common.command_line(__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS, metavar="FORM")
    parser.add_argument("--blocks", type=int, default=SIZES["model"][1], help="decoder blocks of the model")
    args = parser.parse_args(arguments)
    where = common.provenance(torch.device("cpu")) | {"command": common.typed("process_memory", arguments)}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, name) for name in SIZES}
        for name, (hidden, blocks) in SIZES.items():
            save_random_llama(folders[name], hidden, args.blocks if name == "model" else blocks)
        for processes in args.processes:
            before = peaks(folders["nothing"], FORMS["masked"], processes, Path(scratch, "run"))
            for form in args.forms:
                found = peaks(folders["model"], FORMS[form], processes, Path(scratch, "run"))
                sizes = {phase: [a - b for a, b in zip(found[phase], before[phase], strict=True)] for phase in found}
                planned = plan_of(flags_of(folders["model"], FORMS[form]), processes)
                rows.append(where | {"form": form, "processes": processes} | planned | sizes)
                print({name: value for name, value in rows[-1].items() if name not in where}, flush=True)
    if not args.no_save:
        common.save("process_memory", rows)
    report(where, rows)
    return 0


def flags_of(model: Path, form: str) -> list[str]:
    """Of proxsparse.train, all but the output."""
    return ["--model", str(model), *SHORT.split(), *form.split()]


def plan_of(flags: list[str], processes: int) -> dict[str, int]:
    """What the plan says: bytes that N processes share, and those of each at its peak, without what malloc keeps."""
    config = parse_config(flags)
    shape = shape_of(config)
    moments = moments_of_a_run(shape, config, traced(shape, config), processes)
    peak = max(sum(size for name, size in moment.items() if name != "freed gradients") for moment in moments.values())
    waiting = on_host(shape, config, processes).get("W0", 0)
    return {"weights": shape.weights, "shared_bytes": shared(shape, config), "planned_bytes": peak + waiting}


def shared(shape: Shape, config) -> int:
    """Weights, moments, W0 wherever it waits, and gradients, of the whole model."""
    gradients = 4 * shape.learned(config)
    return sum(held(shape, config).values()) + on_host(shape, config, 1).get("W0", 0) + gradients


def peaks(model: Path, form: str, processes: int, run_dir: Path) -> dict[str, list[int]]:
    """Phase -> the most that each process held in it, in the order of their ranks."""
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "proxsparse.train"]
    command = [sys.executable, *run, *flags_of(model, form), "--output_dir", str(run_dir), "--overwrite_output_dir"]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    sampled: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryFile("w+") as said:
        launcher = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        ranks: dict[int, int | None] = {}  # process id -> rank
        while launcher.poll() is None:
            phase = END if steps_done(run_dir) == STEPS else LEARNING
            ranks |= {pid: rank_of(pid) for pid in children(launcher.pid) if ranks.get(pid) is None}
            for pid, rank in ranks.items():
                sampled[phase, rank] = max(sampled.get((phase, rank), 0), anonymous_bytes(pid))
            time.sleep(0.01)
        if launcher.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)}: {said.read().strip()[-1000:]}")
    return {phase: [sampled[phase, rank] for rank in range(processes)] for phase in (LEARNING, END)}


def steps_done(run_dir: Path) -> int:
    """How many rows the run has written."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def children(pid: int) -> list[int]:
    """The processes that torchrun has started."""
    return [int(child) for child in read_process(pid, f"task/{pid}/children").split()]


def rank_of(pid: int) -> int | None:
    """What torchrun told it; None before it has."""
    variables = read_process(pid, "environ").split("\0")
    return next((int(variable[5:]) for variable in variables if variable.startswith("RANK=")), None)


def anonymous_bytes(pid: int) -> int:
    """RssAnon; 0 of a process that has ended."""
    lines = read_process(pid, "status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def read_process(pid: int, name: str) -> str:
    """A file of /proc; empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8")
    except OSError:
        return ""


def report(where: dict[str, object], rows: list[dict]) -> None:
    """The table: what N share / N, the plan, what the smallest and the largest process held, and that at the end."""
    header = ["form", "processes", "shared / N, MB", "planned", "measured", "plan / measured", "at the end"]
    cells = []
    for row in rows:
        low, high, end = min(row[LEARNING]), max(row[LEARNING]), max(row[END])
        sizes = [row["shared_bytes"] / row["processes"], row["planned_bytes"]]
        between = f"{low / MB:.0f} to {high / MB:.0f}"
        ratio = f"{row['planned_bytes'] / high:.3f}"
        numbers = [f"{size / MB:.0f}" for size in sizes]
        cells.append([row["form"], str(row["processes"]), *numbers, between, ratio, f"{end / MB:.0f}"])
    worst = max(abs(row["planned_bytes"] / max(row[LEARNING]) - 1) for row in rows)
    common.show(where, header, cells, f"{rows[0]['weights']:,} weights; the plan is within {worst:.1%} of every peak.")


if __name__ == "__main__":
    sys.exit(main())
