"""FP8 and MXFP4 checkpoints are saved dense; other codes are refused, and nothing is taken for a weight."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from commands import pruned, result_of
from family_models import FAMILIES, save_family
from pruned import tensors_of
from safetensors.torch import load_file
from saved_models import loaded, rewrite
from tiny_models import save_tiny_model

from proxsparse import apply, pack
from proxsparse.errors import InputError
from proxsparse.io.mask_files import load_masks
from proxsparse.io.model_files import Header, refuse_quantized
from proxsparse.models.loading import load_model
from proxsparse.models.matching import model_names, refuse_codes

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


def fp8(tensors, block=16):
    """The linear weights as float8 with a scale for each block of 16 x 16; and what they stand for."""
    stored, meant = {}, {}
    for name, weight in tensors.items():
        stored[name] = meant[name] = weight
        if name.endswith("_proj.weight") and not any(size % block for size in weight.shape):
            blocks = weight.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored |= {name: codes.flatten(2).flatten(0, 1), f"{name}_scale_inv": scale}
            meant[name] = (codes.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.bfloat16)
    return stored, meant


def mxfp4(tensors):
    """The experts as 4-bit codes with a scale for each block of 32; and what they stand for."""
    stored, meant = {}, {}
    for name, weight in tensors.items():
        stored[name] = meant[name] = weight
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del stored[name]
            rows = weight.float().mT.unflatten(2, (-1, 32))
            exponent = rows.abs().amax(-1).div(6).log2().floor() + 1
            codes = ((rows / 2 ** exponent[..., None])[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
            stored |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4}
            stored |= {f"{name}_scales": (exponent + 127).to(torch.uint8)}
            meant[name] = (FP4[codes.int()] * 2 ** exponent[..., None]).flatten(2).mT.to(torch.bfloat16)
    return stored, meant


QUANTIZED = {  # model type -> how its weights are stored, the entry of config.json
    "llama": (fp8, FP8),
    "deepseek_v3": (fp8, FP8),
    "gpt_oss": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints_are_saved_dense(name, tmp_path, capsys):
    form, entry = QUANTIZED[name]
    dense = save_family(name, tmp_path / "dense")
    stored, meant = form(load_file(dense / "model.safetensors"))
    source = rewrite(dense, lambda _: stored, quantization_config=entry)
    run = pruned(source, tmp_path / "run")
    apply.main([str(source), str(run), "--output_dir", str(tmp_path / "applied")])
    printed, said = capsys.readouterr().out, f"the {entry['quant_method']} weights were converted to bfloat16"
    assert printed.count(said) == 2
    assert said in result_of(run)["warnings"][0]
    assert len(load_masks(run / "masks.safetensors")) >= 14
    for folder in (run, tmp_path / "applied"):
        assert said in (folder / "README.md").read_text()
        loaded(folder)
        result = tensors_of(folder)
        assert result.keys() == meant.keys()
        for key, weight in result.items():
            router = key.endswith("mlp.gate.weight") or "correction_bias" in key  # float32 since transformers 5.24
            assert weight.dtype == torch.bfloat16 or (router and weight.dtype == torch.float32), key
            assert ((weight == meant[key]) | (weight == 0)).all(), key
            assert 2 * weight.count_nonzero() >= 0.9 * meant[key].count_nonzero(), key


def experts_as(dtype):
    return lambda tensors: {name: x.to(dtype) if "experts" in name else x for name, x in tensors.items()}


def without_scales(tensors):
    return {name.replace("_scale_inv", "_scale"): tensor for name, tensor in fp8(tensors)[0].items()}


UNSCALED = {  # model, how its weights are stored, the entry of config.json, what is said
    "experts I8": ("mixtral", experts_as(torch.int8), None, r"experts\.0\.w1\.weight is I8, not a dense float"),
    "experts F8": ("mixtral", experts_as(torch.float8_e4m3fn), None, r"w1\.weight is F8_E4M3, not a dense float"),
    "another scale": ("llama", without_scales, FP8, r"down_proj\.weight is F8_E4M3, .* no scale"),
    "remainder": (
        *("llama", lambda tensors: fp8(tensors)[0], FP8 | {"weight_block_size": [24, 24]}),
        r"down_proj\.weight has size 32, not a multiple of the fp8 block \(24\)",
    ),
}


@pytest.mark.parametrize(("model", "form", "entry", "words"), UNSCALED.values(), ids=UNSCALED)
def test_codes_that_would_be_taken_as_weights_are_refused(model, form, entry, words, tmp_path):
    source = rewrite(save_tiny_model(model, tmp_path / "model"), form, quantization_config=entry)
    with pytest.raises(InputError, match=f"{words}.*; give the dense checkpoint"):
        load_model(str(source))
    if entry is None:
        with pytest.raises(InputError, match=words):
            pack.main([str(source), "--output_dir", str(tmp_path / "packed")])


@pytest.mark.parametrize(("name", "scales"), [("inkling2_loop_text", True), ("inkling2_text", False)])
def test_codes_that_a_conversion_of_transformers_scales_are_accepted(name, scales):
    """Experts in 4 bits: those of the first are dequantized with their scale, those of the second stay codes."""
    if name not in FAMILIES:
        pytest.skip(f"this transformers has no {name}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name))
    inside = next(key for key in model.state_dict() if key.endswith("experts.gate_up_proj"))
    stored = inside.replace("model.layers", "model.llm.layers").replace("gate_up_proj", "w13_weight")
    headers = {stored: Header(Path("file"), "U8", (4, 64, 64))}
    assert model_names([stored], model)[0] == {stored: inside}
    with nullcontext() if scales else pytest.raises(InputError, match="w13_weight is U8, not a dense float"):
        refuse_codes(headers, model)


NOT_DENSE = [
    *({"quantization_config": {"quant_method": name}} for name in ("gptq", "awq", "compressed-tensors", "new")),
    {"quantization_config": {"load_in_4bit": True}},
    {"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}},
    {"compression_config": {"quant_method": "compressed-tensors"}},
]


@pytest.mark.parametrize("config", NOT_DENSE, ids=str)
def test_other_quantized_checkpoints_are_refused_from_the_config(config, tmp_path):
    method = re.search(r"'quant_method': '([\w-]+)'", str(config))
    with pytest.raises(InputError, match=f"not dense: quant_method {method[1] if method else None}; give the unq"):
        refuse_quantized(config, "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    with pytest.raises(InputError, match="not dense"):  # there are no weights that could be loaded
        load_model(str(tmp_path))


def test_a_quantized_model_of_the_hub_is_refused_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    asked = []
    download = lambda _, **patterns: asked.append(patterns["allow_patterns"]) or str(tmp_path)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match="not dense: quant_method awq"):
        load_model("someone/tiny")
    assert asked == [["config.json", "additional_chat_templates/*"]]


def test_quantized_tensors_that_the_model_does_not_use_are_named(tmp_path):
    more = {"mtp.q_proj.weight": torch.ones(32, 32).bfloat16()}
    source = rewrite(save_tiny_model("llama", tmp_path / "model"), lambda tensors: fp8(tensors | more)[0])
    rewrite(source, dict, quantization_config=FP8)
    run = pruned(source, tmp_path / "run")
    warning = "2 tensors that LlamaForCausalLM does not use are not saved, the first is mtp.q_proj.weight"
    assert warning in result_of(run)["warnings"]
    assert warning in (run / "README.md").read_text()
    assert not any("mtp" in name for name in tensors_of(run))
