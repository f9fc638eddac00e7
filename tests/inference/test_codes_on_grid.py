"""Models whose kept weights had 4 bits before (GGUF Q4_0, Q4_1): packed with 4 bits, nothing is lost."""

import json

import pytest
import torch
import transformers
from pruned import move_to_grid_, packed_copy, pruned_linear
from safetensors.torch import load_file, save_file

from proxsparse import SparseLinear, sparsify_
from proxsparse.ops.registry import get_kernel
from proxsparse.pack import main as pack

TOKENS, LAYER = torch.arange(3, 23).view(2, 10), "model.layers.1.mlp.up_proj"
load = transformers.AutoModelForCausalLM.from_pretrained


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


@torch.no_grad()
def test_there_and_back_bit_for_bit(tmp_path, capsys):
    dense, packed = packed_copy(tmp_path, dtype=torch.float32, flags=["--bits", "4"], on_grid=True)
    assert "\n14 of these layers already had values of 4 bits and are stored without loss\n" in capsys.readouterr().out
    found = tensors_of(packed)
    sizes = {part: found[f"{LAYER}.{part}"].nbytes for part in ("values", "scales", "indices")}
    assert sum(sizes.values()) * 8 == 4 * 64 * 32  # 4 bits a weight
    model, original = load(packed), load(dense)
    assert torch.equal(model(TOKENS).logits, sparsify_(load(dense))(TOKENS).logits)
    tokens = [each.generate(TOKENS, max_new_tokens=12, do_sample=False) for each in (model, original)]
    assert torch.equal(*tokens)
    assert pack([str(packed), "--unpack", "--output_dir", str(tmp_path / "back")]) == 0
    before, after = tensors_of(dense), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)) for name, tensor in before.items())


def test_calibration_reads_the_dtype_of_the_files(tmp_path, capsys):
    """config.json may have another one, to which transformers would round the weights."""
    dense, packed = packed_copy(tmp_path, dtype=torch.float32, flags=["--bits", "4"], on_grid=True)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    flags = ["--bits", "4", "--calibrate", "builtin", "--num_samples", "2", "--seq_len", "16"]
    capsys.readouterr()
    assert pack([str(dense), *flags, "--output_dir", str(tmp_path / "calibrated")]) == 0
    assert "\n14 of these layers already had values of 4 bits" in capsys.readouterr().out
    found, expected = tensors_of(tmp_path / "calibrated"), tensors_of(packed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_layer_beside_its_grid_is_rounded_alone(tmp_path, capsys):
    dense, _packed = packed_copy(tmp_path, dtype=torch.float32, flags=["--bits", "4"], on_grid=True)
    tensors = tensors_of(dense)
    tensors[f"{LAYER}.weight"].mul_(1.1)
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    assert pack([str(dense), "--bits", "4", "--output_dir", str(tmp_path / "mixed")]) == 0
    assert "\n13 of these layers already had" in capsys.readouterr().out
    assert "rounded to 4 bits" in (tmp_path / "mixed" / "README.md").read_text()
    model = load(tmp_path / "mixed")
    forms = {name: module.grid for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    assert [name for name, grid in forms.items() if not grid] == [LAYER]
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_the_empty_weight_is_needed(tmp_path):
    """It has the dtype of the layer."""
    _dense, packed = packed_copy(tmp_path, dtype=torch.float32, flags=["--bits", "4"], on_grid=True)
    tensors = tensors_of(packed)
    del tensors[f"{LAYER}.weight"]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    for read in (load, lambda folder: pack([str(folder), "--unpack", "--output_dir", str(tmp_path / "out")])):
        with pytest.raises(ValueError, match=r"no file has .*weight"):
            read(packed)


def test_what_a_layer_refuses():
    layer = SparseLinear.from_linear(move_to_grid_(pruned_linear(64, 8, bias=False)), bits=4)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16, the layer is torch\.float32"):
        layer(torch.ones(1, 64, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(1, 64)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="grid=True with bits=8"):
        SparseLinear(64, 8, bits=8, grid=True)
    symmetric = SparseLinear(64, 8, bias=False, bits=4)
    with pytest.raises(RuntimeError, match="are on a grid, but the layer was created with grid=False"):
        symmetric.load_state_dict(layer.state_dict())
    gemv = get_kernel("sparse_linear", "gemv")
    assert "only CUDA GPUs" in gemv.supports(torch.ones(1, 64), layer.values, layer.scales)
    assert "grid=True" in repr(layer)
