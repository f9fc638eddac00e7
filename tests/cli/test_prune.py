"""Every method from the command line to its checkpoint, on tiny random models; the tables; the shared output format."""

import json

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open
from tiny_models import save_tiny_model

from proxsparse import NMPattern, train
from proxsparse.allocations.registry import get_allocation, list_allocations
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.io.mask_files import load_masks
from proxsparse.methods import get_method, list_methods
from proxsparse.models.loading import load_model
from proxsparse.prune import main
from proxsparse.run import folder
from proxsparse.run.parse import SHARED, rows
from proxsparse.run.report import number

QUICK = ["--num_samples", "8", "--seq_len", "32", "--eval_seq_len", "32", "--eval_max_windows", "2"]


def prune(model, text_file, output_dir, *flags):
    """Runs the command in this process and returns its result.json."""
    data = ["--data", str(text_file), "--eval_data", str(text_file)]
    assert main(["--model", str(model), "--output_dir", str(output_dir), *data, *QUICK, *flags]) == 0
    return json.loads((output_dir / "result.json").read_text())


def check_pruned(before_folder, run_dir, updated, patterns):
    """Every layer is exactly its N:M, +0.0 elsewhere, its kept bits equal unless updated; the rest is untouched."""
    before, after = (dict(load_model(str(folder))[0].named_parameters()) for folder in (before_folder, run_dir))
    masks = load_masks(run_dir / "masks.safetensors")
    assert before.keys() == after.keys()
    assert masks.keys() == patterns.keys()
    for name, weight in after.items():
        pretrained, mask = before[name], masks.get(name.removesuffix(".weight"))
        assert weight.dtype == pretrained.dtype == torch.bfloat16
        if mask is None:
            assert torch.equal(weight, pretrained), name
            continue
        assert (weight[~mask] == 0).all(), name
        assert not weight[~mask].signbit().any(), name
        assert torch.equal(weight[mask], pretrained[mask]) != updated, name
        pattern = NMPattern.parse(patterns[name.removesuffix(".weight")])
        assert (pattern.blocks(mask).sum(-1) == pattern.n).all(), name


@pytest.mark.parametrize("name", list_methods())
def test_whole_job(name, tiny_llama, text_file, tmp_path, capsys):
    result = prune(tiny_llama, text_file, tmp_path / "run", "--method", name)
    check_pruned(tiny_llama, tmp_path / "run", get_method(name).updates_weights, result["patterns"])
    assert result["method"] == name
    assert result["layers"] == 14
    assert set(result["patterns"].values()) == {"2:4"}
    assert result["budget"] == {"asked": 0.5, "kept": 0.5}
    assert {"dense", name} <= result["perplexity"].keys()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert model.dtype == torch.bfloat16
    card = (tmp_path / "run" / "README.md").read_text()
    shown = "ProxSparse" if name == "proxsparse" else name
    assert f"pruned to 2:4 with {shown}" in card
    assert ("is the pretrained one, unchanged" in card) != get_method(name).updates_weights
    assert f"Held-out perplexity {number(result['perplexity'][name])}, against" in card
    assert (get_method(name).paper if name != "proxsparse" else "ProxSparse (ICML 2025)") in card
    assert ("Calibration data: none needed." in card) != get_method(name).needs_data
    assert result["samples"] == (8 if get_method(name).needs_data else 0)
    printed = capsys.readouterr().out
    assert f"{shown:<12}{result['perplexity'][name]:>10.2f}" in printed
    assert str(tmp_path / "run") in printed


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize("name", ["wanda", "sparsegpt", "proxsparse"])
def test_families_that_store_no_linear_layers(name, family, text_file, tmp_path):
    model = save_tiny_model(family, tmp_path / "model")
    result = prune(model, text_file, tmp_path / "run", "--method", name, "--pattern", "2:4")
    assert result["layers"] == {"gpt2": 8, "mixtral": 24}[family]
    masks = load_masks(tmp_path / "run" / "masks.safetensors")
    check_pruned(model, tmp_path / "run", name == "sparsegpt", dict.fromkeys(masks, "2:4"))


