"""Families of models: routers stay dense, the walk equals full forward passes, and what is not supported is named."""

import copy
import pickle
import re

import pandas
import pytest
import torch
import transformers
from commands import run
from family_models import family_model, save_family
from methods.layer_cases import hooked_inputs
from tiny_models import COMMON, byte_tokenizer, tiny_model
from torch import nn

from proxsparse import (
    ProxAdamW,
    ProxOptimizer,
    SparseLinear,
    apply_masks_,
    finetune_,
    perplexity,
    prune_,
    sparsify_,
    train,
)
from proxsparse.errors import InputError
from proxsparse.models.checks import context_length
from proxsparse.models.layers import decoder_blocks, dense_share, prunable_layers, routers
from proxsparse.models.loading import load_model, skeleton
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.reference import nm_mask
from proxsparse.runtime.device import autocast

# type -> the end of the name of every kind of router that transformers writes as nn.Linear
ROUTERS = {
    "afmoe": {"mlp.router.gate"},
    "phimoe": {"mlp.router"},
    "qwen2_moe": {"mlp.shared_expert_gate"},
    "hunyuan_v1_moe": {"mlp.gate.wg"},
    "gemma4_text": {"router.proj"},
    "zaya": {f"mlp.gate.{name}" for name in ("down_proj", "router_mlp.fc1", "router_mlp.fc2", "router_mlp.out_proj")},
    "dbrx": {"ffn.router.layer"},
    "qwen3_moe": set(),  # has a class of its own
    # gates of attention, of an MLP and of a state-space layer
    **{name: set() for name in ("minimax", "qwen3", "xlstm")},
}


def family(name):
    return unfold_linears_(family_model(name))


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_stay_dense_unless_included(name):
    model = family(name)
    found = routers(model)
    ends = {next((end for end in ROUTERS[name] if router.endswith(f".{end}")), router) for router in found}
    assert ends == ROUTERS[name]
    pruned = prunable_layers(model)
    assert not pruned.keys() & found.keys()
    inside = {layer for block in decoder_blocks(model) for layer in block.modules() if isinstance(layer, nn.Linear)}
    assert len(pruned) == len(inside) - len(found)  # nothing else is left out
    assert prunable_layers(model, include=["."]).keys() == pruned.keys()
    everything = prunable_layers(model, include=[".", "router", "gate"]).keys()
    assert everything == pruned.keys() | found.keys()
    assert prunable_layers(model, dict.fromkeys(everything, "2:4")).keys() == everything  # a pattern names the layer


def texts():
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(3, 260, (1, length), generator=generator) for length in (20, 40)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in samples]


@torch.no_grad()
def wanda_by_full_passes(model):
    """Masks of Wanda, whose statistics are those of forward passes of the whole model with pruned earlier blocks."""
    masks, layers = {}, prunable_layers(model)
    for block in decoder_blocks(model):
        inputs, inside = hooked_inputs(model, texts()), set(block.modules())
        for name, layer in layers.items():
            if layer in inside:
                norms = sum(rows.square().sum(0) for rows in inputs[name]).sqrt()
                masks[name] = nm_mask(layer.weight.abs() * norms)
                layer.weight.copy_(torch.where(masks[name], layer.weight, 0.0))
    return masks


# outputs of earlier blocks as arguments: glm_moe_dsa, zaya; a list as output: openai-gpt; plain: llama
@pytest.mark.parametrize("name", ["glm_moe_dsa", "zaya", "openai-gpt", "llama"])
def test_wanda_equals_full_forward_passes(name, monkeypatch):
    import family_models

    monkeypatch.setitem(family_models.SIZES, r"(num_hidden|num|n|decoder|encoder)_layers?", 4)
    masks, expected = prune_(family(name), "wanda", texts()), wanda_by_full_passes(family(name))
    assert masks.keys() == expected.keys()
    different = [layer for layer in masks if not torch.equal(masks[layer], expected[layer])]
    assert not different


