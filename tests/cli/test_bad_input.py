"""Bad input: exit code not 0, one message that names the thing and the remedy, no traceback, nothing half-written."""

import os
import subprocess
import sys

import pytest
import torch
from commands import refused
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

from proxsparse import evaluate, prune, train
from proxsparse.errors import InputError
from proxsparse.io import atomic, mask_files
from proxsparse.io.mask_files import load_masks, save_masks
from proxsparse.run import job

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    """A folder with bad text files and model folders."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "other.jsonl").write_text('{"body": "words"}\n')
    (folder / "c.yaml").write_text("lerning_rate: 1.0\n")
    (folder / "short.txt").write_text("a few words")
    for name in ("directory", "linked", "pipe"):
        (folder / name).mkdir()
    (folder / "linked" / "secret.txt").symlink_to(folder / "short.txt")
    os.mkfifo(folder / "pipe" / "a.jsonl")

    def spoil(name, change):
        file = save_tiny_model("llama", folder / name) / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file, {"format": "pt"})
        return file

    for file in spoil("no-tokenizer", lambda weights: None).parent.glob("*token*"):
        file.unlink()
    file = spoil("pickled", lambda weights: None)
    file.rename(file.with_name("pytorch_model.bin"))
    file = spoil("cut", lambda weights: None)
    file.write_bytes(file.read_bytes()[:1000])
    spoil("incomplete", lambda weights: weights.pop(f"{UP}.weight"))
    largest = torch.finfo(torch.bfloat16).max
    spoil("overflowing", lambda weights: weights[f"{UP}.weight"].view(-1)[-1:].fill_(largest))
    for name, value in {"model.layers.1.input_layernorm": torch.inf, UP: torch.nan, "model.norm": torch.inf}.items():
        spoil(name, lambda weights, at=f"{name}.weight", value=value: weights[at].view(-1)[-1:].fill_(value))
    return folder


@pytest.fixture
def prune_flags(tiny_llama, text_file, tmp_path, bad_files, monkeypatch):
    """Flags of a pruning that would work, in the folder of bad files."""
    monkeypatch.chdir(bad_files)
    flags = ["--model", tiny_llama, "--data", text_file, "--output_dir", tmp_path / "run", "--method", "wanda"]
    return [*flags, "--num_samples", "4", "--seq_len", "16", "--eval_data", "none"]


@pytest.fixture
def flags(prune_flags):
    """The same of a training run."""
    index = prune_flags.index("--method")
    return [*prune_flags[:index], *prune_flags[index + 2 :], "--max_steps", "1"]


@pytest.fixture(params=["train", "prune"])
def command(request, flags, prune_flags):
    """(main, flags that would work)"""
    return (train.main, flags) if request.param == "train" else (prune.main, prune_flags)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./absent"], ["./absent", "no such"]),
        (["--model", "pickled"], ["pickled", "convert"]),
        (["--model", "cut"], ["damaged or truncated", "download the file again"]),
        (["--model", "incomplete"], ["up_proj", "complete checkpoint"]),
        (["--data", "absent.jsonl"], ["absent.jsonl", "no such"]),
        (["--data", "c4.jsonl.bz2"], ["'c4.jsonl.bz2': no such file"]),
        (["--data", "linked"], ["secret.txt: not a regular file in this folder"]),
        (["--data", "pipe"], ["a.jsonl: not a regular file in this folder"]),
        (["--data", "empty.jsonl"], ["empty.jsonl"]),
        (["--data", "broken.jsonl"], ["broken.jsonl", "2"]),
        (
            ["--data", "other.jsonl"],
            ["no field 'text'; set --text_field to one of: body"],
        ),
        (["--reg_lambda", "-1"], ["--reg_lambda", "-1"]),
        (["--reg_lambda", "nan", "--objective", "paper"], ["--reg_lambda", "nan"]),
        (["--reg_lambda", "0.1", "--reg_lambda_rel", "0.1"], ["mutually exclusive"]),
        (["--reg_lambda", "25"], ["--objective paper"]),
        (["--seq_len", "0"], ["--seq_len", "0"]),
        (["--num_samples", "0"], ["--num_samples", "0"]),
        (["--learning_rate", "0"], ["--learning_rate"]),
        (["--max_steps", "0"], ["--max_steps"]),
        (["--gradient_accumulation_steps", "9999999999"], ["ion_steps 9999999999", "--num_samples"]),
        (  # the file has 40 documents
            ["--num_samples", "100", "--gradient_accumulation_steps", "50"],
            ["--gradient_accumulation_steps 50", "needs 50 batches", "has 40"],
        ),
        (["--pattern", "4:2"], ["--pattern", "4:2"]),
        (["--pattern", "2/4"], ["--pattern", "2/4"]),
        (["--pattern", "2:5"], ["q_proj", "in_features=32", "--exclude"]),
        (["--objective", "wanda"], ["--objective wanda", "masked"]),
        (["--precision", "fp16"], ["--precision fp16", "bf16"]),
        (["--frozen_eps", "0"], ["--frozen_eps"]),
        (["--warmup_ratio", "5"], ["--warmup_ratio"]),
        (["--num_train_epochs", "1e308"], ["--num_train_epochs 1e+308: must be a number > 0, at most 1,000,000"]),
        (["--num_samples", "many"], ["--num_samples: many", "whole number"]),
        (["--packing", "maybe"], ["--packing: maybe", "true or false"]),
        (["--lerning_rate", "1"], ["--lerning_rate", "--help"]),
        (["--seq_len", "1000"], ["context length of 128", "lower --seq_len"]),
        (["--eval_data", "builtin", "--eval_seq_len", "1000"], ["context length of 128", "lower --eval_seq_len"]),
        (["--include", "nothing"], ["no layer to prune", "nothing"]),
        (["--exclude", "("], ["regular expression"]),
        (["--recipe", "unheard-of"], ["unheard-of", "llama-2-7b"]),
        (["--config", "absent.yaml"], ["absent.yaml"]),
        (["--config", "c.yaml"], ["lerning_rate"]),
        (["--text_field", "content"], ["content", "text"]),
        (["--device", "cuda:7"], ["cuda:7", "--device cpu"]),
        (["--report_to", "wandb"], ["wandb", "pip install"]),
        (["--eval_data", "absent.txt"], ["absent.txt"]),
        (["--eval_data", "wiki.csv"], ["'wiki.csv': no such file"]),
        (["--output_dir", "c.yaml"], ["is a file"]),
        (["--output_dir", "/proc/proxsparse"], ["/proc/proxsparse", "choose another"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_train_refuses(arguments, words, flags, capsys, tmp_path):
    refused(capsys, train.main, [*flags, *arguments], *words)
    assert not (tmp_path / "run").exists() or not names_in(tmp_path / "run")


@pytest.mark.parametrize("weight", ["model.layers.1.input_layernorm", UP, "model.norm"])
def test_weights_that_are_not_finite_are_refused_by_name(weight, command, capsys):
    main, flags = command
    refused(capsys, main, [*flags, "--model", weight], f"{weight}.weight", "NaN or infinite", "download")


def overflow(monkeypatch, module):
    """After the check of its files the module's weights are infinite."""
    damage = lambda model: model.get_submodule(module).weight.data.fill_(torch.inf)  # noqa: E731
    monkeypatch.setattr(job, "refuse_not_finite", damage)


