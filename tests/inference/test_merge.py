"""Merged projections: the same bits as separate products, in fewer calls; and every way out of a group."""

import copy
import io
import pickle
import threading
from importlib.util import find_spec

import pytest
import torch
from pruned import prune_, pruned_linear, pruned_model
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, NOT_PACKED, tiny_model
from torch import nn
from torch.nn import functional

from proxsparse import SparseLinear, use_backend
from proxsparse.inference.convert import sparsify_, unsparsify_
from proxsparse.inference.generate import generate
from proxsparse.inference.merge import Group, MergedPart, merge_projections_, separate_products, split_projections_
from proxsparse.ops import registry
from proxsparse.ops.backends.cpp import FEW_ROWS
from proxsparse.ops.registry import Kernel

GROUPS_IN_TWO_BLOCKS = {"phi3": 0, "gpt2": 0, "opt": 2, "mixtral": 2, "qwen3-moe": 2, "gemma3-composite-mixed": 5}
FORMS = ["dense", "sparse"]
each_form = pytest.mark.parametrize("form", FORMS)


class Attention(nn.Module):
    """Reads one input three times, or `other` in k_proj and v_proj."""

    def __init__(self, bias=True, dtype=torch.float32):
        super().__init__()
        for name, rows in (("q_proj", 24), ("k_proj", 8), ("v_proj", 16)):
            setattr(self, name, pruned_linear(32, rows, bias, dtype))

    def forward(self, x, other=None):
        other = x if other is None else other
        return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(other)], -1)


def attention(form="sparse", merged=True, **options):
    """The module, and one with equal weights that is never merged."""
    module = Attention(**options).requires_grad_(False)
    if form == "sparse":
        sparsify_(module)
    plain = copy.deepcopy(module)
    return (merge_projections_(module) if merged else module), plain


def groups(model) -> list[Group]:
    found = {id(part.group): part.group for part in model.modules() if isinstance(part, MergedPart)}
    return [group for group in found.values() if group.layer is not None]


