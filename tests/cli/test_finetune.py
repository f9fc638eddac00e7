"""`proxsparse finetune`: the mask is held, what is trained changes and nothing else, and nothing is lost."""

import itertools
import json
import os
import signal
import sys

import pytest
import torch
from commands import QUICK, refused
from pruned import save_pruned_model
from safetensors.torch import load_file, save_file
from tiny_models import byte_tokenizer, save_tiny_model

from proxsparse import NMPattern, evaluate, pack, prune
from proxsparse.finetune import main
from proxsparse.io.mask_files import load_masks
from proxsparse.methods.finetune import train_kept_weights
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.training.early_stopping import EarlyStopping

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pruned(tiny_llama, text_file, tmp_path_factory):
    """A folder that prune --method sparsegpt has made."""
    folder = tmp_path_factory.mktemp("pruned") / "run"
    flags = ["--model", tiny_llama, "--data", text_file, "--eval_data", "none", "--output_dir", folder, *QUICK]
    assert prune.main(["--method", "sparsegpt", *map(str, flags)]) == 0
    return folder


@pytest.fixture
def tune(pruned, text_file, tmp_path):
    """tune("name", *flags) -> result.json of a run into that folder of tmp_path."""

    def run(name, *flags, model=pruned):
        given = ["--data", text_file, "--eval_data", text_file, "--output_dir", tmp_path / name, *QUICK]
        assert main(list(map(str, [model, *given, "--held_out", "2", *flags]))) == 0
        return json.loads((tmp_path / name / "result.json").read_text())

    return run


def changed(before, after) -> set[str]:
    """The names of the tensors that differ in two folders."""
    before, after = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_held(before, after):
    """Every layer is 2:4 with the zeros of before, and they are +0.0."""
    masks, weights = load_masks(after / "masks.safetensors"), load_file(after / "model.safetensors")
    pruned = load_file(before / "model.safetensors")
    for name, mask in masks.items():
        weight = weights[f"{name}.weight"]
        assert NMPattern(2, 4).is_feasible(weight)
        assert not weight[~mask].any()
        assert not weight[~mask].signbit().any()
        assert not pruned[f"{name}.weight"][~mask].any(), "a pruned weight has come back"


def test_whole_job(tune, pruned, tmp_path):
    result = tune("run", "--learning_rate", "0.01")  # bf16 norms are 1: smaller changes would be rounded
    assert_held(pruned, tmp_path / "run")
    names = changed(pruned, tmp_path / "run")
    assert UP in names
    assert {"model.norm.weight", "model.layers.1.input_layernorm.weight"} <= names
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert (result["status"], result["method"], result["updated"]) == ("complete", "finetune", True)
    assert result["base_model"] != result["model"] == str(pruned)
    assert {"dense", "pruned", "finetune"} <= result["perplexity"].keys()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == result["steps"] == 6  # 8 samples, 2 held out
    assert [row["step"] for row in rows if "held_out_loss" in row] == list(range(1, 7))
    assert [step for step, _ in result["held_out"]["losses"]] == list(range(7))
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]
    report, card = ((tmp_path / "run" / name).read_text() for name in ("report.md", "README.md"))
    assert "held_out_loss.png" in report
    assert "pruned to 2:4 and fine-tuned" in card
    assert tune("run", "--learning_rate", "0.01", "--resume_from_checkpoint", "last") == result  # nothing to do


@pytest.mark.parametrize(
    ("flags", "trains"),
    [
        (["--train", "norms"], {"norm"}),
        (["--precision", "bf16"], {"norm", "proj"}),
        (["--precision", "bf16", "--master_weights", "--distill", "0"], {"norm", "proj"}),
        (["--distill", "1", "--gradient_accumulation_steps", "2", "--gradient_checkpointing"], {"norm", "proj"}),
        (["--step_in_backward", "--max_grad_norm", "0", "--held_out", "0"], {"norm", "proj"}),
        (["--weight_decay", "0.1", "--per_device_train_batch_size", "2", "--packing"], {"norm", "proj"}),
    ],
    ids=["norms", "bf16", "master", "distill", "backward", "decay"],
)
def test_options(flags, trains, tune, pruned, tmp_path):
    tune("run", "--learning_rate", "0.01", "--held_out", "0", *flags)  # the last weights, even if they are worse
    assert_held(pruned, tmp_path / "run")
    names = changed(pruned, tmp_path / "run")
    kinds = {kind for kind in ("norm", "proj", "embed", "lm_head") for name in names if kind in name}
    assert kinds == trains


def test_a_step_in_the_backward_pass_is_the_same_step(tune, tmp_path):
    """Pruned weights are held in both, so the losses are those of N:M models."""
    flags = ["--max_grad_norm", "0", "--learning_rate", "0.01"]
    after = tune("after", *flags)
    within = tune("within", *flags, "--step_in_backward")
    assert within["held_out"] == after["held_out"]
    assert not changed(tmp_path / "after", tmp_path / "within")


