"""x W^T + b on every backend: odd and large shapes between NaN, twice the same, replayed, compiled, launched early."""

import contextlib

import pytest
import torch
from ops.on_each_backend import backends_of
from pruned import assert_as_good_as_dense, pruned_linear, pruned_weight, quantized

from proxsparse import SparseLinear
from proxsparse.ops import pack_nm, sparse_linear
from proxsparse.ops.backends import cuda
from proxsparse.ops.registry import get_kernel

# Whole tiles, odd numbers of rows, columns that no 16-byte access fits, one block; then layers of a 7B model.
SHAPES = [(1, 4), (7, 12), (33, 260), (65, 320), (129, 1088), (96, 576), (512, 1024)]
LARGE = [(1000, 4096), (14336, 4096), (4096, 14336)]
ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 40, 100, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def among(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """A copy with this number many times before and after it: a kernel that reads further gets it."""
    memory = torch.full((tensor.numel() + 1024,), number, dtype=tensor.dtype, device=tensor.device)
    memory[512:-512] = tensor.flatten()
    return memory[512:-512].view(tensor.shape)


def among_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with NaN before and after it."""
    return among(tensor, torch.nan)


def packed(shape: tuple[int, int], dtype: torch.dtype, device: str, backend: str):
    """weight, values, indices, and the backend's own form of a random 2:4 weight; None if it serves no 8 rows."""
    weight = pruned_weight(shape, dtype).to(device)
    values, indices = pack_nm(weight)
    prepare = get_kernel("sparse_linear", backend).prepare
    if prepare and get_kernel("sparse_linear", backend).supports(weight.new_empty(8, shape[1]), values) is not None:
        return None
    return weight, among_nan(values), indices, prepare(values, indices) if prepare else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", backends_of("sparse_linear"))
def test_products(place, dtype):
    backend, device = place
    count = 0
    for shape in SHAPES + (LARGE if device == "cuda" else []):
        weight, *form = packed(shape, dtype, device, backend) or (None,)
        for rows in ROWS if weight is not None else ():
            x = among_nan(torch.randn(rows, shape[1]).to(device, dtype))
            if get_kernel("sparse_linear", backend).supports(x, form[0]) is not None:
                continue
            for bias in (None, among_nan(torch.randn(shape[0]).to(device, dtype))):
                values, indices, prepared = form
                y = sparse_linear(x, values, indices, bias, prepared, backend)
                assert_as_good_as_dense(y, x, weight, bias)
                again = sparse_linear(x, values, indices, bias, prepared, backend)
                assert torch.equal(y, again), f"{rows} rows, {shape}: two calls differ"
                count += 1
    if count == 0:
        pytest.skip(f"{backend} serves no {dtype} here")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("place", backends_of("sparse_linear"))
def test_products_of_codes(place, bits):
    backend, device = place
    supports = get_kernel("sparse_linear", backend).supports
    easy = quantized(pruned_weight((32, 64), torch.bfloat16), bits)[0].to(device)
    if reason := supports(torch.empty(16, 64, dtype=torch.bfloat16, device=device), easy):
        pytest.skip(reason)
    for shape in SHAPES + (LARGE if device == "cuda" else []):
        weight = pruned_weight(shape, torch.bfloat16)
        codes, indices, scales, weight = (part.to(device) for part in quantized(weight, bits))
        codes, scales = among(codes, 119), among(scales, torch.nan)
        for rows in ROWS:
            x = among_nan(torch.randn(rows, shape[1]).to(device, torch.bfloat16))
            bias = among_nan(torch.randn(shape[0]).to(device, torch.bfloat16))
            if supports(x, codes) is None:
                y = sparse_linear(x, codes, indices, bias, backend=backend, scales=scales)
                assert_as_good_as_dense(y, x, weight, bias)
                assert torch.equal(y, sparse_linear(x, codes, indices, bias, backend=backend, scales=scales))


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "rows"), [("gemv", 1), ("gemv", 16), ("cutlass", 40)])
def test_a_replayed_call_multiplies_the_present_x(backend, rows):
    weight, *form = packed((512, 1024), torch.bfloat16, "cuda", backend) or (None,)
    if weight is None:
        pytest.skip(f"{backend} is not here")
    values, indices, prepared = form
    x, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((rows, 1024), (512,)))
    if reason := get_kernel("sparse_linear", backend).supports(x, values):
        pytest.skip(reason)
    sparse_linear(x, values, indices, bias, prepared, backend)  # what happens once happens here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse_linear(x, values, indices, bias, prepared, backend)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert_as_good_as_dense(y, x, weight, bias)
        assert torch.equal(y, sparse_linear(x, values, indices, bias, prepared, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_dependent_launches_change_nothing(rows):
    """A chain of calls, each launched before the one before it has ended, at once and in a CUDA graph."""
    values, indices = pack_nm(pruned_weight((1024, 1024), torch.bfloat16).cuda() / 16)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    if reason := get_kernel("sparse_linear", "gemv").supports(x, values):
        pytest.skip(reason)

    def chain(context: contextlib.AbstractContextManager) -> torch.Tensor:
        y = x
        with context:
            for _ in range(8):
                y = sparse_linear(y, values, indices, backend="gemv")
        return y

    expected = chain(contextlib.nullcontext())
    torch.cuda.synchronize()  # nothing may still write the weights
    assert torch.equal(chain(cuda.dependent_launch()), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(cuda.dependent_launch())
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(y, chain(contextlib.nullcontext()))


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
