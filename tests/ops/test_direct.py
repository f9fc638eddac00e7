"""SparseLinear on a CPU without the dispatcher: the same bits, and only where nothing needs the dispatcher."""

import pytest
import torch
from pruned import pruned_linear
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from proxsparse import SparseLinear, use_backend
from proxsparse.ops.registry import find_kernel
from proxsparse.ops.sparse_linear import direct

cpp = find_kernel("sparse_linear", "cpp")
pytestmark = pytest.mark.skipif(
    bool(cpp.supports(torch.zeros(1, 8), torch.zeros(8, 4))), reason="the C++ kernels are missing"
)


def layer_and_x(dtype=torch.float32, backend="cpp", bits=16, shape=(2, 3, 24)):
    layer = SparseLinear.from_linear(pruned_linear().to(dtype), backend, bits)
    return layer, torch.randn(shape, dtype=dtype)


def directly(layer, x):
    return direct(x, layer.values, layer.indices, layer.bias, layer.backend, layer.scales)


@pytest.mark.parametrize("shape", [(24,), (1, 1, 24), (40, 24), (2, 0, 24)], ids=str)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_direct_has_the_bits_of_the_op(dtype, bits, shape):
    layer, x = layer_and_x(dtype, bits=bits, shape=shape)
    y = directly(layer, x)
    expected = torch.ops.proxsparse.sparse_linear(x, layer.values, layer.indices, layer.bias, None, "cpp", layer.scales)
    assert y.dtype == dtype
    assert torch.equal(y, expected)
    assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        assert torch.equal(directly(layer, x), expected)
    y.add_(1).relu_()


def with_dispatch_mode(layer, x):
    with FlopCounterMode(display=False):
        return layer(x)


def with_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def with_gradient(layer, x):
    (gradient,) = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(gradient, layer.dense_weight().sum(0).expand_as(x))
    return layer(x)


def with_function_mode(layer, x):
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **kwargs or {})

    with Mode():
        y = layer(x)
    assert any("sparse_linear" in name for name in seen)
    return y


def traced(layer, x):
    graph = make_fx(layer)(x)
    assert any("proxsparse.sparse_linear" in str(node.target) for node in graph.graph.nodes)
    return graph(x)


NEED_THE_DISPATCHER = {
    "autograd": with_gradient,
    "autocast": with_autocast,
    "dispatch mode": with_dispatch_mode,
    "function mode": with_function_mode,
    "make_fx": traced,
    "vmap": lambda layer, x: torch.vmap(layer)(x),
    "functionalize": lambda layer, x: torch.func.functionalize(layer)(x),
    "compile": lambda layer, x: torch.compile(layer, fullgraph=True, backend="aot_eager")(x),
    "parameter": lambda layer, x: layer(torch.nn.Parameter(x, requires_grad=False)),
    "strided": lambda layer, x: layer(x.transpose(0, 1).contiguous().transpose(0, 1)),
    "strided weight": lambda layer, x: (setattr(layer.values, "data", layer.values.T.contiguous().T), layer(x))[1],
    "reference": lambda layer, x: (setattr(layer, "backend", "reference"), layer(x))[1],
}


@pytest.mark.parametrize("name", NEED_THE_DISPATCHER)
def test_calls_that_need_the_dispatcher_get_it(name, monkeypatch):
    layer, x = layer_and_x()
    results = []
    monkeypatch.setattr("proxsparse.inference.linear.direct", lambda *args: results.append(direct(*args)))
    y = NEED_THE_DISPATCHER[name](layer, x)
    assert not [result for result in results if result is not None]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "autocast" else {}
    torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.dense_weight(), layer.bias), **tolerance)


def test_fake_tensors_and_refused_calls_do_not_reach_the_kernel():
    layer, x = layer_and_x()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert directly(layer, mode.from_tensor(x)) is None
        assert layer(mode.from_tensor(x)).shape == (2, 3, 7)
    for wrong in (x[..., :20], x.double(), x.half(), torch.tensor(1.0), x.to("meta")):
        assert directly(layer, wrong) is None


def test_direct_uses_the_chosen_backend(monkeypatch):
    layer, x = layer_and_x(backend="auto")
    assert directly(layer, x) is not None
    with use_backend("reference"):
        assert directly(layer, x) is None
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.dense_weight(), layer.bias))
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    assert directly(layer, x) is None
