"""Mixed N:M per decoder block: the rankings against literal computations, the budget, and what pruning makes of it."""

import itertools
import math

import numpy as np
import pytest
import tiny_models
import torch
from layer_cases import hooked_inputs

from proxsparse import NMPattern, prune_
from proxsparse.allocations.alphapruning import alpha_peak
from proxsparse.allocations.budget import budget, by_decoder_block, nearest_counts
from proxsparse.allocations.registry import allocate, get_allocation, list_allocations
from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks, prunable_layers

BLOCKS = 6
OPTIONS = {"uniform": {}, "owl": {"outlier_factor": 2.0}, "alphapruning": {"epsilon": 0.5}}


@pytest.fixture
def deep_model():
    """number of decoder blocks -> a Llama whose blocks differ in their outliers and in the shape of their spectra."""

    def build(blocks: int = BLOCKS):
        model = tiny_models.tiny_model("llama", num_hidden_layers=blocks)
        for layer in prunable_layers(model).values():
            layer.weight.data *= 10.0 ** torch.rand(layer.out_features, 1) ** 2
            layer.weight.data[torch.rand_like(layer.weight) < 0.05 * torch.rand(())] *= 8
        return model

    return build


def layers_of_block(model, index):
    return prunable_layers(model, include=[rf"layers\.{index}\."])


def wishes_of(name, model, batches, pattern="2:4", **options):
    blocks = by_decoder_block(model, prunable_layers(model))
    return get_allocation(name).targets(model, blocks, batches, NMPattern.parse(pattern), **options)


def gap(counts, sizes, pattern):
    return abs(sum((n - pattern.n) * size for n, size in zip(counts, sizes, strict=True)))


def squared_distance(counts, wishes):
    return sum((n - wish) ** 2 for n, wish in zip(counts, wishes, strict=True))


def best_by_trying(wishes, sizes, pattern):
    """(least distance from the budget, least squared distance from the wishes at it), over all combinations."""
    combinations = itertools.product(range(1, pattern.m), repeat=len(wishes))
    return min((gap(counts, sizes, pattern), squared_distance(counts, wishes)) for counts in combinations)


def between_0_and_1(values):
    return (np.array(values) - min(values)) / (max(values) - min(values))


@pytest.mark.parametrize("pattern", ["2:4", "5:8"])
def test_owl_wishes_by_hand(pattern, deep_model, batches):
    model, inputs, outliers = deep_model(), hooked_inputs(deep_model(), batches), []
    norms = {name: torch.cat(rows).double().square().sum(0).sqrt() for name, rows in inputs.items()}
    for index in range(BLOCKS):
        layers = layers_of_block(model, index).items()
        scores = torch.cat([(layer.weight.double().abs() * norms[name]).flatten() for name, layer in layers])
        outliers.append(100 * (scores > 3 * scores.mean()).double().mean().item())
    ratio = between_0_and_1(outliers) * 2
    expected = NMPattern.parse(pattern).n + ratio - ratio.mean()
    assert wishes_of("owl", model, batches, pattern, outlier_factor=3.0) == pytest.approx(expected, abs=1e-9)


def alpha_by_hand(weight):
    """AlphaPruning's estimator in plain steps: every start of the tail is tried, the one that fits best is taken."""
    eigs = np.sort(np.linalg.svd(weight.double().numpy(), compute_uv=False) ** 2)
    counts, edges = np.histogram(np.log10(eigs), bins=100)
    peak = 10 ** edges[np.argmax(counts)]
    fits = []
    for i, smallest in enumerate(eigs[:-1]):
        if not 0.95 * peak <= smallest <= 1.5 * peak:
            continue
        tail = eigs[i:]
        alpha = 1 + len(tail) / sum(math.log(x / smallest) for x in tail)
        survival = [(x / smallest) ** (1 - alpha) for x in tail]
        fits.append((max(abs(1 - p - k / len(tail)) for k, p in enumerate(survival)), alpha))
    return min(fits)[1]


def test_alphapruning_wishes_by_hand(deep_model):
    model, epsilon = deep_model(), 0.4
    blocks = [layers_of_block(model, index).values() for index in range(BLOCKS)]
    alphas = [np.mean([alpha_by_hand(layer.weight.detach()) for layer in block]) for block in blocks]
    quota = between_0_and_1(alphas) * 2 * epsilon + 1 - epsilon
    pruned = 0.5 * quota / quota.mean()
    assert wishes_of("alphapruning", model, (), epsilon=epsilon) == pytest.approx(4 - 4 * pruned, abs=1e-3)


def test_alpha_ignores_the_zeros_of_a_singular_matrix():
    """The same spectrum plus 64 eigenvalues that are zero, exactly or up to rounding."""
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    left, right = (torch.linalg.qr(torch.randn(128, size)).Q for size in weight.shape)
    alone, *singular = (
        alpha_peak(torch.linalg.svdvals(matrix).square())
        for matrix in (weight, torch.block_diag(weight, torch.zeros(64, 32)), left @ weight @ right.T)
    )
    assert singular == pytest.approx([alone, alone], rel=1e-3)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8"])
