"""SparseLinear: what nn.Linear does, on a packed weight: autocast, autograd, compile, export, copies, state."""

import copy
import io
import pickle

import pytest
import torch
from pruned import assert_as_good_as_dense, pruned_linear
from torch import nn

import proxsparse.inference.linear as inference_linear
from proxsparse import SparseLinear
from proxsparse.inference.linear import NO_AUTOCAST
from proxsparse.ops import choice, registry, unpack_nm
from proxsparse.ops.registry import Kernel, get_kernel


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("in_features", "out_features"), [(4, 1), (12, 3), (20, 128), (256, 1), (0, 3), (8, 0)])
def test_awkward_sizes(in_features, out_features):
    linear = pruned_linear(in_features, out_features)
    sparse = SparseLinear.from_linear(linear)
    with torch.no_grad():
        for x in (torch.randn(5, in_features), torch.randn(in_features, 9).T):  # strided
            assert_as_good_as_dense(sparse(x), x, linear.weight, linear.bias)
    assert torch.equal(sparse.dense_weight(), linear.weight)


def test_autocast_is_that_of_linear():
    linear = pruned_linear()
    sparse, x = SparseLinear.from_linear(linear, "reference"), torch.randn(3, 24)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert torch.equal(sparse(x), linear(x))
            assert torch.equal(sparse(x.to(dtype)), linear(x.to(dtype)))
            assert sparse(x).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert SparseLinear.from_linear(linear.double())(x.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "kind", ["cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone", "meta", "lazy", "vulkan"]
)
def test_which_devices_have_no_autocast(kind):
    assert (kind not in NO_AUTOCAST) == torch.amp.is_autocast_available(kind)


def test_repr_and_wrong_layers():
    text = repr(SparseLinear(24, 7, bias=False))
    assert text == "SparseLinear(in_features=24, out_features=7, bias=False, pattern=2:4, backend=auto, bits=16)"
    with pytest.raises(ValueError, match="multiple of 4"):
        SparseLinear(6, 8)
    with pytest.raises(ValueError, match=r"bits=3: .* 16, 8 or 4"):
        SparseLinear(8, 8, bits=3)
    with pytest.raises(ValueError, match="'fastest'"):
        SparseLinear(8, 8, backend="fastest")
    with pytest.raises(ValueError, match="blocks have more than 2"):
        SparseLinear.from_linear(nn.Linear(8, 8))


def test_gradient_of_x():
    linear = pruned_linear()
    sparse = SparseLinear.from_linear(linear)
    x, grad = torch.randn(2, 3, 24, requires_grad=True), torch.randn(2, 3, 7)
    (expected,) = torch.autograd.grad(linear(x), x, grad)
    (found,) = torch.autograd.grad(sparse(x), x, grad)
    torch.testing.assert_close(found, expected)
    double = SparseLinear.from_linear(linear.double())
    assert torch.autograd.gradcheck(double, torch.randn(2, 24, dtype=torch.float64, requires_grad=True))


def test_gradients_that_there_are_not_are_refused():
    with torch.inference_mode():
        sparse = SparseLinear.from_linear(linear := pruned_linear())
    x = torch.randn(2, 24, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), linear(x))
    with pytest.raises(RuntimeError, match=r"no dL/dx .* torch.inference_mode\(\); use torch.no_grad"):
        sparse(x)
    sparse = SparseLinear.from_linear(pruned_linear()).requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires_grad_"):
        sparse(torch.randn(2, 24)).sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", ["auto", "cpp", "reference"])
