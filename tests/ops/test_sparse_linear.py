"""The op sparse_linear: x W^T + b on every backend against the dense product; what is refused; torch around it."""

import math

import pytest
import torch
from ops.on_each_backend import backends_of
from pruned import assert_as_good_as_dense, pruned_linear, pruned_weight, quantized

from proxsparse import SparseLinear
from proxsparse.ops import choice, dequantize_nm, nm_mask, pack_nm, quantize_nm, sparse_linear, unpack_nm
from proxsparse.ops.backends import cpp
from proxsparse.ops.registry import AUTO, get_kernel, list_backends
from proxsparse.patterns import NMPattern

# Whole tiles, odd numbers of rows, columns that no 16-byte access fits, one block; then layers of a 7B model.
SHAPES = [(1, 4), (7, 12), (33, 260), (65, 320), (129, 1088), (96, 576), (512, 1024)]
LARGE = [(1000, 4096), (14336, 4096), (4096, 14336)]
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 40, 100, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:sparse_linear. not on the")  # no kernel of the fastest backend
each_place = pytest.mark.parametrize("place", backends_of("sparse_linear"))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
kernel_dtypes = pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)


def among(tensor: torch.Tensor, number: float = torch.nan) -> torch.Tensor:
    """A copy with this number many times before and after it: a kernel that reads further gets it."""
    memory = torch.full((tensor.numel() + 1024,), number, dtype=tensor.dtype, device=tensor.device)
    memory[512:-512] = tensor.flatten()
    return memory[512:-512].view(tensor.shape)


def weight_of(shape, dtype, bits, device="cpu"):
    """values or codes between NaN or 119, indices, scales or None, and the weight; bits: 16, 8 or 4."""
    weight = pruned_weight(shape, dtype)
    packed = (*pack_nm(weight), None, weight) if bits == 16 else quantized(weight, bits)
    values, indices, scales, weight = (None if part is None else part.to(device) for part in packed)
    return among(values, torch.nan if bits == 16 else 119), indices, None if bits == 16 else among(scales), weight


# ------------------------------------------------------------------------------------------ against the dense product


@each_dtype
@pytest.mark.parametrize("bits", [16, 8, 4])
@each_place
def test_matches_the_dense_product(place, bits, dtype):
    """And twice the same."""
    (backend, device), served = place, False
    kernel = get_kernel("sparse_linear", backend)
    for shape in SHAPES + (LARGE if device == "cuda" else []):
        values, indices, scales, weight = weight_of(shape, dtype, bits, device)
        given = (values,) if scales is None else (values, scales)
        prepared = None
        if kernel.prepare and kernel.supports(values.new_empty(8, shape[1], dtype=dtype), *given) is None:
            prepared = kernel.prepare(values, indices)
        for rows in ROWS:
            x = among(torch.randn(rows, shape[1]).to(device, dtype))
            if kernel.supports(x, *given) is None:
                for bias in (None, among(torch.randn(shape[0]).to(device, dtype))):
                    call = (x, values, indices, bias, prepared, backend, scales)
                    y, served = sparse_linear(*call), True
                    assert_as_good_as_dense(y, x, weight, bias)
                    assert torch.equal(y, sparse_linear(*call)), f"{rows} rows, {shape}: two calls differ"
    if not served:
        pytest.skip(f"{backend} serves no {dtype} with {bits} bits here")


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10"])
@each_place
def test_windows_match_the_dense_product(place, pattern, bits):
    """Whole blocks, remainders, padding: in_features that fill a step of the kernels, or do not."""
    (backend, device), served = place, False
    for in_features in (480, 4098, 896, 122, 12_398):
        weight = torch.randn(40, in_features)
        cut = in_features // NMPattern.parse(pattern).m * NMPattern.parse(pattern).m
        weight[:, :cut] *= nm_mask(weight[:, :cut].abs(), pattern)
        weight[20:] *= torch.rand(20, in_features) < 0.5  # a window may then keep a zero of another window's column
        weight = weight.bfloat16()
        values, indices = pack_nm(weight, pattern)
        given = (values,) if bits == 16 else quantize_nm(values, bits)
        if bits < 16:
            weight = unpack_nm(dequantize_nm(given[0], given[1].double()), indices, pattern, in_features)
        given, indices, weight = [part.to(device) for part in given], indices.to(device), weight.to(device)
        for rows in (1, 7, 16, 40):
            x = among(torch.randn(rows, in_features).to(device, torch.bfloat16))
            if get_kernel("sparse_linear", backend).supports(x, *given) is None:
                scales = given[1] if bits < 16 else None
                y = sparse_linear(x, given[0], indices, scales=scales, backend=backend, pattern=pattern)
                served = True
                assert_as_good_as_dense(y, x, weight)
    if not served:
        pytest.skip(f"{backend} serves no bfloat16 with {bits} bits here")


