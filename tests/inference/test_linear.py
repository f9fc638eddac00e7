"""SparseLinear does what nn.Linear does, with 16, 8 and 4 bits; the forms that a backend prepares."""

import copy
import io
import pickle

import pytest
import torch
from pruned import assert_as_good_as_dense, pruned_linear
from torch import nn

import proxsparse.inference.linear as inference_linear
from proxsparse import SparseLinear
from proxsparse.ops import choice, registry, sparse_linear, unpack_nm
from proxsparse.ops.registry import Kernel

each_bits = pytest.mark.parametrize("bits", [16, 8, 4])
AS_CODES = {"values", "indices", "scales", "weight", "bias"}


def packed_and_dense(bits=16, in_features=24, out_features=7, backend="auto", pattern="2:4"):
    """A packed layer, and nn.Linear with the weight that it stands for."""
    linear = pruned_linear(in_features, out_features, pattern=pattern)
    packed = SparseLinear.from_linear(linear, backend, bits=bits, pattern=pattern)
    with torch.no_grad():
        linear.weight.copy_(packed.dense_weight())
    return packed, linear


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:sparse_linear. not on the cpp backend")
@pytest.mark.parametrize(
    "size",
    [
        *[(4, 1), (12, 3), (20, 128), (256, 1), (140, 9), (0, 3), (8, 0)],
        *[(896, 2, "6:8"), (4096, 2, "8:10"), (5632, 2, "4:6"), (11008, 2, "8:10"), (14336, 2, "4:6")],
        *[(22, 5, "2:4"), (24, 3, "4:6"), (130, 9, "4:6"), (256, 7, "6:8"), (140, 9, "6:8"), (130, 5, "8:10")],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@each_bits
def test_matches_the_dense_layer(bits, dtype, size):
    in_features, out_features, *pattern = size
    if bits != 16 and 0 in size:
        pytest.skip("codes need a value")
    packed, linear = packed_and_dense(bits, in_features, out_features, "auto", *pattern)
    assert bits != 16 or torch.equal(packed.dense_weight(), linear.weight)
    packed.to(dtype)
    exact = copy.deepcopy(packed).double().dense_weight() if bits != 16 else packed.dense_weight()
    with torch.no_grad():
        for x in (torch.randn(in_features), torch.randn(5, in_features), torch.randn(in_features, 40).T):  # strided
            x = x.to(dtype)
            assert_as_good_as_dense(packed(x), x, exact, packed.bias)


@pytest.mark.parametrize(("pattern", "in_features", "others"), [("2:4", 8, (5, 6, 7)), ("6:8", 96, (90, 94, 95, 97))])
def test_x_of_another_width_is_refused_also_if_its_windows_are_as_many(pattern, in_features, others):
    packed, _ = packed_and_dense(in_features=in_features, pattern=pattern)
    for width in others:
        with pytest.raises(ValueError, match=rf"{width}\]: the last dimension must be in_features={in_features}"):
            packed(torch.randn(3, width))
        if width % 2:
            with pytest.raises(ValueError, match="the last dimension must be"):
                sparse_linear(torch.randn(1, width), packed.values, packed.indices, pattern=pattern)


@each_bits
def test_autocast_is_that_of_linear(bits):
    packed, linear = packed_and_dense(bits, backend="reference")
    x = torch.randn(3, 24)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert packed(x).dtype == packed(x.to(dtype)).dtype == dtype
            torch.testing.assert_close(packed(x), linear(x), rtol=2e-2, atol=2e-2)
            assert bits != 16 or torch.equal(packed(x), linear(x))
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        assert packed.double()(x.double()).dtype == torch.float64


def test_repr_and_wrong_layers():
    text = repr(SparseLinear(24, 7, bias=False))
    assert text == "SparseLinear(in_features=24, out_features=7, bias=False, pattern=2:4, backend=auto, bits=16)"
    spoiled = pruned_linear(8, 4)
    spoiled.weight.data[2, spoiled.weight[2].nonzero()[0]] = torch.nan
    for make, message in (
        (lambda: SparseLinear(7, 8), "even number of at least 4"),
        (lambda: SparseLinear(8, 8, pattern="1:4"), "pattern 1:4: packed layers are 2:4, 4:6"),
        (lambda: SparseLinear(8, 8, bits=3), r"bits=3: .* 16, 8 or 4"),
        (lambda: SparseLinear(8, 8, backend="fastest"), "'fastest'"),
        (lambda: SparseLinear.from_linear(nn.Linear(8, 8)), "blocks have more than 2"),
        (
            lambda: SparseLinear.from_linear(pruned_linear(64, 8), bits=8).quantized(4),
            "bits=4: the layer has been rounded to 8 bits",
        ),
        (lambda: SparseLinear.from_linear(spoiled, bits=8), "values contain NaN, infinity or a magnitude above"),
        (lambda: SparseLinear.from_linear(spoiled, bits=4), "values contain NaN, infinity or a magnitude above"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@each_bits
def test_gradient_of_x(bits):
    packed, linear = packed_and_dense(bits)
    x, grad = torch.randn(2, 3, 24, requires_grad=True), torch.randn(2, 3, 7)
    (expected,) = torch.autograd.grad(linear(x), x, grad)
    (found,) = torch.autograd.grad(packed(x), x, grad)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(packed.double(), torch.randn(2, 24, dtype=torch.float64, requires_grad=True))


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


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
@each_bits
def test_compiles_into_one_graph_and_exports(bits, backend, autocast, monkeypatch):
    """Dynamo of torch 2.11, unlike later ones, breaks the graph at `is_autocast_available`."""
    (packed, _), x = packed_and_dense(bits, 64, 48, backend), torch.randn(3, 64, requires_grad=True)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda _: pytest.fail("Dynamo of 2.11 breaks the graph"))
    torch.compiler.reset()  # it compiles a function for so many layers only
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(compiled(x), packed(x))
        gradients = [torch.autograd.grad(layer(x).float().sum(), x)[0] for layer in (compiled, packed)]
    torch.testing.assert_close(*gradients)
    if not autocast:
        rows = torch.export.Dim("rows", max=64)
        program = torch.export.export(packed, (x.detach(),), dynamic_shapes=({0: rows},))
        for x in (torch.randn(3, 64), torch.randn(5, 64)):
            assert torch.equal(program.module()(x), packed(x))


@each_bits
def test_copies_pickles_and_state_dicts(bits):
    (packed, _), x = packed_and_dense(bits), torch.randn(2, 24)
    packed.eval()
    torch.save(packed, buffer := io.BytesIO())
    buffer.seek(0)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), packed(x))
        assert not any(p.requires_grad for p in other.parameters())
        assert other.values.data_ptr() != packed.values.data_ptr()
    for assign in (False, True):
        other = SparseLinear(24, 7, bits=bits)
        assert other.load_state_dict(packed.state_dict(), assign=assign) == ([], [])
        assert torch.equal(other(x), packed(x))
    assert set(packed.state_dict()) == AS_CODES - ({"scales"} if bits == 16 else set())
    for wrong in {16, 8, 4} - {bits}:
        with pytest.raises(RuntimeError, match=f"values are .* but a layer with {wrong} bits needs|{wrong} bits needs"):
            nn.ModuleDict({"up": SparseLinear(24, 7, bits=wrong)}).load_state_dict(
                nn.ModuleDict({"up": packed}).state_dict()
            )


@pytest.mark.parametrize(
    ("bits", "name", "damage", "word"),
    [
        (16, "indices", lambda tensor: tensor.zero_(), "out of order"),
        (16, "indices", lambda tensor: tensor[:, :2], "indices"),
        (16, "values", lambda tensor: tensor.int(), "16 bits needs torch.float32"),
        (16, "indices", None, "missing"),
        (4, "scales", lambda tensor: tensor * torch.nan, "codes times scales are NaN"),
    ],
)
def test_damaged_state_is_refused_with_the_name_of_the_layer(bits, name, damage, word):
    """The whole state, or a part of it, where the other tensors are those of the layer."""
    model = nn.ModuleDict({"up_proj": packed_and_dense(bits)[0]})
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(model.state_dict())
    tensor = state.pop(f"up_proj.{name}")
    part = {f"up_proj.{name}": damage(tensor)} if damage else {}
    with pytest.raises(RuntimeError, match=rf"up_proj: .*{word}" if damage else r"up_proj\.indices"):
        model.load_state_dict(state | part)
    if damage:
        with pytest.raises(RuntimeError, match=rf"up_proj: .*{word}"):
            model.load_state_dict(part, strict=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    if damage:
        getattr(model["up_proj"], name).data = damage(tensor)
        with pytest.raises(ValueError, match=name):
            model["up_proj"].dense_weight()


# ------------------------------------------------------------------------------------------ forms of a backend


def sparse_and_dense(backend="auto"):
    """A packed layer, the dense one, and two rows of input."""
    return *packed_and_dense(backend=backend), torch.randn(2, 24)


@pytest.fixture
def deriving(monkeypatch):
    """A backend that prepares the dense weight. Returns the dtype of the values in each call; None if not prepared."""
    handed = []

    def linear(x, values, indices, bias, weight, scales):
        handed.append(None if weight is None else values.dtype)
        return nn.functional.linear(x, unpack_nm(values, indices) if weight is None else weight, bias)

    supports = lambda x, values, scales: "it has had enough rows" if len(x) > 99 else None  # noqa: E731
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


def test_a_form_is_that_of_one_backend_and_dtype_and_auto_holds_one_only_after_prepare(deriving):
    sparse, linear, x = sparse_and_dense("deriving")
    for backend in ("deriving", "auto"):
        sparse.backend = backend
        torch.testing.assert_close(sparse(x), linear(x))
    assert deriving == [torch.float32, None]
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
