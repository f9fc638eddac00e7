"""proxsparse.evaluate: several texts, tasks, masks, JSON; what it refuses, before the model is loaded where it can."""

import json
import sys

import pytest
import torch
from task_files import write_task_files

from proxsparse import evaluate
from proxsparse.checkpoint import save_masks
from proxsparse.errors import run_command
from proxsparse.evaluation import zero_shot
from proxsparse.models import load_model, prunable_layers
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
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| task | metric | value | stderr | documents |"
    assert table[-1].startswith("| average of 2 | acc | ")


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
        flags = ["--masks", tmp_path / "masks.safetensors", "--data", text_file]
        fails(capsys, [tiny_llama, *flags, "--seq_len", 64], name, "[8, 8]", words)


def test_without_lm_eval_the_command_that_installs_it_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(capsys, ["model", "--tasks", "all"], "pip install 'lm-eval[hf]'")