@pytest.fixture
def kernel(compiled):
    """The kernel of the CPU."""
    return get_kernel("sparse_linear", "cpp")


FEW_TO_MANY = (0, 1, 2, 3, 5, 7, 33, 64, 170)
# out_features, in_features, rows: then parts of long rows and of a large x
SIZES = [(*shape, FEW_TO_MANY) for shape in ((7, 4), (13, 60), (53, 76), (40, 132), (9, 4612), (26, 128))]
SIZES += [(53, 4612, (43, 170)), (13, 4108, (1090,)), (70, 65536, (70,))]
SIZES += [(53, in_features, (64,)) for in_features in (2728, 5444, 5460)]


@pytest.mark.parametrize(("out_features", "in_features", "rows"), SIZES)
@pytest.mark.parametrize("bits", [16, 8, 4])
@kernel_dtypes
def test_any_number_of_rows_and_any_strides(dtype, bits, out_features, in_features, rows, kernel):
    values, indices, scales, weight = weight_of((out_features, in_features), dtype, bits)
    bias = torch.randn(out_features).to(dtype)
    scattered = [None if part is None else torch.stack([part, part], -1)[..., 0] for part in (values, indices, scales)]
    for count in rows:
        x = torch.randn(count, in_features).to(dtype)
        y = kernel.run(x, values, indices, bias, None, scales)
        assert_as_good_as_dense(y, x, weight, bias)
        y_strided = kernel.run(x.T.contiguous().T, *scattered[:2], bias, None, scattered[2])
        assert torch.equal(y_strided, y)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_many_rows_where_onednn_is_off(bits, kernel):
    """Also on a CPU with AMX the kernel for other CPUs then multiplies."""
    values, indices, scales, weight = weight_of((53, 1028), torch.bfloat16, bits)
    x = torch.randn(70, 1028).bfloat16()
    with torch.backends.mkldnn.flags(enabled=False):
        assert_as_good_as_dense(kernel.run(x, values, indices, None, None, scales), x, weight)


@kernel_dtypes
def test_nan_and_infinity_stay_in_their_row_and_meet_the_kept_weights_alone(dtype, kernel):
    weight, x = pruned_weight((40, 64), dtype), torch.ones(50, 64, dtype=dtype)
    x[7, 3], x[49, 5] = torch.nan, torch.inf
    y = kernel.run(x, *pack_nm(weight), None, None)
    assert y[7].isnan().all()
    others = torch.arange(50) % 42 != 7
    assert_as_good_as_dense(y[others], x[others], weight)

    weight = torch.tensor([1.0, 2.0, 0, 0, 0, 0, 3.0, 4.0], dtype=dtype).repeat(3, 1)
    weight[1, 0], weight[2, 0] = torch.nan, -torch.inf
    x = torch.ones(4, 8, dtype=dtype)
    x[1, 2], x[2, 7], x[3, 1] = torch.nan, torch.inf, torch.nan  # the first meets no weight
    nan, inf = torch.nan, torch.inf
    expected = torch.tensor([[10, nan, -inf], [10, nan, -inf], [inf, nan, nan], [nan, nan, nan]], dtype=dtype)
    y = kernel.run(x, *pack_nm(weight), None, None)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [6, 70])
