"""sparsify_: which layers of a model are packed, which stay dense, which are refused by name; and the way back."""

import weakref

import pytest
import torch
from pruned import prune_, pruned_linear, pruned_model
from tiny_models import tiny_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from proxsparse import SparseLinear, sparsify_
from proxsparse.inference import linear as linear_module
from proxsparse.inference.convert import unsparsify_
from proxsparse.models.unfold_linears import unfold_linears_

TOKENS, UP = torch.arange(3, 23).view(2, 10), "model.layers.1.mlp.up_proj"


def packed_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def two_layers(**more):
    return nn.ModuleDict({"even": pruned_linear(8, 8), **more})


def test_there_and_back_bit_for_bit():
    model = pruned_model(dtype=torch.bfloat16).train()
    blocks = [[-0.0, 0.0, 0.0, -2.0], [0.0, -0.0, 0.0, 1.0]]  # -0.0 where there is room for it
    model.model.layers[0].mlp.up_proj.weight.data[0, :8] = torch.tensor(blocks).flatten()
    before, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict()
    assert all(module.training for module in sparsify_(model).modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    after = unsparsify_(model).state_dict()
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), name  # -0.0 too
    assert model.config.to_dict() == config
    assert packed_names(model) == set()


def test_memory_is_that_of_the_model_and_one_layer(monkeypatch):
    model = nn.Sequential(*(pruned_linear(64, 64) for _ in range(6)))
    weights, alive, pack = [weakref.ref(layer.weight) for layer in model], [], linear_module.pack_nm

    def counting(*arguments):
        alive.append(sum(reference() is not None for reference in weights))
        return pack(*arguments)

    monkeypatch.setattr(linear_module, "pack_nm", counting)
    sparsify_(model)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_include_exclude_and_backend():
    model = sparsify_(pruned_model(), include=[r"mlp\.(up|down)_proj"], exclude=[r"layers\.1\."], backend="reference")
    layers = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert packed_names(model) == set(layers)
    assert model.config.quantization_config["layers"] == layers
    assert {model.get_submodule(name).backend for name in layers} == {"reference"}
    sparsify_(model)  # the rest
    assert len(packed_names(model)) == len(model.config.quantization_config["layers"]) == 14


@pytest.mark.parametrize(
    ("share", "include", "message"),
    [
        (1 / 512, None, "its weight: not quite 2:4: 1 of 512 blocks have more than 2 nonzeros; prune"),
        (0.2, None, "102 of 512 blocks are not 2:4; prune"),
        (0.5, None, "256 of 512 blocks are not 2:4; prune"),
        (0.6, ["mlp"], "its weight is not 2:4 or"),
    ],
)
def test_an_almost_24_layer_is_refused_and_one_mostly_dense_stays_so_unless_it_is_named(share, include, message):
    model = pruned_model()
    blocks = model.get_submodule(UP).weight.data.view(-1, 4)
    blocks[: round(share * len(blocks))] = 1.0
    with pytest.raises(ValueError, match=rf"{UP}: {message}.*exclude"):
        sparsify_(model, include=include)
    assert packed_names(model) == set()
    sparsify_(model, exclude=None if include else ["1.mlp.up_proj"])
    assert len(packed_names(model)) == 13
    assert UP not in packed_names(model)


@pytest.mark.parametrize("in_features", [2, 4, 6, 7])
def test_small_dense_layers_stay_dense(in_features):
    model = sparsify_(two_layers(small=nn.Linear(in_features, 3), pruned=pruned_linear(64, 8, pattern="6:8")))
    assert packed_names(model) >= {"pruned"}
    assert "small" not in packed_names(model)


def test_patterns_that_are_packed_as_a_larger_one_or_refused():
    """Every block of 4:8 is 6:8, although most of its blocks of 6 are 4:6."""
    model = sparsify_(two_layers(pruned=pruned_linear(64, 96, pattern="4:8")))
    assert str(model.pruned.pattern) == "6:8"
    with pytest.raises(ValueError, match=r"pruned: its pattern is 8:16; prune it to one of 2:4 or 4:6"):
        sparsify_(two_layers(pruned=pruned_linear(64, 96, pattern="8:16")))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_dense_layer_with_rows_of_zeros_stays_dense(share):
    model = two_layers(pruned=pruned_linear(64, 40), dense=nn.Linear(64, 40))
    model.dense.weight.data[: round(share * 40)] = 0
    assert "dense" not in packed_names(sparsify_(model))


def test_a_layer_of_another_pattern_with_rows_of_zeros():
    model = two_layers(dead=pruned_linear(64, 40, pattern="6:8"))
    model.dead.weight.data[2:] = 0
    sparsify_(model, include=["dead"])
    assert str(model.dead.pattern) == "6:8"


@pytest.mark.parametrize(
    ("value", "bits", "message"),
    [(torch.nan, 16, "NaN or infinity"), (torch.inf, 8, "which have no code"), (2e38, 4, "which have no code")],
)
def test_a_weight_without_a_code_is_refused_by_name_before_any_layer_is_packed(value, bits, message):
    model = pruned_model()
    weight = model.get_submodule(UP).weight.data
    weight[0] = torch.where(weight[0] != 0, value, 0.0) if bits != 16 else value
    with pytest.raises(ValueError, match=rf"{UP}: .*{message}"):
        sparsify_(model, bits=bits)
    assert packed_names(model) == set()


