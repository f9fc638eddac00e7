"""Zero-shot tasks from local files: lm-eval's own tasks, the numbers of its command line, and errors of bad files."""

import gzip
import json
import sys

import pytest
import torch
import yaml
from task_files import needs_lm_eval, rows_of, write_task_files
from tiny_models import byte_tokenizer, save_tiny_model, tiny_model

from proxsparse.errors import InputError
from proxsparse.evaluation import zero_shot as module
from proxsparse.evaluation.zero_shot import TASKS, average, check_request, zero_shot


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A --data_dir with five questions a task."""
    return write_task_files(tmp_path_factory.mktemp("tasks"), TASKS)


@pytest.fixture(scope="module")
def scores(files):
    """All seven tasks on a tiny random model."""
    model = tiny_model("llama")
    return {name: zero_shot(model, byte_tokenizer(), name, files, batch_size=4) for name in TASKS}


@needs_lm_eval
def test_every_task_gives_the_papers_figure(scores):
    assert list(scores) == list(TASKS)
    for name, figures in scores.items():
        assert figures["documents"] == 5
        assert 0 <= figures["acc"] <= 1
        other = {"truthfulqa_mc": "mc2", "social_iqa": "acc"}.get(name, "acc_norm")
        assert 0 <= figures[other] <= 1
    halves = scores["truthfulqa_mc"]
    assert halves["acc"] == (halves["mc1"] + halves["mc2"]) / 2
    assert average(scores) == pytest.approx(sum(figures["acc"] for figures in scores.values()) / 7)


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
        assert zero_shot(tiny_model("llama"), byte_tokenizer(), name, files)["acc"] == pytest.approx(1), name


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
def test_any_batch_size_gives_the_same_and_limit_takes_the_first_documents(scores, files):
    model, tokenizer, before = tiny_model("llama"), byte_tokenizer(), torch.random.get_rng_state()
    for name in ("arc_easy", "truthfulqa_mc"):
        assert zero_shot(model, tokenizer, name, files, batch_size=1) == scores[name]
    limited = zero_shot(model, tokenizer, "piqa", files, limit=1)
    assert (limited["documents"], limited["acc_stderr"]) == (1, None)
    assert torch.equal(torch.random.get_rng_state(), before), "the random state is restored"


@needs_lm_eval
@pytest.mark.slow
def test_the_command_line_of_lm_eval_gives_the_same_numbers(files, tmp_path, monkeypatch, capsys):
    """Its own command line and loading of the model; YAML files that include lm-eval's tasks."""
    from lm_eval.__main__ import cli_evaluate

    from proxsparse.models.loading import load_model

    folder, tasks = save_tiny_model("llama", tmp_path / "model"), ["piqa", "hellaswag", "truthfulqa_mc"]
    index, names = module.task_manager().task_index, []
    for settings in (settings for name in tasks for settings in module.task_settings(name, files)):
        plain = settings["task"]
        names.append(f"local_{plain}")
        config = {"include": str(index[plain].yaml_path), **settings, "task": names[-1]}
        (tmp_path / f"{plain}.yaml").write_text(yaml.safe_dump(config))
    model_args = f"pretrained={folder},dtype=float32,softmax_dtype=float32"
    command = f"lm_eval run --model hf --model_args {model_args} --tasks {','.join(names)} --include_path {tmp_path}"
    command += f" --device cpu --batch_size 4 --limit 4 --output_path {tmp_path / 'out.json'}"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    cli_evaluate()
    capsys.readouterr()
    (written,) = tmp_path.rglob("out*.json")
    theirs = json.loads(written.read_text())["results"]
    model, tokenizer = load_model(str(folder), torch.float32)
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