def test_a_run_is_repeated_from_its_config(tiny_llama, text_file, tmp_path):
    flags = ["--method", "sparsegpt", "--allocation", "owl", "--damping", "0.05", "--exclude", "down_proj"]
    first = prune(tiny_llama, text_file, tmp_path / "first", *flags)
    config = tmp_path / "first" / "config.yaml"
    assert main(["--config", str(config), "--output_dir", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "result.json").read_text())
    assert again["masks_sha256"] == first["masks_sha256"]
    assert (tmp_path / "again" / "config.yaml").read_text() == config.read_text()
    assert main(["--config", str(config), "--damping", "0.5", "--output_dir", str(tmp_path / "other")]) == 0
    assert "damping: 0.5" in (tmp_path / "other" / "config.yaml").read_text()


@pytest.mark.parametrize("name", list_allocations())
def test_allocations(name, tiny_llama, text_file, tmp_path, capsys):
    flags = ["--method", "wanda", "--pattern", "4:8", "--allocation", name]
    flags += {"owl": ["--spread", "6", "--outlier_factor", "2"], "alphapruning": ["--epsilon", "0.9"]}.get(name, [])
    result = prune(tiny_llama, text_file, tmp_path / "run", *flags)
    check_pruned(tiny_llama, tmp_path / "run", False, result["patterns"])
    mixed = len(set(result["patterns"].values())) > 1
    assert mixed == (name != "uniform")
    assert result["budget"]["kept"] == pytest.approx(0.5)
    assert f"{name}: " in capsys.readouterr().out
    with safe_open(tmp_path / "run" / "masks.safetensors", framework="pt") as file:
        assert file.metadata()["pattern"] == ("mixed" if mixed else "4:8")
        assert not mixed or json.loads(file.metadata()["patterns"]) == result["patterns"]


def test_options_of_a_method(tiny_llama, text_file, tmp_path):
    flags = ["--method", "sparsegpt", "--damping", "0.5", "--update_weights", "false"]
    result = prune(tiny_llama, text_file, tmp_path / "run", *flags, "--eval_data", "none", "--include", "mlp")
    check_pruned(tiny_llama, tmp_path / "run", False, result["patterns"])
    assert result["perplexity"] is None
    assert result["updated"] is False
    assert result["layers"] == 6
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (settings["method"], settings["damping"], settings["update_weights"]) == ("sparsegpt", 0.5, False)
    assert settings["include"] == ["mlp"]
    assert "output_dir" not in settings


@pytest.mark.parametrize("name", list_methods())
def test_same_seed_gives_the_same_masks(name, tiny_llama, text_file, tmp_path):
    flags = ["--method", name, "--eval_data", "none", "--overwrite_output_dir"]
    digests = []
    for seed in ("1", "1", "2"):
        torch.manual_seed(len(digests))
        digests.append(prune(tiny_llama, text_file, tmp_path / "run", *flags, "--seed", seed)["masks_sha256"])
    assert digests[0] == digests[1]
    assert (digests[0] == digests[2]) != get_method(name).needs_data


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
def test_precisions(precision, tiny_llama, text_file, tmp_path):
    result = prune(tiny_llama, text_file, tmp_path / "run", "--method", "sparsegpt", "--precision", precision)
    check_pruned(tiny_llama, tmp_path / "run", True, result["patterns"])


def test_ctrl_c_in_the_last_evaluation_loses_nothing(tiny_llama, text_file, tmp_path, capsys, monkeypatch):
    scores = iter([Perplexity(10.0, 2, 64)])  # the dense model's; the next one is interrupted

    def interrupted(*arguments):
        for score in scores:
            return score
        raise KeyboardInterrupt

    monkeypatch.setattr("proxsparse.run.result.perplexity", interrupted)
    result = prune(tiny_llama, text_file, tmp_path / "run", "--method", "sparsegpt")
    assert result["perplexity"] is None
    assert "the masks are saved" in capsys.readouterr().err
    check_pruned(tiny_llama, tmp_path / "run", True, result["patterns"])