def quantised_model():
    model = pruned_model()
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            lambda: tiny_model("llama"),
            {},
            r"none of 15 [^=]* \(packed layers, Conv1D .*proxsparse prune",
        ),
        (lambda: pruned_model("gpt2"), {}, "nothing to pack: .*Conv1D"),
        (lambda: prune_(nn.TransformerEncoderLayer(8, 1, 8), ["attn"]), {}, "linear1: the module around it reads"),
        (pruned_model, {"include": ["absent"]}, "nothing to pack: .*absent"),
        (lambda: nn.Sequential(nn.ReLU()), {}, "nothing to pack: none of 0"),
        (lambda: pruned_model().to("meta"), {}, "meta device"),
        (quantised_model, {}, "gptq"),
        (pruned_linear, {}, "from_linear"),
        (pruned_model, {"backend": "fastest"}, "'fastest'"),
        (pruned_model, {"exclude": ["("]}, "not a regular expression"),
        (pruned_model, {"include": "mlp"}, "include='mlp': must be a list of regular expressions"),
        (pruned_model, {"exclude": "mlp"}, "exclude='mlp': must be a list"),
        (pruned_model, {"bits": 8.0}, "bits=8.0: packed weights have 16, 8 or 4 bits"),
        (lambda: prune_(unfold_linears_(tiny_model("gpt2"))), {}, "nothing to pack: .*Conv1D"),
    ],
)
def test_what_is_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        sparsify_(build(), **options)


@pytest.mark.parametrize("odd", [nn.Linear(7, 3), nn.Linear(8, 3, dtype=torch.complex64)])
def test_what_cannot_be_packed_stays_dense_or_is_refused_by_name(odd):
    model = two_layers(odd=odd)
    with pytest.raises(ValueError, match=r"odd: .*no blocks of 2:4 or"):
        sparsify_(model, include=["odd"])
    assert packed_names(sparsify_(model)) == {"even"}


def pruned_tied():
    """A model whose lm_head is tied, and 2:4 too."""
    config = pruned_model().config
    config.tie_word_embeddings = True
    return prune_(type(pruned_model())(config), but=())


def test_tied_weights_stay_tied_and_dense():
    model = pruned_tied()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    sparsify_(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head" not in packed_names(model)
    with pytest.raises(ValueError, match="lm_head: its weight is tied"):
        sparsify_(pruned_tied(), include=["mlp", "lm_head"])


class Hub(nn.Module):
    """A model that is saved, but not by transformers."""

    def __init__(self, **attributes):
        super().__init__()
        self.q_proj = pruned_linear(8, 8)
        vars(self).update(attributes)

    def save_pretrained(self, folder):
        pass


@pytest.mark.parametrize("attributes", [{}, {"config": {}}, {"config": None}])
def test_a_model_of_another_hub_is_packed_in_memory(attributes):
    assert packed_names(sparsify_(Hub(**attributes))) == {"q_proj"}


class Scaled(nn.Linear):
    """A layer whose output is not that of nn.Linear."""

    def forward(self, x):
        return 2 * super().forward(x)


ALTERED = {
    "class": lambda layer: setattr(layer, "__class__", Scaled),
    "forward": lambda layer: setattr(layer, "forward", lambda x: x),
    "hook": lambda layer: layer.register_forward_hook(lambda module, inputs, output: 2 * output),
    "state hook": lambda layer: layer.register_state_dict_post_hook(lambda *_: None),
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
}


@pytest.mark.parametrize("altered", ALTERED)
def test_more_than_a_linear_is_not_silently_replaced(altered):
    model = two_layers(q_proj=pruned_linear(8, 8))
    ALTERED[altered](model["q_proj"])
    with pytest.raises(ValueError, match=r"q_proj: it .*exclude 'q_proj'"):
        sparsify_(model)
    assert packed_names(model) == set()
    assert packed_names(sparsify_(model, exclude=["q_proj"])) == {"even"}


def test_a_layer_under_autocast_gives_no_warning(recwarn):
    """Weights in fp32, computation in bf16: `proxsparse evaluate` of a packed folder."""
    with torch.autocast("cpu", torch.bfloat16):
        sparsify_(pruned_model(dtype=torch.float32))(TOKENS)
    assert not recwarn


def test_models_that_share_a_config_are_packed_apart(tmp_path):
    first = prune_(tiny_model("llama"))
    second = prune_(type(first)(first.config))
    sparsify_(first)
    second.save_pretrained(tmp_path / "dense")
    assert not any(
        isinstance(module, SparseLinear)
        for module in AutoModelForCausalLM.from_pretrained(tmp_path / "dense").modules()
    )
    sparsify_(second, bits=8)
    unsparsify_(second)
    first.save_pretrained(tmp_path / "packed")
    assert any(
        isinstance(module, SparseLinear)
        for module in AutoModelForCausalLM.from_pretrained(tmp_path / "packed").modules()
    )
