"""A run on a model that is pruned already: layers that it does not prune keep their weights, masks and patterns."""

import pytest
from commands import QUICK, call, pruned, refused, result_of, run
from pruned import save_pruned_model
from safetensors.torch import load_file

from proxsparse import apply, finetune, prune
from proxsparse.io.mask_files import read_masks

MLP, ATTENTION = ["--include", "mlp"], ["--include", "self_attn"]


def masks_of(folder):
    """The masks of a folder, which are those of its zeros; layer -> pattern; the metadata."""
    masks, patterns, metadata = read_masks(folder / "masks.safetensors")
    weights = load_file(folder / "model.safetensors")
    assert not any(weights[f"{name}.weight"][~mask].any() for name, mask in masks.items())
    return masks, {name: str(pattern) for name, pattern in patterns.items()}, metadata


def applied_equals(base, folder, target):
    call(apply.main, base, folder, "--output_dir", target)
    return (target / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_two_runs_with_two_patterns(tiny_llama, tmp_path, capsys):
    first = pruned(tiny_llama, tmp_path / "first", "--pattern", "6:8", *ATTENTION)
    second = pruned(first, tmp_path / "second", *MLP)
    masks, patterns, metadata = masks_of(second)
    result, card = result_of(second), (second / "README.md").read_text()
    assert all((masks[name] == mask).all() for name, mask in masks_of(first)[0].items())
    assert patterns == result["patterns"]
    assert (len(masks), sorted(set(patterns.values()))) == (14, ["2:4", "6:8"])
    assert (metadata["base_model"], metadata["updated"]) == (str(tiny_llama), "false")
    assert (result["layers"], result["not_selected"], result["updated"]) == (14, 8, False)
    assert result["arithmetic"] == pytest.approx(0.5 * 2 / 3 + 0.75 / 3)
    assert result["dense_share"] == pytest.approx(0)
    assert "8 pruned layers are not selected" in capsys.readouterr().err
    assert "8 of these layers were not selected and are unchanged" in card
    assert "those of the given model" in card
    assert applied_equals(tiny_llama, second, tmp_path / "applied")


def test_masks_of_zeros_are_kept_too(tiny_llama, tmp_path):
    first = pruned(tiny_llama, tmp_path / "first", *ATTENTION)
    (first / "masks.safetensors").rename(tmp_path / "moved")
    second = pruned(first, tmp_path / "second", *MLP)
    assert len(masks_of(second)[0]) == 14
    assert masks_of(second)[2]["base_model"] == str(first)
    assert applied_equals(first, second, tmp_path / "applied")


@pytest.mark.parametrize(("method", "updated"), [("magnitude", False), ("sparsegpt", True)])
def test_updated_weights_remain_updated(method, updated, tiny_llama, text_file, tmp_path):
    run(prune.main, tiny_llama, text_file, tmp_path / "first", "--method", method, *ATTENTION)
    result = run(prune.main, tmp_path / "first", text_file, tmp_path / "second", "--method", "wanda", *MLP)
    assert (result["updated"], masks_of(tmp_path / "second")[2]["updated"]) == (updated, str(updated).lower())
    assert ("differ from the pretrained ones" in (tmp_path / "second" / "README.md").read_text()) == updated
    assert {"given", "wanda"} <= result["perplexity"].keys()


def test_finetune_of_some_layers(tiny_llama, text_file, tmp_path, capsys):
    """The masks of the others are kept, and the teacher is the dense model, not the half-pruned one."""
    half = pruned(tiny_llama, tmp_path / "half", *ATTENTION)
    whole = pruned(half, tmp_path / "whole", *MLP)
    data = ["--data", text_file, "--eval_data", "none", *QUICK]
    call(finetune.main, whole, *data, *MLP, "--output_dir", tmp_path / "tuned")
    result, (masks, patterns, metadata) = result_of(tmp_path / "tuned"), masks_of(tmp_path / "tuned")
    assert (len(masks), len(patterns), result["layers"], result["not_selected"]) == (14, 14, 14, 8)
    assert (metadata["base_model"], metadata["updated"]) == (str(tiny_llama), "true")
    assert result["teacher"] == tiny_llama.name
    flags = ["--method", "wanda", "--finetune", "--model", half, *MLP, *data, "--output_dir", tmp_path / "none"]
    refused(capsys, prune.main, flags, "--finetune: its teacher would be", "run proxsparse finetune")
    (half / "masks.safetensors").unlink()  # as of another tool
    refused(capsys, prune.main, flags, "--finetune: its teacher would be", "--distill 0")


def test_a_denser_pattern_than_that_of_the_zeros_is_not_that_of_the_base(tiny_llama, tmp_path, capsys):
    """The base under the new masks would have weights where the given model has zeros."""
    first = pruned(tiny_llama, tmp_path / "first")
    assert "starts from a pruned model" not in capsys.readouterr().err
    same, denser = (result_of(pruned(first, tmp_path / flag[0], "--pattern", flag)) for flag in ("2:4", "6:8"))
    assert (same["updated"], denser["updated"], denser["already_pruned"]) == (False, True, "14 x 2:4")
    assert capsys.readouterr().err.count("starts from a pruned model: 14 x 2:4") == 2
    assert "pruned before the run: 14 x 2:4" in (tmp_path / "6" / "README.md").read_text()


def test_masks_that_are_not_those_of_the_model_are_refused(tiny_llama, tmp_path, capsys):
    other, folder = pruned(tiny_llama, tmp_path / "other"), save_pruned_model(tmp_path / "model")
    (other / "masks.safetensors").rename(folder / "masks.safetensors")
    flags = ["--method", "magnitude", "--model", folder, "--eval_data", "none", "--output_dir", tmp_path / "run"]
    refused(
        capsys,
        prune.main,
        flags,
        "masks.safetensors: the mask of layer",
        "does not fit",
        "proxsparse apply",
        "delete the file",
    )