class Derived(nn.Module):
    """A decoder block with an argument that the model computes from the output of the previous block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden_states, level=None, **kwargs):
        return self.block(hidden_states, **kwargs)


def rewired(forward):
    """A llama whose blocks are called by `forward(model, hidden, keywords)`."""
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList(map(Derived, model.model.layers))

    def whole(input_ids, attention_mask, use_cache):
        hidden = model.model.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = model.model.rotary_emb(hidden, position_ids=positions)
        forward(model.model.layers, hidden, {"position_embeddings": rotary, "attention_mask": None})

    model.forward = whole
    return model


def derived_argument(blocks, hidden, keywords):
    for block in blocks:
        hidden = block(hidden, level=hidden.mean(), **keywords)


def changed_between(blocks, hidden, keywords):
    for block in blocks:
        hidden = block(hidden, **keywords) + 1


def called_twice(blocks, hidden, keywords):
    for block in [*blocks, *blocks]:
        hidden = block(hidden, **keywords)


def called_once(blocks, hidden, keywords):
    blocks[0](hidden, **keywords)


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (derived_argument, r"argument \(level\) that .* computes from earlier blocks.*method magnitude"),
        (changed_between, "once and in order.*method magnitude"),
        (called_twice, "once and in order.*method magnitude"),
        (called_once, "only 1 of its 2 decoder blocks.*method magnitude"),
    ],
)
def test_a_model_that_the_walk_cannot_follow_is_refused(forward, words):
    with pytest.raises(InputError, match=words):
        prune_(rewired(forward), "wanda", texts())


def test_layers_that_share_a_weight_are_pruned_once(text_file, tmp_path):
    folder = save_family("zamba", tmp_path / "zamba")
    run(train.main, folder, text_file, tmp_path / "out", "--exclude", "mamba", "--max_steps", "2")
    model, _ = load_model(str(tmp_path / "out"))
    shared = [m.weight for name, m in model.named_modules() if name.endswith("shared_transf.self_attn.q_proj")]
    assert len(shared) in (1, 2)
    assert all((weight == 0).float().mean() == 0.5 for weight in shared)


@pytest.mark.parametrize(
    ("name", "method", "words"),
    [
        ("bart", "wanda", "does not call this layer by itself.*exclude encoder_attn$"),
        ("mamba", "wanda", "does not call this layer by itself.*exclude dt_proj$"),
        ("flex_olmo", "wanda", "reached this expert; use more samples, or exclude experts$"),
        ("hrm_text", "wanda", "once and in order"),
        ("reformer", "wanda", "returns a ReformerOutput"),
        ("blt", "magnitude", "in the lists .*cross_attn_layers"),
    ],
)
def test_refusals_name_the_cause(name, method, words):
    with pytest.raises(InputError, match=words):
        prune_(family(name), method, texts())


@pytest.mark.parametrize("name", ["jetmoe", "llama4_text", "zamba", "inkling_text"])
def test_the_advised_exclusion_leaves_fused_weights_dense(name):
    """zamba: modules of one name are several matrices, and contain others; inkling_text: one matrix."""
    model = family(name)
    with pytest.raises(InputError, match="in one tensor") as raised:
        prunable_layers(model)
    words = str(raised.value).rpartition("--exclude ")[2].split()
    assert 0 < dense_share(model, prunable_layers(model, exclude=words)) < 1


@pytest.mark.parametrize("name", ["modernbert-decoder", "hrm_text", "longcat_flash"])
def test_all_decoder_blocks_are_found(name):
    model = family(name)
    attention = {block for block in model.modules() if "DecoderLayer" in type(block).__name__}
    assert set(decoder_blocks(model)) == attention


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("bert", {}, "not a causal decoder .is_decoder is false."),
        ("bert-generation", {}, "not a causal decoder .is_decoder is false."),
        ("xlnet", {}, "not a causal decoder .attn_type is bi."),
        ("llama", {"is_causal": False}, "not a causal decoder .is_causal is false."),
        ("bart", {}, "bart is an encoder-decoder"),
        ("t5", {}, "t5 is an encoder-decoder"),
        ("blip-2", {}, "cannot run on text alone .it needs pixel_values."),
        ("musicgen", {}, "Multiple valid text configs .*give the folder of a causal"),
        ("mllama", {"architectures": ["MllamaForCausalLM"]}, "only the text model"),
        ("bert", {"is_decoder": True}, None),
        ("gpt_neox", {}, None),  # its is_decoder is false and does nothing
    ],
)
def test_only_causal_decoders_are_accepted(name, settings, words, tmp_path):
    transformers.CONFIG_MAPPING[name](**settings).save_pretrained(tmp_path)
    if words is None:
        assert skeleton(tmp_path)
    else:
        with pytest.raises(InputError, match=words):
            skeleton(tmp_path)


@pytest.mark.parametrize(("name", "length"), [("mpt", 128), ("whisper", 448), ("roberta", 127), ("prophetnet", 126)])
def test_the_context_length_may_have_another_name(name, length):
    """The positions of RoBERTa begin after that of the padding."""
    model = family(name)
    model.config.is_decoder = True
    assert context_length(model) == length
    assert perplexity(model, byte_tokenizer(), ["a text of 1,000 words "] * 200, max_windows=1) > 1


def test_different_dtypes_under_autocast_name_the_precision():
    with pytest.raises(InputError, match="--precision fp32"), autocast(torch.device("cpu"), torch.bfloat16):
        torch.zeros(2, 2).index_add_(0, torch.tensor([0]), torch.zeros(1, 2, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="size"), autocast(torch.device("cpu"), torch.bfloat16):
        torch.zeros(2) + torch.zeros(3)


OPTIMIZERS = {
    "ProxOptimizer": lambda params, **more: ProxOptimizer(torch.optim.AdamW(params, lr=1e-2), reg_lambda=5.0, **more),
    "ProxAdamW": lambda params, **more: ProxAdamW(params, lr=1e-2, reg_lambda=5.0, **more),
}


def pruned_by(optimizer, model):
    """The names of the parameters that have zeros after a step."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: int((parameter == 0).sum()) for name, parameter in model.named_parameters()}
    optimizer.step()
    return {name for name, parameter in model.named_parameters() if int((parameter == 0).sum()) > before[name]}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_an_optimizer_with_the_model_prunes_its_layers_only(make, name, recwarn):
    model = tiny_model(name)
    inside = {id(m.weight) for m in model.model.layers.modules() if isinstance(m, nn.Linear)}
    expected = {key for key, parameter in model.named_parameters() if id(parameter) in inside}
    optimizer = make(model.parameters(), model=model)
    optimizer.load_state_dict(optimizer.state_dict())  # the choice is in the state
    assert pruned_by(optimizer, model) == expected
    words = r"not pruned: \d modules with fused experts, such as model.layers.0"
    assert [bool(re.search(words, str(each.message))) for each in recwarn] == [True] * (name == "qwen3-moe")


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_embeddings_are_not_pruned_in_silence(make):
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match=r"not pruned.*embed_tokens.weight, lm_head.weight.*model="):
        optimizer = make(model.named_parameters())
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & pruned_by(optimizer, model)
    with pytest.warns(UserWarning, match=r"\[260, 32\], \[260, 32\] are pruned.*model="):
        make(tiny_model("llama").parameters())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_model_also_selects_in_groups_that_are_added_later(make, recwarn):
    model = tiny_model("llama")
    optimizer = make(model.model.layers[0].parameters(), model=model)
    optimizer.add_param_group({"params": [*model.model.layers[1].parameters(), *model.lm_head.parameters()]})
    optimizer.add_param_group({"params": model.model.embed_tokens.parameters()})
    assert pruned_by(optimizer, model) == {f"{name}.weight" for name in prunable_layers(model)}
    assert not recwarn.list
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.add_param_group({"params": [torch.nn.Parameter(torch.ones(8, 8))]})


