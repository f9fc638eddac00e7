"""The seven zero-shot tasks of the ProxSparse paper, by lm-eval's own tasks and `simple_evaluate`.

The only file that imports lm_eval. The tasks' data sets come from the Hugging Face hub or, with `data_dir`, from local
files: then the task is still lm-eval's, told to read its split from a file (`task_from_file`); nothing else differs.
The scores are those of the `lm_eval` command line with the same model, dtype, data and `softmax_dtype=float32`.

The paper's tables report, and average, one accuracy a task, and do not say which. `acc` below is our reading of their
dense rows: the plain accuracy, not normalised by length, and for truthfulqa_mc the mean of mc1 and mc2. It has not been
checked by measuring one of the paper's models.
"""

import functools
import importlib.util
import itertools
import logging
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from proxsparse.data.sources import read_path, without_bars
from proxsparse.errors import InputError
from proxsparse.runtime.progress import importing, phase

INSTALL = "pip install 'lm-eval[hf]'"
METRICS = ("acc", "acc_norm", "mc1", "mc2")  # of `zero_shot`, each with a standard error by the name METRIC_stderr


@dataclass(frozen=True)
class Task:
    """A task of the paper: its names in lm-eval, and how its local file is called and what a row of it holds.

    The file is `{file}.jsonl.gz` or `{file}.jsonl`, one row of the hub's data set a line; the last word of `file` is
    the split, the one that lm-eval measures. `fields` are all that lm-eval reads of a row; "a.b" is field b in field a.
    """

    lm_eval: tuple[str, ...]
    file: str
    fields: tuple[str, ...]

    @property
    def split(self) -> str:
        """test or validation."""
        return self.file.rpartition("_")[2]