def test_forward_calls_only_what_torch_2_11_compiles(backend, autocast, monkeypatch):
    """Dynamo of torch 2.11, unlike later ones, breaks the graph at `is_autocast_available`."""
    if reason := backend == "cpp" and get_kernel("sparse_linear", "cpp").supports(
        torch.zeros(3, 64), torch.zeros(48, 32)
    ):
        pytest.skip(reason)
    layer, x = SparseLinear.from_linear(pruned_linear(64, 48), backend), torch.randn(3, 64)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda _: pytest.fail("Dynamo of 2.11 breaks the graph"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
        torch.compiler.reset()  # it compiles a function for so many layers only
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(compiled, y)


def test_compiles_into_one_graph_and_exports():
    linear = pruned_linear()
    sparse, x = SparseLinear.from_linear(linear, "reference"), torch.randn(2, 3, 24, requires_grad=True)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), sparse(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], torch.autograd.grad(linear(x).sum(), x)[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), linear(x))
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(sparse, (torch.randn(3, 24),), dynamic_shapes=({0: rows},))
    for x in (torch.randn(3, 24), torch.randn(5, 24)):
        assert torch.equal(program.module()(x), sparse(x))


def test_casts_and_moves():
    sparse = SparseLinear.from_linear(pruned_linear())
    before = sparse.indices.clone()
    for dtype in (torch.half, torch.double, torch.float, torch.bfloat16):
        sparse.to(dtype)
        assert sparse.values.dtype == sparse.bias.dtype == dtype
        assert torch.equal(sparse.indices, before)
        assert sparse(torch.randn(2, 24, dtype=dtype)).dtype == dtype
    assert sparse.to("meta").indices.is_meta
    assert sparse(torch.empty(2, 24, device="meta", dtype=torch.bfloat16)).shape == (2, 7)
    with pytest.raises(ValueError, match="meta"):
        sparse(torch.zeros(2, 24, dtype=torch.bfloat16))
    assert SparseLinear(24, 7, device="meta").to_empty(device="cpu").indices.device.type == "cpu"


def test_copies_pickles_and_state_dicts():
    sparse, x = SparseLinear.from_linear(pruned_linear()).eval(), torch.randn(2, 24)
    torch.save(sparse, buffer := io.BytesIO())
    buffer.seek(0)
    for other in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), sparse(x))
        assert not any(p.requires_grad for p in other.parameters())
        assert other.values.data_ptr() != sparse.values.data_ptr()
    for assign in (False, True):
        other = SparseLinear(24, 7)
        assert other.load_state_dict(sparse.state_dict(), assign=assign) == ([], [])
        assert torch.equal(other(x), sparse(x))
    assert set(sparse.state_dict()) == {"values", "indices", "weight", "bias"}


