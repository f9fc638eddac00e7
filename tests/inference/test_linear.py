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


def test_wrong_layers_are_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        SparseLinear(6, 8)
    with pytest.raises(ValueError, match="'fastest'"):
        SparseLinear(8, 8, backend="fastest")
    with pytest.raises(ValueError, match="blocks hold more than 2"):
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


def test_a_weight_packed_under_inference_mode_gives_no_gradient_and_says_so():
    with torch.inference_mode():
        sparse = SparseLinear.from_linear(linear := pruned_linear())
    x = torch.randn(2, 24, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), linear(x))
    with pytest.raises(RuntimeError, match=r"no dL/dx .* torch.inference_mode\(\): do that under torch.no_grad"):
        sparse(x)


def test_an_adapter_learns_beside_it():
    sparse = SparseLinear.from_linear(pruned_linear())
    down, up = nn.Linear(24, 2, bias=False), nn.Linear(2, 7, bias=False)
    nn.init.zeros_(up.weight)
    model = nn.ModuleList([sparse, down, up])
    x, target = torch.randn(16, 24), torch.randn(16, 7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append((sparse(x) + up(down(x)) - target).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert sparse.values.grad is None


def test_a_packed_weight_that_shall_learn_is_refused():
    sparse = SparseLinear.from_linear(pruned_linear()).requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires_grad_"):
        sparse(torch.randn(2, 24)).sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", ["auto", "cpp", "reference"])
def test_forward_calls_only_what_torch_2_11_compiles(backend, autocast, monkeypatch):
    """Dynamo of torch 2.11, unlike later ones, breaks the graph at `is_autocast_available`."""
    x, values = torch.zeros(3, 64), torch.zeros(48, 32)
    if reason := backend == "cpp" and get_kernel("sparse_linear", "cpp").supports(x, values):
        pytest.skip(reason)
    layer, x = SparseLinear.from_linear(pruned_linear(64, 48), backend), torch.randn(3, 64)
    monkeypatch.setattr(
        torch.amp, "is_autocast_available", lambda _kind: pytest.fail("Dynamo of 2.11 breaks the graph")
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
        torch.compiler.reset()  # it compiles a function for so many layers only
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(compiled, y)


def test_compiles_into_one_graph():
    linear = pruned_linear()
    sparse, x = SparseLinear.from_linear(linear, "reference"), torch.randn(2, 3, 24, requires_grad=True)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), sparse(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], torch.autograd.grad(linear(x).sum(), x)[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), linear(x))


def test_exports():
    sparse, x = SparseLinear.from_linear(pruned_linear()), torch.randn(3, 24)
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(sparse, (x,), dynamic_shapes=({0: rows},))
    for count in (3, 5):
        x = torch.randn(count, 24)
        assert torch.equal(program.module()(x), sparse(x))


def test_meta():
    sparse = SparseLinear(24, 7, device="meta", dtype=torch.bfloat16)
    assert sparse(torch.empty(2, 24, device="meta", dtype=torch.bfloat16)).shape == (2, 7)
    with pytest.raises(ValueError, match="meta"):
        sparse(torch.zeros(2, 24, dtype=torch.bfloat16))
    assert sparse.to_empty(device="cpu").indices.device.type == "cpu"


def test_casts_and_moves():
    linear = pruned_linear()
    sparse = SparseLinear.from_linear(linear)
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()):
        before = sparse.indices.clone()
        cast(sparse)
        assert sparse.values.dtype == sparse.bias.dtype
        assert torch.equal(sparse.indices, before)
        x = torch.randn(2, 24).to(sparse.values.dtype)
        assert sparse(x).dtype == x.dtype
    assert sparse.to("meta").indices.is_meta