def test_an_optimizer_names_what_it_cannot_prune():
    """GPT-2: embeddings with other names; Conv1D, which stores W^T."""
    with pytest.warns(UserWarning, match=r"not pruned.*wte.weight, transformer.wpe.weight"):
        optimizer = ProxAdamW(tiny_model("gpt2").named_parameters(), reg_lambda=5.0)
    assert optimizer.param_groups[0]["prox_skip"][:2] == [True, True]
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no nn.Linear .* Conv1D .* proxsparse.prune_"):
        ProxAdamW((model := tiny_model("gpt2")).parameters(), reg_lambda=5.0, model=model)


# ---------------------------------------------------------------------------------------------- layers in another form


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_layers_that_are_stored_in_another_form(name, tmp_path):
    """Conv1D and fused experts: checkpoints, masks on a new copy, what learns, and packing."""
    settings = {"num_samples": 4, "seq_len": 32}
    weights = []
    for _ in range(2):  # the second call is restored from the checkpoints
        model = tiny_model(name).requires_grad_(False)
        prune_(model, "sparsegpt", "builtin", byte_tokenizer(), checkpoints=tmp_path / "prune", **settings)
        assert not any(weight.requires_grad for weight in model.parameters())
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    saved = {"checkpoints": tmp_path / "tune", "save_steps": 1}
    finetune_(model, tiny_model(name), "builtin", byte_tokenizer(), **saved, **settings)

    masks = prune_(pruned := tiny_model(name), "magnitude")
    apply_masks_(other := tiny_model(name), masks)
    state = other.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in pruned.state_dict().items())
    with pytest.raises(InputError, match="masks of another model"):
        apply_masks_(tiny_model("llama"), masks)

    if name == "gpt2":
        with pytest.raises(ValueError, match=r"nothing to pack: .*Conv1D"):
            sparsify_(pruned)
        return
    tokens = torch.arange(3, 23)[None]
    expected = pruned(tokens).logits
    packed = [key for key, module in sparsify_(pruned).named_modules() if isinstance(module, SparseLinear)]
    assert packed
    assert all("self_attn" in key for key in packed)
    torch.testing.assert_close(pruned(tokens).logits, expected)


