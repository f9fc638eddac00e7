"""proxsparse.evaluate: several texts, tasks, masks, JSON; what it refuses, before the model is loaded where it can."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from task_files import write_task_files
from tiny_models import save_tiny_model

from proxsparse import evaluate
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation import zero_shot
from proxsparse.io.mask_files import save_masks
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import base_identity, load_model
from proxsparse.ops import nm_mask

needs_lm_eval = pytest.mark.skipif(
    not zero_shot.is_installed(), reason=f"lm-eval is not installed; run: {zero_shot.INSTALL}"
)


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    """A second text."""
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text("The sea is wide.\n\n" * 40)
    return path


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """A --data_dir."""
    return write_task_files(tmp_path_factory.mktemp("tasks"), zero_shot.TASKS)


@pytest.fixture
def mask_file(tiny_llama, tmp_path):
    """A 2:4 mask of every layer of the tiny model, by magnitude."""
    model, _tokenizer = load_model(str(tiny_llama))
    masks = {name: nm_mask(layer.weight.detach().abs(), "2:4") for name, layer in prunable_layers(model).items()}
    save_masks(tmp_path / "masks.safetensors", masks, "2:4", str(tiny_llama))
    return tmp_path / "masks.safetensors"


def rows(capsys, *arguments):
    """The rows that the command prints as JSON."""
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def fails(capsys, arguments, *words):
    """The command must fail with one line that holds the words, and print nothing else."""
    assert run_command(lambda: evaluate.main([str(argument) for argument in arguments])) == 2
    captured = capsys.readouterr()
    message = captured.err.splitlines()[-1]
    assert message.startswith("error: ")
    assert not captured.out
    for word in words:
        assert word in message, message


def test_several_texts_in_one_call(tiny_llama, text_file, other_text, capsys):
    both = rows(capsys, tiny_llama, "--data", text_file, other_text, "--seq_len", 64)
    each = [rows(capsys, tiny_llama, "--data", text, "--seq_len", 64) for text in (text_file, other_text)]
    assert both == [row for only in each for row in only]
    assert [row["data"] for row in both] == [str(text_file), str(other_text)]


def test_sentences_on_the_terminal_and_json_in_a_file(tiny_llama, text_file, other_text, tmp_path, capsys):
    flags = [tiny_llama, "--data", text_file, other_text, "--seq_len", "64", "--max_windows", "2"]
    assert evaluate.main([*map(str, flags), "--json", str(tmp_path / "scores.jsonl")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert f"{text_file}: 2 windows of 64 tokens" in said[0]
    written = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert written == rows(capsys, *flags)


def test_a_mask_is_judged_without_a_checkpoint(tiny_llama, mask_file, text_file, tmp_path, capsys):
    (masked,) = rows(capsys, tiny_llama, "--masks", mask_file, "--data", text_file, "--seq_len", 64)
    model, tokenizer = load_model(str(tiny_llama))
    with torch.no_grad():
        for layer in prunable_layers(model).values():
            layer.weight.mul_(nm_mask(layer.weight.abs(), "2:4"))
    model.save_pretrained(tmp_path / "pruned")
    tokenizer.save_pretrained(tmp_path / "pruned")
    (pruned,) = rows(capsys, tmp_path / "pruned", "--data", text_file, "--seq_len", 64)
    (dense,) = rows(capsys, tiny_llama, "--data", text_file, "--seq_len", 64)
    assert masked["perplexity"] == pruned["perplexity"] != dense["perplexity"]
    assert len(masked["masks_sha256"]) == 64


@needs_lm_eval
def test_tasks_and_text_in_one_call_and_the_same_twice(tiny_llama, text_file, task_folder, capsys):
    flags = ["--tasks", "piqa", "arc_easy", "--data_dir", task_folder, "--limit", 3]
    found = rows(capsys, tiny_llama, "--data", text_file, "--seq_len", 64, *flags)
    assert [row.get("task", row.get("data")) for row in found] == [str(text_file), "arc_easy", "piqa", "average"]
    assert found[1]["documents"] == found[1]["limit"] == 3
    assert found[-1]["acc"] == (found[1]["acc"] + found[2]["acc"]) / 2
    assert rows(capsys, tiny_llama, *flags) == found[1:]
    assert evaluate.main([str(word) for word in (tiny_llama, *flags)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("arc_easy: acc 0.")
    assert said[0].endswith(", 3 documents")
    assert said[-1].startswith("average of 2 tasks: acc 0.")


@needs_lm_eval
def test_nothing_but_phases_on_stderr(tiny_llama, task_folder, tmp_path, monkeypatch, capfd):
    """No bars of other libraries, which fill log files; no complaint of git outside a checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    flags = [tiny_llama, "--tasks", "piqa", "--data_dir", task_folder, "--limit", 3]
    assert run_command(lambda: evaluate.main(list(map(str, flags)))) == 0
    lines = capfd.readouterr().err.split("\n")
    phases = [line.partition(":")[0] for line in lines if not line.startswith("importing ")]
    assert phases == [f"loading {tiny_llama}", "checking the weights", "piqa", ""]


