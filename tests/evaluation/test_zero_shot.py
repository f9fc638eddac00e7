"""Zero-shot tasks from local files: lm-eval's own tasks, its command line's numbers, bad files; `evaluate --tasks`.

The import of lm-eval takes seconds, so all tests that need it are here.
"""

import gzip
import json
import logging
import sys

import pytest
import torch
import yaml
from commands import rows_in, rows_printed
from task_files import needs_lm_eval, rows_of, write_task_files
from tiny_models import byte_tokenizer, tiny_model

from proxsparse import evaluate
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation import zero_shot as module
from proxsparse.evaluation.zero_shot import TASKS, check_request, zero_shot


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A --data_dir with five questions a task."""
    return write_task_files(tmp_path_factory.mktemp("tasks"), TASKS)


@pytest.mark.slow
@needs_lm_eval
def test_a_model_that_knows_the_answers_gets_them_right(files, monkeypatch):
    """Guards against a wrong split, label or field: the log-likelihood of an answer is 0 if it is right, else -50."""
    from lm_eval.models.huggingface import HFLM

    right = {
        lm_eval_name: [correct_answers(name, row) for row in rows_of(name)]
        for name, task in TASKS.items()
        for lm_eval_name in task.lm_eval
    }

    def loglikelihood(_model, requests):
        known = [request.args[1].strip() in right[request.task_name][request.doc_id] for request in requests]
        return [(0.0 if it_is else -50.0, False) for it_is in known]

    monkeypatch.setattr(HFLM, "loglikelihood", loglikelihood)
    for name in TASKS:
        figures = zero_shot(tiny_model("llama"), byte_tokenizer(), name, files)
        assert (figures["acc"], figures["documents"]) == (pytest.approx(1), 5), name
        assert 0 <= figures[{"truthfulqa_mc": "mc2", "social_iqa": "acc"}.get(name, "acc_norm")] <= 1


def correct_answers(name: str, row: dict) -> list[str]:
    """The texts that lm-eval should count as right."""
    match name:
        case "social_iqa":
            return [row["answer" + "ABC"[int(row["label"]) - 1]]]
        case "hellaswag":  # lm-eval's process_docs takes the markers out
            return [row["endings"][int(row["label"])].replace(" [step]", "")]
        case "piqa":
            return [row[("sol1", "sol2")[row["label"]]]]
        case "truthfulqa_mc":
            targets = row["mc2_targets"]
            return [text for text, label in zip(targets["choices"], targets["labels"], strict=True) if label]
    return [row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]]


@needs_lm_eval
@pytest.mark.slow
def test_any_batch_size_gives_the_same_and_limit_takes_the_first_documents(files):
    model, tokenizer, before = tiny_model("llama"), byte_tokenizer(), torch.random.get_rng_state()
    for name in ("arc_easy", "truthfulqa_mc"):
        one, four = (zero_shot(model, tokenizer, name, files, batch_size=size) for size in (1, 4))
        assert one == four
    assert one["acc"] == (one["mc1"] + one["mc2"]) / 2
    limited = zero_shot(model, tokenizer, "piqa", files, limit=1)
    assert (limited["documents"], limited["acc_stderr"]) == (1, None)
    assert torch.equal(torch.random.get_rng_state(), before), "the random state is restored"


@needs_lm_eval
@pytest.mark.slow
def test_the_command_line_of_lm_eval_gives_the_same_numbers(tiny_llama, files, tmp_path, monkeypatch, capsys):
    """Its own command line and loading of the model; YAML files that include lm-eval's tasks."""
    from lm_eval.__main__ import cli_evaluate

    from proxsparse.models.loading import load_model

    tasks, index, names = ["piqa", "hellaswag", "truthfulqa_mc"], module.task_manager().task_index, []
    for settings in (settings for name in tasks for settings in module.task_settings(name, files)):
        plain = settings["task"]
        names.append(f"local_{plain}")
        config = {"include": str(index[plain].yaml_path), **settings, "task": names[-1]}
        (tmp_path / f"{plain}.yaml").write_text(yaml.safe_dump(config))
    model_args = f"pretrained={tiny_llama},dtype=float32,softmax_dtype=float32"
    command = f"lm_eval run --model hf --model_args {model_args} --tasks {','.join(names)} --include_path {tmp_path}"
    command += f" --device cpu --batch_size 4 --limit 4 --output_path {tmp_path / 'out.json'}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    cli_evaluate()
    capsys.readouterr()
    (written,) = tmp_path.rglob("out*.json")
    theirs = json.loads(written.read_text())["results"]
    model, tokenizer = load_model(str(tiny_llama), torch.float32)
    ours = {name: zero_shot(model, tokenizer, name, files, limit=4, batch_size=4) for name in tasks}
    for task, metric, name, key in (
        *((task, metric, task, metric) for task in ("piqa", "hellaswag") for metric in ("acc", "acc_norm")),
        *(("truthfulqa_mc", metric, f"truthfulqa_{metric}", "acc") for metric in ("mc1", "mc2")),
    ):
        for suffix in ("", "_stderr"):
            assert ours[task][metric + suffix] == theirs[f"local_{name}"][f"{key}{suffix},none"], (task, metric)


