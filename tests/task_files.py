"""Small files of the seven zero-shot tasks for --data_dir: invented questions, the fields of the real data sets."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from proxsparse.evaluation.zero_shot import INSTALL

needs_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason=f"lm-eval is not installed; run: {INSTALL}")
QUESTIONS = ["What is wet?", "Which of these is a fruit?", "Where do fish live?", "Who flies?", "What burns?"]
ANSWERS = ["the sea", "a pear", "in water of any kind", "birds and, now and then, a squirrel"]


def rows_of(task: str) -> list[dict]:
    """Five rows; the right answer is another one each time."""
    make = {
        "arc_challenge": arc,
        "arc_easy": arc,
        "social_iqa": lambda i, question: {
            "context": f"Kim saw {i} ships.",
            "question": question,
            **{f"answer{letter}": answer for letter, answer in zip("ABC", ANSWERS, strict=False)},
            "label": str(i % 3 + 1),
        },
        "hellaswag": lambda i, question: {
            "activity_label": "Sailing",
            "ctx_a": f"A man has {i} boats.",
            "ctx_b": "he",
            "endings": [f"sees {answer} [step] twice." for answer in ANSWERS],
            "label": str(i % 4),
        },
        "openbookqa": lambda i, question: {"question_stem": question, **arc(i, question)},
        "piqa": lambda i, question: {"goal": question, "sol1": ANSWERS[i % 4], "sol2": "none", "label": i % 2},
        "truthfulqa_mc": lambda i, question: {
            "question": question,
            "mc1_targets": {"choices": ANSWERS[: 2 + i % 3], "labels": [1, 0, 0, 0][: 2 + i % 3]},
            "mc2_targets": {"choices": ANSWERS, "labels": [1, i % 2, 0, 0]},
        },
    }[task]
    return [make(i, question) for i, question in enumerate(QUESTIONS)]


def arc(i: int, question: str) -> dict:
    """A row of ARC."""
    return {"question": question, "choices": {"text": ANSWERS, "label": list("ABCD")}, "answerKey": "ABCD"[i % 4]}


def write_task_files(folder: Path, tasks: dict) -> Path:
    """One file a task of `proxsparse.evaluation.zero_shot.TASKS`, every second one compressed; returns the folder."""
    for number, (name, task) in enumerate(tasks.items()):
        lines = "".join(json.dumps(row) + "\n" for row in rows_of(name)).encode()
        if number % 2:
            (folder / f"{task.file}.jsonl").write_bytes(lines)
        else:
            (folder / f"{task.file}.jsonl.gz").write_bytes(gzip.compress(lines))
    return folder
