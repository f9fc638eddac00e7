"""proxsparse.evaluate: several texts, masks, JSON; what it refuses. Tasks are in evaluation/test_zero_shot.py."""

import sys

import pytest
import torch
from commands import call, refused, rows_in, rows_printed, run
from tiny_models import byte_tokenizer, save_tiny_model

from proxsparse import evaluate, prune
from proxsparse.io.mask_files import save_masks
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.ops import nm_mask
from proxsparse.runtime.device import PRECISIONS


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text("The sea is wide.\n\n" * 40)
    return path


def fails(capsys, arguments, *words):
    """The command must print nothing but the error and its phases."""
    phases = ("loading ", "checking the weights", "digest of the weights", "reading ")
    others = refused(capsys, evaluate.main, arguments, *words)
    assert all(line.startswith(phases) for line in others), others


def magnitude_masks(model):
    return {name: nm_mask(layer.weight.detach().abs()) for name, layer in prunable_layers(model).items()}


def test_several_texts_as_json_and_as_sentences(tiny_llama, text_file, other_text, tmp_path, capsys):
    both = rows_printed(capsys, tiny_llama, "--data", text_file, other_text, "--seq_len", 64)
    each = [rows_printed(capsys, tiny_llama, "--data", text, "--seq_len", 64) for text in (text_file, other_text)]
    assert both == [row for only in each for row in only]
    assert [(row["data"], row["split"]) for row in both] == [(str(text_file), None), (str(other_text), None)]
    assert all(row["precision"] in PRECISIONS for row in both)  # not auto
    assert all(row["windows"] * 64 == row["tokens"] and 1 < row["perplexity"] < 1000 for row in both)
    flags = [tiny_llama, "--data", text_file, other_text, "--seq_len", 64, "--max_windows", 2]
    (tmp_path / "scores.jsonl").touch()  # as a full disk leaves it
    call(evaluate.main, *flags, "--json", tmp_path / "scores.jsonl")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert f"{text_file}: 2 windows of 64 tokens" in printed[0]
    assert rows_in(tmp_path / "scores.jsonl") == rows_printed(capsys, *flags)


def test_the_row_says_where_bos_stands(tmp_path, text_file, capsys):
    folder = save_tiny_model("gemma2-mixed", tmp_path / "gemma")
    data = [folder, "--data", text_file, "--seq_len", 64]
    (without,) = rows_printed(capsys, *data)
    byte_tokenizer(bos=True).save_pretrained(folder)
    found = {row["bos"]: row for flags in ([], ["--bos", "first"]) for row in rows_printed(capsys, *data, *flags)}
    assert set(found) == {"each", "first"}
    assert len({row["perplexity"] for row in (without, *found.values())}) == 3
    call(evaluate.main, *data)
    assert "64 tokens, bos before each" in capsys.readouterr().out
    result = run(prune.main, folder, text_file, tmp_path / "run", "--method", "magnitude", "--eval_bos", "first")
    assert result["perplexity"]["bos"] == "first"
    assert "bos before the first" in capsys.readouterr().out


def test_a_mask_is_judged_without_a_checkpoint(tiny_llama, text_file, tmp_path, capsys):
    model, tokenizer = load_model(str(tiny_llama))
    save_masks(file := tmp_path / "masks.safetensors", masks := magnitude_masks(model), "2:4", str(tiny_llama))
    with torch.no_grad():
        for name, layer in prunable_layers(model).items():
            layer.weight.mul_(masks[name])
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "pruned")
    data = ["--data", text_file, "--seq_len", 64]
    (masked,) = rows_printed(capsys, tiny_llama, "--masks", file, *data)
    (pruned,), (dense,) = (rows_printed(capsys, folder, *data) for folder in (tmp_path / "pruned", tiny_llama))
    assert masked["perplexity"] == pruned["perplexity"] != dense["perplexity"]
    assert len(masked["masks_sha256"]) == 64


def test_what_was_measured_before_an_interruption_is_kept(tiny_llama, text_file, other_text, tmp_path, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    results = iter([evaluate.perplexity, interrupted])
    monkeypatch.setattr(evaluate, "perplexity", lambda *arguments: next(results)(*arguments))
    scores = tmp_path / "scores.jsonl"
    with pytest.raises(KeyboardInterrupt):
        call(evaluate.main, tiny_llama, "--data", text_file, other_text, "--seq_len", 64, "--json", scores)
    assert [row["data"] for row in rows_in(scores)] == [str(text_file)]


def test_without_lm_eval_the_command_that_installs_it_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(capsys, ["model", "--tasks", "all"], "pip install 'lm-eval[hf]'")
