"""Bad input: exit code not 0, one message that names the thing and the remedy, no traceback, nothing half-written."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from proxsparse import evaluate, prune, train
from proxsparse.errors import InputError, run_command
from proxsparse.io import atomic, mask_files
from proxsparse.io.mask_files import load_masks, save_masks
from proxsparse.run import job

QUICK = ["--num_samples", "4", "--seq_len", "16", "--max_steps", "1", "--eval_data", "none"]


def fails(capsys, main, arguments, *words):
    """Runs a command in this process; it must fail with one line that holds all the words."""
    code = run_command(lambda: main([str(argument) for argument in arguments]))
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert code != 0
    assert message.startswith("error: ")
    for word in words:
        assert word in message, message


def kept_in(folder):
    """The names in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def flags(tiny_llama, text_file, tmp_path):
    """Flags of a run that would work."""
    return ["--model", tiny_llama, "--data", text_file, "--output_dir", tmp_path / "run", *QUICK]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./absent"], ["./absent", "no such"]),
        (["--data", "absent.jsonl"], ["absent.jsonl", "no such"]),
        (["--reg_lambda", "-1"], ["--reg_lambda", "-1"]),
        (["--reg_lambda", "nan", "--objective", "paper"], ["--reg_lambda", "nan"]),
        (["--reg_lambda", "0.1", "--reg_lambda_rel", "0.1"], ["exclude each other"]),
        (["--reg_lambda", "25"], ["--objective paper"]),
        (["--seq_len", "0"], ["--seq_len", "0"]),
        (["--num_samples", "0"], ["--num_samples", "0"]),
        (["--learning_rate", "0"], ["--learning_rate"]),
        (["--max_steps", "0"], ["--max_steps"]),
        (["--pattern", "4:2"], ["--pattern", "4:2"]),
        (["--pattern", "2/4"], ["--pattern", "2/4"]),
        (["--pattern", "2:5"], ["q_proj", "in_features=32", "--exclude"]),
        (["--objective", "wanda"], ["--objective wanda", "masked"]),
        (["--precision", "fp16"], ["--precision fp16", "bf16"]),
        (["--frozen_eps", "0"], ["--frozen_eps"]),
        (["--forward", "dense"], ["--forward", "--help"]),  # a YAML file may set it
        (["--warmup_ratio", "5"], ["--warmup_ratio"]),
        (["--num_samples", "many"], ["--num_samples many", "whole number"]),
        (["--packing", "maybe"], ["--packing maybe", "true or false"]),
        (["--lerning_rate", "1"], ["--lerning_rate", "--help"]),
        (["--seq_len", "1000"], ["128 positions", "lower --seq_len"]),
        (["--eval_data", "builtin", "--eval_seq_len", "1000"], ["128 positions", "lower --eval_seq_len"]),
        (["--include", "nothing"], ["no layer to prune", "nothing"]),
        (["--exclude", "("], ["regular expression"]),
        (["--recipe", "unheard-of"], ["unheard-of", "llama-2-7b"]),
        (["--config", "absent.yaml"], ["absent.yaml"]),
        (["--text_field", "content"], ["content", "text"]),
        (["--device", "cuda:7"], ["cuda:7", "--device cpu"]),
        (["--report_to", "wandb"], ["wandb", "pip install"]),
        (["--eval_data", "absent.txt"], ["absent.txt"]),
        (["--start", "swop"], ["--start 'swop'", "swap"]),
        (["--start", "absent.safetensors"], ["absent.safetensors", "no such file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_train_refuses(arguments, words, flags, capsys, tmp_path):
    fails(capsys, train.main, [*flags, *arguments], *words)
    assert not (tmp_path / "run" / "result.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", "", ["empty.jsonl"]),
        ("broken.jsonl", '{"text": "fine"}\n{"text": \n', ["broken.jsonl", "2"]),
        ("other.jsonl", '{"body": "words"}\n', ["other.jsonl", "body"]),
    ],
)
def test_train_refuses_data(name, content, words, flags, capsys, tmp_path):
    (tmp_path / name).write_text(content)
    fails(capsys, train.main, [*flags, "--data", tmp_path / name], *words)