def test_norms_leave_the_layers_as_they_are(tune, pruned, text_file, tmp_path):
    """Linear weights that are not trained keep all bits of the file, also if the run computes in bf16."""
    model, tokenizer = load_model(str(pruned), torch.float32)
    with torch.no_grad():
        for layer in prunable_layers(model).values():
            layer.weight *= 1 + 2**-12
    model.save_pretrained(tmp_path / "fp32")
    tokenizer.save_pretrained(tmp_path / "fp32")
    flags = ["--train", "norms", "--precision", "bf16", "--learning_rate", "0.01", "--distill", "0"]
    tune("run", *flags, model=tmp_path / "fp32")
    assert all("norm" in name for name in changed(tmp_path / "fp32", tmp_path / "run"))
    assert "were not trained" in (tmp_path / "run" / "README.md").read_text()


def test_a_folder_of_another_tool_and_its_patterns(tune, text_file, tiny_llama, tmp_path):
    foreign = save_pruned_model(tmp_path / "foreign")
    tune("norms", "--teacher", tiny_llama, model=foreign)
    assert_held(foreign, tmp_path / "norms")
    flags = ["--allocation", "owl", "--method", "wanda", "--eval_data", "none", *QUICK]
    where = ["--model", str(tiny_llama), "--data", str(text_file), "--output_dir", str(tmp_path / "owl")]
    assert prune.main([*flags, *where]) == 0
    tuned = tune("tuned", model=tmp_path / "owl")
    assert tuned["patterns"] == json.loads((tmp_path / "owl" / "result.json").read_text())["patterns"]


def test_the_best_weights_are_kept_and_training_stops_early(tune, pruned, monkeypatch, tmp_path):
    weight, losses = torch.zeros(3), iter([3.0, 1.0, 2.0, 1.5, 0.5])
    stopping = EarlyStopping(lambda: next(losses), {"w": weight}, every=2, last=100, patience=2)
    for step in range(1, 9):
        weight.fill_(step)
        assert stopping.observe(step).keys() == ({"held_out_loss"} if step % 2 == 0 else set())
        assert stopping.finished == (step == 8)
    stopping.take_best_()
    assert weight.tolist() == [4, 4, 4]
    assert (stopping.best_step, stopping.best_loss) == (4, 1.0)
    worse = iter(range(100))
    monkeypatch.setattr("proxsparse.methods.finetune.held_out_loss", lambda *_: float(next(worse)))
    result = tune("run", "--evals", "6", "--patience", "2")
    assert (result["status"], result["steps"], result["held_out"]["best_step"]) == ("complete", 2, 0)
    assert not changed(tmp_path / "run", pruned)


@pytest.mark.parametrize(
    ("where", "call", "saved"),
    [
        ("proxsparse.run.result.perplexity", 1, ""),
        ("proxsparse.training.distillation.most_likely", 2, ""),
        ("proxsparse.methods.finetune.calibration_loss", 4, "checkpoints/step-3"),
        ("proxsparse.methods.finetune.held_out_loss", 3, "checkpoints/step-8"),
        ("proxsparse.run.folder.save_masks", 1, "complete"),
    ],
    ids=["perplexity", "teacher", "step", "held out", "saving"],
)
def test_ctrl_c_and_continued_bit_for_bit(
    where, call, saved, tune, pruned, text_file, tmp_path, command_in_child, monkeypatch
):
    """In every phase: exit code 130, the last line says how to continue, and nothing unfinished is called complete."""

    def sabotage():
        module, _, name = where.rpartition(".")
        function, calls = getattr(sys.modules[module], name), itertools.count(1)

        def interrupted(*arguments, **more):
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGINT)
            return function(*arguments, **more)

        monkeypatch.setattr(where, interrupted)

    flags = ["--num_samples", "40", "--seq_len", "16", "--evals", "5"]
    flags += ["--per_device_train_batch_size", "2", "--max_steps", "20"]
    whole, run_dir = tune("whole", *flags), tmp_path / "run"
    given = ["--data", text_file, "--eval_data", text_file, "--output_dir", run_dir, *QUICK, "--held_out", "2", *flags]
    code, stderr = command_in_child(main, [str(pruned), *map(str, given)], sabotage)
    assert code == 130
    last = stderr.strip().splitlines()[-1]
    resume = f"to resume, run the same command with --output_dir {run_dir} --resume_from_checkpoint last"
    if not saved:
        assert last == "interrupted; nothing has been saved; to start again, run the same command"
        assert not run_dir.exists()
    elif saved == "complete":
        assert last.endswith(f"to measure it, run proxsparse evaluate {run_dir}")
    else:
        assert last.removeprefix("interrupted; ") == f"{saved} saved; {resume}"
    has_model = "step" in saved or saved == "complete"
    assert (run_dir / "model.safetensors").exists() == (run_dir / "result.json").exists() == has_model
    if has_model:
        result = json.loads((run_dir / "result.json").read_text())
        assert (result["status"], result["perplexity"]) == ("complete" if saved == "complete" else "interrupted", None)
        assert_held(pruned, run_dir)
        assert ("interrupted after" in (run_dir / "report.md").read_text()) == (saved != "complete")
    resumed = tune("run", *flags, "--resume_from_checkpoint", "last")
    assert not changed(tmp_path / "whole", run_dir)
    assert resumed["held_out"] == whole["held_out"]
    assert saved == "complete" or resumed["perplexity"] == whole["perplexity"]


