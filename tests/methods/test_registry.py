"""What holds for every registered method, on every model family."""

import dataclasses

import pytest
import tiny_models
import torch
from pruned import assert_pruned
from tiny_models import MODELS, byte_tokenizer

from proxsparse import prune_
from proxsparse.allocations.registry import ALLOCATIONS
from proxsparse.methods import get_method, list_methods, register_layer_method
from proxsparse.models.layers import prunable_layers
from proxsparse.training.options import LearningOptions

# Layers of two decoder blocks: 4 projections of attention and 3 of an MLP in each, unless said otherwise.
LAYER_COUNT = {"phi3": 8, "opt": 12, "gpt2": 8, "mixtral": 24, "qwen3-moe": 24}
ROWS = [*map(get_method, list_methods()), *ALLOCATIONS.values()]
QUICK = ("llama", "gpt2", "mixtral", "gemma2-mixed")  # every kind of layer and of walk


@pytest.mark.parametrize("name", list_methods())
@pytest.mark.parametrize("family", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in MODELS])
def test_layers_are_pruned_and_nothing_else(name, family, tiny_model, batches):
    model, dense = tiny_model(family), dict(tiny_model(family).named_parameters())
    masks = prune_(model, name, iter(batches))
    assert list(masks) == list(prunable_layers(model))
    assert len(masks) == LAYER_COUNT.get(family, 14)
    assert all(weight.requires_grad for weight in model.parameters())
    patterns = dict.fromkeys(masks, "2:4")
    assert_pruned(dense, dict(model.named_parameters()), masks, patterns, get_method(name).updates_weights)


@pytest.mark.parametrize("name", list_methods())
@pytest.mark.parametrize("pattern", [None, "1:4", "4:8", "6:8", "8:10"])
def test_other_patterns_in_bfloat16_with_layers_left_out(name, pattern, tiny_model, batches):
    """None: of each layer its own."""
    model, dense = tiny_model(dtype=torch.bfloat16), dict(tiny_model(dtype=torch.bfloat16).named_parameters())
    left = list(prunable_layers(model, exclude=[r"layers\.0\.mlp", "down_proj"]))
    patterns = {key: pattern or ("1:4" if ".0." in key else "3:4") for key in left}
    how = {"pattern": pattern, "exclude": [r"layers\.0\.mlp", "down_proj"]} if pattern else {"pattern": patterns}
    masks = prune_(model, name, batches, **how)
    assert list(masks) == left
    assert_pruned(dense, dict(model.named_parameters()), masks, patterns, get_method(name).updates_weights)


@pytest.mark.parametrize("name", list_methods())
@pytest.mark.parametrize("family", ["qwen2", "mixtral"])  # an expert sees tokens, and does not know which are padding
def test_padding_does_not_count(family, name, tiny_model, batches):
    ids, padding = batches[0]["input_ids"], torch.full((1, 5), 7)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(padding)], dim=1)
    padded = {"input_ids": torch.cat([ids, padding], dim=1), "attention_mask": mask}
    alone, padded_model = tiny_model(family), tiny_model(family)
    masks, padded_masks = prune_(alone, name, batches[:1]), prune_(padded_model, name, [padded])
    assert all(torch.equal(mask, padded_masks[layer]) for layer, mask in masks.items())
    for one, other in zip(alone.parameters(), padded_model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list_methods())
def test_the_seed_decides_where_data_is_used(name):
    texts, found = [f"text {i}: the quick brown fox jumps over {i} dogs" for i in range(40)], []
    for seed in (1, 1, 2):
        model = tiny_models.tiny_model("llama")
        torch.manual_seed(len(found))  # which must not matter
        masks = prune_(model, name, texts, byte_tokenizer(), num_samples=8, seq_len=32, seed=seed)
        found.append(torch.cat([mask.flatten() for mask in masks.values()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) != get_method(name).needs_data


def test_options_need_a_default():
    with pytest.raises(ValueError, match="'rate' of prune_x"):

        @register_layer_method("x", updates_weights=False, paper="none")
        def prune_x(weight, statistics, pattern, *, rate):
            """Never registered."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_option_is_described(row):
    own = row.options.keys() - {one.name for one in dataclasses.fields(LearningOptions)}
    assert own <= row.descriptions.keys()
    assert all(5 < len(text) < 120 for name, text in row.descriptions.items() if name in own)