@needs_lm_eval
def test_an_error_in_one_task_is_the_row_of_that_task(tiny_llama, task_folder, tmp_path, capsys, monkeypatch):
    """Its answers are longer than the model's positions, or lm-eval itself fails; the others are measured."""
    measure = evaluate.zero_shot

    def fail(model, tokenizer, tasks, *others):
        if tasks == ["arc_easy"]:
            raise AssertionError
        return measure(model, tokenizer, tasks, *others)

    monkeypatch.setattr(evaluate, "zero_shot", fail)
    flags = ["--tasks", "piqa", "arc_easy", "--data_dir", task_folder, "--json", tmp_path / "scores.jsonl"]
    assert evaluate.main([str(word) for word in (tiny_llama, *flags)]) == 1
    written = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["task"] for row in written] == ["arc_easy", "piqa"]
    assert written[0]["error"].startswith("AssertionError")
    assert "acc" in written[1]
    captured = capsys.readouterr()
    assert "arc_easy: failed: AssertionError" in captured.out
    assert captured.err.splitlines()[-1] == "error: 1 of 2 tasks failed: arc_easy"


@needs_lm_eval
def test_answers_that_do_not_fit_are_refused_before_the_task(tiny_llama, task_folder, monkeypatch):
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.max_length", 2)
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **_: pytest.fail("the task was run"))
    model, tokenizer = load_model(str(tiny_llama))
    with pytest.raises(InputError, match=r"piqa has an answer of \d+ tokens, the model has 2 positions; leave out"):
        zero_shot.zero_shot(model, tokenizer, ["piqa"], task_folder)


def test_what_was_measured_before_an_interruption_is_kept(tiny_llama, text_file, other_text, tmp_path, monkeypatch):
    measure, calls = evaluate.perplexity, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(evaluate, "perplexity", interrupted)
    flags = ["--data", text_file, other_text, "--seq_len", "64", "--json", tmp_path / "scores.jsonl"]
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([str(word) for word in (tiny_llama, *flags)])
    (line,) = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert json.loads(line)["data"] == str(text_file)


def test_weights_that_are_not_finite_are_named(text_file, tmp_path, capsys):
    folder = save_tiny_model("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    fails(
        capsys,
        [folder, "--data", text_file, "--seq_len", 64],
        "model.layers.1.mlp.up_proj.weight has weights that are NaN",
    )


def test_masks_that_belong_to_other_weights_are_refused(tiny_llama, text_file, tmp_path, capsys):
    folder = save_tiny_model("llama", tmp_path / "model")
    model, _ = load_model(str(folder))
    masks = {name: nm_mask(layer.weight.detach().abs()) for name, layer in prunable_layers(model).items()}
    file = tmp_path / "masks.safetensors"
    save_masks(file, masks, "2:4", **base_identity("Qwen/Qwen2.5", model) | {"base_revision": "0a1b"})
    data = ["--masks", file, "--data", text_file, "--seq_len", 64]
    same = rows(capsys, folder, *data)  # under another name, and in another dtype
    assert same[0].keys() == rows(capsys, folder, *data, "--precision", "bf16")[0].keys()
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(folder)
    words = ("belong to 'Qwen/Qwen2.5' at revision 0a1b", "--allow_other_base")
    fails(capsys, [folder, *data], *words)
    assert rows(capsys, folder, *data, "--allow_other_base")[0]["perplexity"] > 0


@needs_lm_eval
@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_tasks_in_lower_precision(precision, tiny_llama, task_folder, capsys):
    flags = ["--tasks", "piqa", "--data_dir", task_folder, "--precision", precision]
    found = rows(capsys, tiny_llama, *flags)
    assert found == rows(capsys, tiny_llama, *flags)
    assert 0 <= found[0]["acc"] <= 1


@needs_lm_eval
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "boolq"], ["'boolq'", "arc_challenge", "truthfulqa_mc", "all"]),
        (["--tasks", "piqa", "--limit", "0"], ["--limit 0", "at least 1"]),
        (["--tasks", "piqa", "--batch_size", "0"], ["--batch_size 0", "at least 1"]),
        (["--tasks", "piqa", "--data_dir", "absent"], ["absent", "no such folder", "piqa"]),
        (["--tasks", "piqa", "--data_dir", "{tmp}"], ["piqa_validation.jsonl.gz", "piqa"]),
        (["--tasks", "piqa", "--data_dir", "{tasks}", "--num_fewshot", "3"], ["--num_fewshot 3", "--data_dir"]),
        (["--json", "absent/scores.jsonl"], ["absent/scores.jsonl", "no such folder"]),
        (["--json", "{tmp}"], ["--json", "it is a folder"]),
        (["--max_windows", "0"], ["--max_windows 0"]),
        (["--data", "absent.raw"], ["absent.raw"]),
        (["--masks", "absent.safetensors"], ["absent.safetensors", "no such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_refused_before_the_model_is_loaded(arguments, words, task_folder, tmp_path, capsys, monkeypatch):
    def loads(*_arguments):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(evaluate, "load_model", loads)
    fails(capsys, ["model", *(a.format(tmp=tmp_path, tasks=task_folder) for a in arguments)], *words)


def test_masks_of_another_model_are_refused(tiny_llama, text_file, tmp_path, capsys):
    mask = torch.tensor([True, True, False, False]).repeat(8, 2)
    for name, words in (("model.layers.9.mlp", "no such layer"), ("model.layers.0.mlp.up_proj", "one of [64, 32]")):
        save_masks(tmp_path / "masks.safetensors", {name: mask}, "2:4", "another")
        flags = ["--masks", tmp_path / "masks.safetensors", "--data", text_file, "--allow_other_base"]
        fails(capsys, [tiny_llama, *flags, "--seq_len", 64], name, "[8, 8]", words)


def test_without_lm_eval_the_command_that_installs_it_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(capsys, ["model", "--tasks", "all"], "pip install 'lm-eval[hf]'")