@pytest.mark.parametrize("sizes", [[1] * 5, [3, 3, 2, 2, 3], [10, 7, 7, 3, 1], [1000, 1, 1, 1, 1]])
def test_counts_are_the_best_of_all_combinations(pattern, sizes):
    pattern, generator = NMPattern.parse(pattern), np.random.default_rng(0)
    for _ in range(4):
        wishes = (pattern.n + generator.normal(0, 1.5, len(sizes))).tolist()
        counts = nearest_counts(wishes, [4096 * size for size in sizes], pattern)
        found = gap(counts, sizes, pattern), squared_distance(counts, wishes)
        assert all(1 <= n < pattern.m for n in counts)
        assert found == pytest.approx(best_by_trying(wishes, sizes, pattern))


@pytest.mark.parametrize("name", list_allocations())
@pytest.mark.parametrize("pattern", ["2:4", "2:8", "4:8"])
def test_every_allocation_keeps_the_budget_and_the_model(name, pattern, deep_model, batches):
    model, before = deep_model().train(), deep_model().state_dict()
    layers, parsed = prunable_layers(model, pattern), NMPattern.parse(pattern)
    patterns = allocate(name, model, layers, batches, pattern, **OPTIONS[name])
    assert list(patterns) == list(layers)
    assert budget(layers, patterns) == parsed.density
    assert {chosen.m for chosen in patterns.values()} == {parsed.m}
    for index in range(BLOCKS):
        assert len({patterns[layer] for layer in layers_of_block(model, index)}) == 1
    assert (len(set(patterns.values())) > 1) == (name != "uniform")
    assert patterns == allocate(name, model, layers, batches, pattern, **OPTIONS[name])
    assert model.training
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    masks = prune_(model, "wanda", batches, pattern=patterns)
    assert all((patterns[layer].blocks(mask).sum(-1) == patterns[layer].n).all() for layer, mask in masks.items())


@pytest.mark.parametrize("name", ["owl", "alphapruning"])
def test_unequal_decoder_blocks_come_as_near_as_they_can(name, deep_model, batches):
    """One decoder block without its MLP: the wishes are centred by weights, the budget is not met exactly."""
    model, pattern = deep_model(4), NMPattern(2, 4)
    layers = prunable_layers(model, exclude=[r"layers\.1\.mlp"])
    blocks = by_decoder_block(model, layers)
    patterns = allocate(name, model, layers, batches, pattern, **OPTIONS[name])
    sizes = [sum(layer.weight.numel() for layer in block.values()) for block in blocks]
    wishes = get_allocation(name).targets(model, blocks, batches, pattern, **OPTIONS[name])
    counts = [next(patterns[layer].n for layer in block) for block in blocks]
    assert len(set(sizes)) == 2
    assert np.average(wishes, weights=sizes) == pytest.approx(2)
    assert squared_distance(counts, wishes) == pytest.approx(best_by_trying(wishes, sizes, pattern)[1])
    assert budget(layers, patterns) == pytest.approx(np.average(counts, weights=sizes) / 4)


@pytest.mark.parametrize(
    ("name", "pattern", "options", "message"),
    [
        ("owl", "2:4", {"epsilon": 0.3}, "no option 'epsilon'; its options: outlier_factor, spread"),
        ("uniform", "2:4", {"spread": 2.0}, "no option 'spread'; its options: none"),
        ("owl", "1:2", {}, "'owl': pattern 1:2: every decoder block would keep 1.*1 < n < m - 1"),
        ("alphapruning", "3:4", {}, "'alphapruning': pattern 3:4: every decoder block would keep 3"),
        ("owl", "2:4", {"spread": 0.08, "outlier_factor": 2.0}, "'owl'.*the same pattern.*outlier_factor or spread"),
        ("alphapruning", "2:4", {"epsilon": 0.01}, "'alphapruning'.*the same pattern.*epsilon"),
        ("owl", "2:4", {"outlier_factor": 1e9}, "6 decoder blocks .* the score 0.*lower outlier_factor"),
    ],
)
def test_bad_input_names_the_remedy(name, pattern, options, message, deep_model, batches):
    model = deep_model()
    with pytest.raises(InputError, match=message):
        allocate(name, model, prunable_layers(model, pattern), batches, pattern, **options)


@pytest.mark.parametrize("name", ["owl", "alphapruning"])
@pytest.mark.parametrize(("blocks", "include"), [(1, None), (3, [r"layers\.1\."])])
def test_one_decoder_block_cannot_share(name, blocks, include, deep_model, batches):
    layers = prunable_layers(model := deep_model(blocks), include=include)
    with pytest.raises(InputError, match=f"'{name}': the 1 decoder blocks with layers.*uniform"):
        allocate(name, model, layers, batches, "2:4")


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_numbers_that_are_not_finite_name_the_layer(value, deep_model, batches):
    model = deep_model()
    decoder_blocks(model)[2].mlp.up_proj.weight.data[:] = value
    with pytest.raises(InputError, match=r"'alphapruning': model\.layers\.2\.mlp\.up_proj: its spectrum"):
        allocate("alphapruning", model, prunable_layers(model), (), "2:4")
    model.model.layers[1].input_layernorm.weight.data[0] = math.inf
    with pytest.raises(InputError, match=r"'owl': model\.layers\.1\.self_attn\.q_proj: .*overflow"):
        allocate("owl", model, prunable_layers(model), batches, "2:4")
    with pytest.raises(InputError, match="'owl': no calibration sample"):
        allocate("owl", model, prunable_layers(model), [], "2:4")