def test_tasks_come_in_the_papers_order_once(monkeypatch):
    monkeypatch.setattr(module, "require_lm_eval", lambda: None)
    assert check_request(["piqa", "arc_easy", "piqa"]) == ["arc_easy", "piqa"]
    assert check_request(["piqa", "all"]) == list(TASKS)
    with pytest.raises(InputError, match=r"task 'boolq': unknown; choose from arc_.*, truthfulqa_mc, or all"):
        check_request(["boolq"])


@needs_lm_eval
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"no gzip at all",
        lambda content: gzip.compress(gzip.decompress(content)[:-20]),
        lambda content: b"",
        lambda content: gzip.compress(gzip.decompress(content).replace(b"answerKey", b"solution")),
    ],
    ids=["truncated", "not gzip", "cut line", "empty", "no field"],
)
def test_damaged_data_is_one_error_that_names_the_file(damage, files, tmp_path):
    name = f"{TASKS['arc_challenge'].file}.jsonl.gz"
    (tmp_path / name).write_bytes(damage((files / name).read_bytes()))
    with pytest.raises(InputError, match=r"task arc_challenge: .*arc_challenge_test.jsonl"):
        zero_shot(tiny_model("llama"), byte_tokenizer(), "arc_challenge", tmp_path)


# ---------------------------------------------------------------------------------------------- proxsparse evaluate


@needs_lm_eval
def test_tasks_and_text_in_one_call_and_the_same_twice(tiny_llama, text_file, files, capsys):
    flags = ["--tasks", "piqa", "arc_easy", "--data_dir", files, "--limit", 3]
    found = rows_printed(capsys, tiny_llama, "--data", text_file, "--seq_len", 64, *flags)
    assert [row.get("task", row.get("data")) for row in found] == [str(text_file), "arc_easy", "piqa", "average"]
    assert found[1]["documents"] == found[1]["limit"] == 3
    assert found[-1]["acc"] == (found[1]["acc"] + found[2]["acc"]) / 2
    assert rows_printed(capsys, tiny_llama, *flags) == found[1:]


@needs_lm_eval
def test_nothing_but_phases_on_stderr_and_a_line_for_each_task(tiny_llama, files, tmp_path, monkeypatch, capfd):
    """No bars of other libraries, which fill log files; no complaint of git outside a checkout."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a handler may have the stderr of an earlier test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    flags = [tiny_llama, "--tasks", "piqa", "arc_easy", "--data_dir", files, "--limit", 3]
    assert run_command(lambda: evaluate.main(list(map(str, flags)))) == 0
    printed = capfd.readouterr()
    lines = [line for line in printed.err.split("\n") if not line.startswith("importing ")]  # slow: twice
    phases = dict.fromkeys(line.partition(":")[0] for line in lines)
    assert [*phases] == [f"loading {tiny_llama}", "checking the weights", "arc_easy", "piqa", ""]
    first, _, last = printed.out.splitlines()
    assert first.startswith("arc_easy: acc 0.")
    assert first.endswith(", 3 documents")
    assert last.startswith("average of 2 tasks: acc 0.")


@needs_lm_eval
def test_an_error_in_one_task_is_the_row_of_that_task(tiny_llama, files, tmp_path, capsys, monkeypatch):
    """lm-eval fails, for example; the others are measured."""
    measure = evaluate.zero_shot

    def fail(model, tokenizer, task, *others):
        assert task != "arc_easy"
        return measure(model, tokenizer, task, *others)

    monkeypatch.setattr(evaluate, "zero_shot", fail)
    flags = [tiny_llama, "--tasks", "piqa", "arc_easy", "--data_dir", files, "--json", tmp_path / "scores.jsonl"]
    assert evaluate.main(list(map(str, flags))) == 1
    failed, measured = rows_in(tmp_path / "scores.jsonl")
    assert (failed["task"], measured["task"]) == ("arc_easy", "piqa")
    assert failed["error"].startswith("AssertionError")
    assert "acc" in measured
    captured = capsys.readouterr()
    assert "arc_easy: failed: AssertionError" in captured.out
    assert captured.err.splitlines()[-1] == "error: 1 of 2 tasks failed: arc_easy"