@pytest.mark.parametrize(
    "form", [[], ["--step_in_backward", "--max_grad_norm", "0"], ["--gradient_accumulation_steps", "4"]], ids=" ".join
)
@pytest.mark.parametrize("weight", ["model.layers.1.input_layernorm", "model.norm"])
def test_a_loss_that_is_not_finite_names_the_layer(weight, form, flags, capsys, monkeypatch):
    """Finite weights whose products overflow, as those of a run that diverges."""
    overflow(monkeypatch, weight)
    refused(capsys, train.main, [*flags, "--objective", "paper", *form], f"of {weight}; lower --learning_rate")


def test_the_scaling_names_the_layer_that_is_not_finite(flags, capsys, monkeypatch):
    overflow(monkeypatch, "model.layers.1.input_layernorm")
    refused(capsys, train.main, flags, "model.layers.1.self_attn.q_proj: its calibration inputs", "damaged")


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_prune_names_the_layer_whose_inputs_are_not_finite(method, prune_flags, capsys, tmp_path):
    flags = [*prune_flags, "--model", "overflowing", "--method", method]
    refused(capsys, prune.main, flags, "model.layers.1.mlp.down_proj", "NaN", "--precision")
    assert names_in(tmp_path / "run") == {".proxsparse.json", "config.yaml", "checkpoints"}


