"""What holds for every registered method, on every model family."""

import pytest
import torch
from tiny_models import MODELS

from proxsparse import NMPattern
from proxsparse.errors import InputError
from proxsparse.methods import method, methods, prune_, register_method
from proxsparse.models import prunable_layers


def bits(tensor):
    """The tensor's bytes: tells -0.0 from +0.0."""
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("family", MODELS)
def test_layers_are_pruned_and_nothing_else(name, family, tiny_model, batches):
    model, dense = tiny_model(family), tiny_model(family).state_dict()
    masks = prune_(model, name, batches)
    layers = prunable_layers(model)
    assert list(masks) == list(layers)
    assert len(masks) == 14
    for key, after in model.state_dict().items():
        mask = masks.get(key.removesuffix(".weight"))
        if mask is None:
            assert torch.equal(bits(after), bits(dense[key])), key
            continue
        assert (NMPattern(2, 4).blocks(mask).sum(-1) == 2).all(), key
        assert (bits(after[~mask]) == 0).all(), key
        unchanged = torch.equal(bits(after[mask]), bits(dense[key][mask]))
        assert unchanged != method(name).updates_weights, key


@pytest.mark.parametrize("name", methods())
@pytest.mark.parametrize("pattern", ["1:4", "4:8"])
def test_other_patterns_and_bfloat16(name, pattern, tiny_model, batches):
    model = tiny_model(dtype=torch.bfloat16)
    masks = prune_(model, name, batches, pattern)
    for layer_name, layer in prunable_layers(model).items():
        assert layer.weight.dtype == torch.bfloat16
        assert (NMPattern.parse(pattern).blocks(masks[layer_name]).sum(-1) == NMPattern.parse(pattern).n).all()
        assert NMPattern.parse(pattern).is_feasible(layer.weight)


@pytest.mark.parametrize("name", methods())
def test_exclude_leaves_layers_dense(name, tiny_model, batches):
    model, dense = tiny_model(), tiny_model().state_dict()
    masks = prune_(model, name, batches, exclude=[r"layers\.0\.", "down_proj"])
    assert len(masks) == 6
    for key, after in model.state_dict().items():
        assert torch.equal(after, dense[key]) == (key.removesuffix(".weight") not in masks), key


@pytest.mark.parametrize("name", methods())
def test_padding_does_not_count(name, tiny_model, batches):
    ids = batches[1]["input_ids"]
    padding = torch.full((1, 5), 7)
    padded = {
        "input_ids": torch.cat([ids, padding], dim=1),
        "attention_mask": torch.cat([torch.ones_like(ids), torch.zeros_like(padding)], dim=1),
    }
    alone, beside = tiny_model("qwen2"), tiny_model("qwen2")
    masks, padded_masks = prune_(alone, name, batches[1:2]), prune_(beside, name, [padded])
    for layer_name, mask in masks.items():
        assert torch.equal(mask, padded_masks[layer_name]), layer_name
    for one, other in zip(alone.parameters(), beside.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_training_modes_come_back(tiny_model, batches):
    model = tiny_model().train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    prune_(model, "wanda", batches)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(InputError, match="no calibration sample"):
        prune_(model, "wanda", [])
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_unknown_method_lists_the_choices(tiny_model):
    with pytest.raises(InputError, match=r"'obs'.*magnitude, sparsegpt, wanda"):
        prune_(tiny_model(), "obs")


def test_overflowing_inputs_name_the_layer(tiny_model, batches):
    model = tiny_model()
    model.model.layers[1].input_layernorm.weight.data[0] = torch.inf
    with pytest.raises(InputError, match=r"model\.layers\.1\.self_attn\.q_proj: .*overflow"):
        prune_(model, "wanda", batches)


def test_a_method_with_data_needs_statistics():
    with pytest.raises(ValueError, match="both or neither"):
        register_method("half", needs_data=True, updates_weights=False, paper="none")