@pytest.mark.parametrize("method", ["proxsparse", "admm", "maskllm", "swap"])
def test_the_default_dtype_does_not_matter(method):
    torch.set_default_dtype(torch.bfloat16)
    try:
        prune_(tiny_model("llama"), method, "builtin", byte_tokenizer(), num_samples=4, seq_len=32)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("call", [lambda model, *data: prune_(model, "wanda", *data), perplexity])
@pytest.mark.parametrize(
    ("auto", "kind", "words"),
    [
        ("AutoModel", "qwen3", "load it with AutoModelForCausalLM"),
        ("AutoModelForMaskedLM", "bert", "not a causal decoder"),
        ("AutoModelForCausalLM", "bert", "not a causal decoder"),
        ("AutoModelForSeq2SeqLM", "m2m_100", "not a causal decoder"),
    ],
)
def test_only_causal_language_models(call, auto, kind, words):
    config = transformers.AutoConfig.for_model(kind, **COMMON)
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    data = (byte_tokenizer(), ["a text"]) if call is perplexity else (["a text"], byte_tokenizer())
    with pytest.raises(InputError, match=words):
        call(model, *data)


def test_a_table_is_refused_and_its_column_is_read():
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    with pytest.raises(InputError, match=r"data: a DataFrame of columns; .* data\['text'\]"):
        perplexity(model, tokenizer, pandas.DataFrame({"text": ["a text"]}))
    assert perplexity(model, tokenizer, pandas.DataFrame({"text": ["a text"]})["text"]) > 1
