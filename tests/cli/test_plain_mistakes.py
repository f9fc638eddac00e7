"""Mistakes that users have made: each gets one line that names the file or flag and the remedy."""

import os

import pytest
import torch
from tiny_models import save_tiny_model

from proxsparse import ProxOptimizer, evaluate, pack, prune, train


def refusal(main, *arguments) -> str:
    """The message of the error with which a command ends, in one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the callers look at the words
        main([str(argument) for argument in arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path, tiny_llama, text_file):
    """A folder with data in wrong places, the current one."""
    (tmp_path / "field.jsonl").write_text('{"body": "some words"}\n')
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "directory").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "secret.txt").symlink_to(tmp_path / "short.txt")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "a.jsonl")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "c4.jsonl.bz2"], "'c4.jsonl.bz2': no such file"),
        (["--eval_data", "wiki.csv"], "'wiki.csv': no such file"),
        (["--data", "{folder}/field.jsonl"], "no field 'text'; set --text_field to the field with the text: body"),
        (["--data", "{folder}/linked"], "secret.txt: is not a regular file of this folder"),
        (["--data", "{folder}/pipe"], "a.jsonl: is not a regular file of this folder"),
        (["--start", "{folder}/directory"], "it is a directory; give the masks.safetensors in it"),
        (["--num_train_epochs", "1e308"], "--num_train_epochs 1e+308: must be a number > 0, at most 1,000,000"),
    ],
)
def test_train(flags, words, folder, tiny_llama, text_file):
    flags = [flag.format(folder=folder) for flag in flags]
    known = ["--model", tiny_llama, "--data", text_file, "--eval_data", "none", "--num_samples", "4"]
    assert words in refusal(train.main, *known, "--output_dir", folder / "run", *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--masks", "{folder}/directory"], "it is a directory; give the masks.safetensors in it"),
        (["--data", "{folder}/short.txt", "--seq_len", "64"], "--seq_len 64: the text has 11 tokens; lower it"),
        (["--json", "{folder}/directory"], "it is a folder; name a file"),
    ],
)
def test_evaluate(flags, words, folder, tiny_llama, text_file):
    flags = [flag.format(folder=folder) for flag in flags]
    assert words in refusal(evaluate.main, tiny_llama, "--data", text_file, *flags)


def test_a_model_without_a_tokenizer(folder, text_file):
    model = save_tiny_model("llama", folder / "model")
    for file in model.glob("*token*"):
        file.unlink()
    assert "no tokenizer.json or other tokenizer files" in refusal(evaluate.main, model, "--data", text_file)


def test_a_model_without_linear_layers(folder, text_file):
    flags = ["--method", "magnitude", "--model", save_tiny_model("gpt2", folder / "gpt2"), "--eval_data", "none"]
    assert prune.main([*map(str, flags), "--data", str(text_file), "--output_dir", str(folder / "pruned")]) == 0
    words = "GPT2LMHeadModel has its weights in Conv1D or other modules"
    assert words in refusal(pack.main, folder / "pruned", "--output_dir", folder / "packed")


def test_a_compiled_step_does_not_recompile_for_every_layer(caplog):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(12)])
    optimizer = ProxOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), reg_lambda=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        step()
    assert "recompile_limit" not in caplog.text