@kernel_dtypes
def test_threads_change_nothing(dtype, rows, kernel):
    """Every output is computed by one thread, in one order."""
    weight, x = pruned_weight((301, 1024), dtype), torch.randn(rows, 1024).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(kernel.run(x, *pack_nm(weight), None, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_as_good_as_dense(results[0], x, weight)


# ------------------------------------------------------------------------------------------ torch around it


@pytest.fixture
def packed():
    """x [2, 24], values, indices and bias of a layer with 7 outputs."""
    linear = pruned_linear()
    values, indices = pack_nm(linear.weight)
    return {"x": torch.zeros(2, 24), "values": values, "indices": indices, "bias": linear.bias.detach()}


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_opcheck(bits):
    values, indices, scales, _ = weight_of((7, 24), torch.float32, bits)
    inputs = [(torch.randn(2, 3, 24, requires_grad=True), None), (torch.randn(24, 5).T, torch.randn(7))]
    for x, bias in [*inputs, (torch.randn(0, 24), None)]:
        arguments = (x, values, indices, bias, None, AUTO, scales)
        torch.library.opcheck(torch.ops.proxsparse.sparse_linear.default, arguments)


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


def test_only_one_backend_prepares_something():
    """A layer on "auto" passes what it holds to whichever backend is chosen."""
    kernels = [get_kernel("sparse_linear", backend) for backend in list_backends("sparse_linear")]
    assert [kernel.backend for kernel in kernels if kernel.prepare] == ["cutlass"]


# ------------------------------------------------------------------------------------------ refusals


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
    codes, indices, scales, _ = quantized(pruned_weight((7, 24)), 8)
    with pytest.raises(ValueError, match=r"scales of shape \[7, 0\] must be \[7, 1\]"):
        sparse_linear(packed["x"], codes, indices, scales=scales[:, :0])


@pytest.mark.parametrize(
    ("x", "values", "reason"),
    [
        (torch.zeros(1, 8).half(), torch.zeros(2, 4).half(), "not torch.float16 times"),
        (torch.zeros(1, 8), torch.zeros(2, 4).bfloat16(), "not torch.float32 times torch.bfloat16"),
        (torch.zeros(1, 8, device="meta"), torch.zeros(2, 4), "the tensor is on meta"),
        (torch.zeros(1, 8), torch.zeros(2, 4, device="meta"), "the tensor is on meta"),
        (torch.zeros(1, 8).half(), torch.zeros(2, 4).char(), "not torch.float16 times torch.int8"),
    ],
)
def test_what_the_cpu_kernel_does_not_serve(x, values, reason, kernel, monkeypatch):
    assert reason in kernel.supports(x, values)
    assert kernel.supports(torch.zeros(1, 8), torch.zeros(2, 4)) is None
    monkeypatch.setattr(cpp, "_C", None)
    monkeypatch.setattr(cpp, "_missing", "the compiled extension is missing")
    assert kernel.supports(torch.zeros(1, 8), torch.zeros(2, 4)) == "the compiled extension is missing"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 8).double()}, "x has dtype Double: .* supports float32 and bfloat16"),
        ({"x": torch.zeros(2, 9)}, r"m=4, x of shape \[2, 9\]: .* the number of columns even"),
        ({"m": 5}, "m=5, .* m must be 4, 6, 8"),
        ({"x": torch.zeros(2, 12)}, r"values of shape \[3, 4\].*of shape \[3, 6\]"),
        ({"x": torch.zeros(8, 2).T}, "x of shape .* must be a contiguous"),
        ({"values": torch.zeros(3, 4).bfloat16()}, "values .* must be a contiguous Float"),
        ({"indices": torch.zeros(3, 2).byte()}, r"indices of shape \[3, 2\].*shape \[3, 1\]"),
        ({"bias": torch.zeros(2)}, r"bias of shape \[2\].*shape \[3\]"),
        ({"y": torch.zeros(2, 4)}, r"y of shape \[2, 4\].*shape \[2, 3\]"),
        ({"scales": torch.zeros(3, 1)}, "values .* must be a contiguous Byte"),
        ({"values": torch.zeros(3, 4).char(), "scales": torch.zeros(3)}, r"scales of .* shape \[3, 1\]"),
        ({"values": torch.zeros(3, 4).char(), "scales": torch.zeros(3, 1).int()}, "scales of .* contiguous Float"),
    ],
)
def test_the_compiled_kernel_refuses_what_does_not_fit(changed, message, compiled):
    good = {"x": torch.zeros(2, 8), "values": torch.zeros(3, 4), "indices": torch.zeros(3, 1).byte(), "m": 4}
    with pytest.raises(ValueError, match=message):
        compiled.sparse_linear(**good | {"bias": None, "scales": None, "y": torch.ones(2, 3)} | changed)


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "rows"), [("gemv", 1), ("gemv", 16), ("cutlass", 40)])
def test_a_replayed_call_multiplies_the_present_x(backend, rows):
    values, indices, _, weight = weight_of((512, 1024), torch.bfloat16, 16, "cuda")
    x, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rows, 1024), (512,)))
    kernel = get_kernel("sparse_linear", backend)
    if reason := kernel.supports(x, values):
        pytest.skip(reason)
    call = (x, values, indices, bias, kernel.prepare(values, indices) if kernel.prepare else None, backend)
    sparse_linear(*call)  # what happens once happens here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse_linear(*call)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert_as_good_as_dense(y, x, weight, bias)
        assert torch.equal(y, sparse_linear(*call))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_layer_compiled_by_inductor(mode):
    """Without a graph break, and under the CUDA graphs of torch.compile."""
    layer = SparseLinear.from_linear(pruned_linear(1024, 512, dtype=torch.bfloat16).cuda(), "gemv")
    x = torch.randn(2, 3, 1024, device="cuda").bfloat16()
    if reason := get_kernel("sparse_linear", "gemv").supports(x.view(6, 1024), layer.values):
        pytest.skip(reason)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        for _ in range(3):
            assert torch.equal(compiled(x), layer(x))
