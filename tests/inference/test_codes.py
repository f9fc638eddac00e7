"""Packed weights with codes of 8 and 4 bits: layers, models and folders."""

import copy
import io
import json

import pytest
import torch
import transformers
from pruned import assert_as_good_as_dense, packed_copy, pruned_linear, pruned_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

from proxsparse import SparseLinear, sparsify_
from proxsparse.inference.convert import unsparsify_
from proxsparse.pack import main as pack

TOKENS, LAYER = torch.arange(3, 23).view(2, 10), "model.layers.1.mlp.up_proj"
load = transformers.AutoModelForCausalLM.from_pretrained
pytestmark = pytest.mark.parametrize("bits", [8, 4])


def packed_linear(bits, in_features=140, out_features=9, dtype=torch.float32):
    return SparseLinear.from_linear(pruned_linear(in_features, out_features), bits=bits).to(dtype)


def packed_model(bits, **options):
    return sparsify_(pruned_model(), bits=bits, **options)


def packed_folders(bits, folder):
    """The dense and the packed folder of a tiny model in float32."""
    return packed_copy(folder, dtype=torch.float32, flags=["--bits", str(bits)])


@pytest.mark.filterwarnings("ignore:sparse_linear. not on the cpp backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_multiplies_by_the_weight_that_it_unpacks(bits, dtype):
    layer = packed_linear(bits, dtype=dtype)
    exact = copy.deepcopy(layer).double().dense_weight()
    for rows in (1, 3, 40):
        x = torch.randn(rows, 140).to(dtype)
        assert_as_good_as_dense(layer(x), x, exact, layer.bias)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert layer(x).dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)


def test_casts_compiles_exports_and_gives_gradients(bits):
    layer, x = packed_linear(bits), torch.randn(3, 140, requires_grad=True)
    codes = layer.values.clone()
    for dtype in (torch.half, torch.double, torch.bfloat16, torch.float):
        layer.to(dtype)
        assert layer.dtype == layer.weight.dtype == layer.bias.dtype == dtype
        assert torch.equal(layer.values, codes)
    torch._dynamo.reset()  # the recompilations of other tests count against its limit
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(gradient, layer.dense_weight().sum(0).expand(3, -1))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    program = torch.export.export(layer, (x.detach(),))
    assert torch.equal(program.module()(x.detach()), layer(x))


def test_states(bits):
    layer = packed_linear(bits)
    assert set(layer.state_dict()) == {"values", "indices", "scales", "weight", "bias"}
    torch.save(layer.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    other = SparseLinear(140, 9, bits=bits)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.dense_weight(), layer.dense_weight())
    for wrong in {16, 8, 4} - {bits}:
        with pytest.raises(RuntimeError, match=f"values are .* but a layer with {wrong} bits needs"):
            nn.ModuleDict({"up": SparseLinear(140, 9, bits=wrong)}).load_state_dict(
                nn.ModuleDict({"up": layer}).state_dict()
            )
    damages = [({"scales": layer.scales[1:]}, "scales of shape"), ({"indices": layer.indices * 0}, "out of order")]
    damages += [({"scales": layer.scales * torch.nan}, "scales contain NaN")]
    damages += [({"scales": layer.scales * 0 + 3e38}, "codes times scales overflow")]
    damages += [({"scales": layer.scales.int()}, r"scales has dtype torch\.int32")]
    for damage, message in damages:
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict(layer.state_dict() | damage)
        with pytest.raises(RuntimeError, match=message):  # the other tensors are those of the layer
            other.load_state_dict(damage, strict=False)


@torch.no_grad()
def test_a_model_in_memory_and_its_folder(bits, tmp_path):
    dense, packed = packed_folders(bits, tmp_path)
    model = sparsify_(load(dense), bits=bits)
    model.save_pretrained(tmp_path / "saved")
    first, second = (load_file(folder / "model.safetensors") for folder in (packed, tmp_path / "saved"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    entry = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert entry == json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert entry["format_version"] == 3
    assert entry["bits"] == dict.fromkeys(entry["layers"], bits)

    loaded = load(packed)
    assert loaded.get_submodule(LAYER).bits == bits
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    expected = unsparsify_(model)
    torch.testing.assert_close(loaded(TOKENS).logits, expected(TOKENS).logits, rtol=1e-4, atol=1e-5)
    assert pack([str(packed), "--unpack", "--output_dir", str(tmp_path / "unpacked")]) == 0
    unpacked = load(tmp_path / "unpacked")
    assert torch.equal(unpacked.get_submodule(LAYER).weight, expected.get_submodule(LAYER).weight)
    difference = unpacked.get_submodule(LAYER).weight - load(dense).get_submodule(LAYER).weight
    note = (packed / "README.md").read_text()
    assert 0 < difference.norm() < 0.12 * expected.get_submodule(LAYER).weight.norm()
    assert f"rounded to {bits} bits" in note
    layer = load(packed, dtype=torch.bfloat16).get_submodule(LAYER)
    assert layer.dtype == layer.dense_weight().dtype == torch.bfloat16


@torch.no_grad()
def test_layers_of_several_bits(bits, tmp_path):
    model = sparsify_(packed_model(bits, include=["mlp"]))
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert (loaded.get_submodule(LAYER).bits, loaded.model.layers[0].self_attn.q_proj.bits) == (bits, 16)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.dequantize().get_submodule(LAYER).weight.shape == (64, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{LAYER}.scales"), "no file has .*scales"),
        (lambda tensors: tensors.update({f"{LAYER}.scales": torch.ones(64)}), r"scales is F32 \[64\]"),
        # as proxsparse wrote them before its first release, for models that had codes of 4 bits
        (lambda tensors: tensors.update({f"{LAYER}.scales": torch.ones(64, 1).int()}), "pack the pruned folder again"),
        (lambda tensors: tensors[f"{LAYER}.scales"].fill_(torch.inf), "up_proj: scales contain NaN or infinity"),
        (lambda tensors: tensors.update({f"{LAYER}.values": torch.ones(64, 16)}), "values is F32"),
        (lambda tensors: tensors[f"{LAYER}.scales"].fill_(3e38), "up_proj: codes times scales overflow"),
        (lambda tensors: tensors[f"{LAYER}.indices"].zero_(), "out of order"),
    ],
)
def test_damaged_folders_are_refused(bits, change, message, tmp_path):
    _dense, packed = packed_folders(bits, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    for read in (load, lambda folder: pack([str(folder), "--unpack", "--output_dir", str(tmp_path / "out")])):
        with pytest.raises(ValueError, match=message):
            read(packed)


def test_numbers_without_a_code_are_refused(bits):
    layer = pruned_linear(8, 4)
    layer.weight.data[2, layer.weight[2].nonzero()[0]] = torch.nan
    with pytest.raises(ValueError, match="values contain NaN, infinity or a magnitude above"):
        SparseLinear.from_linear(layer, bits=bits)


def test_the_reference_backend(bits):
    layer, x = packed_linear(bits), torch.randn(2, 140)
    layer.backend = "reference"
    assert torch.equal(layer(x), linear(x, layer.dense_weight(), layer.bias))
