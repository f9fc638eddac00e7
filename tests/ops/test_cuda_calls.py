"""What Python hands to proxsparse._C_cuda and _C_cutlass: whole calls of a GPU with compiled kernels (tests/ptx)."""

import functools

import pytest
import torch
from ops.test_cutlass_codes import exact
from pruned import assert_as_good_as_dense, pruned_weight, quantized
from ptx.gpu import Extension, cutlass_flags

from proxsparse.ops.backends import cuda, cutlass, cutlass_codes
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


# ------------------------------------------------------------------------------------------ packing, metadata


@pytest.mark.parametrize("shape", [(1, 4), (3, 12), (9, 260), (130, 64), (0, 8)], ids=str)
def test_packing_there_and_back(shape, cuda_on_cpu):
    weight = pruned_weight(shape, bf16)
    values, indices = get_kernel("pack_nm", "cuda").run(weight, 2, 4)
    assert all(map(torch.equal, (values, indices), pack.pack_nm(weight)))
    assert torch.equal(get_kernel("unpack_nm", "cuda").run(*pack.pack_nm(weight), 2, 4), weight)


@pytest.mark.parametrize(("architecture", "shape"), TILED, ids=str)
def test_metadata_is_what_the_equations_say(architecture, shape, cuda_on_cpu):
    indices = torch.randint(0, 256, (shape[0], shape[1] // 8), dtype=torch.uint8)
    metadata = torch.empty(cutlass.metadata_bytes(*shape, architecture), dtype=torch.uint8)
    cuda.cutlass_metadata_(indices, metadata, architecture)
    assert torch.equal(metadata, EQUATIONS[architecture](indices))


# ------------------------------------------------------------------------------------------ gemv


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_gemv(bits, cuda_on_cpu):
    for rows, shape in ((1, (33, 320)), (3, (20, 260)), (16, (64, 512))):
        weight, x, bias = (
            pruned_weight(shape, bf16),
            torch.randn(rows, shape[1]).to(bf16),
            torch.randn(shape[0]).to(bf16),
        )
        values, indices, scales, multiplied = (
            (*pack.pack_nm(weight), None, weight) if bits == 16 else quantized(weight, bits)
        )
        y = kernel("gemv").run(x, values, indices, bias, None, scales)
        assert_as_good_as_dense(y, x, multiplied, bias)


@pytest.mark.slow
def test_gemv_takes_x_at_any_address(cuda_on_cpu):
    weight, memory = pruned_weight((33, 320), bf16), torch.randn(2 * 320 + 8).bfloat16()
    for offset in range(8):
        x = memory[offset : offset + 2 * 320].view(2, 320)
        assert_as_good_as_dense(cuda.gemv(x, *pack.pack_nm(weight), None), x, weight)


@pytest.mark.slow
def test_a_dependent_launch_only_within_its_block(cuda_on_cpu):
    x, weight = torch.randn(1, 320).bfloat16(), pack.pack_nm(pruned_weight((33, 320), bf16))
    cuda.gemv(x, *weight, None)
    with cuda.dependent_launch():
        cuda.gemv(x, *weight, None)
    cuda.gemv(x, *weight, None)
    assert [bool(launch.dependent) for _, launch in cuda_on_cpu.launches] == [False, True, False]


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
def test_the_metadata_of_cutlass_can_be_prepared_once(major, multiplications, gpu, cuda_on_cpu):
    """Also of indices that begin anywhere, which are copied before."""
    gpu(major)
    values, indices = pack.pack_nm(pruned_weight((96, 320), bf16))
    anywhere = torch.cat([indices.new_zeros(1), indices.flatten()])[1:].view(indices.shape)
    prepared = kernel("cutlass").prepare(values, indices)
    assert torch.equal(prepared, EQUATIONS[10 * major](indices))
    assert torch.equal(prepared, kernel("cutlass").prepare(values, anywhere))
    for rows in (17, 40):
        x, count = torch.randn(rows, 320).bfloat16(), len(cuda_on_cpu.launches)
        y = kernel("cutlass").run(x, values, indices, None, prepared)
        assert len(cuda_on_cpu.launches) == count
        assert torch.equal(y, kernel("cutlass").run(x, values, indices, None, None))
        assert len(cuda_on_cpu.launches) == count + 1


@pytest.fixture
def compiled_tile(cuda_on_cpu, gpu, monkeypatch):
    """compiled_tile(name): proxsparse._C_cutlass with this tile for sm_80, as nvcc compiles it."""

    def use(name: str) -> None:
        flags = cutlass_flags()
        gpu(8)
        load = lambda *_: cuda_on_cpu.library(f"cutlass/sm80_{name}.cu", flags, 80)  # noqa: E731
        monkeypatch.setattr(cutlass_codes, "missing", lambda *_: None)
        monkeypatch.setattr(cutlass, "_C", Extension(cuda_on_cpu, "cutlass/bindings.cpp", load))

    return use


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(96, 320), (32, 64)], ids=str)
def test_a_tile_of_cutlass(shape, compiled_tile):
    compiled_tile("64x64")
    weight, bias = pruned_weight(shape, bf16), torch.randn(shape[0]).bfloat16()
    for rows in (1, 17, 72):
        x = torch.randn(rows, shape[1]).bfloat16()
        assert_as_good_as_dense(kernel("cutlass").run(x, *pack.pack_nm(weight), None, None), x, weight)
        y = kernel("cutlass").run(x, *pack.pack_nm(weight), bias, None)
        torch.testing.assert_close(
            y.double(), torch.nn.functional.linear(*(t.double() for t in (x, weight, bias))), rtol=8e-3, atol=3e-2
        )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(96, 384), (32, 128)], ids=str)
def test_a_tile_of_cutlass_for_codes(shape, compiled_tile):
    compiled_tile("int8_64x64")
    codes, indices, scales, _ = quantized(pruned_weight(shape, bf16), 8)
    bias = torch.randn(shape[0]).bfloat16()
    for rows in (1, 17, 72):
        x = torch.randn(rows, shape[1]).bfloat16()
        y = cutlass_codes.sparse_linear_int8(x, codes, indices, scales, bias)
        expected, largest = exact(cutlass_codes.INT8, x, codes, indices, scales, bias)
        assert ((y.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * largest).all()
