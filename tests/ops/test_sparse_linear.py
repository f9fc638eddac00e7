"""The op sparse_linear: every backend against the dense product, what is refused, and which backend serves."""

import math

import pytest
import torch
from pruned import assert_as_good_as_dense, pruned_linear, pruned_weight, quantized
from torch.utils.flop_counter import FlopCounterMode

from proxsparse import use_backend
from proxsparse.ops import choice, pack_nm, registry, sparse_linear, unpack_nm
from proxsparse.ops.registry import AUTO, Kernel, get_kernel, list_backends

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dtypes_of(backend: str) -> list[torch.dtype]:
    """The dtypes that the backend multiplies by on this machine."""
    if backend == AUTO:
        return DTYPES
    supports = get_kernel("sparse_linear", backend).supports
    x, values = torch.zeros(8, 128, device=DEVICE), torch.zeros(64, 64, device=DEVICE)
    return [dtype for dtype in DTYPES if supports(x.to(dtype), values.to(dtype)) is None]


HERE = [(backend, dtype) for backend in (AUTO, *list_backends("sparse_linear")) for dtype in dtypes_of(backend)]


@pytest.mark.filterwarnings("ignore:sparse_linear. not on the")  # another dtype than the fastest backend serves
@pytest.mark.parametrize(("backend", "dtype"), HERE, ids=str)
@pytest.mark.parametrize("shape", [(128,), (1, 128), (2, 3, 128), (0, 128), (2, 0, 128), (5, 1, 3, 128)], ids=str)
def test_equals_the_dense_product(shape, backend, dtype):
    x = torch.randn(shape).to(DEVICE, dtype)
    weight, bias = pruned_weight((64, 128), dtype).to(DEVICE), torch.randn(64).to(DEVICE, dtype)
    values, indices = pack_nm(weight)
    rows, prepared = math.prod(shape[:-1]), None
    if backend != AUTO:
        kernel = get_kernel("sparse_linear", backend)
        if reason := kernel.supports(x.reshape(rows, 128), values):
            pytest.skip(reason)
        prepared = kernel.prepare(values, indices) if kernel.prepare else None
    for b in (None, bias):
        assert_as_good_as_dense(sparse_linear(x, values, indices, b, prepared, backend), x, weight, b)


