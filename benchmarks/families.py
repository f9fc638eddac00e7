"""Every causal language model type of transformers, as a tiny random model, through prune, train and pack.

    python benchmarks/families.py [TYPE ...]

Each type runs in its own process with a time limit. A refusal that names a flag as the remedy is tried again with it.
Exit code 1 if a command has another error than a refusal.
"""

import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from lib.common import new_parser

from proxsparse import pack, prune, train

LIMIT = 180  # seconds for a type
REMEDY = re.compile(r"use (--precision fp32)|(--exclude (?!it\b)[\w.]+(?: [a-z]\w+)*)")


def attempt(main, flags: list[str], output: Path) -> str:
    """ "works", "works with FLAGS", "refused: ..." or "fails: ..."."""
    more = []
    while True:
        shutil.rmtree(output, ignore_errors=True)  # what the first attempt began
        try:
            main([*flags, *more, "--output_dir", str(output)])
            return f"works with {' '.join(more)}" if more else "works"
        except ValueError as error:  # the command line prints it as one line
            remedy = REMEDY.search(str(error))
            if not remedy or remedy[0].split()[-1] in more:
                return f"refused: {' '.join(str(error).split())}"
            more += (remedy[1] or remedy[2]).split()[more[:1] == ["--exclude"] :]
        except Exception as error:  # of any type: this is what the benchmark looks for
            return f"fails: {type(error).__name__}: {' '.join(str(error).split())}"


def run_type(name: str, folder: Path) -> dict[str, str]:
    """Stage -> outcome, see `attempt`."""
    from family_models import save_family
    from tiny_models import save_texts

    saved, pruned = folder / "model", folder / "magnitude"
    model = ["--model", str(saved), "--eval_data", "none", "--device", "cpu"]
    text = str(save_texts(folder / "text.jsonl"))
    # mixed is the default of GPUs; slower CPUs take fp32, where a model that cannot compute in bf16 needs no remedy
    data = ["--data", text, "--num_samples", "8", "--seq_len", "64", "--precision", "mixed"]
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        outcome = {"build": attempt(lambda flags: save_family(name, saved), [], saved)}
        if outcome["build"] == "works":
            outcome["magnitude"] = attempt(prune.main, [*model, "--method", "magnitude"], pruned)
            outcome["wanda"] = attempt(prune.main, [*model, "--method", "wanda", *data], folder / "wanda")
            outcome["train"] = attempt(train.main, [*model, "--max_steps", "2", *data], folder / "train")
        if (pruned / "config.json").exists():
            outcome["pack"] = attempt(pack.main, [str(pruned)], folder / "pack")
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each type and each stage; returns the exit code."""
    from family_models import FAMILIES

    parser = new_parser(__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", default=FAMILIES)
    counts = defaultdict(Counter)
    context = multiprocessing.get_context("forkserver")  # a fork of this process might lack autograd's threads
    context.set_forkserver_preload(["proxsparse.prune", "proxsparse.train", "proxsparse.pack", "family_models"])
    for name in parser.parse_args(arguments).types:
        with tempfile.TemporaryDirectory() as folder, context.Pool(1) as pool:
            try:
                outcome = pool.apply_async(run_type, (name, Path(folder))).get(LIMIT)
            except multiprocessing.TimeoutError:  # it takes too long, or has crashed
                outcome = {"build": f"fails: not within {LIMIT} s"}
        print(name, {stage: text for stage, text in outcome.items() if text != "works"}, flush=True)
        for stage, text in outcome.items():
            counts[stage][re.match(r"works with|\w+", text)[0]] += 1
    for stage, found in counts.items():
        print(stage, dict(found))
    return int(any(found["fails"] for stage, found in counts.items() if stage != "build"))


if __name__ == "__main__":
    sys.exit(main())
