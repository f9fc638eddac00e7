"""`proxsparse.pack` from the command line: a pruned checkpoint to a packed one and back, and what it refuses."""

import json
import shutil

import pytest
import torch
from commands import call, config_of
from pruned import tensors_of
from safetensors.torch import save_file

from proxsparse import evaluate, pack
from proxsparse.inference.convert import pack_tensors
from proxsparse.io.mask_files import load_masks, read_masks
from proxsparse.io.model_files import FROM_CLONE, headers
from proxsparse.io.output_folder import MARKER

TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
MODEL = {"config.json", "generation_config.json", "model.safetensors", "masks.safetensors"}


@pytest.fixture(scope="module")
def packed_dir(tmp_path_factory, pruned_dir):
    return packed(pruned_dir, tmp_path_factory.mktemp("packed") / "llama")


def packed(source, target, *flags):
    """The folder `target`, which pack has written."""
    call(pack.main, source, "--output_dir", target, *flags)
    return target


def test_include_and_exclude(pruned_dir, tmp_path):
    folder = packed(pruned_dir, tmp_path / "packed", "--include", "mlp", "--exclude", r"layers\.0\.")
    assert packed_layers(folder) == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.fixture
def spoiled(pruned_dir, tmp_path):
    """spoiled(change) -> a copy of the run's folder that `change` has changed."""

    def make(change):
        change(folder := shutil.copytree(pruned_dir, tmp_path / "spoiled"))
        return folder

    return make


def names_in(folder):
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def packed_layers(folder):
    return config_of(folder)["quantization_config"]["layers"]


def test_there_and_back(pruned_dir, packed_dir, tmp_path):
    dense = packed(packed_dir, tmp_path / "dense", "--unpack")
    before, after = tensors_of(pruned_dir), tensors_of(dense)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), after[name].view(torch.int16)), name
    for name in ("config.json", "generation_config.json", "masks.safetensors", "README.md", *TOKENIZER):
        assert (dense / name).read_bytes() == (pruned_dir / name).read_bytes(), name


def test_what_is_written(pruned_dir, tmp_path, capsys):
    folder = packed(pruned_dir, tmp_path / "packed")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("packed 14 of 15 nn.Linear layers", "(0.562x)", str(folder)))
    assert names_in(folder) == MODEL | TOKENIZER | {"README.md", MARKER}
    assert load_masks(folder / "masks.safetensors").keys() == load_masks(pruned_dir / "masks.safetensors").keys()
    assert FROM_CLONE.format(".") in (folder / "README.md").read_text()
    assert len(packed_layers(folder)) == 14
    config = config_of(folder)
    del config["quantization_config"]
    assert FROM_CLONE.format(".") in config.pop("transformers_weights")
    assert config == config_of(pruned_dir)


@pytest.mark.parametrize("bits", ["8", "4"])
def test_calibration_changes_the_codes_alone(bits, spoiled, text_file, tmp_path):
    """Each layer keeps its dtype."""
    name = "model.layers.0.mlp.up_proj.weight"

    def one_in_fp32(folder):
        tensors = tensors_of(folder)
        save_file(tensors | {name: tensors[name].float()}, folder / "model.safetensors", {"format": "pt"})

    source = spoiled(one_in_fp32)
    flags = ["--bits", bits, "--calibrate", str(text_file), "--num_samples", "6", "--seq_len", "32"]
    found = tensors_of(packed(source, tmp_path / "gptq", *flags))
    nearest = tensors_of(packed(source, tmp_path / "nearest", *flags[:2]))
    assert found[name.replace("weight", "scales")].dtype == torch.float32
    assert found.keys() == nearest.keys()
    assert all((tensor.dtype, tensor.shape) == (nearest[n].dtype, nearest[n].shape) for n, tensor in found.items())
    changed = {name.rpartition(".")[2] for name, tensor in found.items() if not torch.equal(tensor, nearest[name])}
    assert "values" in changed
    assert changed <= {"values", "scales"}