def test_train_refuses_a_config_file_with_an_unknown_flag(flags, capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("lerning_rate: 1.0\n")
    fails(capsys, train.main, [*flags, "--config", tmp_path / "c.yaml"], "lerning_rate")


def test_train_refuses_pickled_weights(flags, capsys, tmp_path):
    model = save_tiny_model("llama", tmp_path / "pickled")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    fails(capsys, train.main, [*flags, "--model", model], "pickled", "convert")


def damaged_model(family, weight, folder):
    """The folder of a tiny model with an infinite number in that weight."""
    model = save_tiny_model(family, folder)
    weights = load_file(model / "model.safetensors")
    weights[weight].view(-1)[-1] = torch.inf
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def overflow(monkeypatch, module):
    """After the check of its files the module's weights are infinite."""

    def damage(model):
        model.get_submodule(module).weight.data.fill_(torch.inf)

    monkeypatch.setattr(job, "refuse_not_finite", damage)


@pytest.mark.parametrize("command", [train.main, prune.main], ids=["train", "prune"])
@pytest.mark.parametrize("weight", ["model.layers.1.input_layernorm", "model.layers.1.mlp.up_proj", "model.norm"])
def test_weights_that_are_not_finite_are_refused_by_name(weight, command, flags, prune_flags, capsys, tmp_path):
    model = damaged_model("llama", f"{weight}.weight", tmp_path / "damaged")
    arguments = flags if command is train.main else prune_flags
    fails(capsys, command, [*arguments, "--model", model], f"{weight}.weight", "NaN or infinite", "files again")


@pytest.mark.parametrize(
    "form", [[], ["--step_in_backward", "--max_grad_norm", "0"], ["--gradient_accumulation_steps", "4"]], ids=" ".join
)
@pytest.mark.parametrize("weight", ["model.layers.1.input_layernorm", "model.norm"])
def test_a_loss_that_is_not_finite_names_the_layer(weight, form, flags, capsys, monkeypatch):
    """Finite weights whose products overflow, as those of a run that diverges."""
    overflow(monkeypatch, weight)
    fails(capsys, train.main, [*flags, "--objective", "paper", *form], f"of {weight}; lower --learning_rate")


def test_the_scaling_names_the_layer_that_is_not_finite(flags, capsys, monkeypatch):
    overflow(monkeypatch, "model.layers.1.input_layernorm")
    fails(capsys, train.main, flags, "model.layers.1.self_attn.q_proj: its calibration inputs", "damaged")


def test_prune_refuses_an_allocation_of_what_learns_one_pattern(flags, capsys):
    command = [*flags, "--method", "proxsparse", "--allocation", "owl"]
    fails(capsys, prune.main, command, "--allocation owl", "one --pattern", "wanda")


def test_train_refuses_an_output_folder_in_use(flags, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    for more in ([], ["--overwrite_output_dir"], ["--resume_from_checkpoint", "last"]):
        fails(capsys, train.main, [*flags, *more], "not empty (thesis.tex)", "choose another")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_train_refuses_a_file_as_output_folder(flags, capsys, tmp_path):
    (tmp_path / "run").write_text("")
    fails(capsys, train.main, flags, "is a file")


def test_train_refuses_an_unwritable_output_folder(flags, capsys):
    fails(capsys, train.main, [*flags, "--output_dir", "/proc/proxsparse"], "/proc/proxsparse", "choose another")


def test_full_disk_leaves_nothing_half_written(flags, capsys, tmp_path, monkeypatch):
    def no_space(path, *_arguments, **_base):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("proxsparse.run.folder.save_masks", no_space)
    fails(capsys, train.main, flags, "disk is full", "--output_dir")
    assert kept_in(tmp_path / "run") == {".proxsparse.json", "config.yaml", "metrics.jsonl"}


def test_a_mistyped_model_leaves_the_folder_as_it_was(flags, capsys, tmp_path):
    fails(capsys, train.main, [*flags, "--model", "./absent"], "./absent")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    fails(capsys, train.main, [*flags, "--model", "./absent"], "./absent")
    assert not list((tmp_path / "run").iterdir())


def test_train_refuses_to_write_over_its_own_model(tiny_llama, flags, capsys):
    fails(capsys, train.main, [*flags, "--output_dir", tiny_llama, "--overwrite_output_dir"], "folder of --model")


def test_train_refuses_an_incomplete_checkpoint(flags, capsys, tmp_path):
    model = save_tiny_model("llama", tmp_path / "incomplete")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    fails(capsys, train.main, [*flags, "--model", model], "up_proj", "whole checkpoint")


def test_train_refuses_a_damaged_checkpoint(flags, capsys, tmp_path):
    model = save_tiny_model("llama", tmp_path / "damaged")
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    fails(capsys, train.main, [*flags, "--model", model], "damaged or cut off", "get the file again")


def test_too_small_a_disk_is_refused_before_learning(flags, capsys, monkeypatch):
    usage = atomic.shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _path: usage)
    fails(capsys, train.main, flags, "MiB free", "--output_dir")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./absent"], ["./absent"]),
        (["{model}", "--data", "absent.raw"], ["absent.raw"]),
        (["{model}", "--data", "{data}", "--seq_len", "0"], ["seq_len=0"]),
        (["{model}", "--data", "{data}", "--seq_len", "1000000"], ["1000000", "128 positions", "lower --seq_len"]),
    ],
)
def test_evaluate_refuses(arguments, words, tiny_llama, text_file, capsys):
    filled = [argument.format(model=tiny_llama, data=text_file) for argument in arguments]
    fails(capsys, evaluate.main, filled, *words)


