"""sparsify_: which layers of a model are packed, which stay dense, which are refused by name; and the way back."""

import copy
import weakref

import pytest
import torch
from pruned import prune_, pruned_linear, pruned_model
from tiny_models import MODELS, NOT_PACKED, tiny_model
from torch import nn
from torch.nn.utils import parametrize

from proxsparse import SparseLinear, sparsify_
from proxsparse.inference import linear as linear_module
from proxsparse.inference.convert import unsparsify_
from proxsparse.models.unfold_linears import unfold_linears_

TOKENS = torch.arange(3, 23).view(2, 10)


def packed_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def linear_names(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name", sorted(set(MODELS) - NOT_PACKED))
def test_families(name):
    model = pruned_model(name)
    dense = copy.deepcopy(model)
    assert sparsify_(model) is model
    assert packed_names(model) == linear_names(dense) - {"lm_head"}
    assert len(packed_names(model)) >= 8
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(TOKENS, **options), dense.generate(TOKENS, **options))


def test_there_and_back_bit_for_bit():
    model = pruned_model(dtype=torch.bfloat16)
    blocks = (
        torch.tensor([-0.0, 0.0, 0.0, -2.0]),
        torch.tensor([0.0, -0.0, 0.0, 1.0]),
    )  # -0.0 where there is room for it
    model.model.layers[0].mlp.up_proj.weight.data[0, :8] = torch.cat(blocks)
    before, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict()
    unsparsify_(sparsify_(model))
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor.view(torch.int16), before[name].view(torch.int16)), name  # -0.0 too
    assert model.config.to_dict() == config
    assert packed_names(model) == set()


def test_of_minus_zeros_in_pruned_places_some_lose_their_sign():
    layer = pruned_linear(8, 1)
    layer.weight.data[0, :4] = torch.tensor([-0.0, -0.0, -0.0, 1.0])
    back = unsparsify_(sparsify_(nn.ModuleDict({"layer": copy.deepcopy(layer)})))["layer"].weight
    assert torch.equal(back, layer.weight)
    assert back[0, :4].signbit().tolist() == [True, False, False, False]


def test_memory_is_that_of_the_model_and_one_layer(monkeypatch):
    model = nn.Sequential(*(pruned_linear(64, 64) for _ in range(6)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    pack = linear_module.pack_nm

    def counting(*arguments):
        alive.append(sum(reference() is not None for reference in weights))
        return pack(*arguments)

    monkeypatch.setattr(linear_module, "pack_nm", counting)
    sparsify_(model)
    assert alive == [6, 5, 4, 3, 2, 1]


def test_backend_reaches_every_layer():
    model = sparsify_(pruned_model(), backend="reference")
    assert {m.backend for m in model.modules() if isinstance(m, SparseLinear)} == {"reference"}
    with pytest.raises(ValueError, match="'fastest'"):
        sparsify_(pruned_model(), backend="fastest")


def test_include_and_exclude():
    model = sparsify_(pruned_model(), include=[r"mlp\.(up|down)_proj"], exclude=[r"layers\.1\."])
    assert packed_names(model) == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"}
    assert model.config.quantization_config["layers"] == ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    sparsify_(model)  # the rest
    assert len(packed_names(model)) == len(model.config.quantization_config["layers"]) == 14
    with pytest.raises(ValueError, match="not a regular expression"):
        sparsify_(pruned_model(), exclude=["("])


@torch.no_grad()
def spoil_(model, name, share):
    """Makes this share of the layer's blocks dense."""
    weight = model.get_submodule(name).weight
    blocks = weight.view(-1, 4)
    blocks[: round(share * len(blocks))] = 1.0


@pytest.mark.parametrize(("share", "count"), [(1 / 512, 1), (0.5, 256)])
def test_an_almost_24_layer_is_refused_and_nothing_is_replaced(share, count):
    model = pruned_model()
    spoil_(model, "model.layers.1.mlp.up_proj", share)
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.up_proj: {count} of 512 blocks .*exclude"):
        sparsify_(model)
    assert packed_names(model) == set()
    assert "model.layers.1.mlp.up_proj" not in packed_names(sparsify_(model, exclude=["1.mlp.up_proj"]))


def test_a_dense_layer_stays_dense_unless_it_is_named():
    model = pruned_model()
    spoil_(model, "model.layers.1.mlp.up_proj", 0.6)
    with pytest.raises(ValueError, match=r"up_proj: 307 of 512 blocks"):
        sparsify_(model, include=["mlp"])
    assert len(packed_names(sparsify_(model))) == 13


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match=r"nothing to pack: none of 15 .*proxsparse prune"):
        sparsify_(tiny_model("llama"))
    with pytest.raises(ValueError, match="nothing to pack"):
        sparsify_(pruned_model(), include=["absent"])
    with pytest.raises(ValueError, match="nothing to pack: Sequential has its weights in"):
        sparsify_(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="meta device"):
        sparsify_(pruned_model().to("meta"))


def test_a_quantised_model_is_refused():
    model = pruned_model()
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="gptq"):
        sparsify_(model)


@pytest.mark.parametrize("odd", [nn.Linear(6, 3), nn.Linear(8, 3, dtype=torch.complex64)])
def test_what_cannot_be_packed_stays_dense_or_is_refused_by_name(odd):
    model = nn.ModuleDict({"odd": odd, "even": pruned_linear(8, 3)})
    with pytest.raises(ValueError, match=r"odd: .*no blocks of 4"):
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


def test_a_module_that_is_held_twice_is_packed_once():
    layer = pruned_linear(8, 8)
    model = nn.ModuleDict({"first": layer, "second": layer})
    sparsify_(model)
    assert model["first"] is model["second"]
    assert isinstance(model["first"], SparseLinear)
    unsparsify_(model)
    assert model["first"] is model["second"]
    assert torch.equal(model["first"].weight, layer.weight)


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


def with_forward(layer):
    layer.forward = lambda x: x
    return layer


def with_hook(layer):
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return layer


def with_state_hook(layer):
    layer.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    return layer


def parametrized(layer):
    return parametrize.register_parametrization(layer, "weight", nn.Identity())


@pytest.mark.parametrize(
    "alter", [lambda layer: prune_(Scaled(8, 8)), with_forward, with_hook, with_state_hook, parametrized]
)
def test_more_than_a_linear_is_not_silently_replaced(alter):
    model = nn.ModuleDict({"q_proj": alter(pruned_linear(8, 8)), "k_proj": pruned_linear(8, 8)})
    with pytest.raises(ValueError, match=r"q_proj: it .*exclude 'q_proj'"):
        sparsify_(model)
    assert packed_names(model) == set()
    assert packed_names(sparsify_(model, exclude=["q_proj"])) == {"k_proj"}


def test_the_whole_model_a_linear_is_refused():
    with pytest.raises(ValueError, match="from_linear"):
        sparsify_(pruned_linear())


@pytest.mark.parametrize(("name", "layer"), [("gpt2", "c_attn"), ("mixtral", "experts")])
def test_unfolded_layers_are_refused_by_name(name, layer):
    model = prune_(unfold_linears_(tiny_model(name)))
    with pytest.raises(ValueError, match=rf"{layer}.*exclude"):
        sparsify_(model)


def test_conv1d_is_left_dense():
    with pytest.raises(ValueError, match="nothing to pack"):
        sparsify_(pruned_model("gpt2"))


def test_training_mode_and_dtype_stay():
    model = pruned_model(dtype=torch.float16).train()
    sparsify_(model)
    assert all(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float16}
