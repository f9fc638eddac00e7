"""Every causal language model type of transformers, as a tiny random model, through prune, train and pack.

    python benchmarks/families.py [TYPE ...] [--folder FOLDER]

Each type runs in its own process with a time limit. Prints a line for each type, then the table of the docs: how many
types each command supports, and for which reasons the others are refused. Exit code 1 if a command fails with another
error than InputError, or if a router is pruned.
"""

import argparse
import collections
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import torch
from family_models import FAMILIES, save_family
from safetensors import safe_open
from tiny_models import save_texts

from proxsparse import pack, prune, train
from proxsparse.errors import InputError

ROUTER = re.compile(r"router|(^|\.)gate(\.|$)|expert_gate$")
LIMIT = 120  # seconds for a type


def run_type(name: str, folder: Path) -> dict[str, str]:
    """Stage -> "works", "refused: ..." or "fails: ..."."""
    model, text = folder / name, save_texts(folder / f"{name}.jsonl")
    common = ["--model", model, "--eval_data", "none", "--device", "cpu", "--output_dir"]
    data = ["--data", text, "--num_samples", "2", "--seq_len", "32"]
    stages = {
        "build": partial(save_family, name, model),
        "magnitude": partial(prune.main, [*common, folder / "m", "--method", "magnitude"]),
        "wanda": partial(prune.main, [*common, folder / "w", "--method", "wanda", *data]),
        "train": partial(train.main, [*common, folder / "t", "--max_steps", "2", *data]),
        "pack": partial(pack.main, [folder / "m", "--output_dir", folder / "p"]),
    }
    outcome = {}
    for stage, run in stages.items():
        if (stage == "pack" and outcome["magnitude"] != "works") or outcome.get("build", "works") != "works":
            continue
        if isinstance(run.args[0], list):
            run = partial(run.func, list(map(str, run.args[0])))
        try:
            run()
            outcome[stage] = "works"
        except InputError as error:
            outcome[stage] = f"refused: {' '.join(str(error).split())}"
        except Exception as error:
            outcome[stage] = f"fails: {type(error).__name__}: {' '.join(str(error).split())}"
        masks = folder / stage[0] / "masks.safetensors"
        if outcome[stage] == "works" and masks.exists():
            with safe_open(masks, "pt") as file:
                if routers := list(filter(ROUTER.search, file.keys())):
                    outcome[stage] = f"fails: router pruned: {routers[0]}"
    return outcome


def in_child(name: str) -> dict[str, str]:
    """`run_type` in a forked process."""
    with tempfile.TemporaryDirectory() as folder:
        if (child := os.fork()) == 0:
            signal.alarm(LIMIT)
            with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
                Path(folder, "outcome").write_text(json.dumps(run_type(name, Path(folder))))
            os._exit(0)
        os.waitpid(child, 0)
        outcome = Path(folder, "outcome")
        return json.loads(outcome.read_text()) if outcome.exists() else {"build": f"fails: over {LIMIT} s, or killed"}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE")
    torch.set_num_threads(1)
    outcomes = {}
    for name in parser.parse_args().types or FAMILIES:
        outcomes[name] = in_child(name)
        print(name, json.dumps({k: v[:200] for k, v in outcomes[name].items() if v != "works"}), flush=True)
    reasons = collections.defaultdict(set)
    print()
    for stage in ("build", "magnitude", "wanda", "train", "pack"):
        counts = collections.Counter(outcome[stage].partition(":")[0] for outcome in outcomes.values() if stage in outcome)
        print(f"{stage}: {dict(counts)}")
    for name, outcome in outcomes.items():
        for stage, text in outcome.items():
            if text != "works":
                reasons[re.sub(r"\d+|'[^']*'|[\w.]*\.[\w.]+", "...", text)[:90]].add(name)
    for reason, names in sorted(reasons.items()):
        print(f"| {len(names)} | {reason} | {', '.join(sorted(names))} |")
    return int(any(text.startswith("fails") for outcome in outcomes.values() for text in outcome.values()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