@pytest.mark.parametrize("card", [b"---\nlicense: mit\n---\n# Tiny\n", b"\xff\xfe caf\xe9", None])
def test_a_card_gets_a_note_and_loses_it_again(card, spoiled, tmp_path):
    readme = lambda folder: folder / "README.md"  # noqa: E731
    source = spoiled(lambda folder: readme(folder).unlink() if card is None else readme(folder).write_bytes(card))
    noted = readme(packed(source, tmp_path / "packed")).read_bytes()
    assert noted.startswith(card or b"")
    assert b"--unpack" in noted
    dense = readme(packed(tmp_path / "packed", tmp_path / "dense", "--unpack"))
    assert (dense.read_bytes() if dense.exists() else None) == card


@pytest.mark.parametrize("bits", ["8", "4"])
def test_masks_of_rounded_weights_say_so(bits, pruned_dir, tmp_path):
    packed(pruned_dir, tmp_path / "packed", "--bits", bits)
    before, after = (read_masks(folder / "masks.safetensors") for folder in (pruned_dir, tmp_path / "packed"))
    assert all(torch.equal(mask, before[0][name]) for name, mask in after[0].items())
    before, after = ({**read[2], "in_features": json.loads(read[2]["in_features"])} for read in (before, after))
    assert after == before | {"updated": "true"}


@pytest.mark.parametrize("bits", ["8", "4"])
def test_the_card_says_that_weights_were_rounded_also_after_unpacking(bits, pruned_dir, tmp_path):
    card = lambda folder: " ".join((folder / "README.md").read_text().split())  # noqa: E731
    assert "The kept weights are the pretrained ones, unchanged" in card(pruned_dir)
    one = packed(pruned_dir, tmp_path / "packed", "--bits", bits)
    dense = packed(one, tmp_path / "dense", "--unpack")
    again = packed(dense, tmp_path / "again", "--bits", bits)
    for folder in (one, dense, packed(dense, tmp_path / "whole"), again):
        assert "unchanged" not in card(folder)
        assert card(folder).count(f"rounded to {bits} bits. A perplexity above is that of the model before.") == 1
    assert "proxsparse.pack" not in card(dense)
    assert card(again) == card(one)


def test_evaluate_takes_a_packed_folder(pruned_dir, packed_dir, text_file, capsys):
    scores = []
    for folder in (pruned_dir, packed_dir):
        flags = ["--data", str(text_file), "--seq_len", "32", "--max_windows", "2", "--precision", "fp32", "--json"]
        call(evaluate.main, folder, *flags)
        scores.append(json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"])
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)


def test_weights_in_other_forms_and_links_out_of_the_folder_are_not_copied(pruned_dir, tmp_path, capsys):
    cache = tmp_path / "models--tiny"
    folder = shutil.copytree(pruned_dir, cache / "snapshots" / "0a1b")
    for name in ("tf_model.h5", "flax_model.msgpack", "consolidated.00.pth", "model.onnx", "rust_model.ot", "w.pt"):
        (folder / name).write_bytes(b"weights")
    (cache / "blobs").mkdir()
    (cache / "blobs" / "77").write_text("a template")
    (tmp_path / "secret").write_text("not for publishing")
    (folder / "chat_template.jinja").symlink_to("../../blobs/77")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").symlink_to("../../../blobs/77")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to(tmp_path / "secret")
    (folder / "alias.json").symlink_to("generation_config.json")
    out = packed(folder, tmp_path / "out")
    templates = {"chat_template.jinja", "additional_chat_templates"}
    assert names_in(out) == MODEL | TOKENIZER | templates | {"alias.json", "README.md", MARKER}
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "a template"
    assert b"publishing" not in (out / "README.md").read_bytes()
    assert "notes.txt" in capsys.readouterr().err


def test_other_tensors_of_any_dtype_are_handed_on_and_only_weights_must_be_finite(tmp_path):
    """float8_e4m3fn has no isfinite."""
    dtypes = {"scale": torch.float8_e4m3fn, "n": torch.int8, "clamp": torch.float32}
    tensors = {name: torch.ones(4).to(dtype) for name, dtype in dtypes.items()}
    tensors["clamp"][0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    found = headers([tmp_path / "model.safetensors"])
    assert {name: tensor.dtype for name, tensor in pack_tensors(found, [], buffers=["clamp"])} == dtypes
    with pytest.raises(ValueError, match="clamp contains NaN or infinity"):
        list(pack_tensors(found, []))
