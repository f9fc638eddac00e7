"""What is saved is what `from_pretrained` loads: towers, further tensors, renamed tensors."""

import json
import re

import gguf
import numpy
import pytest
import torch
import transformers
from commands import call, pruned, refused, result_of
from family_models import save_family
from pruned import tensors_of
from saved_models import loaded, rewrite, save_new
from tiny_models import COMMON, TINY, save_tiny_model

from proxsparse import apply, evaluate, finetune, pack
from proxsparse.errors import InputError
from proxsparse.inference.linear import SparseLinear
from proxsparse.io.mask_files import load_masks
from proxsparse.io.model_files import INDEX, weight_files
from proxsparse.models.loading import load_model, save_model

MTP = {
    "mtp.norm.weight": torch.full([32], -torch.inf).bfloat16(),
    "mtp.layers.0.down.weight": torch.ones(4, 32).bfloat16(),
}
VISION = {"num_hidden_layers": 1, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32, **TINY}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TEXT = COMMON | {"head_dim": 8, "rope_parameters": ROPE}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


NORM = "model.norm.weight"
ROUNDED = {  # change of the tensors, dtype in config.json, tensors that are rounded
    "float32": (lambda tensors: {name: tensor.float() for name, tensor in tensors.items()}, "bfloat16", 21),
    "float16": (lambda tensors: {name: tensor.half() for name, tensor in tensors.items()}, "bfloat16", 21),
    "one": (lambda tensors: tensors | {NORM: tensors[NORM].float()}, "bfloat16", 1),
    "one half": (lambda tensors: tensors | {NORM: tensors[NORM].half()}, "bfloat16", 1),  # the others are bfloat16
    "none": (dict, "bfloat16", 0),
    "wider": (dict, "float32", 0),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_tensors_that_loading_rounds_are_named(name, tmp_path, capsys):
    change, dtype, count = ROUNDED[name]
    source = rewrite(save_tiny_model("llama", tmp_path / "model"), change, dtype=dtype)
    run = pruned(source, tmp_path / "run")
    apply.main([str(source), str(run), "--output_dir", str(tmp_path / "applied")])
    printed = capsys.readouterr().out.count(f"WARNING: {count} tensors were rounded while loading")
    assert printed == 2 * len(result_of(run)["warnings"]) == 2 * bool(count)
    for folder in (run, tmp_path / "applied"):
        card, widest = (folder / "README.md").read_text(), "float16" if name == "float16" else "float32"
        assert card.count(f" to bfloat16; to keep them, set dtype in config.json to {widest}") == bool(count)
    assert load_model(str(source), torch.bfloat16)[0].source.notes == []  # asked for


def test_a_folder_without_the_code_of_its_source_does_not_name_it(tmp_path):
    """transformers has the type itself; the code is in neither folder, and is never run."""
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["tokenization_x.X", None]}}
    source = save_tiny_model("llama", tmp_path / "model")
    (source / "processor_config.json").write_text("{}")
    for file in source.glob("*config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | code))
    run = pruned(source, tmp_path / "run")
    assert not any("auto_map" in file.read_text() for file in run.glob("*config.json"))
    transformers.AutoModelForCausalLM.from_pretrained(run, trust_remote_code=True)


def save_gguf(path, extra=(), scaling=None):
    """A tiny Llama with random weights as a .gguf file, as llama.cpp writes it, and further tensors."""
    writer, size = gguf.GGUFWriter(path, "llama"), COMMON["hidden_size"]
    writer.add_context_length(128)
    writer.add_embedding_length(size)
    writer.add_block_count(COMMON["num_hidden_layers"])
    writer.add_feed_forward_length(COMMON["intermediate_size"])
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling:
        writer.add_rope_scaling_type(scaling)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{number}>" for number in range(COMMON["vocab_size"])])
    writer.add_token_scores([0.0] * COMMON["vocab_size"])
    wide, tall = (size, COMMON["intermediate_size"]), (COMMON["intermediate_size"], size)
    block = {f"attn_{name}": (size, size) for name in ("q", "k", "v", "output")}
    block |= {"ffn_gate": tall, "ffn_up": tall, "ffn_down": wide, "attn_norm": (size,), "ffn_norm": (size,)}
    shapes = {f"blk.{i}.{name}": shape for i in range(COMMON["num_hidden_layers"]) for name, shape in block.items()}
    shapes |= {"token_embd": (COMMON["vocab_size"], size), "output_norm": (size,), **dict.fromkeys(extra, (size,))}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numpy.random.default_rng(0).normal(0, 0.02, shape).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("extra", "scaling", "named"),
    [
        ((), None, []),
        (("rope_freqs",), None, ["rope_freqs.weight"]),
        ((), gguf.RopeScalingType.YARN, ["llama.rope.scaling.type"]),
    ],
    ids=["plain", "tensors", "scaling"],
)
def test_a_scaling_that_is_not_loaded_from_a_gguf_file_is_named(extra, scaling, named, tmp_path, capsys):
    save_gguf(tmp_path / "tiny.gguf", extra, scaling)
    run = pruned(tmp_path / "tiny.gguf", tmp_path / "run")
    warnings = result_of(run)["warnings"]
    assert len(warnings) == len(named)
    pruning, flags = capsys.readouterr().out, [tmp_path / "tiny.gguf", "--data", "builtin"]
    evaluation = "\n".join(refused(capsys, evaluate.main, flags, "has 0 tokens"))  # its tokenizer knows no word
    for text in (pruning, evaluation, str(warnings), (run / "README.md").read_text()):
        assert [text.count(name) for name in named] == [1] * len(named)
        assert text.count("scaling of rotary positions") == any("rope" in name for name in named)


