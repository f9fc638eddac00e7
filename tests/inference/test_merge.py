"""Merged projections: the same bits as separate products, in fewer calls, in every mode of torch."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from merge_cases import Attention, assert_same, attention, each_form, groups
from pruned import pruned_linear, pruned_model
from tiny_models import MODELS, NOT_PACKED
from torch import nn
from torch.nn import functional

from proxsparse import use_backend
from proxsparse.inference.convert import sparsify_
from proxsparse.inference.generate import generate
from proxsparse.inference.merge import merge_projections_, separate_products

GROUPS_IN_TWO_BLOCKS = {"phi3": 0, "gpt2": 0, "opt": 2, "mixtral": 2, "qwen3-moe": 2, "gemma3-composite-mixed": 5}


@pytest.fixture
def products(monkeypatch):
    """The numbers of rows of W in the products of nn.Linear."""
    calls, linear = [], functional.linear
    monkeypatch.setattr(functional, "linear", lambda x, w, b=None: calls.append(len(w)) or linear(x, w, b))
    return calls


@each_form
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_family_gives_the_same_bits_and_tokens(name, form):
    if form == "sparse" and name in NOT_PACKED:
        pytest.skip("not packed")
    model, input_ids = pruned_model(name), torch.randint(3, 260, (2, 7))
    model = sparsify_(model) if form == "sparse" else model
    expected, tokens = model(input_ids).logits, generate(model, input_ids, 6)
    merge_projections_(model)
    assert len(groups(model)) == GROUPS_IN_TWO_BLOCKS.get(name, 4)
    assert_same(model(input_ids).logits, expected, form)
    assert torch.equal(generate(model, input_ids, 6), tokens)
    assert len(groups(model)) == GROUPS_IN_TWO_BLOCKS.get(name, 4)  # nothing was given up on the way
    assert all(group.state.pending is None for group in groups(model))


@pytest.mark.parametrize("backend", ["cpp", "reference", None])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 300])
@torch.no_grad()
def test_products_are_the_same_bits(rows, bias, backend):
    """Sizes of SmolLM2."""
    layers = {name: pruned_linear(576, out, bias) for name, out in (("q_proj", 576), ("k_proj", 192), ("v_proj", 192))}
    module, x = nn.ModuleDict(layers), torch.randn(2, rows, 576)[0]
    module = sparsify_(module) if backend else module
    with use_backend(backend):
        expected = [layer(x) for layer in module.values()]
        merge_projections_(module)
        for layer, y in zip(module.values(), expected, strict=True):
            assert_same(layer(x), y, "sparse" if backend == "cpp" else "dense")
    assert len(groups(module)) == 1


@torch.no_grad()
def test_one_product_serves_all_parts_in_any_order(products):
    (module, plain), x = attention("dense"), torch.randn(2, 5, 32)
    assert_same(module(x), plain(x))
    assert products == [48, 24, 8, 16]
    products.clear()
    names = ["v_proj", "q_proj", "k_proj"]
    found = [getattr(module, name)(x) for name in names]
    assert products == [48]
    for y, name in zip(found, names, strict=True):
        assert_same(y, getattr(plain, name)(x))
    with separate_products():
        products.clear()
        module(x)
    assert products == [24, 8, 16]


@each_form
@pytest.mark.parametrize("parts", [["q_proj"], ["q_proj", "k_proj", "v_proj"]])
@torch.no_grad()
def test_parts_that_read_different_inputs_end_the_group(parts, form, products):
    """One that is called alone, and cross-attention: k and v read something else."""
    module, plain = attention(form)
    for _ in range(4):
        x, other = torch.randn(3, 32), torch.randn(5, 32)
        for name, read in zip(parts, (x, other, other), strict=False):
            assert_same(getattr(module, name)(read), getattr(plain, name)(read), form)
    assert groups(module) == []
    assert 48 not in products[-2:]
    assert_same(merge_projections_(module)(x), plain(x), form)
    assert len(groups(module)) == 1


@torch.no_grad()
def test_an_interrupted_forward_costs_nothing_but_its_product():
    module, plain = attention("dense")
    module.q_proj(torch.randn(3, 32))  # and an exception before k
    for _ in range(4):
        x = torch.randn(3, 32)
        assert_same(module(x), plain(x))
        module.q_proj(x)
    assert len(groups(module)) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])  # where no version counter shows the change
@each_form
def test_an_input_changed_in_place_is_another_input(form, mode):
    module, plain = attention(form)
    with mode():
        x = torch.randn(3, 32)
        assert_same(module.q_proj(x), plain.q_proj(x), form)
        x.add_(1)
        assert_same(module.k_proj(x), plain.k_proj(x), form)
        assert_same(module.v_proj(x), plain.v_proj(x), form)


@each_form
@torch.no_grad()
def test_a_tensor_is_multiplied_again_each_time_and_not_held(form):
    """The replay of a graph writes into the same tensors, and no version counter shows it; as numpy does here."""
    (module, plain), x = attention(form), torch.randn(1, 32)
    for _ in range(3):
        x.numpy()[:] = torch.randn(1, 32).numpy()
        assert_same(module(x), plain(x), form)
    assert len(groups(module)) == 1
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_threads_do_not_mix():
    (module, plain), wrong = attention(), []

    @torch.no_grad()
    def call(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x = torch.randn(2, 32, generator=generator)
            if not torch.allclose(module(x), plain(x), atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    assert len(groups(module)) == 1


@each_form
@torch.no_grad()
def test_autocast(form):
    (module, plain), x = attention(form), torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(module(x), plain(x), form)
        assert module.q_proj(x).dtype == torch.bfloat16
    assert torch.equal(module.k_proj(x), plain.k_proj(x))  # float32: not the slice of the product in bfloat16
    assert len(groups(module)) == 1


@each_form
def test_a_gradient_is_that_of_separate_products(form, products):
    (module, plain), x = attention(form), torch.randn(3, 32, requires_grad=True)
    grad = torch.randn(3, 48)
    (expected,) = torch.autograd.grad(plain(x), x, grad)
    products.clear()
    (found,) = torch.autograd.grad(module(x), x, grad)
    assert 48 not in products
    assert_same(found, expected)
    frozen = x.detach()
    assert_same(module(frozen), plain(frozen), form)
    assert form == "sparse" or 48 in products


def test_merged_dense_layers_and_an_adapter_around_one_learn():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, nn.Parameter(torch.ones(24, 32))

        def forward(self, x):
            return self.base(x) + x @ self.down.T

    module = merge_projections_(Attention())
    plain, x = copy.deepcopy(module), torch.randn(3, 32)
    for adapted in (False, True):
        for model in (module, plain):
            model.q_proj = Adapter(model.q_proj) if adapted else model.q_proj
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(x).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x))  # of the merged weight, which learned as well
        assert adapted or len(groups(module)) == 1


@each_form
@torch.no_grad()
def test_compiles_into_one_graph_and_once_and_exports(form):
    (module, plain), graphs = attention(form), []
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for _ in range(3):
        x = torch.randn(3, 32)
        assert_same(compiled(x), plain(x), form)
        assert torch.equal(module(x), plain(x))  # eager calls change nothing for it
    assert len(graphs) == 1
    assert len(groups(module)) == 1
    assert_same(torch.export.export(module, (x,)).module()(x), plain(x), form)


@pytest.mark.gpu
@each_form
@torch.no_grad()
def test_a_replayed_graph_multiplies_again(form):
    module, plain = (model.to("cuda", torch.bfloat16) for model in attention(form, dtype=torch.bfloat16, merged=False))
    merge_projections_(module)
    x = torch.randn(1, 32, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        module(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, plain(x), rtol=2e-2, atol=2e-2)
    assert len(groups(module)) == 1
