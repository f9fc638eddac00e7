"""`proxsparse.apply`: the model of a run from the pretrained model and the masks, and what it refuses."""

import shutil

import pytest
from commands import call, refused, result_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from proxsparse import apply, evaluate
from proxsparse.io.mask_files import BASE, read_masks, save_masks


def applied(base, masks, target, *flags):
    """The folder `target`, which apply has written."""
    call(apply.main, base, masks, "--output_dir", target, *flags)
    return target


@pytest.mark.parametrize("place", [".", "masks.safetensors"])
def test_the_same_model_as_that_of_the_run(place, pruned_dir, tiny_llama, tmp_path, capsys):
    masks = shutil.copytree(pruned_dir, tmp_path / "masks", ignore=lambda *_: ["model.safetensors", "result.json"])
    folder = applied(tiny_llama, masks / place, tmp_path / "model")
    printed = capsys.readouterr().out
    assert f"masked 14 linear layers (2:4); all other parameters are those of {tiny_llama}" in printed
    assert f"saved to {folder}" in printed
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (pruned_dir / name).read_bytes(), name
    (_, patterns, made), (_, of_run, facts) = (read_masks(path / "masks.safetensors") for path in (folder, pruned_dir))
    assert (patterns, [made[key] for key in BASE]) == (of_run, [facts[key] for key in BASE])
    written = {path.name for path in pruned_dir.iterdir()} - {"result.json", "config.yaml"}
    assert {path.name for path in folder.iterdir()} == written
    card, digest = (folder / "README.md").read_text(), result_of(pruned_dir)
    assert "2:4 in 14 linear layers. The kept weights\nare the pretrained ones" in card
    assert digest["masks_sha256"] in card
    assert str(tiny_llama.parent) not in card


@pytest.mark.parametrize("updated", [False, True])
def test_masks_of_a_run_that_changed_weights_say_so(updated, pruned_dir, tiny_llama, text_file, tmp_path, capsys):
    masks, patterns, recorded = read_masks(pruned_dir / "masks.safetensors")
    base = {name: recorded[name] for name in BASE}
    save_masks(file := tmp_path / "masks.safetensors", masks, patterns, **base, updated=updated)
    words = "WARNING: the pruned model of these masks has other weights"
    applied(tiny_llama, file, tmp_path / "model")
    assert (words in capsys.readouterr().out) == updated
    assert ("has other weights than" in (tmp_path / "model" / "README.md").read_text()) == updated
    call(evaluate.main, tiny_llama, "--masks", file, "--data", text_file, "--max_windows", 1)
    assert (words in capsys.readouterr().err) == updated


def test_one_changed_weight_is_another_model(pruned_dir, tiny_llama, tmp_path, capsys):
    other, target = shutil.copytree(tiny_llama, tmp_path / "other"), tmp_path / "model"
    applied(other, pruned_dir, tmp_path / "same")  # under another name
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    refused(capsys, apply.main, [other, pruned_dir, "--output_dir", target], "belong to", "--allow_other_base")
    assert not target.exists()
    applied(other, pruned_dir, target, "--allow_other_base")
    assert f"The masks were made for {tiny_llama.name}." in (target / "README.md").read_text()
    for name, weight in load_file(target / "model.safetensors").items():
        assert ((weight == weights[name]) | (weight == 0)).all()
    unknown = tmp_path / "masks.safetensors"  # without a digest only the name is compared
    with safe_open(pruned_dir / "masks.safetensors", framework="pt") as file:
        masks, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    metadata |= {"base_model": "another", "base_weights_sha256": ""}
    save_file(masks, unknown, metadata)
    refused(capsys, apply.main, [tiny_llama, unknown, "--output_dir", tmp_path / "none"], "belong to 'another'")
    save_file(masks, unknown, metadata | {"base_model": ""})
    words = "does not say to which model it belongs", "--allow_other_base"
    refused(capsys, apply.main, [tiny_llama, unknown, "--output_dir", tmp_path / "none"], *words)
