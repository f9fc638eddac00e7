"""The table of docs/scaling.md: what a run takes from 135M to 405B weights on 1 to 512 H200s, by the plan's formulas.

`--write` puts it into the page, between its two marks; nothing of it is written by hand.
"""

import argparse
import sys
from pathlib import Path

import common

from proxsparse.plan.cost import cost, operations_of_a_document
from proxsparse.plan.memory import on_device, shape_of, traced
from proxsparse.plan.page import duration
from proxsparse.run.config import TrainConfig

PAGE = common.FOLDER.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- made by benchmarks/scaling_table.py -->\n", "<!-- end -->\n"
MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-hf",
    "Qwen/Qwen2.5-14B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
)
DEVICES = (1, 8, 64, 512)
DOCUMENTS, H200_GB, GB = 400, 141, 10**9
SETTINGS = {"seq_len": 4096, "precision": "bf16", "gradient_checkpointing": True, "pretrained_weights": "device"}
HEADER = ["model", "PFLOP a run", "H200s", "GB each", "fits", "GB received a step", "s a step", "steps", "run"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="HUB_ID")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(common.FOLDER.parent)}")
    args = parser.parse_args(arguments)
    table = common.table(HEADER, [row for name in args.models for row in rows(name)]) + "\n"
    print(table)
    if args.write:
        write(PAGE, table)
    return 0


def rows(name: str) -> list[list[str]]:
    """A row for every number of devices; 400 documents of 4,096 tokens, one a device and step."""
    config = TrainConfig(model=name, num_samples=DOCUMENTS, eval_seq_len=4096, device="cuda", **SETTINGS).check()
    shape = shape_of(config)
    found = traced(shape, config)
    run = f"{DOCUMENTS * operations_of_a_document(shape, config) / 1e15:,.0f}"
    cells = []
    for devices in DEVICES:
        total = sum(on_device(shape, config, found, devices)[1].values())
        step = cost(shape, config, devices)
        fits = "yes" if total <= H200_GB * GB else "no"
        numbers = f"{total / GB:,.1f}", fits, f"{step.network / GB:,.1f}", f"{step.seconds:.3g}", str(step.steps)
        first = [name.partition("/")[2], run] if devices == DEVICES[0] else ["", ""]
        cells.append([*first, str(devices), *numbers, duration(step.run_seconds) if fits == "yes" else "-"])
    return cells


def write(page: Path, table: str) -> None:
    """Replaces what stands between the marks of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + table + "\n" + END + rest.partition(END)[2], encoding="utf-8")
    print(f"written into {page}")


if __name__ == "__main__":
    sys.exit(main())