ARC = ("question", "choices.text", "choices.label", "answerKey")
TASKS = {  # in the order of the paper's columns
    "arc_challenge": Task(("arc_challenge",), "arc_challenge_test", ARC),
    "arc_easy": Task(("arc_easy",), "arc_easy_test", ARC),
    "social_iqa": Task(
        ("social_iqa",),
        "social_i_qa_validation",
        ("context", "question", "answerA", "answerB", "answerC", "label"),
    ),
    "hellaswag": Task(("hellaswag",), "hellaswag_validation", ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "openbookqa": Task(
        ("openbookqa",), "openbookqa_test", ("question_stem", "choices.text", "choices.label", "answerKey")
    ),
    "piqa": Task(("piqa",), "piqa_validation", ("goal", "sol1", "sol2", "label")),
    "truthfulqa_mc": Task(
        ("truthfulqa_mc1", "truthfulqa_mc2"),
        "truthful_qa_mc_validation",
        ("question", "mc1_targets.choices", "mc1_targets.labels", "mc2_targets.choices", "mc2_targets.labels"),
    ),
}


def zero_shot(
    model: nn.Module,
    tokenizer,
    tasks: list[str],
    data_dir: Path | str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    num_fewshot: int = 0,
    autocast_dtype: torch.dtype | None = None,
) -> dict[str, dict[str, float | int | None]]:
    """Shares of right choices: the one with the largest log-likelihood (`acc`), or with the largest per character
    (`acc_norm`, where lm-eval has it).

    Args:
        tasks: of `TASKS`, or "all".
        data_dir: folder with the tasks' files; None: the hub.
        limit: only the first documents of each task; None: all.
        batch_size: requests in a forward pass; they are sorted by length.
        num_fewshot: solved examples before each question, 0 in the paper; truthfulqa_mc always has its own six.
        autocast_dtype: compute in this dtype under autocast; None computes in the weights' own.
    Returns:
        Task -> {acc, acc_stderr, acc_norm, acc_norm_stderr, documents}, for truthfulqa_mc {acc = (mc1 + mc2) / 2, mc1,
        mc1_stderr, mc2, mc2_stderr, documents}. A standard error is None where there is one document.
    Raises:
        InputError: unknown task, number out of range, lm-eval or a file missing, a file damaged or without a field.
    """
    names = check_request(tasks, data_dir, limit, batch_size, num_fewshot)
    import lm_eval.models.huggingface
    from lm_eval import simple_evaluate

    with (
        phase(", ".join(names), unit="request") as current,
        current.instead_of_tqdm(lm_eval.api.task, lm_eval.api.model, lm_eval.models.huggingface),
        without_bars(),
        # git would complain outside a checkout
        mock.patch.object(lm_eval.evaluator, "get_git_commit_hash", return_value=None),
    ):
        specifications = [
            task_from_hub(name) if data_dir is None else task_from_file(name, Path(data_dir)) for name in names
        ]
        loaded = [task for specification in specifications for task in load_tasks(specification)]
        lm = language_model(model, tokenizer, batch_size, autocast_dtype)
        for task in loaded:
            refuse_long_answers(task, lm, limit)
        # One call for all: requests are batched by length across tasks, and those that mc1 and mc2 share are run once.
        results = simple_evaluate(
            model=lm,
            tasks=loaded,
            task_manager=task_manager(),
            num_fewshot=num_fewshot or None,  # None: each task's own, 0 for all seven
            limit=limit,
            log_samples=False,
            random_seed=None,  # the caller's generators stay as they are: nothing here is random
            numpy_random_seed=None,
            torch_random_seed=None,
        )
        found = {name: scores(TASKS[name], results) for name in names}
        current.result = ", ".join(f"acc {score['acc']:.4f}" for score in found.values())
    return found


def average(scores_by_task: dict[str, dict]) -> float:
    """The mean of the tasks' `acc`, each task counting once: the AVG column of the paper's tables."""
    return sum(scores["acc"] for scores in scores_by_task.values()) / len(scores_by_task)


# ---------------------------------------------------------------------------------------------- what was asked for


def check_request(
    tasks: list[str],
    data_dir: Path | str | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    num_fewshot: int = 0,
) -> list[str]:
    """The tasks in the paper's order. Raises the InputErrors of `zero_shot` that need no model, the hub's excepted."""
    names = choose_tasks(tasks)
    for name, value, minimum in (("limit", limit, 1), ("batch_size", batch_size, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and value < minimum:
            raise InputError(f"--{name} {value}: must be at least {minimum}")
    if num_fewshot and data_dir is not None:
        raise InputError(
            f"--num_fewshot {num_fewshot}: the examples are drawn from the training split, which the files of "
            "--data_dir are not; leave out --data_dir or --num_fewshot"
        )
    require_lm_eval()
    for name in names if data_dir is not None else ():
        task_file(name, Path(data_dir))
    return names


def choose_tasks(names: list[str]) -> list[str]:
    """The names in the paper's order, without repetition; "all" is all seven. Raises InputError for another name."""
    for name in names:
        if name != "all" and name not in TASKS:
            raise InputError(f"task {name!r}: unknown; choose from {', '.join(TASKS)}, or all")
    return [name for name in TASKS if name in names or "all" in names]


def is_installed() -> bool:
    """Whether lm-eval is there; it is not imported."""
    return importlib.util.find_spec("lm_eval") is not None


def require_lm_eval() -> None:
    """Raises InputError with the command that installs lm-eval."""
    try:
        with importing("lm_eval"):
            import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise InputError(f"--tasks needs lm-eval, which cannot be imported ({error}); run: {INSTALL}") from error


# ---------------------------------------------------------------------------------------------- lm-eval's tasks


def task_from_hub(name: str) -> list[dict]:
    """lm-eval's tasks as they are."""
    return [{"task": lm_eval_name} for lm_eval_name in TASKS[name].lm_eval]


def task_from_file(name: str, folder: Path) -> list[dict]:
    """lm-eval's tasks with the data set replaced by a file: the loader, and the one split there is.

    The other splits of the task must be unset, else lm-eval looks for few-shot examples in them.
    """
    path = task_file(name, folder)
    split = TASKS[name].split
    unset = {f"{other}_split": None for other in ("training", "validation", "test") if other != split}
    data_set = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path.resolve())}},
    }
    return [{"task": lm_eval_name, **data_set, **unset} for lm_eval_name in TASKS[name].lm_eval]


