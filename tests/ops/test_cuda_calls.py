"""What Python hands to proxsparse._C_cuda and _C_cutlass: the calls of a GPU from end to end, kernels on the CPU."""

import ctypes
import functools

import pytest
import torch
from ops.on_cpu import address, fenced, survives
from pruned import assert_as_good_as_dense, pruned_weight, quantized
from torch import Tensor

from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.reference import pack

kernel = functools.partial(get_kernel, "sparse_linear")
EQUATIONS = {80: cutlass.metadata_sm80, 90: cutlass.metadata_sm90}
# Of the tests of the metadata: whole tiles, and what sm_90 pads.
TILED = [(80, (32, 64)), (80, (64, 192)), (80, (96, 320)), (90, (64, 128)), (90, (128, 384)), (90, (8, 16))]
TILED += [(90, (72, 144)), (90, (200, 640))]
bf16 = torch.bfloat16


@pytest.fixture
def gpu(cuda_on_cpu, monkeypatch):
    """gpu(major): from then on a GPU of this compute capability is asked for."""
    return lambda major: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))


@pytest.mark.parametrize("dtypes", [(bf16, bf16), (torch.float32, bf16), (torch.float64, torch.float64)], ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (3, 12), (1, 128), (5, 260), (2, 1536)], ids=str)
def test_the_masked_weight_stays_within_its_memory(shape, dtypes, cuda_on_cpu):
    weight, pretrained = (torch.randn(shape, dtype=dtype) for dtype in dtypes)
    scale = torch.rand(shape[1], dtype=torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    for at_end in (True, False):
        tensors = [fenced(tensor, at_end) for tensor in (weight, weight, pretrained, scale)]
        assert survives(lambda: get_kernel("masked_weight_", "cuda").run(*tensors, 2, 4))  # noqa: B023 it runs at once


# ------------------------------------------------------------------------------------------ packing, metadata


@pytest.mark.parametrize("dtype", [bf16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (3, 12), (5, 8), (9, 260), (130, 64), (2, 1028)], ids=str)
def test_packing_stays_within_its_memory(shape, dtype, cuda_library):
    weight = pruned_weight(shape, dtype)
    packed = pack.pack_nm(weight)

    def run(weight: Tensor, values: Tensor, indices: Tensor, infeasible: Tensor | None = None) -> None:
        tensors = (address(tensor) for tensor in (weight, values, indices, infeasible))
        assert cuda_library.pack(*tensors, ctypes.c_int64(shape[0]), shape[1], weight.itemsize) == 0

    for at_end in (True, False):
        tensors = [fenced(tensor, at_end) for tensor in (weight, *packed, torch.zeros(1, dtype=torch.int32))]
        assert survives(lambda: run(*tensors))  # noqa: B023 it runs at once
        assert survives(lambda: run(*tensors[:3]))  # noqa: B023


@pytest.mark.parametrize(("architecture", "shape"), TILED, ids=str)
def test_metadata_is_what_the_equations_say(architecture, shape, cuda_library):
    indices = torch.randint(0, 256, (shape[0], shape[1] // 8), dtype=torch.uint8)
    metadata = torch.empty(cutlass.metadata_bytes(*shape, architecture), dtype=torch.uint8)

    def run(indices: Tensor, metadata: Tensor) -> None:
        assert cuda_library.metadata(address(indices), address(metadata), *shape, architecture) == 0

    run(indices, metadata)
    assert torch.equal(metadata, EQUATIONS[architecture](indices))
    for at_end in (True, False):
        assert survives(lambda: run(fenced(indices, at_end), fenced(metadata, at_end)))  # noqa: B023


# ------------------------------------------------------------------------------------------ gemv


@pytest.mark.parametrize("bias", [None, torch.randn(33).half()], ids=["", "bias"])
@pytest.mark.parametrize("rows", [1, 16])
def test_gemv(rows, bias, cuda_on_cpu):
    weight, x = pruned_weight((33, 320), torch.float16), torch.randn(rows, 320).half()
    assert_as_good_as_dense(kernel("gemv").run(x, *pack.pack_nm(weight), bias, None), x, weight, bias)


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_gemv_of_codes(bits, dtype, cuda_on_cpu):
    """As good as torch with the dequantized weight, rounded to the dtype."""
    for rows, shape in ((1, (33, 320)), (3, (20, 260)), (16, (64, 512))):
        codes, indices, scales, weight = quantized(pruned_weight(shape, dtype), bits)
        x, bias = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype) if rows == 3 else None
        assert_as_good_as_dense(kernel("gemv").run(x, codes, indices, bias, None, scales), x, weight, bias)


def test_gemv_takes_x_at_any_address(cuda_on_cpu):
    weight, memory = pruned_weight((33, 320), bf16), torch.randn(2 * 320 + 8).bfloat16()
    for offset in range(8):
        x = memory[offset : offset + 2 * 320].view(2, 320)
        assert_as_good_as_dense(cuda.gemv(x, *pack.pack_nm(weight), None), x, weight)


def test_a_dependent_launch_only_within_its_block(cuda_on_cpu):
    x, weight = torch.randn(1, 320).bfloat16(), pack.pack_nm(pruned_weight((33, 320), bf16))
    cuda.gemv(x, *weight, None)
    with cuda.dependent_launch():
        cuda.gemv(x, *weight, None)
    cuda.gemv(x, *weight, None)
    assert cuda._C.gemv_dependent == [False, True, False]


# ------------------------------------------------------------------------------------------ CUTLASS


class Multiplications:
    """proxsparse._C_cutlass (csrc/cutlass/bindings.cpp): multiplies by what the metadata say."""

    def __init__(self) -> None:
        self.tiles, self.pointers = [], []

    def workspace_bytes(self, architecture, tile, values, x):
        return 0

    def gemm(self, architecture, tile, values, metadata, x, bias, y, workspace, stream):
        self.tiles.append(tile)
        self.pointers.append(x.data_ptr())
        indices = torch.full((len(values), values.shape[1] // 4), -1, dtype=torch.int32)
        place = EQUATIONS[architecture](torch.arange(indices.numel(), dtype=torch.int32).view(indices.shape) + 1000)
        real = place >= 1000
        indices.view(-1)[place[real].long() - 1000] = metadata[real].int()
        weight = pack.unpack_nm(values, indices.to(torch.uint8)).float()
        product = x.float() @ weight.t() + (0 if bias is None else bias.float())
        if architecture == 80:
            assert bias is None
            assert len(x) % 8 == 0
            product = product.t()
        assert y.shape == product.shape
        y.copy_(product)


@pytest.fixture
def multiplications(cuda_on_cpu, monkeypatch):
    monkeypatch.setattr(cutlass, "_C", Multiplications())
    return cutlass._C


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("major", "shape"), [(9, (72, 144)), (8, (96, 320)), (10, (32, 64))], ids=str)
def test_cutlass(major, shape, with_bias, multiplications, gpu):
    """With the tiles of the GPU; x is copied only to add rows."""
    gpu(major)
    weight, bias = pruned_weight(shape, bf16), torch.randn(shape[0]).bfloat16() if with_bias else None
    for rows in (17, 40, 200, 600):
        x = torch.randn(rows, shape[1]).bfloat16()
        y = kernel("cutlass").run(x, *pack.pack_nm(weight), bias, None)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), exact, rtol=8e-3, atol=3e-2)
        assert (multiplications.pointers[-1] == x.data_ptr()) == (rows % 8 == 0 or major == 9)
    small, large = ["64x64"] * 2, ["128x128"] * 2
    assert multiplications.tiles == (["64x32", "64x64", "128x128", "128x256"] if major == 9 else small + large)


@pytest.mark.parametrize("major", [8, 9])
def test_the_metadata_of_cutlass_can_be_prepared_once(major, multiplications, gpu):
    """Also of indices that begin anywhere, which are copied before."""
    gpu(major)
    values, indices = pack.pack_nm(pruned_weight((96, 320), bf16))
    anywhere = torch.cat([indices.new_zeros(1), indices.flatten()])[1:].view(indices.shape)
    prepared = kernel("cutlass").prepare(values, indices)
    assert torch.equal(prepared, EQUATIONS[10 * major](indices))
    assert torch.equal(prepared, kernel("cutlass").prepare(values, anywhere))
    for rows in (17, 40):
        x, count = torch.randn(rows, 320).bfloat16(), cuda._C.metadata_calls
        y = kernel("cutlass").run(x, values, indices, None, prepared)
        assert cuda._C.metadata_calls == count
        assert torch.equal(y, kernel("cutlass").run(x, values, indices, None, None))
        assert cuda._C.metadata_calls == count + 1