def test_copies_and_pickles():
    sparse, x = SparseLinear.from_linear(pruned_linear()).eval(), torch.randn(2, 24)
    buffer = io.BytesIO()
    torch.save(sparse, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(sparse),
        pickle.loads(pickle.dumps(sparse)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(other(x), sparse(x))
        assert not any(p.requires_grad for p in other.parameters())
        assert other.values.data_ptr() != sparse.values.data_ptr()


def test_state_dict_round_trip():
    sparse, x = SparseLinear.from_linear(pruned_linear()), torch.randn(2, 24)
    other = SparseLinear(24, 7)
    for assign in (False, True):
        assert other.load_state_dict(sparse.state_dict(), assign=assign) == ([], [])
        assert torch.equal(other(x), sparse(x))
    assert set(sparse.state_dict()) == {"values", "indices", "bias"}


@pytest.mark.parametrize(
    ("name", "damage", "word"),
    [
        ("indices", lambda tensor: tensor.zero_(), "out of order"),
        ("indices", lambda tensor: tensor.fill_(255), "out of order"),
        ("indices", lambda tensor: tensor[:, :2], "indices"),
        ("indices", lambda tensor: tensor.int(), "indices"),
        ("values", lambda tensor: tensor[:, :10], "indices"),
        ("values", lambda tensor: tensor.int(), "dtype"),
    ],
)
def test_damaged_state_is_refused_with_the_name_of_the_layer(name, damage, word):
    model = nn.ModuleDict({"up_proj": SparseLinear.from_linear(pruned_linear())})
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = {key: tensor.clone() for key, tensor in before.items()}
    state[f"up_proj.{name}"] = damage(state[f"up_proj.{name}"])
    with pytest.raises(RuntimeError, match=rf"up_proj: .*{word}"):
        model.load_state_dict(state)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_missing_state_is_refused():
    sparse = SparseLinear.from_linear(pruned_linear())
    with pytest.raises(RuntimeError, match="indices"):
        SparseLinear(24, 7).load_state_dict({"values": sparse.values, "bias": sparse.bias})


@pytest.fixture
def preparing(monkeypatch):
    """A backend with a form of its own: the dense weight. Returns the list of the dtypes that it has prepared."""
    prepared = []

    def prepare(values, indices):
        prepared.append(values.dtype)
        return torch.ops.proxsparse.unpack_nm(values, indices, 2, 4)

    def linear(x, values, indices, bias, weight):
        assert weight.device == x.device
        return nn.functional.linear(x, weight, bias)

    kernel = Kernel("preparing", linear, lambda x, values: None, prepare)
    monkeypatch.setitem(registry._kernels["sparse_linear"], "preparing", kernel)
    return prepared


def test_a_backends_own_form_is_made_once_and_dropped_when_the_weight_changes(preparing):
    linear = pruned_linear()
    sparse, x = SparseLinear.from_linear(linear, "preparing"), torch.randn(2, 24)
    assert preparing == []
    torch.testing.assert_close(sparse(x), linear(x))
    sparse(x)
    assert preparing == [torch.float32]
    sparse.double()(x.double())
    assert preparing == [torch.float32, torch.float64]
    sparse.float().load_state_dict(SparseLinear.from_linear(other := pruned_linear()).state_dict())
    torch.testing.assert_close(sparse(x), other(x))
    assert len(preparing) == 3
    copy.deepcopy(sparse)(x)
    assert len(preparing) == 4
    assert set(sparse.state_dict()) == {"values", "indices", "bias"}


def test_a_backends_own_form_under_autocast_and_compile(preparing):
    linear = pruned_linear()
    sparse, x = SparseLinear.from_linear(linear, "preparing"), torch.randn(2, 24)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(sparse(x), linear(x))
        assert preparing == [torch.bfloat16]
        compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), linear(x))


@pytest.fixture
def deriving(monkeypatch):
    """A backend that can do without the form of its own, here the dense weight. Returns what each call was handed."""
    handed = []

    def linear(x, values, indices, bias, weight):
        handed.append(None if weight is None else values.dtype)
        weight = unpack_nm(values, indices) if weight is None else weight
        return nn.functional.linear(x, weight, bias)

    def supports(x, values):
        return "it has had enough rows" if len(x) > 99 else None

    kernel = Kernel("deriving", linear, supports, unpack_nm, True)
    monkeypatch.setitem(registry._kernels["sparse_linear"], "deriving", kernel)
    monkeypatch.setattr(choice, "order", lambda *arguments: ["preparing", "deriving", "reference"])
    choice.forget()
    yield handed
    choice.forget()