def task_file(name: str, folder: Path) -> Path:
    """The file of the task, its rows checked. Raises InputError: absent, damaged, or a row without a field."""
    expected = [folder / f"{TASKS[name].file}{suffix}" for suffix in (".jsonl.gz", ".jsonl")]
    path = next((path for path in expected if path.is_file()), None)
    if path is None:
        what = f"no file {expected[0].name} (or .jsonl) in it" if folder.is_dir() else "no such folder"
        raise InputError(f"--data_dir {str(folder)!r}: {what}, which task {name} needs; leave the task or the flag out")
    where = None
    for where, row in read_path(path):
        absent = next((field for field in TASKS[name].fields if not has_field(row, field)), None)
        if absent:
            raise InputError(f"{where}: no field {absent!r}; task {name} needs {', '.join(TASKS[name].fields)}")
    if where is None:
        raise InputError(f"{path}: no question in it; get the file again, or leave task {name} out")
    return path


def has_field(row: object, field: str) -> bool:
    """Whether the row has the field; "a.b" is field b in field a."""
    for key in field.split("."):
        if not isinstance(row, dict) or row.get(key) is None:
            return False
        row = row[key]
    return True


@functools.cache
def task_manager():
    """lm-eval's index of its tasks, which takes seconds to build."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def load_tasks(specifications: list[dict]) -> list:
    """lm-eval's task objects, their data sets loaded. Raises InputError if a data set cannot be had.

    A group is lm-eval's way to name a task of its own with some settings replaced; only the members are used.
    """
    try:
        return list(task_manager().load({"group": "proxsparse", "task": specifications})["tasks"].values())
    except Exception as error:  # the hub's clients, Arrow and lm-eval's templates have errors of their own
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        where = specifications[0].get("dataset_kwargs", {}).get("data_files", "the Hugging Face hub")
        raise InputError(
            f"task {specifications[0]['task']}: its data cannot be loaded from {where} ({reason}); check them, or give "
            "local files with --data_dir"
        ) from error


def language_model(model: nn.Module, tokenizer, batch_size: int, autocast_dtype: torch.dtype | None):
    """Our model as lm-eval sees one; log-probabilities are in fp32 whatever the logits are."""
    from lm_eval.models.huggingface import HFLM

    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of every model that is not a name
    try:
        return HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            softmax_dtype=torch.float32,
            mixed_precision_dtype=autocast_dtype,
        )
    finally:
        logger.setLevel(level)


def refuse_long_answers(task, lm, limit: int | None) -> None:
    """Raises InputError if an answer of a lm-eval task has more tokens than the model has positions."""
    answers = {answer for doc in itertools.islice(task.eval_docs, limit) for answer in task.doc_to_choice(doc)}
    longest = max((len(lm.tok_encode(f" {answer}")) for answer in answers), default=0)
    if longest > lm.max_length:
        raise InputError(
            f"{task.config.task} has an answer of {longest} tokens, the model has {lm.max_length} positions; leave out "
            "this task"
        )


def scores(task: Task, results: dict) -> dict[str, float | int | None]:
    """lm-eval's results of one task of the paper, by the names of `zero_shot`."""
    documents = {"documents": results["n-samples"][task.lm_eval[0]]["effective"]}
    if len(task.lm_eval) == 1:
        return metrics(results["results"][task.lm_eval[0]]) | documents
    first, second = (metrics(results["results"][name]) for name in task.lm_eval)
    halves = {"mc1": first["acc"], "mc1_stderr": first["acc_stderr"]}
    halves |= {"mc2": second["acc"], "mc2_stderr": second["acc_stderr"]}
    return {"acc": (first["acc"] + second["acc"]) / 2} | halves | documents


def metrics(result: dict) -> dict[str, float | None]:
    """lm-eval's {"acc,none": 0.3, "acc_stderr,none": ...} -> {"acc": 0.3, "acc_stderr": ...}."""
    found = {}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in result:
            stderr = result[f"{metric}_stderr,none"]
            known = isinstance(stderr, float) and math.isfinite(stderr)
            found |= {metric: float(result[f"{metric},none"]), f"{metric}_stderr": stderr if known else None}
    return found