@pytest.mark.parametrize(
    ("name", "damage", "word"),
    [
        ("indices", lambda tensor: tensor.zero_(), "out of order"),
        ("indices", lambda tensor: tensor.fill_(255), "out of order"),
        ("indices", lambda tensor: tensor[:, :2], "indices"),
        ("indices", lambda tensor: tensor.int(), "indices"),
        ("values", lambda tensor: tensor[:, :10], "indices"),
        ("values", lambda tensor: tensor.int(), "16 bits needs torch.float32"),
        ("indices", None, "missing"),
    ],
)
def test_damaged_state_is_refused_with_the_name_of_the_layer(name, damage, word):
    model = nn.ModuleDict({"up_proj": SparseLinear.from_linear(pruned_linear())})
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(model.state_dict())
    tensor = state.pop(f"up_proj.{name}")
    if damage:
        state[f"up_proj.{name}"] = damage(tensor)
    with pytest.raises(RuntimeError, match=rf"up_proj: .*{word}" if damage else r"up_proj\.indices"):
        model.load_state_dict(state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def sparse_and_dense(backend="auto"):
    """A packed layer, the dense one, and two rows of input."""
    linear = pruned_linear()
    return SparseLinear.from_linear(linear, backend), linear, torch.randn(2, 24)


@pytest.fixture
def deriving(monkeypatch):
    """A backend that prepares the dense weight. Returns the dtype of the values in each call; None if not prepared."""
    handed = []

    def linear(x, values, indices, bias, weight):
        handed.append(None if weight is None else values.dtype)
        return nn.functional.linear(x, unpack_nm(values, indices) if weight is None else weight, bias)

    supports = lambda x, values: "it has had enough rows" if len(x) > 99 else None  # noqa: E731
    kernel = Kernel("deriving", linear, supports, unpack_nm)
    monkeypatch.setitem(registry._kernels["sparse_linear"], "deriving", kernel)
    monkeypatch.setattr(choice, "order", lambda *arguments: ["deriving", "reference"])
    choice.clear_cache()
    yield handed
    choice.clear_cache()


def load(layer):
    layer.load_state_dict(SparseLinear.from_linear(pruned_linear()).state_dict())
    return layer


CHANGES = {
    "cast": lambda layer: layer.double().float(),
    "moved": lambda layer: layer.to("cpu"),
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "loaded": load,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", ["deriving", "auto"])
def test_a_form_is_held_until_the_weight_changes_and_is_not_part_of_the_state(backend, change, deriving):
    sparse, linear, x = sparse_and_dense(backend)
    if backend == "auto":
        assert sparse.prepare_("deriving") is sparse
    for _ in range(2):
        torch.testing.assert_close(sparse(x), linear(x))
    assert deriving == [torch.float32] * 2
    sparse = CHANGES[change](sparse)
    assert sparse.prepared is None
    torch.testing.assert_close(sparse(x), nn.functional.linear(x, sparse.dense_weight(), sparse.bias))
    assert deriving[2:] == [torch.float32 if backend == "deriving" else None]
    assert set(sparse.state_dict()) == {"values", "indices", "weight", "bias"}


def test_a_form_is_that_of_one_backend(deriving):
    sparse, linear, x = sparse_and_dense("deriving")
    for backend in ("deriving", "auto"):
        sparse.backend = backend
        torch.testing.assert_close(sparse(x), linear(x))
    assert deriving == [torch.float32, None]


def test_auto_holds_a_form_only_after_prepare_and_only_for_its_dtype(deriving):
    sparse, _, x = sparse_and_dense()
    for _ in range(2):
        sparse(x)
    assert deriving == [None, None]
    sparse.prepare_("deriving")
    with torch.autocast("cpu", torch.bfloat16):
        sparse(x)
    sparse(x)
    assert deriving[2:] == [None, torch.float32]


def test_a_compiled_call_holds_no_form_and_uses_one_that_is_held(deriving):
    sparse, linear, x = sparse_and_dense("deriving")
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), linear(x))
    assert sparse.prepared is None
    sparse.prepare_("deriving")
    torch.testing.assert_close(compiled(x), linear(x))
    assert deriving == [None, None, torch.float32]


def test_a_captured_call_holds_no_form_and_uses_one_that_is_held(deriving, monkeypatch):
    sparse, linear, x = sparse_and_dense("deriving")
    capturing = [True]
    monkeypatch.setattr(inference_linear, "is_capturing", lambda tensor: capturing[0])
    torch.testing.assert_close(sparse(x), linear(x))
    with pytest.raises(RuntimeError, match="call prepare_ before the capture"):
        sparse.prepare_("deriving")
    assert sparse.prepared is None
    capturing[0] = False
    sparse(x)
    capturing[0], held = True, sparse.prepared
    torch.testing.assert_close(sparse(x), linear(x))
    assert sparse.prepared is held
    assert deriving == [None, torch.float32, torch.float32]


def test_a_refused_call_makes_no_form(deriving):
    sparse = SparseLinear.from_linear(pruned_linear(), "deriving")
    with pytest.raises(RuntimeError, match=r"'deriving' was chosen explicitly but does not support .*enough rows"):
        sparse(torch.randn(100, 24))
    with pytest.raises(ValueError, match="must be in_features=24"):
        sparse(torch.randn(2, 20))
    assert sparse.prepared is None
    assert deriving == []


def test_a_form_that_would_not_be_read_is_not_prepared(deriving, monkeypatch):
    auto, other = (SparseLinear.from_linear(pruned_linear(), backend) for backend in ("auto", "reference"))
    for layer, backend, message in (
        (auto, "reference", "'reference' reads the packed format; no prepare_"),
        (other, "deriving", "a layer with backend='reference' never calls 'deriving'"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.prepare_(backend)
    monkeypatch.setattr(inference_linear, "MANY_ROWS", 100)
    with pytest.raises(RuntimeError, match="'deriving' does not support this layer: it has had enough rows"):
        auto.prepare_("deriving")
    assert auto.prepared is None