def test_the_result_can_be_evaluated_and_packed(tune, text_file, tmp_path):
    tune("run")
    assert evaluate.main([str(tmp_path / "run"), "--data", str(text_file), "--seq_len", "32"]) == 0
    assert pack.main([str(tmp_path / "run"), "--output_dir", str(tmp_path / "packed")]) == 0


def test_bad_input_is_refused_in_one_line(pruned, tiny_llama, text_file, tmp_path, capsys):
    def refuse(model, *flags, words):
        given = [model, "--data", text_file, "--eval_data", "none", "--output_dir", tmp_path / "out", *QUICK, *flags]
        printed = refused(capsys, main, given, *words)
        assert not any("perplexity" in line or "sampling" in line for line in printed), "refused before the slow phases"

    dense = [tiny_llama, "--distill", "0", "--data", text_file, "--output_dir", tmp_path / "out", *QUICK]
    refused(capsys, main, dense, "is not 2:4")
    refuse(tiny_llama, "--distill", "0", words=["model.layers.0", "is not 2:4", "blocks have more than 2 non-zero"])
    three = tmp_path / "three"
    prune.main(
        [
            "--method",
            "magnitude",
            "--pattern",
            "3:4",
            "--model",
            str(tiny_llama),
            "--eval_data",
            "none",
            "--output_dir",
            str(three),
        ]
    )
    (three / "masks.safetensors").unlink()
    refuse(three, "--teacher", tiny_llama, words=["is not 2:4"])
    refuse(three, words=["--teacher is missing", "--distill 0"])
    other = save_tiny_model("llama", tmp_path / "other", vocab_size=300)
    refuse(pruned, "--teacher", other, words=["--teacher", "vocabulary has 300 tokens"])
    tokenizer = byte_tokenizer()
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokens["model"]["vocab"]
    tokens["model"]["vocab"] = vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(tokens))
    tokenizer.save_pretrained(tmp_path / "other")
    words = [f"--teacher {tmp_path / 'other'}", str(pruned), "2 token ids differ", "'b' in the teacher, 'a' in"]
    refuse(pruned, "--teacher", tmp_path / "other", "--eval_data", text_file, words=words)
    refuse(pruned, "--teacher", tmp_path / "absent", words=["--teacher", "no such file or folder"])
    weights = load_file(pruned / "model.safetensors")
    weights[UP][0, (weights[UP][0] != 0).nonzero()[0]] = float("nan")
    damaged = tmp_path / "damaged"
    model, tokenizer = load_model(str(pruned))
    model.save_pretrained(damaged)
    tokenizer.save_pretrained(damaged)
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    refuse(damaged, "--teacher", tiny_llama, words=[UP, "NaN"])
    refuse(pruned, "--held_out", "8", words=["--held_out 8", "only 8 samples"])
    refuse(pruned, "--pattern", "1:4", words=["--pattern 1:4", "are 2:4"])
    refuse(tmp_path / "absent", words=["absent", "no such file or folder"])
    refuse("runs/absent", words=["MODEL runs/absent: no such folder", "--teacher"])
    refuse(pruned, "--patience", "3", "--held_out", "0", words=["--patience 3", "set --held_out"])
    refuse(pruned, "--train", "all", words=["--train all", "kept, norms"])
    refuse(pruned, "--learning_rate", "1e30", words=["--learning_rate"])
    refused(capsys, main, [], "MODEL is missing")


def test_from_python(pruned):
    model, _ = load_model(str(pruned), torch.float32)
    layers = prunable_layers(model)
    ids = torch.arange(80).view(4, 20)
    batches = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
    tuned = train_kept_weights(model, layers, batches, dict.fromkeys(layers, NMPattern(2, 4)), distill=0.0, held_out=1)
    tuned.stop.restore()
    for name, layer in layers.items():
        assert not layer.weight[~tuned.masks[name]].any()
