"""The patterns of layers chosen by sensitivity: costs against a literal computation, the budget, what pruning makes."""

import pytest
import tiny_models
import torch

from proxsparse import nm_mask, prune_
from proxsparse.allocations.budget import numel, packed_cost
from proxsparse.allocations.registry import allocate, get_allocation
from proxsparse.allocations.sensitivity import loss_costs
from proxsparse.data.calibration import single_samples
from proxsparse.errors import InputError
from proxsparse.models.feature_norms import FeatureNorms, make_hook
from proxsparse.models.layers import prunable_layers
from proxsparse.patterns import WINDOWED, NMPattern

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def model():
    """A Llama whose layers differ in how much their pruning costs."""
    model = tiny_models.tiny_model("llama", num_hidden_layers=4)
    for layer in prunable_layers(model).values():
        layer.weight.data *= 10.0 ** torch.rand(layer.out_features, 1) ** 2
    return model


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("2:4", 0.5), ("4:6", 2 / 3), ("6:8", 0.75), ("1:2", 0.5), ("1:3", 0.5), ("3:4", 0.75), ("4:8", 0.75), ("7:8", 1)],
)
def test_arithmetic_and_bytes_of_a_packed_layer(pattern, expected):
    layers = {"a": torch.nn.Linear(768, 8), "b": torch.nn.Linear(768, 8)}
    share, size = packed_cost(layers, {"a": NMPattern.parse(pattern)})
    assert share == pytest.approx((expected + 1) / 2, rel=0.02)
    assert size == pytest.approx((2.25 * expected + 2) / 2 if expected < 1 else 2, rel=0.02)


def test_costs_are_squared_changes_of_the_loss_to_first_order(model, batches):
    samples = list(single_samples(batches))
    costs, weight = loss_costs(model, prunable_layers(model), samples)[0][LAYER], model.get_submodule(LAYER).weight
    statistics = FeatureNorms(model.get_submodule(LAYER))
    hook = model.get_submodule(LAYER).register_forward_pre_hook(make_hook(statistics))
    gradients = []
    for ids in samples:
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        gradients.append(torch.autograd.grad(loss, weight)[0])
    hook.remove()
    assert costs.pop(None) == 0
    assert list(costs) == list(WINDOWED)
    for pattern, cost in costs.items():
        change = torch.where(nm_mask(weight.abs() * statistics.norms().detach(), pattern), 0.0, -weight).detach()
        expected = sum((gradient * change).sum() ** 2 for gradient in gradients) / len(gradients)
        assert cost == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("target", [0.5, 0.625, 0.9])
def test_the_arithmetic_is_at_most_the_target_and_close_to_it(target, model, batches):
    before = {name: p.clone() for name, p in model.named_parameters()}
    layers = prunable_layers(model)
    expected = allocate("sensitivity", model, layers, batches, "2:4", target_flops=target)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # of the caller
    patterns = allocate("sensitivity", model, layers, batches, "2:4", target_flops=target)
    assert patterns == expected
    largest = max(layer.weight.numel() for layer in layers.values()) / numel(layers)
    assert target - 2 * largest < packed_cost(layers, patterns)[0] <= target + 1e-6
    assert target > 0.5 or set(patterns.values()) == {WINDOWED[0]}
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_layers_with_the_same_input_get_the_same_pattern(model, batches):
    patterns = allocate("sensitivity", model, prunable_layers(model), batches, "2:4", target_flops=0.7)
    for group in ("self_attn.{}_proj q k v", "mlp.{}_proj gate up"):
        name, *parts = group.split()
        for block in range(4):
            assert len({patterns.get(f"model.layers.{block}.{name.format(part)}") for part in parts}) == 1
    assert len({*patterns.values()}) > 1
    _, first_of = loss_costs(model, prunable_layers(model), list(single_samples(batches)))
    assert {first_of[f"model.layers.1.self_attn.{part}_proj"] for part in "qkv"} == {"model.layers.1.self_attn.q_proj"}
    assert first_of["model.layers.1.self_attn.o_proj"] == "model.layers.1.self_attn.o_proj"


def test_the_costly_layers_keep_more(model, batches):
    layers = prunable_layers(model)
    patterns = allocate("sensitivity", model, layers, batches, "2:4", target_flops=0.6)
    costs, _ = loss_costs(model, layers, list(single_samples(batches)))
    per_weight = {name: costs[name][NMPattern(2, 4)] / layer.weight.numel() for name, layer in layers.items()}
    kept = {name: patterns[name].density if name in patterns else 1.0 for name in layers}
    ranked = sorted(layers, key=per_weight.get)
    assert sum(kept[name] for name in ranked[-7:]) > sum(kept[name] for name in ranked[:7])


def test_pruned_layers_have_their_patterns_and_the_others_stay_dense(model):
    options = {"allocation": "sensitivity", "target_flops": 0.8, "samples": 4}
    texts = ["a text of some words"] * 8
    masks = prune_(model, "magnitude", texts, tiny_models.byte_tokenizer(), seq_len=16, num_samples=8, **options)
    found = {name: next(p for p in WINDOWED if p.is_mask(mask)) for name, mask in masks.items()}
    assert len(set(found.values())) > 1
    for name, layer in prunable_layers(model).items():
        assert (name not in found and layer.weight.all()) or found[name].is_feasible(layer.weight)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unknown", {}, "no such allocation; choose from sensitivity, uniform"),
        ("sensitivity", {"spread": 1}, "no option 'spread'; its options: target_flops, samples"),
        ("sensitivity", {"target_flops": 0.4}, "target_flops.*from 0.5"),
        ("sensitivity", {"target_flops": 1.0}, "target_flops.*below 1"),
        ("sensitivity", {"samples": 0}, "samples.*at least 1"),
        ("uniform", {"samples": 1}, "no option 'samples'"),
    ],
)
def test_refusals(name, options, message, model, batches):
    with pytest.raises(InputError, match=message):
        allocate(name, model, prunable_layers(model), batches, "2:4", **options)


def test_weights_that_are_not_finite(model, batches):
    model.get_submodule(LAYER).weight.data[0] = torch.nan
    with pytest.raises(InputError, match=r"'sensitivity': .*NaN"):
        allocate("sensitivity", model, prunable_layers(model), batches, "2:4")
    assert get_allocation("sensitivity").needs_data