def storages(model) -> int:
    """The bytes of all memory that the tensors of a model are in."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return sum(found.values())


@pytest.fixture
def products(monkeypatch):
    """The numbers of rows of W in the products of the packed layers and of nn.Linear."""
    calls, linear = [], functional.linear

    def counted(x, weight, bias=None):
        calls.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(functional, "linear", counted)
    return calls


def assert_same(found, expected, form="dense"):
    """Equal bits where our kernel multiplies; BLAS may add in another order for another number of rows of W."""
    if form == "sparse" and found.dtype == torch.float32 and find_spec("proxsparse._C"):
        assert torch.equal(found, expected)
    else:
        assert found.dtype == expected.dtype
        tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------ exactness


@each_form
@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_same_bits_and_tokens(name, form):
    if form == "sparse" and name in NOT_PACKED:
        pytest.skip("not packed")
    model, input_ids = pruned_model(name), torch.randint(3, 260, (2, 7))
    model = sparsify_(model) if form == "sparse" else model
    with torch.no_grad():
        expected, tokens = model(input_ids).logits, generate(model, input_ids, 6)
        merge_projections_(model)
        assert len(groups(model)) == GROUPS_IN_TWO_BLOCKS.get(name, 4)
        assert_same(model(input_ids).logits, expected, form)
        assert torch.equal(generate(model, input_ids, 6), tokens)
    assert len(groups(model)) == GROUPS_IN_TWO_BLOCKS.get(name, 4)  # nothing was given up on the way
    assert all(group.state.pending is None for group in groups(model))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_packed_products_are_the_same_bits(rows, bias, backend):
    """Sizes of SmolLM2. Beyond 256 rows cpp unpacks slabs of W for BLAS, as the reference does with all of it."""
    layers = {name: pruned_linear(576, out, bias) for name, out in (("q_proj", 576), ("k_proj", 192), ("v_proj", 192))}
    module = sparsify_(nn.ModuleDict(layers), backend=backend)
    x = torch.randn(2, rows, 576)[0]
    with torch.no_grad():
        expected = [layer(x) for layer in module.values()]
        merge_projections_(module)
        for layer, y in zip(module.values(), expected, strict=True):
            assert_same(layer(x), y, "sparse" if backend == "cpp" and rows <= FEW_ROWS[torch.float32] else "dense")
    assert len(groups(module)) == 1


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_dense_products_agree(rows):
    module = nn.ModuleDict({"gate_proj": nn.Linear(576, 1536), "up_proj": nn.Linear(576, 1536)})
    x = torch.randn(rows, 576)
    with torch.no_grad():
        expected = [layer(x) for layer in module.values()]
        merge_projections_(module)
        for layer, y in zip(module.values(), expected, strict=True):
            assert_same(layer(x), y)


# ------------------------------------------------------------------------------------------ one product


@torch.no_grad()
def test_one_product_serves_all_parts_in_any_order(products):
    (module, plain), x = attention("dense"), torch.randn(2, 5, 32)
    assert_same(module(x), plain(x), "dense")
    assert products == [48, 24, 8, 16]
    products.clear()
    order = [module.v_proj, module.q_proj, module.k_proj]
    found = [part(x) for part in order]
    assert products == [48]
    for y, part in zip(found, (plain.v_proj, plain.q_proj, plain.k_proj), strict=True):
        assert_same(y, part(x), "dense")
    with separate_products():
        products.clear()
        module(x)
    assert products == [24, 8, 16]


@each_form
@torch.no_grad()
def test_other_inputs_give_their_own_outputs_and_end_the_group(form):
    module, plain = attention(form)
    for _ in range(4):  # cross-attention: k and v read something else
        x, other = torch.randn(3, 32), torch.randn(5, 32)
        assert_same(module.q_proj(x), plain.q_proj(x), form)
        assert_same(module.k_proj(other), plain.k_proj(other), form)
        assert_same(module.v_proj(other), plain.v_proj(other), form)
    assert groups(module) == []
    assert_same(merge_projections_(module)(x), plain(x), form)
    assert len(groups(module)) == 1


@torch.no_grad()
def test_a_part_that_is_called_alone_ends_the_group(products):
    module, plain = attention("dense")
    for _ in range(4):
        x = torch.randn(3, 32)
        assert_same(module.q_proj(x), plain.q_proj(x), "dense")
    assert groups(module) == []
    assert products[-2:] == [24, 24]


@torch.no_grad()
def test_an_interrupted_forward_costs_nothing_but_its_product(products):
    module, plain = attention("dense")
    module.q_proj(torch.randn(3, 32))  # and an exception before k
    for _ in range(4):
        x = torch.randn(3, 32)
        assert_same(module(x), plain(x), "dense")
        module.q_proj(x)
    assert len(groups(module)) == 1


@each_form
@torch.no_grad()
def test_an_input_changed_in_place_is_another_input(form):
    (module, plain), x = attention(form), torch.randn(3, 32)
    assert_same(module.q_proj(x), plain.q_proj(x), form)
    x.add_(1)
    assert_same(module.k_proj(x), plain.k_proj(x), form)
    assert_same(module.v_proj(x), plain.v_proj(x), form)


@each_form
@torch.no_grad()
def test_the_same_tensor_with_content_of_a_replayed_graph_is_multiplied_again(form):
    """A replay writes into the same tensors, and their version counters do not see it; as numpy does here."""
    (module, plain), x = attention(form), torch.randn(1, 32)
    for _ in range(3):
        x.numpy()[:] = torch.randn(1, 32).numpy()
        assert_same(module(x), plain(x), form)
    assert len(groups(module)) == 1


@torch.no_grad()
def test_nothing_is_held_after_the_last_part():
    import gc
    import weakref

    module, x = attention()[0], torch.randn(3, 32)
    module(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


@torch.no_grad()
def test_threads_do_not_mix():
    module, plain = attention()
    wrong = []

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x = torch.randn(2, 32, generator=generator)
            with torch.no_grad():
                if not torch.allclose(module(x), plain(x), atol=1e-5):
                    wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    assert len(groups(module)) == 1


# ------------------------------------------------------------------------------------------ modes of torch


@each_form
def test_autocast(form):
    (module, plain), x = attention(form), torch.randn(3, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(module(x), plain(x), form)
        q = module.q_proj(x)
    assert q.dtype == torch.bfloat16
    with torch.no_grad():
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


def test_merged_dense_layers_learn():
    module = merge_projections_(Attention())
    plain, x = copy.deepcopy(module), torch.randn(3, 32)
    assert len(groups(module)) == 1
    for model in (module, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(module(x), plain(x))  # of the merged weight, which learned as well
    assert len(groups(module)) == 1


def test_an_adapter_beside_a_part_and_around_one():
    module, plain = attention("dense")

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, nn.Parameter(torch.randn(24, 32))

        def forward(self, x):
            return self.base(x) + x @ self.down.T

    module.q_proj, plain.q_proj = Adapter(module.q_proj), Adapter(plain.q_proj)
    plain.q_proj.load_state_dict(module.q_proj.state_dict())
    x = torch.randn(3, 32)
    grads = [torch.autograd.grad(model(x).square().sum(), model.q_proj.down)[0] for model in (module, plain)]
    assert_same(*grads)


@each_form
def test_inference_mode(form):
    module, plain = attention(form)
    with torch.inference_mode():
        x = torch.randn(3, 32)
        assert_same(module.q_proj(x), plain.q_proj(x), form)
        x.add_(1)  # which no version counter shows
        assert_same(module.k_proj(x), plain.k_proj(x), form)


@each_form
def test_compiles_into_one_graph_and_once(form):
    module, plain = attention(form)
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 32)
            assert_same(compiled(x), plain(x), form)
            assert torch.equal(module(x), plain(x))  # eager calls change nothing for it
    assert len(compiled_graphs) == 1
    assert len(groups(module)) == 1


def test_exports():
    (module, plain), x = attention(), torch.randn(3, 32)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), plain(x))


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


# ------------------------------------------------------------------------------------------ memory and copies


@each_form
def test_merging_takes_no_memory_and_splitting_undoes_it(form):
    module, plain = attention(form, merged=False)
    parameters, before = list(module.parameters()), storages(module)
    assert storages(merge_projections_(module)) == before
    assert len({t.untyped_storage().data_ptr() for t in module.state_dict().values()}) == (3 if form == "sparse" else 2)
    assert all(tensor.is_contiguous() for tensor in module.state_dict().values())
    assert all(one is two for one, two in zip(parameters, module.parameters(), strict=True))
    assert merge_projections_(module) is module  # again: nothing to do
    assert len(groups(module)) == 1
    split_projections_(module)
    assert type(module.q_proj) is type(plain.q_proj)
    assert storages(module) == before
    assert len({t.untyped_storage().data_ptr() for t in module.state_dict().values()}) == len(module.state_dict())
    x = torch.randn(3, 32)
    assert_same(module(x), plain(x), form)
    assert vars(module.q_proj).keys() == vars(plain.q_proj).keys()


@each_form
def test_copies_and_pickles_are_plain_layers(form):
    (module, plain), x = attention(form), torch.randn(3, 32)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    assert len(buffer.getvalue()) < 1.5 * size_saved(plain)
    buffer.seek(0)
    assert len(pickle.dumps(module)) < 1.5 * len(pickle.dumps(plain))
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other.q_proj) is type(plain.q_proj)
        assert storages(other) == storages(plain)
        assert_same(other(x), plain(x), form)
        other.q_proj.bias.data.fill_(9)
        assert_same(module(x), plain(x), form)
    alone = copy.deepcopy(module.q_proj)
    assert storages(alone) == storages(plain.q_proj)
    assert [p.requires_grad for p in alone.parameters()] == [p.requires_grad for p in plain.q_proj.parameters()]


def size_saved(model) -> int:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return len(buffer.getvalue())


@pytest.mark.filterwarnings("ignore:sparse_linear. not on the cpp backend")  # float64
@each_form
@torch.no_grad()
def test_a_model_that_is_cast_multiplies_separately_until_it_is_merged_again(form):
    (module, plain), x = attention(form), torch.randn(3, 32)
    assert groups(module.float())  # nothing moved
    for model in (module, plain):
        model.double()
    assert groups(module) == []
    assert storages(module) == storages(plain)
    assert_same(module(x.double()), plain(x.double()), form)
    merge_projections_(module)
    assert_same(module(x.double()), plain(x.double()), form)
    assert len(groups(module)) == 1
    assert storages(module) == storages(plain)
    assert module.to("meta").q_proj(x.to("meta").double()).shape == (3, 24)


@each_form
@pytest.mark.parametrize("assign", [False, True])
@torch.no_grad()
def test_a_loaded_state_is_what_multiplies(form, assign):
    (module, _), (_, other) = attention(form), attention(form)
    x = torch.randn(3, 32)
    module(x)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert module.load_state_dict(state, assign=assign) == ([], [])
    assert_same(module(x), other(x), form)
    assert bool(groups(module)) is not assign
    assert storages(module) == storages(other)


@each_form
@pytest.mark.parametrize("assign", [False, True])
@torch.no_grad()
def test_a_state_loaded_between_two_parts_is_what_multiplies(form, assign):
    (module, _), (_, other) = attention(form), attention(form)
    x = torch.randn(3, 32)
    module.q_proj(x)
    module.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert_same(module.k_proj(x), other.k_proj(x), form)


@each_form
@torch.no_grad()
def test_a_replaced_or_reassigned_tensor_is_what_multiplies(form):
    name = "values" if form == "sparse" else "weight"
    for replace in (
        lambda part, new: setattr(part, name, new),
        lambda part, new: setattr(getattr(part, name), "data", new.data),
        lambda part, new: part._parameters.update({name: new}),
    ):
        (module, plain), x = attention(form), torch.randn(3, 32)
        new = nn.Parameter(2 * getattr(plain.k_proj, name), requires_grad=False)
        for model in (module, plain):
            replace(model.k_proj, new)
        assert_same(module(x), plain(x), form)
    getattr(module.q_proj, name).mul_(2)
    getattr(plain.q_proj, name).mul_(2)
    assert_same(merge_projections_(module)(x), plain(x), form)


@torch.no_grad()
def test_a_backends_own_form_is_made_again_for_loaded_weights(monkeypatch):
    def prepare(values, indices):
        return torch.ops.proxsparse.unpack_nm(values, indices, 2, 4)

    own = Kernel("own", lambda x, v, i, b, w: functional.linear(x, w, b), lambda x, values: None, prepare)
    monkeypatch.setitem(registry._kernels["sparse_linear"], "own", own)
    layers = {"gate_proj": pruned_linear(32, 8), "up_proj": pruned_linear(32, 8)}
    module, x = merge_projections_(sparsify_(nn.ModuleDict(layers), backend="own")), torch.randn(3, 32)
    other = sparsify_(nn.ModuleDict({"gate_proj": pruned_linear(32, 8), "up_proj": pruned_linear(32, 8)}))
    for _ in range(2):
        before = [layer(x) for layer in module.values()]
        module.load_state_dict(other.state_dict())
        for layer, old, expected in zip(module.values(), before, other.values(), strict=True):
            torch.testing.assert_close(found := layer(x), expected(x))
            assert not torch.equal(found, old) or _ == 1
    assert len(groups(module)) == 1


# ------------------------------------------------------------------------------------------ files


@each_form
def test_a_merged_model_is_saved_as_ever(form, tmp_path):
    import transformers

    model, plain = pruned_model("qwen2"), pruned_model("qwen2")
    if form == "sparse":
        sparsify_(model), sparsify_(plain)
    merge_projections_(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path / "merged")
    plain.save_pretrained(tmp_path / "plain")
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    assert (tmp_path / "merged" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.randint(3, 260, (1, 5))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, plain(tokens).logits)


@each_form
def test_safetensors_and_torch_save_take_the_state(form, tmp_path):
    module, plain = attention(form)
    save_file(module.state_dict(), tmp_path / "state.safetensors")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    for state in (load_file(tmp_path / "state.safetensors"), torch.load(tmp_path / "state.pt")):
        assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


@torch.no_grad()
def test_a_merged_model_is_unpacked():
    model, plain = pruned_model(), pruned_model()
    merge_projections_(sparsify_(model))
    unsparsify_(model)
    assert not any(isinstance(module, SparseLinear | MergedPart) for module in model.modules())
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_merged_dense_model_is_not_packed_before_it_is_split():
    model = merge_projections_(pruned_model())
    with pytest.raises(ValueError, match=r"it is a MergedLinear, not nn\.Linear itself"):
        sparsify_(model)
    sparsify_(split_projections_(model))


# ------------------------------------------------------------------------------------------ what stays apart


def change(name, act):
    return pytest.param(act, id=name)


@pytest.mark.parametrize(
    "act",
    [
        change("one is packed", lambda m: setattr(m, "k_proj", SparseLinear.from_linear(m.k_proj))),
        change("a bias is missing", lambda m: setattr(m.k_proj, "bias", None)),
        change("dtype", lambda m: m.k_proj.double()),
        change("device", lambda m: m.k_proj.to("meta")),
        change("all on meta", lambda m: m.to("meta")),
        change("in_features", lambda m: setattr(m, "k_proj", pruned_linear(16, 8))),
        change("a name is missing", lambda m: delattr(m, "v_proj")),
        change("None", lambda m: setattr(m, "v_proj", None)),
        change("forward hook", lambda m: m.k_proj.register_forward_hook(lambda *_: None)),
        change("forward pre-hook", lambda m: m.k_proj.register_forward_pre_hook(lambda *_: None)),
        change("own forward", lambda m: setattr(m.k_proj, "forward", lambda x: x)),
        change("subclass", lambda m: setattr(m, "k_proj", type("Special", (nn.Linear,), {})(32, 8))),
        change("parametrised", lambda m: nn.utils.parametrizations.weight_norm(m.k_proj)),
        change("requires_grad", lambda m: m.k_proj.requires_grad_(False)),
        change("tied", lambda m: setattr(m, "tied", tied(m.k_proj))),
        change("the same layer twice", lambda m: setattr(m, "k_proj", m.q_proj)),
    ],
)
def test_what_differs_stays_apart(act):
    module = Attention()
    assert len(groups(merge_projections_(copy.deepcopy(module)))) == 1
    act(module)
    merge_projections_(module)
    assert not any(isinstance(part, MergedPart) for part in module.modules())


def tied(layer):
    """Another layer with the same weight."""
    other = nn.Linear(layer.in_features, layer.out_features, bias=False)
    other.weight = layer.weight
    return other


def test_different_backends_and_other_names_stay_apart():
    module = Attention()
    module.q_proj, module.k_proj = (SparseLinear.from_linear(layer) for layer in (module.q_proj, module.k_proj))
    module.v_proj = SparseLinear.from_linear(module.v_proj, "reference")
    assert groups(merge_projections_(module)) == []
    other = nn.ModuleDict({"left": pruned_linear(), "right": pruned_linear()})
    assert groups(merge_projections_(other)) == []


@torch.no_grad()
def test_a_hook_added_later_sees_its_part():
    (module, plain), x, seen = attention(), torch.randn(3, 32), []
    module.k_proj.register_forward_hook(lambda part, inputs, y: seen.append((part, inputs[0], y)))
    module.v_proj.register_forward_pre_hook(lambda part, inputs: (2 * inputs[0],))
    assert_same(module(x)[:, :32], plain(x)[:, :32], "sparse")
    assert_same(module.v_proj(x), plain.v_proj(2 * x), "sparse")
    assert seen[0][:2] == (module.k_proj, x)
    assert_same(seen[0][2], plain.k_proj(x), "sparse")


@torch.no_grad()
def test_an_explicit_backend_serves_the_merged_product():
    (module, plain), x = attention(), torch.randn(3, 32)
    for backend in ("cpp", "reference"):
        with use_backend(backend):
            assert_same(module(x), plain(x), "sparse" if backend == "cpp" else "dense")


def test_a_model_of_several_kinds_merges_what_fits():
    model = tiny_model("llama")
    prune_(model, but=("lm_head", "k_proj"))
    sparsify_(model)
    merge_projections_(model)
    assert len(groups(model)) == 2  # gate and up of two blocks; k is dense beside packed q and v