def test_tensors_that_the_model_does_not_use_are_kept(tmp_path, text_file, capsys):
    source = rewrite(save_tiny_model("llama", tmp_path / "model"), lambda tensors: tensors | MTP)
    run = pruned(source, tmp_path / "run")
    assert "2 tensors that LlamaForCausalLM does not use, such as mtp" in capsys.readouterr().err
    tuned, packed = tmp_path / "tuned", tmp_path / "packed"
    short = ["--num_samples", "2", "--seq_len", "16", "--eval_data", "none"]
    call(finetune.main, run, "--data", text_file, *short, "--output_dir", tuned)
    call(pack.main, run, "--output_dir", packed)
    assert [file.name for file in weight_files(run)] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for folder in (run, tuned, packed):
        loaded(folder)
        found = tensors_of(folder)
        assert all(torch.equal(found[name], tensor) for name, tensor in MTP.items())


def test_an_unmerged_adapter_is_refused(tmp_path):
    lora = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 32).bfloat16()}
    source = rewrite(save_tiny_model("llama", tmp_path / "model"), lambda tensors: tensors | lora)
    with pytest.raises(InputError, match=r"an unmerged adapter .*q_proj\.lora_A.*; merge it first"):
        load_model(str(source))


PROCESSOR = [f"{kind}processor_config.json" for kind in ("", "pre", "video_pre")]
PROCESSOR += ["audio_tokenizer_config.json", "chat_template.json"]
KINDS = ["sliding_attention", "full_attention"]
COMPOSITE = {
    "qwen3_5": (DELTA | {"layer_types": ["linear_attention", "full_attention"]}, {}),
    "llama4": (
        {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 64},
        {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 32},
    ),
    "gemma3": ({"layer_types": KINDS, "rope_parameters": dict.fromkeys(KINDS, ROPE)}, {}),
    "qwen2_5_vl": (MROPE, {"hidden_size": 16, "num_heads": 2}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"}),
    "qwen3_vl_moe": (
        MROPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
}


@pytest.mark.parametrize("model_type", COMPOSITE)
def test_a_model_keeps_its_class_and_its_towers(model_type, tmp_path):
    text, vision = COMPOSITE[model_type]
    settings = {"text_config": TEXT | text, "vision_config": VISION | vision}
    source = save_new(tmp_path / "model", model_type, **settings)
    for name in PROCESSOR:
        (source / name).write_text(json.dumps({"name": name}))
    run = pruned(source, tmp_path / "run", *["--exclude", "experts", "router"] * (model_type == "llama4"))
    before, after = tensors_of(source), tensors_of(run)
    assert type(loaded(run)) is type(loaded(source))
    assert before.keys() == after.keys()
    masks = load_masks(run / "masks.safetensors")
    assert all(".language_model." in f".{name}" for name in masks)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == len({re.sub(r"experts\.\d+", "experts", name) for name in masks})  # saved as one tensor
    assert not any("vis" in name for name in changed)
    assert all((run / name).read_text() == (source / name).read_text() for name in PROCESSOR)


@pytest.mark.parametrize(  # types whose tensors have other names in the files
    ("model_type", "exclude"), [("nemotron_h", "experts"), ("mamba", "dt_proj"), ("mamba2", "none"), ("falcon", "none")]
)
def test_pack_takes_what_prune_wrote(model_type, exclude, tmp_path):
    source = save_family(model_type, tmp_path / "model")
    run, packed, back = pruned(source, tmp_path / "run", "--exclude", exclude), tmp_path / "packed", tmp_path / "back"
    call(pack.main, run, "--output_dir", packed)
    call(pack.main, packed, "--unpack", "--output_dir", back)
    dense, model, tokens = loaded(run), loaded(packed), torch.arange(5, 11)[None]
    count = sum(isinstance(module, SparseLinear) for module in model.modules())
    assert count == len(load_masks(run / "masks.safetensors"))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, dense(input_ids=tokens).logits)
    expected, found = tensors_of(run), tensors_of(back)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_pack_says_why_a_layer_cannot_be_packed(tmp_path):
    """Falcon Mamba calls dt_proj in one branch, and multiplies by its weight in another."""
    run = pruned(save_family("falcon_mamba", tmp_path / "model"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"dt_proj: the module around it reads its weight.* exclude 'dt_proj'"):
        pack.main([str(run), "--output_dir", str(tmp_path / "packed")])


def test_an_index_next_to_a_single_file_is_ignored(tmp_path):
    """transformers reads the single file first; such an index is left over from another saving."""
    stale, packed = json.dumps({"weight_map": {"a": "absent.safetensors"}}), tmp_path / "packed"
    source = save_tiny_model("llama", tmp_path / "model")
    (source / INDEX).write_text(stale)
    run = pruned(source, tmp_path / "run")
    (run / INDEX).write_text(stale)
    call(pack.main, run, "--output_dir", packed)
    assert torch.equal(loaded(packed).lm_head.weight, loaded(run).lm_head.weight)


@pytest.mark.parametrize("name", ["return_dict", "output_attentions", "output_hidden_states"])
def test_settings_of_the_outputs_in_config_json_are_ignored(name, tmp_path, text_file):
    """With them transformers fails in its own forward pass, or only when it saves the model."""
    default = getattr(transformers.PretrainedConfig(), name)
    model = rewrite(save_tiny_model("llama", tmp_path / "model"), dict, **{name: not default})
    run = pruned(model, tmp_path / "run", "--method", "wanda", "--data", text_file, "--num_samples", 8)
    assert getattr(loaded(run).config, name) == default


LOSSES = {
    "missing": lambda tensors: tensors.popitem() and tensors,
    "has shape": lambda tensors: tensors | {"model.norm.weight": torch.ones(31).bfloat16()},
    "is F32, in the model BF16": lambda tensors: tensors | {"model.norm.weight": torch.ones(32)},
    "is not a tensor of LlamaForCausalLM": lambda tensors: tensors | MTP,
}


@pytest.mark.parametrize("words", LOSSES)
def test_a_folder_that_does_not_fit_the_model_is_not_saved(words, tmp_path, monkeypatch):
    source, write = save_tiny_model("llama", tmp_path / "model"), transformers.PreTrainedModel.save_pretrained

    def damaged(model, folder, **options):
        write(model, folder, **options)
        rewrite(folder, LOSSES[words])

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", damaged)
    with pytest.raises(InputError, match=f"{words}.*not saved"):
        pruned(source, tmp_path / "run")
    assert not {"model.safetensors", "result.json"} & {path.name for path in (tmp_path / "run").glob("*")}
    model, tokenizer = load_model(str(source))
    (tmp_path / "scratch").mkdir()
    with pytest.raises(InputError, match=words):
        save_model(tmp_path / "scratch", model, tokenizer)
