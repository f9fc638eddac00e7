"""Runs of the pruning job for benchmarks: each has a folder named by its settings, and is done once."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

from lib import common

from proxsparse.io.atomic import write_file
from proxsparse.run import job
from proxsparse.run.args import LAST, NOT_REPEATED, SECTIONS, RunArgs
from proxsparse.runtime.device import choose_device

PROVENANCE = "provenance.json"  # device, versions and commit of a run, written last
WEIGHTS = "model*.safetensors*"
# Flags that do not change the masks.
NOT_SETTINGS = {*NOT_REPEATED, "recipe", "save_minutes", "save_steps", "save_total_limit", "pretrained_weights"}


def run_once(args: RunArgs, folder: Path, again: bool, resumes: bool = True) -> tuple[dict, dict]:
    """The provenance and result.json of a complete run in the folder; does the run, or the rest of it, if needed.

    A run of code with uncommitted changes is done again at another commit. The folder keeps the masks, and the model
    only if its weights are updated.

    Args:
        again: also do again what is complete.
        resumes: whether a run that was stopped is continued; else it starts again.
    """
    here, record = common.provenance(choose_device(args.hardware.device)), folder / PROVENANCE
    if record.exists():
        made = json.loads(record.read_text(encoding="utf-8"))
        again = again or not (is_committed(made["commit"]) or made["commit"] == here["commit"])
        if not again:
            return made, result_of(folder)
    if again or not resumes:
        shutil.rmtree(folder, ignore_errors=True)
    args.output.output_dir, args.output.resume_from_checkpoint = str(folder), LAST
    record.unlink(missing_ok=True)
    code, result = job.prune(args), result_of(folder)
    names = {args.method} | ({"magnitude"} if args.method == "proxsparse" else set())
    if code != 0 or (not names <= (result["perplexity"] or {}).keys() and args.evaluate.eval_data != "none"):
        raise KeyboardInterrupt  # Ctrl-C, also in the last evaluation
    if not result["updated"]:  # dozens of models would fill the disk
        for weights in folder.glob(WEIGHTS):
            weights.unlink()
    write_file(record, json.dumps(here).encode())
    return here, result


def result_of(folder: Path) -> dict | None:
    """result.json of a run; None without one."""
    file = folder / "result.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def settings_of(args: RunArgs) -> dict:
    """Every setting of `proxsparse train` that changes the masks and differs from the default of its field."""
    defaults = {field.name: field.default for section in SECTIONS["train"] for field in dataclasses.fields(section)}
    values = args.flags().items()
    return {name: value for name, value in values if value != defaults.get(name) and name not in NOT_SETTINGS}


def digest(settings: dict) -> str:
    """Ten digits that identify the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def is_committed(commit: str) -> bool:
    """Whether the commit names the code exactly, so that its rows count."""
    return commit != "unknown" and not commit.endswith("-dirty")


def label(source: str) -> str:
    """The last part of a local path, so that rows name no folder of the machine; any other name as it is."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source