PRUNE_QUICK = ["--num_samples", "4", "--seq_len", "16", "--eval_data", "none"]


@pytest.fixture
def prune_flags(tiny_llama, text_file, tmp_path):
    """Flags of a pruning that would work."""
    run_dir = tmp_path / "run"
    return ["--method", "wanda", "--model", tiny_llama, "--data", text_file, "--output_dir", run_dir, *PRUNE_QUICK]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "obs"], ["--method 'obs'", "choose from", "magnitude", "proxsparse"]),
        (["--allocation", "owls"], ["'owls'", "choose from", "owl", "uniform"]),
        (["--momentum", "0.9"], ["--momentum", "--help"]),
        (["--damping", "0.1"], ["--damping", "option of", "sparsegpt", "not of --method wanda"]),
        (["--spread", "2"], ["--spread", "option of owl", "--allocation uniform"]),
        (["--learning_rate", "1"], ["--learning_rate", "option of", "not of --method wanda"]),
        (["--max_steps", "3"], ["--max_steps", "--help"]),
        (["--method", "sparsegpt", "--damping", "much"], ["--damping much", "not a number"]),
        (["--method", "obs", "--list_all"], ["--list_all", "--help"]),
        (["--method", "sparsegpt", "--update_weights", "perhaps"], ["--update_weights perhaps", "true or false"]),
        (["--num_samples", "0"], ["--num_samples", "0"]),
        (["--pattern", "4:2"], ["--pattern", "4:2"]),
        (["--pattern", "2:5"], ["q_proj", "in_features=32", "--exclude"]),
        (["--include", "nothing"], ["no layer to prune", "nothing"]),
        (["--model", "./absent"], ["./absent", "no such"]),
        (["--data", "absent.jsonl"], ["absent.jsonl", "no such"]),
        (["--seq_len", "1000"], ["128 positions", "lower --seq_len"]),
        (["--eval_data", "builtin", "--eval_seq_len", "1000"], ["128 positions", "lower --eval_seq_len"]),
        (["--eval_data", "absent.txt"], ["absent.txt"]),
    ],
    ids=" ".join,
)
def test_prune_refuses(arguments, words, prune_flags, capsys, tmp_path):
    fails(capsys, prune.main, [*prune_flags, *arguments], *words)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ("objective: masked\nseq_len: 32\n", ["--method", "wanda"], ["objective is a flag of", "{train}"]),
        ("recipe: demo\n", [], ["recipe is a flag of", "{train}"]),
        ("method: proxsparse\n", [], ["method proxsparse", "drop this line", "{train}"]),
        ("learning_rate: 0.1\n", ["--method", "wanda"], ["--learning_rate is an option of maskllm, not of"]),
        ("method: obs\n", [], ["'obs': there is no such method; choose from"]),
    ],
)
def test_prune_refuses_the_config_of_another_command(settings, arguments, words, capsys, tmp_path):
    (file := tmp_path / "config.yaml").write_text(settings)
    train = f"proxsparse train --config {file}"
    fails(capsys, prune.main, ["--config", file, *arguments], *(word.format(train=train) for word in words))


def test_prune_needs_a_method(capsys):
    fails(capsys, prune.main, [], "--method is missing", "sparsegpt")