@pytest.fixture
def packed():
    """x [2, 24], values, indices and bias of a layer with 7 outputs."""
    linear = pruned_linear()
    return {"x": torch.zeros(2, 24), "bias": linear.bias.detach()} | dict(
        zip(("values", "indices"), pack_nm(linear.weight), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x[:, :20], r"x of shape \[2, 20\].* in_features=24"),
        ("x", lambda x: x[0, 0], "in_features=24"),
        ("x", lambda x: x.bfloat16(), r"torch.bfloat16, values is torch.float32.* torch.autocast"),
        ("x", lambda x: x.long(), "torch.int64, which must be floating point"),
        ("x", lambda x: x.to("meta"), "x is on meta, values is on cpu"),
        ("values", lambda values: values[0], "values of shape .* must be a matrix"),
        ("indices", lambda indices: indices[:, :2], "indices"),
        ("indices", lambda indices: indices.int(), "indices"),
        ("bias", lambda bias: bias[:3], r"bias of shape \[3\] must be \[7\]"),
        ("bias", lambda bias: bias.double(), "bias is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_kernel(name, change, message, packed, monkeypatch):
    monkeypatch.setattr(choice, "choose", lambda *_: pytest.fail("a kernel was chosen"))
    with pytest.raises(ValueError, match=f"sparse_linear: .*{message}"):
        sparse_linear(**packed | {name: change(packed[name])})


@pytest.mark.filterwarnings("ignore:sparse_linear. not on the")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes(bits, dtype):
    values, indices, scales, weight = quantized(pruned_weight((64, 160), dtype), bits)
    x = torch.randn(5, 160, dtype=dtype, requires_grad=True)
    for backend in (AUTO, "reference"):
        y = sparse_linear(x, values, indices, backend=backend, scales=scales)
        assert_as_good_as_dense(y, x, weight)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.dtype == dtype
    torch.library.opcheck(torch.ops.proxsparse.sparse_linear.default, (x, values, indices, None, None, AUTO, scales))
    with pytest.raises(ValueError, match=r"x is torch\.int64"):
        sparse_linear(x.long(), values, indices, scales=scales)
    with pytest.raises(ValueError, match=r"scales of shape .* do not belong to codes"):
        sparse_linear(x, values, indices, scales=scales[:, :-1])


@pytest.fixture
def served_by(monkeypatch, packed):
    """served_by(backend) -> the backend that multiplied; "cpp" is the automatic choice and "gemv" serves nothing."""
    used = []

    def add(backend: str, reason: str | None = None) -> None:
        def run(x, values, *_others):
            used.append(backend)
            return x.new_zeros(len(x), len(values))

        kernel = Kernel(backend, run, lambda x, values: reason)
        monkeypatch.setitem(registry._kernels["sparse_linear"], backend, kernel)

    add("cpp")
    add("reference")
    add("gemv", "it is a test")
    monkeypatch.setattr(choice, "choose", lambda *_: get_kernel("sparse_linear", "cpp"))
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.delenv("PROXSPARSE_BACKEND", raising=False)
    return lambda backend=AUTO: (sparse_linear(**packed, backend=backend), used.pop())[1]


def test_an_explicit_choice_serves_or_raises(served_by, monkeypatch):
    assert served_by() == "cpp"
    assert served_by("reference") == "reference"
    with use_backend("reference"):
        assert (served_by(), served_by("cpp")) == ("reference", "cpp")
        with use_backend(None):
            assert served_by() == "cpp"
    with use_backend("triton"), pytest.warns(UserWarning, match="sparse_linear: backend 'triton' has no kernel"):
        assert served_by() == "cpp"
    with pytest.raises(RuntimeError, match=r"'gemv' was chosen .* does not support.*it is a test.*backend='auto'"):
        served_by("gemv")
    with use_backend("gemv"), pytest.raises(RuntimeError, match=r"'gemv' was chosen .*unset PROXSPARSE_BACKEND or"):
        served_by()
    with pytest.raises(ValueError, match="no such backend 'fastest'; choose from auto, cpp"):
        served_by("fastest")
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    assert served_by() == "reference"


def test_only_one_backend_prepares_something():
    """A layer on "auto" passes what it holds to whichever backend is chosen."""
    kernels = [get_kernel("sparse_linear", backend) for backend in list_backends("sparse_linear")]
    assert [kernel.backend for kernel in kernels if kernel.prepare] == ["cutlass"]


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias, packed):
    values, indices, bias = packed["values"], packed["indices"], packed["bias"] if bias else None
    for x in (torch.randn(2, 3, 24, requires_grad=True), torch.randn(24, 5).T, torch.randn(0, 24)):
        torch.library.opcheck(torch.ops.proxsparse.sparse_linear.default, (x, values, indices, bias, None, AUTO))


IN_PLACE = {"add": lambda y: y.add_(1), "clamp": lambda y: y.clamp_(-0.1, 0.1), "relu": torch.nn.ReLU(inplace=True)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 3, 24)], ids=str)
def test_the_output_can_be_changed_in_place_while_grad_is_on(shape, compiled, packed):
    """A view that a custom op returns could not."""
    weight = unpack_nm(packed["values"], packed["indices"])

    def gradient(linear, change):
        x = torch.linspace(-1, 1, math.prod(shape)).view(shape).requires_grad_()
        change(linear(x)).sum().backward()
        return x.grad

    for change in IN_PLACE.values():
        run = lambda x: sparse_linear(x, packed["values"], packed["indices"])  # noqa: E731
        run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        torch.testing.assert_close(gradient(run, change), gradient(lambda x: x @ weight.T, change))


def test_flops_are_those_of_the_dense_product(packed):
    def count(linear) -> int:
        with FlopCounterMode(display=False) as counter:
            linear(torch.zeros(2, 3, 24, requires_grad=True)).sum().backward()
        return counter.get_total_flops()

    weight = unpack_nm(packed["values"], packed["indices"])
    dense = count(lambda x: torch.nn.functional.linear(x, weight))
    assert count(lambda x: sparse_linear(x, packed["values"], packed["indices"])) == dense == 2 * 2 * 6 * 24 * 7
    values, indices, scales, _weight = quantized(pruned_weight((7, 24), torch.float32), 8)
    assert count(lambda x: sparse_linear(x, values, indices, scales=scales)) == dense


def test_unpacking_compiles_without_a_graph_break(packed):
    unpack = torch.compile(unpack_nm, fullgraph=True, backend="aot_eager")
    assert torch.equal(unpack(packed["values"], packed["indices"]), unpack_nm(packed["values"], packed["indices"]))
