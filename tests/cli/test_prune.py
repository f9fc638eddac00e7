"""Every method from the command line to its checkpoint, on tiny random models; the tables; the shared output format."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import transformers
from commands import QUICK, call, check_pruned, refused, result_of, run
from safetensors import safe_open

from proxsparse import train
from proxsparse.allocations.registry import ALLOCATIONS
from proxsparse.errors import Terminated
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.methods import get_method, list_methods
from proxsparse.prune import main
from proxsparse.run import folder
from proxsparse.run.args import SHARED
from proxsparse.run.sections import NAMES, number
from proxsparse.runtime.device import PRECISIONS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "training.md"


@pytest.fixture
def prune(tiny_llama, text_file, tmp_path):
    """prune("name", *flags) -> result.json of a run into that folder of tmp_path."""
    return lambda name, *flags: run(main, tiny_llama, text_file, tmp_path / name, *flags)


@pytest.mark.parametrize("name", list_methods())
def test_whole_job(name, prune, tiny_llama, tmp_path, capsys):
    method, result, run_dir = get_method(name), prune("run", "--method", name), tmp_path / "run"
    check_pruned(tiny_llama, run_dir, result["patterns"], method.updates_weights)
    assert (result["method"], result["layers"], set(result["patterns"].values())) == (name, 14, {"2:4"})
    assert (result["kept"], result["arithmetic"]) == (0.5, 0.5)
    assert {"dense", name} <= result["perplexity"].keys()
    assert result["samples"] == (8 if method.needs_data else 0)
    assert transformers.AutoModelForCausalLM.from_pretrained(run_dir).dtype == torch.bfloat16
    transformers.AutoTokenizer.from_pretrained(run_dir)
    card = (run_dir / "README.md").read_text()
    assert f"pruned to 2:4 with {name}" in card
    assert ("are the pretrained ones, unchanged" in card) != method.updates_weights
    label = NAMES.get(name, name)
    assert f"; {label}: {number(result['perplexity'][name])}" in card
    assert method.paper in card
    assert ("Calibration data: none needed." in card) != method.needs_data
    printed, notes = capsys.readouterr()
    assert f"  {label:<20}{result['perplexity'][name]:>10.2f}" in printed
    assert str(run_dir) in printed
    assert ("uses no text and ignores --data, --num_samples, --seq_len\n" in notes) != method.needs_data


def test_a_run_is_repeated_from_its_config(prune, tmp_path, capsys):
    flags = ["--method", "sparsegpt", "--allocation", "sensitivity", "--damping", "0.05", "--exclude", "down_proj"]
    first, config = prune("first", *flags)["masks_sha256"], tmp_path / "first" / "config.yaml"
    call(main, "--config", config, "--output_dir", tmp_path / "again")
    assert result_of(tmp_path / "again")["masks_sha256"] == first
    assert (tmp_path / "again" / "config.yaml").read_text() == config.read_text()
    call(main, "--config", config, "--damping", "0.5", "--output_dir", tmp_path / "other")
    assert "damping: 0.5" in (tmp_path / "other" / "config.yaml").read_text()
    flags = ["--config", config, "--method", "wanda", "--output_dir", tmp_path / "wanda"]
    refused(capsys, main, flags, "config.yaml: unrecognized arguments: --damping=0.05")


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocations(name, prune, tiny_llama, tmp_path, capsys):
    flags = ["--target_flops", "0.8"] if name == "sensitivity" else ["--pattern", "4:8"]
    result = prune("run", "--method", "wanda", "--allocation", name, *flags)
    check_pruned(tiny_llama, tmp_path / "run", result["patterns"])
    mixed = len(set(result["patterns"].values())) > 1
    assert mixed == (name != "uniform")
    assert result["arithmetic"] <= 0.8 if mixed else result["kept"] == 0.5
    assert f"({name}): " in capsys.readouterr().out
    with safe_open(tmp_path / "run" / "masks.safetensors", framework="pt") as file:
        assert file.metadata()["pattern"] == ("mixed" if mixed else "4:8")
        assert not mixed or json.loads(file.metadata()["patterns"]) == result["patterns"]


def test_shared_files_do_not_name_the_folders_of_this_machine(prune, tmp_path):
    """`docs/training.md`: what `hf upload` takes, except the name of the pretrained model in masks.safetensors."""
    excluded = re.findall(r"--exclude \"?([^\s\"]+)", re.search(".*hf upload.*--exclude.*", DOCS.read_text())[0])
    prune("run", "--method", "proxsparse", "--max_steps", "2", "--include", "/nowhere/x", "mlp")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "masks.safetensors"]
    assert {"result.json", "report.md", "README.md"} <= {path.name for path in files}
    named = [path.name for path in files if str(tmp_path.parent.parent).encode() in path.read_bytes()]
    assert sorted(named) == [".proxsparse.json", "config.yaml"]
    assert all(any(fnmatch(name, pattern) for pattern in excluded) for name in named)


@pytest.mark.parametrize("precision", ["mixed", "bf16"])
def test_precisions_and_options_of_a_method(precision, prune, tiny_llama, tmp_path):
    updated = precision == "bf16"
    flags = ["--method", "sparsegpt", "--damping", "0.5", "--update_weights", str(updated).lower()]
    result = prune("run", *flags, "--precision", precision)
    assert (result["updated"], result["precision"]) == (updated, precision)
    check_pruned(tiny_llama, tmp_path / "run", updated=updated)


def test_a_method_without_data_has_no_window_of_samples(prune):
    result = prune("run", "--method", "magnitude", "--eval_data", "none", "--seq_len", "1000")
    assert (result["seq_len"], result["samples"]) == (None, 0)
    assert (result["precision"] in PRECISIONS, result["config"]["precision"]) == (True, "auto")  # the one that was used


@pytest.mark.parametrize(
    ("measured", "ending", "code"),
    [
        (["dense"], KeyboardInterrupt, 130),
        (["dense", "proxsparse"], Terminated, 143),
        (["dense", "proxsparse"], MemoryError, 0),
    ],
)
def test_last_evaluations_lose_nothing(measured, ending, code, tiny_llama, text_file, tmp_path, capsys, monkeypatch):
    scores = iter(measured)  # the next one is interrupted

    def interrupted(*arguments):
        for _ in scores:
            return Perplexity(10.0, 2, 64)
        raise ending

    monkeypatch.setattr("proxsparse.run.result.perplexity", interrupted)
    flags = ["--model", tiny_llama, "--data", text_file, "--eval_data", text_file, *QUICK, "--max_steps", 1]
    assert main(list(map(str, ["--method", "proxsparse", *flags, "--output_dir", tmp_path / "run"]))) == code
    result = result_of(tmp_path / "run")
    assert result["status"] == "complete"
    assert {*result["perplexity"]} & {"dense", "proxsparse", "magnitude"} == {*measured}
    printed = capsys.readouterr().err
    assert "the model is complete; proxsparse evaluate measures its perplexity" in printed
    assert ("measuring the perplexity failed: MemoryError" in printed) == (ending is MemoryError)
    check_pruned(tiny_llama, tmp_path / "run")


def test_the_result_comes_last(prune, monkeypatch):
    """A run that has a result has a model card too, whenever it was killed."""
    write_file = folder.write_file

    def checked(path, content):
        assert path.name != "result.json" or (path.parent / "README.md").exists()
        write_file(path, content)

    monkeypatch.setattr(folder, "write_file", checked)
    prune("run", "--method", "magnitude", "--eval_data", "none")


def test_too_little_text_is_reported(prune, capsys):
    result = prune("run", "--method", "wanda", "--num_samples", "4000")
    assert "--num_samples 4000" in result["warnings"][0]
    assert result["warnings"][0] in capsys.readouterr().out


def test_proxsparse_is_the_training_command(prune, tiny_llama, text_file, tmp_path):
    pruned = prune("a", "--method", "proxsparse", "--max_steps", "2")
    check_pruned(tiny_llama, tmp_path / "a")
    trained = run(train.main, tiny_llama, text_file, tmp_path / "b", "--max_steps", "2")
    config = tmp_path / "b" / "config.yaml"
    call(main, "--method", "proxsparse", "--config", config, "--output_dir", tmp_path / "c")
    (tmp_path / "c.yaml").write_text(config.read_text() + "method: proxsparse\nallocation: uniform\nfinetune: false\n")
    for command in (main, train.main):
        call(command, "--config", tmp_path / "c.yaml", "--output_dir", tmp_path / command.__module__)
        assert result_of(tmp_path / command.__module__)["masks_sha256"] == trained["masks_sha256"]
    assert pruned["masks_sha256"] == trained["masks_sha256"] == result_of(tmp_path / "c")["masks_sha256"]
    assert prune("d", "--method", "wanda").keys() - {"paper"} <= pruned.keys()
    assert {path.name for path in (tmp_path / "d").iterdir()} <= {path.name for path in (tmp_path / "a").iterdir()}


def test_the_list_has_every_method_and_allocation(capsys):
    call(main, "--list")
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line]
    listed = {line[0]: line[1:3] for line in lines}
    assert listed["proxsparse"] == ["yes", "no"]
    words = {True: "yes", False: "no"}
    for name in list_methods():
        assert listed[name] == [words[get_method(name).needs_data], words[get_method(name).updates_weights]]
        assert get_method(name).paper in printed
    for name in ALLOCATIONS:
        assert listed[name][0] == words[ALLOCATIONS[name].needs_data]
    assert "train --help" in printed


@pytest.mark.parametrize("row", [*map(get_method, list_methods()), *ALLOCATIONS.values()])
def test_help_describes_every_option(row, capsys):
    choice = "--allocation" if row.name in ALLOCATIONS else "--method"
    with pytest.raises(SystemExit):
        main([choice, row.name, "--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in row.options)


def test_no_option_hides_another_flag():
    """A method's seed is the shared flag; any other option with a shared or an allocation's name would be ambiguous."""
    options = {name for row in map(get_method, list_methods()) for name in row.options}
    assert options & set(SHARED) <= {"seed"}
    for row in ALLOCATIONS.values():
        assert not row.options.keys() & (options | set(SHARED))