CHANGES = {
    "cast": lambda layer: layer.double().float(),
    "moved": lambda layer: layer.to("cpu"),
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@pytest.mark.parametrize("change", [*CHANGES.values(), None], ids=[*CHANGES, "loaded"])
@pytest.mark.parametrize("backend", ["deriving", "auto"])
def test_a_form_that_is_optional_is_held_until_the_weight_changes(backend, change, deriving):
    sparse, x = SparseLinear.from_linear(linear := pruned_linear(), backend), torch.randn(2, 24)
    if backend == "auto":
        assert sparse.prepare_("deriving") is sparse
    for _ in range(2):
        torch.testing.assert_close(sparse(x), linear(x))
    assert deriving == [torch.float32] * 2
    if change:
        sparse = change(sparse)
    else:
        sparse.load_state_dict(SparseLinear.from_linear(linear := pruned_linear()).state_dict())
    assert sparse.prepared is None
    torch.testing.assert_close(sparse(x), linear(x))
    assert deriving[2:] == [None if backend == "auto" else torch.float32]


def test_a_form_is_that_of_one_backend(deriving, preparing):
    sparse, x = SparseLinear.from_linear(linear := pruned_linear(), "deriving"), torch.randn(2, 24)
    sparse(x)
    for backend in ("auto", "preparing"):
        sparse.backend = backend
        torch.testing.assert_close(sparse(x), linear(x))
    assert deriving == [torch.float32, None]
    assert preparing == [torch.float32]


def test_auto_derives_a_form_that_is_optional_and_never_takes_a_backend_that_needs_one(deriving, preparing):
    sparse, x = SparseLinear.from_linear(pruned_linear()), torch.randn(2, 24)
    for _ in range(2):
        sparse(x)
    assert deriving == [None, None]
    assert preparing == []
    sparse.prepare_("deriving")
    with torch.autocast("cpu", torch.bfloat16):
        sparse(x)
    sparse(x)
    assert deriving[2:] == [None, torch.float32]


def test_a_compiled_call_holds_no_form_that_is_optional_and_uses_one_that_is_held(deriving):
    sparse, x = SparseLinear.from_linear(linear := pruned_linear(), "deriving"), torch.randn(2, 24)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), linear(x))
    assert sparse.prepared is None
    sparse.prepare_("deriving")
    torch.testing.assert_close(compiled(x), linear(x))
    assert deriving == [None, None, torch.float32]


@pytest.mark.parametrize("backend", ["deriving", "preparing"])
def test_a_captured_call_holds_no_form_and_uses_one_that_is_held(backend, deriving, preparing, monkeypatch):
    sparse, x = SparseLinear.from_linear(linear := pruned_linear(), backend), torch.randn(2, 24)
    capturing = [True]
    monkeypatch.setattr(inference_linear, "is_capturing", lambda tensor: capturing[0])
    torch.testing.assert_close(sparse(x), linear(x))
    with pytest.raises(RuntimeError, match="call prepare_ before the capture"):
        sparse.prepare_(backend)
    assert sparse.prepared is None
    capturing[0] = False
    sparse(x)
    capturing[0], held = True, sparse.prepared
    torch.testing.assert_close(sparse(x), linear(x))
    assert sparse.prepared is held
    assert deriving == ([None, torch.float32, torch.float32] if backend == "deriving" else [])
    assert preparing == ([torch.float32] * 2 if backend == "preparing" else [])


def test_a_refused_call_makes_no_form(deriving):
    sparse = SparseLinear.from_linear(pruned_linear(), "deriving")
    with pytest.raises(RuntimeError, match=r"'deriving' was chosen explicitly but cannot serve .*enough rows"):
        sparse(torch.randn(100, 24))
    with pytest.raises(ValueError, match="must be in_features=24"):
        sparse(torch.randn(2, 20))
    assert sparse.prepared is None


def test_a_form_that_would_not_be_read_is_not_prepared(deriving, preparing, monkeypatch):
    auto, other = (SparseLinear.from_linear(pruned_linear(), backend) for backend in ("auto", "reference"))
    with pytest.raises(ValueError, match="'reference' reads the packed form; there is nothing to prepare"):
        auto.prepare_("reference")
    with pytest.raises(ValueError, match="a layer of backend 'auto' never calls 'preparing'"):
        auto.prepare_("preparing")
    with pytest.raises(ValueError, match="a layer of backend 'reference' never calls 'deriving'"):
        other.prepare_("deriving")
    monkeypatch.setattr(inference_linear, "MANY_ROWS", 100)
    with pytest.raises(RuntimeError, match="'deriving' cannot serve this layer: it has had enough rows"):
        auto.prepare_("deriving")
    assert auto.prepared is None


def test_repr():
    text = repr(SparseLinear(24, 7, bias=False))
    assert text == "SparseLinear(in_features=24, out_features=7, bias=False, pattern=2:4, backend=auto)"
