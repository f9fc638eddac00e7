"""Every causal language model type of transformers, as a tiny random model, through prune, train and pack.

    python benchmarks/families.py [TYPE ...]

Each type runs in its own process with a time limit. A refusal that names a flag as the remedy is tried again with it.
Exit code 1 if a command has another error than a refusal, or prunes a router.
"""

import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from lib import common  # noqa: F401, finds proxsparse in this checkout
from safetensors import safe_open

from proxsparse import pack, prune, train

LIMIT = 180  # seconds for a type
REMEDY = re.compile(r"use (--precision fp32)|(--exclude (?!it\b)[\w.]+(?: [a-z]\w+)*)")
ROUTER = re.compile(r"router|(^|\.)gate(\.|$)|expert_gate$")  # in the name of a pruned layer
STAGES = ("build", "magnitude", "wanda", "train", "pack")


def attempt(main, flags: list[str]) -> str:
    """ "works", "works with FLAGS", "refused: ..." or "fails: ..."."""
    more = []
    try:
        while True:
            try:
                main([*flags, *more, *["--overwrite_output_dir"] * bool(more)])  # which the first attempt began
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

    m, w, t, p = (str(folder / one) for one in "mwtp")
    model = ["--model", str(folder / "model"), "--eval_data", "none", "--device", "cpu", "--output_dir"]
    data = ["--data", str(save_texts(folder / "text.jsonl")), "--num_samples", "8", "--seq_len", "64"]
    build = attempt(lambda flags: save_family(name, folder / "model"), [])
    outcome = {"build": build}
    if build == "works":
        outcome["magnitude"] = attempt(prune.main, [*model, m, "--method", "magnitude"])
        outcome["wanda"] = attempt(prune.main, [*model, w, "--method", "wanda", *data])
        outcome["train"] = attempt(train.main, [*model, t, "--max_steps", "2", *data])
        if outcome["magnitude"].startswith("works"):
            outcome["pack"] = attempt(pack.main, [m, "--output_dir", p])
    for masks in folder.glob("[mwt]/masks.safetensors"):
        with safe_open(masks, "pt") as file:
            if routers := list(filter(ROUTER.search, file.keys())):
                outcome["routers"] = f"fails: pruned {routers[0]}"
    return outcome


def in_child(name: str) -> dict[str, str]:
    """`run_type` in a forked process."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing:
        result = Path(folder, "result")
        if (child := os.fork()) == 0:
            signal.alarm(LIMIT)
            with redirect_stdout(nothing), redirect_stderr(nothing):
                result.write_text(json.dumps(run_type(name, Path(folder))).replace(folder, "DIR"))
            os._exit(0)
        os.waitpid(child, 0)
        return json.loads(result.read_text()) if result.exists() else {"build": f"fails: not within {LIMIT} s"}


def main() -> int:
    """Returns the exit code."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from family_models import FAMILIES

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        run_type("llama", Path(folder))  # imports everything before the processes are forked
    outcomes, reasons = {}, defaultdict(list)
    for name in sys.argv[1:] or FAMILIES:
        outcomes[name] = in_child(name)
        print(name, json.dumps({stage: text for stage, text in outcomes[name].items() if text != "works"}), flush=True)
        for stage, text in outcomes[name].items():
            reasons[stage, re.sub(r"DIR\S*|\S*\d\S*", "...", text)].append(name)
    for (stage, text), names in sorted(reasons.items()):
        print(f"| {stage} | {len(names)} | {text[:200]} | {', '.join(names) if len(names) < 20 else ''} |")
    for stage in STAGES:
        texts = [outcome[stage] for outcome in outcomes.values() if stage in outcome]
        print(stage, dict(Counter(re.match(r"works with|\w+", text)[0] for text in texts)))
    return int(any(text.startswith("fails") and stage != "build" for stage, text in reasons))


if __name__ == "__main__":
    sys.exit(main())