def test_the_result_comes_last(tiny_llama, text_file, tmp_path, monkeypatch):
    """Who finds it finds the model card too, wherever the run was killed."""
    write_file = folder.write_file

    def checked(path, content):
        assert path.name != "result.json" or (path.parent / "README.md").exists()
        write_file(path, content)

    monkeypatch.setattr(folder, "write_file", checked)
    prune(tiny_llama, text_file, tmp_path / "run", "--method", "magnitude", "--eval_data", "none")


def test_overwriting_leaves_nothing_of_the_earlier_run(tiny_llama, text_file, tmp_path):
    prune(tiny_llama, text_file, tmp_path / "run", "--method", "proxsparse", "--max_steps", "2")
    assert (tmp_path / "run" / "report.md").exists()
    prune(tiny_llama, text_file, tmp_path / "run", "--method", "magnitude", "--overwrite_output_dir")
    assert not (tmp_path / "run" / "report.md").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_too_little_text_is_said(tiny_llama, text_file, tmp_path, capsys):
    result = prune(tiny_llama, text_file, tmp_path / "run", "--method", "wanda", "--num_samples", "4000")
    assert "--num_samples 4000" in result["warnings"][0]
    assert result["warnings"][0] in capsys.readouterr().out


def test_proxsparse_is_the_training_command(tiny_llama, text_file, tmp_path):
    flags = ["--max_steps", "2"]
    pruned = prune(tiny_llama, text_file, tmp_path / "a", "--method", "proxsparse", *flags)
    check_pruned(
        tiny_llama, tmp_path / "a", False, dict.fromkeys(load_masks(tmp_path / "a" / "masks.safetensors"), "2:4")
    )
    data = ["--data", str(text_file), "--eval_data", str(text_file), *QUICK, *flags]
    assert train.main(["--model", str(tiny_llama), "--output_dir", str(tmp_path / "b"), *data]) == 0
    assert json.loads((tmp_path / "b" / "result.json").read_text())["masks_sha256"] == pruned["masks_sha256"]
    config, again = str(tmp_path / "b" / "config.yaml"), tmp_path / "c"
    assert main(["--method", "proxsparse", "--config", config, "--output_dir", str(again)]) == 0
    assert json.loads((again / "result.json").read_text())["masks_sha256"] == pruned["masks_sha256"]
    one_shot = prune(tiny_llama, text_file, tmp_path / "d", "--method", "wanda")
    assert one_shot.keys() - {"paper"} <= pruned.keys()
    assert {path.name for path in (tmp_path / "d").iterdir()} <= {path.name for path in (tmp_path / "a").iterdir()}


def test_the_list_has_every_method_and_allocation(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line and not line.startswith(" ")]
    listed = {line[0]: line[1:3] for line in lines}
    assert listed["proxsparse"] == ["yes", "no"]
    words = {True: "yes", False: "no"}
    for name in list_methods():
        assert listed[name] == [words[get_method(name).needs_data], words[get_method(name).updates_weights]]
        assert get_method(name).paper in printed
    for name in list_allocations():
        assert listed[name][0] == words[get_allocation(name).needs_data]
    assert "--damping=0.01" in printed


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "see proxsparse train --help" in " ".join(printed.split())  # the options of the method proxsparse
    for row in rows():
        assert all(f"--{name}" in printed for name in row.options)


def test_no_option_hides_another_flag():
    """A method's seed is the shared flag; any other option with a shared or an allocation's name would be ambiguous."""
    options = {name for row in map(get_method, list_methods()) for name in row.options}
    assert options & set(SHARED) <= {"seed"}
    for row in map(get_allocation, list_allocations()):
        assert not row.options.keys() & (options | set(SHARED))
