"""The table of docs/scaling.md: memory and time of runs on models of 135M to 405B weights on 1 to 512 H200s, planned.

`--write` writes it into the page.
"""

import argparse
import sys

from lib import common

from proxsparse.plan.cost import cost
from proxsparse.plan.memory import Plan
from proxsparse.plan.page import HEADER, device_row
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
DEVICES, DOCUMENTS = (1, 8, 64, 512), 400
FLAGS = {"seq_len": 4096, "precision": "bf16", "gradient_checkpointing": True, "eval_seq_len": 4096, "device": "cuda"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/scaling.md")
    args = parser.parse_args(arguments)
    table = common.markdown_table(["model", "PFLOP/run", *HEADER], *(row for name in MODELS for row in rows(name)))
    print(table)
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 0


def rows(name: str) -> list[list[str]]:
    """One row for every number of devices: 400 documents of 4,096 tokens, one per device and step."""
    plan = Plan(TrainConfig(model=name, num_samples=DOCUMENTS, **FLAGS).check())
    first = [name.partition("/")[2], f"{DOCUMENTS * cost(plan, 1).operations / 1e15:,.0f}"]
    return [[*(first if devices == 1 else ["", ""]), *device_row(plan, devices)] for devices in DEVICES]


if __name__ == "__main__":
    sys.exit(main())