def test_an_output_folder_in_use_is_refused(command, capsys, tmp_path):
    main, flags = command
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    for more in ([], ["--resume_from_checkpoint", "last"]):
        refused(capsys, main, [*flags, *more], "not empty (thesis.tex)", "choose another")
    assert names_in(tmp_path / "run") == {"thesis.tex"}


def test_a_full_disk_leaves_nothing_half_written(command, capsys, tmp_path, monkeypatch):
    def no_space(path, *_arguments, **_base):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("proxsparse.run.folder.save_masks", no_space)
    main, flags = command
    words = [] if main is train.main else ["2 decoder blocks in checkpoints/ saved"]
    refused(capsys, main, flags, "disk is full", "--output_dir", *words)
    kept = "metrics.jsonl" if main is train.main else "checkpoints"
    assert names_in(tmp_path / "run") == {".proxsparse.json", "config.yaml", kept}


def test_too_small_a_disk_is_refused_before_the_work(command, capsys, monkeypatch, tmp_path):
    usage = atomic.shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _path: usage)
    refused(capsys, *command, "MiB free", "--output_dir")
    assert not (tmp_path / "run").exists()


def test_a_mistyped_model_leaves_the_folder_as_it_was(flags, capsys, tmp_path):
    refused(capsys, train.main, [*flags, "--model", "./absent"], "./absent")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    refused(capsys, train.main, [*flags, "--model", "./absent"], "./absent")
    assert not names_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./absent"], ["./absent"]),
        ([UP, "--data", "{data}", "--seq_len", "64"], [f"{UP}.weight: has weights that are NaN"]),
        (["no-tokenizer", "--data", "{data}"], ["no tokenizer.json or other tokenizer files"]),
        (["{model}", "--data", "{data}", "--masks", "directory"], ["a directory; give the masks.safetensors in it"]),
        (["{model}", "--data", "short.txt", "--seq_len", "64"], ["--seq_len 64: the text has 11 tokens; lower it"]),
        (["{model}", "--data", "{data}", "--seq_len", "0"], ["--seq_len 0: must be at least 2"]),
        (
            ["{model}", "--data", "{data}", "--seq_len", "1000000"],
            ["1000000", "length of 128", "lower --seq_len"],
        ),
    ],
)
def test_evaluate_refuses(arguments, words, tiny_llama, text_file, capsys, bad_files, monkeypatch):
    monkeypatch.chdir(bad_files)
    refused(capsys, evaluate.main, [a.format(model=tiny_llama, data=text_file) for a in arguments], *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "obs"], ["--method 'obs'", "choose from", "magnitude", "proxsparse"]),
        (["--allocation", "owls"], ["'owls'", "choose from", "owl", "uniform"]),
        (
            ["--method", "proxsparse", "--allocation", "owl"],
            ["--allocation owl", "another --method"],
        ),
        (["--momentum", "0.9"], ["--momentum", "--help"]),
        (["--damping", "0.1"], ["unrecognized arguments: --damping 0.1"]),
        (["--spread", "2"], ["unrecognized arguments: --spread 2"]),
        (["--learning_rate", "1"], ["unrecognized arguments: --learning_rate 1"]),
        (["--max_steps", "3"], ["--max_steps", "--help"]),
        (["--method", "sparsegpt", "--damping", "much"], ["--damping: much: must be a number"]),
        (["--method", "obs", "--list_all"], ["--list_all", "--help"]),
        (
            ["--method", "sparsegpt", "--update_weights", "perhaps"],
            ["--update_weights: perhaps", "true or false"],
        ),
        (["--method", "sparsegpt", "--damping", "-0.1"], ["--damping -0.1: must be a finite number >= 0"]),
        (["--method", "sparsegpt", "--damping", "nan"], ["--damping nan: must be"]),
        (["--method", "sparsegpt", "--chunk", "0"], ["--chunk 0: must be at least 1"]),
        (["--method", "swap", "--sweeps", "0"], ["--sweeps 0: must be at least 1"]),
        (["--num_samples", "0"], ["--num_samples 0: must be at least 1"]),
        (["--seq_len", "1"], ["--seq_len 1: must be at least 2"]),
        (["--pattern", "4:2"], ["--pattern", "4:2", "1 <= n < m"]),
        (["--method", "admm", "--iterations", "10"], ["--mask_iterations 15: must be from 1 to --iterations 10"]),
        (["--method", "admm", "--rho", "0"], ["--rho 0.0: must be a finite number > 0"]),
        (["--method", "maskllm", "--tau", "0"], ["--tau 0.0: must be"]),
        (["--method", "maskllm", "--epochs", "0"], ["--epochs 0: must be at least 1"]),
        (["--method", "maskllm", "--learning_rate", "nan"], ["--learning_rate nan: must be"]),
        (["--method", "maskllm", "--scale", "0"], ["--scale 0.0: must be"]),
        (["--method", "maskllm", "--prior", "nope"], ["--prior 'nope': no such method"]),
        (["--allocation", "owl", "--outlier_factor", "-1"], ["--outlier_factor -1.0: must be"]),
        (["--allocation", "alphapruning", "--epsilon", "99"], ["--epsilon 99.0: must be above 0 and below 1"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_prune_checks_options_before_it_loads_anything(arguments, words, prune_flags, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(job, "load_model", lambda _: pytest.fail("the model was loaded"))
    refused(capsys, prune.main, [*prune_flags, *arguments], *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        (
            "objective: masked\nseq_len: 32\n",
            ["--method", "wanda"],
            ["{file}", "arguments: --objective=masked"],
        ),
        ("learning_rate: 0.1\n", ["--method", "wanda"], ["{file}: unrecognized arguments: --learning_rate=0.1"]),
        ("method: obs\n", [], ["'obs': no such method; choose from"]),
        ("", [], ["--method is missing", "sparsegpt"]),
    ],
)
def test_prune_refuses_the_config_of_another_command(settings, arguments, words, capsys, tmp_path):
    (file := tmp_path / "config.yaml").write_text(settings)
    refused(capsys, prune.main, ["--config", file, *arguments], *(word.format(file=file) for word in words))


def test_prune_names_the_layer_whose_hessian_is_singular(prune_flags, capsys):
    flags = [*prune_flags, "--method", "sparsegpt", "--damping", "0", "--num_samples", "1", "--precision", "fp32"]
    refused(capsys, prune.main, flags, "model.layers.0.self_attn.q_proj", "not positive definite", "increase damping")


def test_masks_are_checked_against_their_own_patterns(tmp_path, monkeypatch):
    masks = {"a": torch.tensor([[True, False, False, False]]), "b": torch.tensor([[True, True, False, False]])}
    path = tmp_path / "masks.safetensors"
    save_masks(path, masks, {"a": "1:4", "b": "2:4"}, "tiny")
    assert all(torch.equal(mask, masks[name]) for name, mask in load_masks(path).items())
    for patterns, layer in (({"a": "2:4", "b": "2:4"}, "a"), ({"a": "1:4", "b": "1:4"}, "b")):
        save_masks(path, masks, patterns, "tiny")
        with pytest.raises(InputError, match=f"layer {layer} does not keep {patterns[layer]}"):
            load_masks(path)
    with monkeypatch.context() as patch:
        patch.setattr(mask_files, "MIXED", "9:8")
        save_masks(path, masks, {"a": "1:4", "b": "2:4"}, "tiny")
    with pytest.raises(InputError, match=r"masks\.safetensors.*9:8"):
        load_masks(path)


def test_the_command_line_prints_no_traceback(tmp_path):
    command = [sys.executable, "-m", "proxsparse.train", "--model", "./absent", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
