"""Merged layers that are copied, cast, loaded, saved or split; and what is never merged."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from merge_cases import Attention, assert_same, attention, each_form, groups
from pruned import prune_, pruned_linear, pruned_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import nn
from torch.nn import functional

from proxsparse import SparseLinear
from proxsparse.inference.convert import sparsify_, unsparsify_
from proxsparse.inference.merge import MergedPart, merge_projections_, split_projections_
from proxsparse.ops import registry
from proxsparse.ops.registry import Kernel


def storages(model) -> dict:
    """The bytes of all memory that the tensors of a model are in, by address."""
    tensors = [tensor for tensor in model.state_dict().values() if tensor.numel()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def memory(model) -> int:
    return sum(storages(model).values())


@each_form
@torch.no_grad()
def test_merging_takes_no_memory_and_splitting_undoes_it(form):
    module, plain = attention(form, merged=False)
    parameters, before = list(module.parameters()), memory(module)
    assert memory(merge_projections_(module)) == before
    assert len(storages(module)) == (3 if form == "sparse" else 2)
    assert all(tensor.is_contiguous() for tensor in module.state_dict().values())
    assert all(one is two for one, two in zip(parameters, module.parameters(), strict=True))
    assert merge_projections_(module) is module  # again: nothing to do
    assert len(groups(module)) == 1
    split_projections_(module)
    assert type(module.q_proj) is type(plain.q_proj)
    assert memory(module) == before
    assert len(storages(module)) == sum(tensor.numel() > 0 for tensor in module.state_dict().values())
    x = torch.randn(3, 32)
    assert_same(module(x), plain(x), form)
    assert vars(module.q_proj).keys() == vars(plain.q_proj).keys()


def saved(model) -> bytes:
    torch.save(model, buffer := io.BytesIO())
    return buffer.getvalue()


@each_form
@torch.no_grad()
def test_copies_and_pickles_are_plain_layers(form):
    (module, plain), x = attention(form), torch.randn(3, 32)
    assert len(saved(module)) < 1.5 * len(saved(plain))
    assert len(pickle.dumps(module)) < 1.5 * len(pickle.dumps(plain))
    loaded = torch.load(io.BytesIO(saved(module)), weights_only=False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert type(other.q_proj) is type(plain.q_proj)
        assert memory(other) == memory(plain)
        assert_same(other(x), plain(x), form)
        other.q_proj.bias.data.fill_(9)
        assert_same(module(x), plain(x), form)
    alone = copy.deepcopy(module.q_proj)
    assert memory(alone) == memory(plain.q_proj)
    assert [p.requires_grad for p in alone.parameters()] == [p.requires_grad for p in plain.q_proj.parameters()]


@pytest.mark.filterwarnings("ignore:sparse_linear. not on the cpp backend")  # float64
@each_form
@torch.no_grad()
def test_a_model_that_is_cast_multiplies_separately_until_it_is_merged_again(form):
    (module, plain), x = attention(form), torch.randn(3, 32, dtype=torch.float64)
    assert groups(module.float())  # nothing moved
    for model in (module, plain):
        model.double()
    for merged in (False, True):
        assert len(groups(merge_projections_(module) if merged else module)) == merged
        assert memory(module) == memory(plain)
        assert_same(module(x), plain(x), form)
    assert module.to("meta").q_proj(x.to("meta")).shape == (3, 24)


@each_form
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("between", [False, True])
@torch.no_grad()
def test_a_loaded_state_is_what_multiplies(form, assign, between):
    (module, _), (_, other), x = attention(form), attention(form), torch.randn(3, 32)
    module.q_proj(x) if between else module(x)  # between two parts that read x
    assert module.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign) == ([], [])
    if between:
        assert_same(module.k_proj(x), other.k_proj(x), form)
    assert_same(module(x), other(x), form)
    assert bool(groups(module)) is not assign
    assert memory(module) == memory(other)


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
    for model in (module, plain):
        getattr(model.q_proj, name).mul_(2)
    assert_same(merge_projections_(module)(x), plain(x), form)


@torch.no_grad()
def test_a_backends_own_form_is_made_again_for_loaded_weights(monkeypatch):
    def prepare(values, indices):
        return torch.ops.proxsparse.unpack_nm(values, indices, 2, 4)

    own = Kernel("own", lambda x, v, i, b, w: functional.linear(x, w, b), lambda x, values: None, prepare)
    monkeypatch.setitem(registry._kernels["sparse_linear"], "own", own)
    (_, first), (_, second), x = attention(), attention(), torch.randn(3, 32)
    for layer in first.children():
        layer.backend = "own"
    module = merge_projections_(first)
    before = module(x)
    for _ in range(2):
        module.load_state_dict(second.state_dict())
        torch.testing.assert_close(module(x), second(x))
    assert not torch.equal(module(x), before)
    assert len(groups(module)) == 1


@each_form
@torch.no_grad()
def test_a_merged_model_is_saved_like_any_other(form, tmp_path):
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
    loaded, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(tokens).logits, plain(tokens).logits)


@each_form
def test_safetensors_and_torch_save_take_the_state(form, tmp_path):
    module, plain = attention(form)
    save_file(module.state_dict(), tmp_path / "state.safetensors")
    torch.save(module.state_dict(), tmp_path / "state.pt")
    for state in (load_file(tmp_path / "state.safetensors"), torch.load(tmp_path / "state.pt")):
        assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_a_merged_model_is_unpacked_and_is_split_before_it_is_packed():
    model, plain = merge_projections_(sparsify_(pruned_model())), pruned_model()
    unsparsify_(model)
    assert not any(isinstance(module, SparseLinear | MergedPart) for module in model.modules())
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"it is a MergedLinear, a subclass"):
        sparsify_(merge_projections_(model))
    sparsify_(split_projections_(model))


CHANGES = {
    "one is packed": lambda m: setattr(m, "k_proj", SparseLinear.from_linear(m.k_proj)),
    "backend": lambda m: setattr(sparsify_(m).v_proj, "backend", "reference"),
    "a bias is missing": lambda m: setattr(m.k_proj, "bias", None),
    "dtype": lambda m: m.k_proj.double(),
    "device": lambda m: m.k_proj.to("meta"),
    "all on meta": lambda m: m.to("meta"),
    "in_features": lambda m: setattr(m, "k_proj", pruned_linear(16, 8)),
    "a name is missing": lambda m: delattr(m, "v_proj"),
    "None": lambda m: setattr(m, "v_proj", None),
    "forward hook": lambda m: m.k_proj.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.k_proj.register_forward_pre_hook(lambda *_: None),
    "own forward": lambda m: setattr(m.k_proj, "forward", lambda x: x),
    "subclass": lambda m: setattr(m, "k_proj", type("Special", (nn.Linear,), {})(32, 8)),
    "parametrised": lambda m: nn.utils.parametrizations.weight_norm(m.k_proj),
    "requires_grad": lambda m: m.k_proj.requires_grad_(False),
    "tied": lambda m: setattr(m, "tied", nn.ParameterList([m.k_proj.weight])),
    "the same layer twice": lambda m: setattr(m, "k_proj", m.q_proj),
    "other names": lambda m: setattr(m, "left_proj", m._modules.pop("k_proj")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_stays_apart(change):
    module = Attention()
    assert len(groups(merge_projections_(copy.deepcopy(module)))) == 1
    CHANGES[change](module)
    merge_projections_(module)
    assert not any(isinstance(part, MergedPart) for part in module.modules())


def test_a_model_of_several_kinds_merges_what_fits():
    model = merge_projections_(sparsify_(prune_(tiny_model("llama"), but=("lm_head", "k_proj"))))
    assert len(groups(model)) == 2  # gate and up of two blocks; k is dense, q and v are packed


@torch.no_grad()
def test_a_hook_added_later_sees_its_part():
    (module, plain), x, seen = attention(), torch.randn(3, 32), []
    module.k_proj.register_forward_hook(lambda part, inputs, y: seen.append((part, inputs[0], y)))
    module.v_proj.register_forward_pre_hook(lambda part, inputs: (2 * inputs[0],))
    assert_same(module(x)[:, :32], plain(x)[:, :32], "sparse")
    assert_same(module.v_proj(x), plain.v_proj(2 * x), "sparse")
    assert seen[0][:2] == (module.k_proj, x)
    assert_same(seen[0][2], plain.k_proj(x), "sparse")
