"""What Python hands to proxsparse._C_cuda and _C_cutlass: the calls of a GPU from end to end, kernels on the CPU."""

import contextlib
import ctypes
import functools
import json
from types import SimpleNamespace

import pytest
import torch
from ops.on_cpu import TYPES, address
from torch import Tensor

from proxsparse.ops import tuning
from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.reference import pack

kernel = functools.partial(get_kernel, "sparse_linear")
EQUATIONS = {80: cutlass.metadata_sm80, 90: cutlass.metadata_sm90}


class Kernels:
    """proxsparse._C_cuda (csrc/cuda/bindings.cpp) on tensors of the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.metadata = library, 0
        self.launches = []

    def gemv(self, x, values, indices, bias, y, warps, splits, tiles, dependent, stream):
        assert x.data_ptr() % 8 == 0
        self.launches.append((warps, splits, tiles, dependent))
        tensors = (address(tensor) for tensor in (x, values, indices, bias, y))
        sizes = (*y.shape, x.shape[1], TYPES.index(x.dtype))
        assert self.library.gemv(*tensors, *sizes, warps, splits, tiles, dependent, 132, 9, 90) == 0

    def pack_24(self, weight, values, indices, infeasible, stream):
        self._pack(weight, values, indices, infeasible)

    def unpack_24(self, values, indices, weight, stream):
        self._pack(weight, values, indices, None)

    def _pack(self, weight, values, indices, infeasible):
        if weight.numel():
            tensors = (address(tensor) for tensor in (weight, values, indices, infeasible))
            rows, columns = weight.shape
            assert self.library.pack(*tensors, ctypes.c_int64(rows), columns, weight.itemsize) == 0

    def cutlass_metadata_(self, indices, metadata, architecture, stream):
        rows, columns = len(indices), 8 * indices.shape[1]
        self.metadata += 1
        assert self.library.metadata(address(indices), address(metadata), rows, columns, architecture) == 0


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
def multiplications(linear_library, monkeypatch):
    """Both extensions replaced, and no GPU asked for."""
    fake = Multiplications()
    monkeypatch.setattr(cuda, "_C", Kernels(linear_library))
    monkeypatch.setattr(cutlass, "_C", fake)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return fake


def pruned(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    blocks = torch.randn(*shape[:-1], shape[-1] // 4, 4)
    return blocks.where(torch.rand(blocks.shape).argsort(-1) < 2, 0).flatten(-2).to(dtype)


@pytest.mark.parametrize("shape", [(8, 16), (3, 12), (4,), (2, 3, 20), (0, 8), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packing(shape, dtype, multiplications):
    weight = pruned(shape, dtype)
    values, indices = cuda._pack_nm(weight, 2, 4)
    expected = pack.pack_nm(weight)
    assert torch.equal(values, expected[0])
    assert torch.equal(indices, expected[1])
    assert torch.equal(cuda._unpack_nm(values, indices, 2, 4), weight)


def test_packing_refuses_what_is_not_24(multiplications):
    weight = pruned((3, 12))
    weight[1, 8:] = 1
    with pytest.raises(ValueError, match="block 2 of row"):
        cuda._pack_nm(weight, 2, 4)


@pytest.mark.parametrize("bias", [None, torch.randn(33)], ids=["", "bias"])
@pytest.mark.parametrize("rows", [1, 16])
def test_gemv(rows, bias, multiplications):
    weight, x = pruned((33, 320), torch.float16), torch.randn(rows, 320).half()
    bias = None if bias is None else bias.half()
    y = kernel("gemv").run(x, *pack.pack_nm(weight), bias, None)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)


def test_gemv_takes_x_at_any_address(multiplications):
    weight, memory = pruned((33, 320)), torch.randn(2 * 320 + 8).bfloat16()
    for offset in range(8):
        x = memory[offset : offset + 2 * 320].view(2, 320)
        y = cuda.gemv(x, *pack.pack_nm(weight), None)
        torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=8e-3, atol=1e-3)


def test_gemv_is_launched_with_the_parameters_of_the_table(multiplications, tmp_path, monkeypatch):
    fastest = {"64x320x1": {"warps": 4, "splits": 2, "tiles": 1}, "64x320x16": {"warps": 8}}
    table = {tuning.device_kind(torch.device("cpu")): {"gemv bfloat16": {"measured": {}, "fastest": fastest}}}
    (tmp_path / "tuned.json").write_text(json.dumps(table))
    weight = pack.pack_nm(pruned((33, 320)))
    cuda.gemv(torch.randn(1, 320).bfloat16(), *weight, None)
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned.json")
    tuning.forget()
    for rows in (1, 16):
        cuda.gemv(torch.randn(rows, 320).bfloat16(), *weight, None)
    with tuning.use_launch_parameters("gemv", warps=16, splits=8, tiles=4), cuda.dependent_launch():
        cuda.gemv(torch.randn(1, 320).bfloat16(), *weight, None)
    tuning.forget()
    expected = [(0, 0, 0, False), (4, 2, 1, False), (8, 0, 0, False), (16, 8, 4, True)]
    assert cuda._C.launches == expected


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("major", "shape"), [(9, (72, 144)), (8, (96, 320)), (10, (32, 64))], ids=str)
def test_cutlass(major, shape, with_bias, multiplications, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    weight, bias = pruned(shape), torch.randn(shape[0]).bfloat16() if with_bias else None
    values, indices = pack.pack_nm(weight)
    for rows in (17, 40, 200, 600):
        x = torch.randn(rows, shape[1]).bfloat16()
        y = kernel("cutlass").run(x, values, indices, bias, None)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), exact, rtol=8e-3, atol=3e-2)
    small, large = ["64x64"] * 2, ["128x128"] * 2
    assert multiplications.tiles == (["64x32", "64x64", "128x128", "128x256"] if major == 9 else small + large)


@pytest.mark.parametrize("major", [8, 9])
def test_the_metadata_of_cutlass_can_be_prepared_once(major, multiplications, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    values, indices = pack.pack_nm(pruned((96, 320)))
    prepared = kernel("cutlass").prepare(values, indices)
    assert torch.equal(prepared, EQUATIONS[10 * major](indices))
    for rows in (17, 40):
        x, count = torch.randn(rows, 320).bfloat16(), cuda._C.metadata
        y = kernel("cutlass").run(x, values, indices, None, prepared)
        assert cuda._C.metadata == count
        assert torch.equal(y, kernel("cutlass").run(x, values, indices, None, None))
        assert cuda._C.metadata == count + 1


def test_x_is_copied_only_to_add_rows(multiplications, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    values, indices = pack.pack_nm(pruned((96, 320)))
    for rows in (24, 128, 17):
        x = torch.randn(rows, 320).bfloat16()
        kernel("cutlass").run(x, values, indices, None, None)
        assert (multiplications.pointers[-1] == x.data_ptr()) == (rows % 8 == 0)


def test_indices_that_begin_anywhere_are_copied_before_their_metadata_are_made(multiplications, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    values, indices = pack.pack_nm(pruned((64, 128)))
    anywhere = torch.cat([indices.new_zeros(1), indices.flatten()])[1:].view(indices.shape)
    assert torch.equal(kernel("cutlass").prepare(values, anywhere), kernel("cutlass").prepare(values, indices))
