"""The seven zero-shot tasks of the ProxSparse paper, evaluated by lm-eval.

This is the only file that imports lm_eval. The data sets come from the Hugging Face hub or, with `data_dir`, from local
files; only the data source of lm-eval's task changes (`task_settings`). The scores are those of the `lm_eval` command
with the same model, dtype, data and `softmax_dtype=float32`.

The paper's tables report one accuracy per task without saying which. `acc` is our reading of their dense rows: the
accuracy without length normalization, and for truthfulqa_mc the mean of mc1 and mc2. It has not been verified on a
model of the paper.
"""

import functools
import logging
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from proxsparse.data.sources import disable_bars
from proxsparse.errors import InputError, require
from proxsparse.runtime.progress import importing, phase

INSTALL = "pip install 'lm-eval[hf]'"
METRICS = ("acc", "acc_norm", "mc1", "mc2")  # results of `zero_shot`; METRIC_stderr is the standard error


@dataclass(frozen=True)
class Task:
    lm_eval: tuple[str, ...]  # its names in lm-eval
    file: str  # {file}.jsonl.gz or {file}.jsonl: a row of the hub's data set per line; the last word is the split


TASKS = {  # in the order of the paper's columns
    "arc_challenge": Task(("arc_challenge",), "arc_challenge_test"),
    "arc_easy": Task(("arc_easy",), "arc_easy_test"),
    "social_iqa": Task(("social_iqa",), "social_i_qa_validation"),
    "hellaswag": Task(("hellaswag",), "hellaswag_validation"),
    "openbookqa": Task(("openbookqa",), "openbookqa_test"),
    "piqa": Task(("piqa",), "piqa_validation"),
    "truthfulqa_mc": Task(("truthfulqa_mc1", "truthfulqa_mc2"), "truthful_qa_mc_validation"),
}


def zero_shot(
    model: nn.Module,
    tokenizer,
    task: str,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    autocast_dtype: torch.dtype | None = None,
) -> dict[str, float | int | None]:
    """Zero-shot accuracy: the chosen answer has the largest log-likelihood (`acc`) or log-likelihood per character
    (`acc_norm`, for the tasks for which lm-eval reports it).

    Args:
        task: a name from `TASKS`.
        data_dir: folder with the data sets; None: the hub.
        limit: largest number of documents; None: all.
        batch_size: requests per forward pass; they are sorted by length.
        autocast_dtype: compute in this dtype under autocast; None: in the dtype of the weights.
    Returns:
        {acc, acc_stderr, acc_norm, acc_norm_stderr, documents}; for truthfulqa_mc {acc = (mc1 + mc2) / 2, mc1,
        mc1_stderr, mc2, mc2_stderr, documents}. A standard error is None if there is only one document.
    Raises:
        InputError: a file is missing or damaged.
    """
    import lm_eval.models.huggingface
    from lm_eval import simple_evaluate

    disable_bars()
    with (
        phase(task, unit="request") as current,
        current.instead_of_tqdm(lm_eval.api.task, lm_eval.api.model, lm_eval.models.huggingface),
        # outside a checkout git prints an error
        mock.patch.object(lm_eval.evaluator, "get_git_commit_hash", return_value=None),
    ):
        loaded = load_tasks(task_settings(task, data_dir))
        more = {"batch_size": batch_size, "softmax_dtype": torch.float32, "mixed_precision_dtype": autocast_dtype}
        # it warns about every model that is not given by name
        with mock.patch.object(logging.getLogger("lm_eval.models.huggingface"), "disabled", True):
            lm = lm_eval.models.huggingface.HFLM(model, backend="causal", tokenizer=tokenizer, **more)
        # One call for mc1 and mc2: the requests that they share run only once.
        results = simple_evaluate(
            model=lm,
            tasks=loaded,
            task_manager=task_manager(),
            limit=limit,
            log_samples=False,
            random_seed=None,  # do not reseed the caller's generators; nothing here is random
            numpy_random_seed=None,
            torch_random_seed=None,
        )
        found = scores(TASKS[task], results)
        current.result = f"acc {found['acc']:.4f}"
    return found


def average(scores_by_task: dict[str, dict]) -> float:
    """The mean of `acc` over the tasks: the AVG column of the paper's tables."""
    return sum(scores["acc"] for scores in scores_by_task.values()) / len(scores_by_task)