def test_prune_refuses_empty_data(prune_flags, capsys, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    fails(capsys, prune.main, [*prune_flags, "--data", tmp_path / "empty.jsonl"], "empty.jsonl")


def test_prune_refuses_an_output_folder_in_use_and_its_own_model(prune_flags, tiny_llama, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    fails(capsys, prune.main, prune_flags, "not empty (thesis.tex)", "choose another")
    own = ["--output_dir", tiny_llama, "--overwrite_output_dir"]
    fails(capsys, prune.main, [*prune_flags, *own], "folder of --model")


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_prune_names_the_layer_whose_inputs_are_not_finite(method, prune_flags, capsys, tmp_path):
    model = save_tiny_model("llama", tmp_path / "damaged")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.finfo(torch.bfloat16).max  # its output overflows
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    flags = [*prune_flags, "--model", model, "--method", method]
    fails(capsys, prune.main, flags, "model.layers.1.mlp.down_proj", "NaN", "--precision")
    assert kept_in(tmp_path / "run") == {".proxsparse.json", "config.yaml", "finished_blocks"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["sparsegpt", "--damping", "-0.1"], "--damping -0.1: must be a finite number >= 0"),
        (["sparsegpt", "--damping", "nan"], "--damping nan: must be"),
        (["sparsegpt", "--chunk", "0"], "--chunk 0: must be at least 1"),
        (["swap", "--sweeps", "0"], "--sweeps 0: must be at least 1"),
        (["swap", "--sweeps", "-5"], "--sweeps -5: must be at least 1"),
        (["admm", "--iterations", "10"], "--mask_iterations 15: must be from 1 to --iterations 10"),
        (["admm", "--rho", "0"], "--rho 0.0: must be a finite number > 0"),
        (["maskllm", "--tau", "0"], "--tau 0.0: must be"),
        (["maskllm", "--epochs", "0"], "--epochs 0: must be at least 1"),
        (["maskllm", "--learning_rate", "nan"], "--learning_rate nan: must be"),
        (["maskllm", "--scale", "0"], "--scale 0.0: must be"),
        (["maskllm", "--prior", "nope"], "--prior 'nope': there is no such method"),
        (["wanda", "--allocation", "owl", "--outlier_factor", "-1"], "--outlier_factor -1.0: must be"),
        (["wanda", "--allocation", "alphapruning", "--epsilon", "99"], "--epsilon 99.0: must be above 0 and below 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_prune_checks_options_before_it_loads_anything(flags, words, prune_flags, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(job, "load_model", lambda _: pytest.fail("the model was loaded"))
    fails(capsys, prune.main, [*prune_flags, "--method", *flags], words)
    assert not (tmp_path / "run").exists()


def test_train_refuses_steps_of_more_samples_than_there_are(flags, capsys, tmp_path):
    many = ["--gradient_accumulation_steps", "9999999999"]
    fails(capsys, train.main, [*flags, *many], "--gradient_accumulation_steps 9999999999", "--num_samples")
    assert not (tmp_path / "run").exists()
    some = ["--num_samples", "100", "--gradient_accumulation_steps", "50"]  # the file has 40 documents
    fails(capsys, train.main, [*flags, *some], "--gradient_accumulation_steps 50", "takes 50 batches", "makes 40")


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_prune_refuses_weights_that_are_not_finite(method, prune_flags, capsys, tmp_path):
    model = save_tiny_model("llama", tmp_path / "damaged")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    words = "model.layers.1.mlp.up_proj.weight has weights that are NaN or infinite"
    fails(capsys, prune.main, [*prune_flags, "--model", model, "--method", method], words)


def test_prune_names_the_layer_whose_hessian_is_singular(prune_flags, capsys):
    flags = [*prune_flags, "--method", "sparsegpt", "--damping", "0", "--num_samples", "1", "--precision", "fp32"]
    fails(capsys, prune.main, flags, "model.layers.0.self_attn.q_proj", "not positive definite", "larger damping")


def test_prune_on_a_full_disk_leaves_nothing_half_written(prune_flags, capsys, tmp_path, monkeypatch):
    def no_space(path, *_arguments, **_base):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("proxsparse.run.folder.save_masks", no_space)
    fails(capsys, prune.main, prune_flags, "disk is full", "2 finished decoder blocks", "--output_dir")
    assert kept_in(tmp_path / "run") == {".proxsparse.json", "config.yaml", "finished_blocks"}


def test_prune_refuses_too_small_a_disk_before_the_work(prune_flags, capsys, monkeypatch, tmp_path):
    usage = atomic.shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _path: usage)
    fails(capsys, prune.main, prune_flags, "MiB free", "--output_dir")
    assert not (tmp_path / "run").exists()


def test_masks_are_checked_against_their_own_patterns(tmp_path, monkeypatch):
    masks = {"a": torch.tensor([[True, False, False, False]]), "b": torch.tensor([[True, True, False, False]])}
    path = tmp_path / "masks.safetensors"
    save_masks(path, masks, {"a": "1:4", "b": "2:4"}, "tiny")
    assert all(torch.equal(mask, masks[name]) for name, mask in load_masks(path).items())
    for patterns, layer in (({"a": "2:4", "b": "2:4"}, "a"), ({"a": "1:4", "b": "1:4"}, "b")):
        save_masks(path, masks, patterns, "tiny")
        with pytest.raises(InputError, match=f"layer {layer} does not keep {patterns[layer]}"):
            load_masks(path)
    monkeypatch.setattr(mask_files, "MIXED", "9:8")
    save_masks(path, masks, {"a": "1:4", "b": "2:4"}, "tiny")
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"masks\.safetensors.*9:8"):
        load_masks(path)


def test_the_command_line_prints_no_traceback(tmp_path):
    command = [sys.executable, "-m", "proxsparse.train", "--model", "./absent", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_evaluate_prints_json(tiny_llama, text_file, capsys):
    assert evaluate.main([str(tiny_llama), "--data", str(text_file), "--seq_len", "64", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["windows"] * 64 == figures["tokens"]
    assert 1 < figures["perplexity"] < 1000
