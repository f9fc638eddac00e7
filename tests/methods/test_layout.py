"""Conv1D and fused experts as nn.Linear layers: the same model, the same checkpoint, no copy."""

import functools

import pytest
import torch
import transformers
from family_models import family_model
from tiny_models import COMMON, MODELS
from tiny_models import tiny_model as own_layout
from torch import nn

from proxsparse import prune_
from proxsparse.models.layers import prunable_layers
from proxsparse.models.unfold_linears import unfold_linears_

IDS = torch.arange(3, 20)[None]


def nemotron_h():
    """Experts without a gate."""
    settings = {"layers_block_type": ["moe", "attention"], "moe_shared_expert_intermediate_size": 16}
    settings |= {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("nemotron_h", **{**COMMON, "head_dim": 8, **settings})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gpt_oss_without_biases():
    model = family_model("gpt_oss")
    for name, parameter in model.named_parameters():
        if name.endswith("_proj_bias"):
            nn.init.zeros_(parameter)
    return model


BUILDERS = {name: functools.partial(own_layout, name) for name in MODELS}
# gpt_oss: experts with biases, weights stored [in_features, out_features], and a gate of their own
BUILDERS |= {"gpt-oss": functools.partial(family_model, "gpt_oss"), "nemotron-h": nemotron_h}
BUILDERS |= {"gpt-oss without biases": gpt_oss_without_biases}
FOLDED = ["gpt2", "mixtral", "qwen3-moe", "gpt-oss", "nemotron-h"]


def logits(model):
    """Of one sequence, with the plain loop over experts: transformers' other ways to compute them round differently."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", BUILDERS)
def test_the_model_computes_the_same_and_has_the_same_state(family):
    model, untouched = BUILDERS[family](), BUILDERS[family]()
    expected, before = logits(untouched), untouched.state_dict()
    assert unfold_linears_(unfold_linears_(model)) is model
    # GPT-OSS adds the bias of an expert after the product, nn.Linear within it: on some CPUs the last bits differ
    rounding = {} if family == "gpt-oss" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(logits(model), expected, **rounding)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in untouched.parameters())
    # also after the weights have been joined for the state_dict
    torch.testing.assert_close(logits(model), expected, **rounding)


@pytest.mark.parametrize("declared", [None, False, True])
def test_the_norm_of_an_experts_output(declared):
    """None: transformers 5.17, whose experts have no `has_post_expert_norm`."""
    fused = own_layout("mixtral").model.layers[0].mlp.experts
    vars(fused).pop("has_post_expert_norm", None)
    if declared is not None:
        fused.has_post_expert_norm = declared
    x = torch.randn(5, fused.gate_up_proj.shape[-1])
    fused.post_expert_norm = nn.LayerNorm(x.shape[-1])
    expected = nn.functional.linear(fused._apply_gate(x @ fused.gate_up_proj[1].mT), fused.down_proj[1])
    expected = fused.post_expert_norm(expected) if declared else expected
    experts = unfold_linears_(nn.ModuleDict({"experts": fused}))["experts"]
    torch.testing.assert_close(experts(x, torch.ones(5, 1, dtype=torch.long), torch.ones(5, 1)), expected)


def addresses(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("family", FOLDED)
def test_every_matrix_of_a_decoder_block_is_a_linear_layer_and_nothing_is_copied(family):
    model = BUILDERS[family]()
    stored = addresses(model.parameters())
    unfold_linears_(model)
    matrices = {name for name, p in model.named_parameters() if p.ndim > 1 and ("layers." in name or ".h." in name)}
    routers = ("mlp.gate.weight", "mlp.router.weight", "mixer.gate.weight")
    assert {f"{name}.weight" for name in prunable_layers(model)} == {n for n in matrices if not n.endswith(routers)}
    assert addresses(model.parameters()) <= stored
    state = model.state_dict()
    assert addresses(model.parameters()) <= addresses(state.values())  # the joined state shares their memory
    other = unfold_linears_(BUILDERS[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_matrices_that_cannot_be_split_are_named(tiny_model):
    model = tiny_model()
    model.model.layers[1].mlp.experts = nn.Module()
    model.model.layers[1].mlp.experts.weight = nn.Parameter(torch.zeros(4, 8, 8))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: .* 3 dimensions .*exclude experts\$$"):
        prune_(model, "magnitude")
    assert len(prune_(model, "magnitude", exclude=["experts"])) == 14