def check_request(
    tasks: list[str], data_dir: Path | str | None = None, limit: int | None = None, batch_size: int = 1
) -> list[str]:
    """The tasks in the paper's order, without repetition; "all" is all seven.

    Raises InputError, without model and network, for an unknown task, a number out of range, a missing file or lm-eval.
    """
    for name in tasks:
        if name != "all" and name not in TASKS:
            raise InputError(f"task {name!r}: unknown; choose from {', '.join(TASKS)}, or all")
    names = [name for name in TASKS if name in tasks or "all" in tasks]
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None:
            require(name, value, value >= 1, "at least 1")
    require_lm_eval()
    for name in names if data_dir is not None else ():
        task_file(name, Path(data_dir))
    return names


def require_lm_eval() -> None:
    """Raises InputError with the command that installs lm-eval."""
    try:
        with importing("lm_eval"):
            import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise InputError(f"--tasks: lm-eval cannot be imported ({error}); run: {INSTALL}") from error


def task_settings(name: str, folder: Path | str | None) -> list[dict]:
    """lm-eval's tasks; the data set comes from the hub if `folder` is None, else from a local file.

    The other splits of a local task are unset, because lm-eval would look for few-shot examples in them.
    """
    local = {}
    if folder is not None:
        split = TASKS[name].file.rpartition("_")[2]
        local = dict.fromkeys({"training_split", "validation_split", "test_split"} - {f"{split}_split"})
        files = {"data_files": {split: str(task_file(name, Path(folder)).resolve())}}
        local |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
    return [{"task": lm_eval_name, **local} for lm_eval_name in TASKS[name].lm_eval]


def task_file(name: str, folder: Path) -> Path:
    """The file of the task. Raises InputError if there is none."""
    expected = [folder / f"{TASKS[name].file}{suffix}" for suffix in (".jsonl.gz", ".jsonl")]
    if found := [path for path in expected if path.is_file()]:
        return found[0]
    what = f"no file {expected[0].name} (or .jsonl)" if folder.is_dir() else "no such folder"
    raise InputError(f"--data_dir {str(folder)!r}: {what} for task {name}; add it, or leave out the task or the flag")


@functools.cache
def task_manager():
    """lm-eval's index of tasks; cached, because building it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def load_tasks(specifications: list[dict]) -> list:
    """lm-eval's task objects with their data sets. Raises InputError if a data set cannot be loaded."""
    # lm-eval accepts tasks with changed settings only as members of a group
    try:
        return list(task_manager().load({"group": "proxsparse", "task": specifications})["tasks"].values())
    except Exception as error:  # of many types: the hub's clients, Arrow, lm-eval's templates
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        where = specifications[0].get("dataset_kwargs", {}).get("data_files", "the Hugging Face hub")
        what = f"task {specifications[0]['task']}: its data cannot be loaded from {where} ({reason})"
        raise InputError(f"{what}; check the data, or give local files with --data_dir") from error


def scores(task: Task, results: dict) -> dict[str, float | int | None]:
    """The scores of one task of the paper as `zero_shot` returns them, from lm-eval's results."""
    documents = {"documents": results["n-samples"][task.lm_eval[0]]["effective"]}
    if len(task.lm_eval) == 1:
        found = results["results"][task.lm_eval[0]]
        return metric("acc", found) | (metric("acc_norm", found) if "acc_norm,none" in found else {}) | documents
    first, second = (results["results"][name] for name in task.lm_eval)
    mc1, mc2 = metric("acc", first, "mc1"), metric("acc", second, "mc2")
    return {"acc": (mc1["mc1"] + mc2["mc2"]) / 2} | mc1 | mc2 | documents


def metric(name: str, result: dict, to: str = "") -> dict[str, float | None]:
    """lm-eval's {"acc,none": 0.3, "acc_stderr,none": ...} -> {"acc": 0.3, "acc_stderr": ...}, renamed to `to`."""
    stderr = result[f"{name}_stderr,none"]
    known = isinstance(stderr, float) and math.isfinite(stderr)
    return {to or name: float(result[f"{name},none"]), f"{to or name}_stderr": stderr if known else None}
