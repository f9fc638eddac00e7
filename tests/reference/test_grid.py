"""Values that were rounded to 4 bits before: their grid is found again, and they are stored bit for bit."""

import pytest
import torch
from pruned import nearest_grid, prune

from proxsparse.ops import dequantize_nm, encode_nm, pack_nm, unpack_nm
from proxsparse.reference.grid import find_grid
from proxsparse.reference.quantize import grid_numbers, grid_scales

INF, NAN = torch.inf, torch.nan


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 20.0])
@pytest.mark.parametrize("mask", ["magnitude", "random"])
def test_pruned_weights_of_gguf_are_stored_bit_for_bit(form, scale, mask):
    quants = pytest.importorskip("gguf.quants", reason="the package gguf is missing: pip install proxsparse[gguf]")
    kind = quants.GGMLQuantizationType[form]
    weight = scale * torch.randn(64, 480)
    weight[3], weight[4, :32] = 0, 0.3 * scale
    weight[5, 64:96] *= torch.arange(32) == 7
    dense = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
    random = torch.rand(64, 120, 4).argsort(-1).flatten(-2) < 2
    pruned = torch.where(random, dense, 0.0) if mask == "random" else prune(dense)
    pruned = pruned + 0.0  # Q4_0 has -0.0
    values, indices = pack_nm(pruned)
    codes, scales = encode_nm(values, 4)
    assert scales.dtype == torch.int32
    assert (codes.shape, scales.shape) == ((64, 120), (64, 15))
    assert same_bits(unpack_nm(dequantize_nm(codes, scales), indices), pruned)
    assert all(map(torch.equal, find_grid(values), (codes, scales)))
    assert torch.equal(dequantize_nm(*find_grid(pack_nm(torch.where(pruned == 0, -0.0, pruned))[0])), values)


@pytest.mark.parametrize("k", [2, 14, 16, 18, 62])
@pytest.mark.parametrize("codes", [[0, 15], [3, 4], [7], [0, 5, 10], [2, 9, 14]], ids=str)
def test_grids_of_few_codes_and_any_length(k, codes):
    """Also where d is negative, or m far from the values; the grid that is found may be another."""
    numbers = torch.tensor(codes)[torch.randint(len(codes), (200, k))].float()
    d, m = (torch.randn(200, 1) * 10.0 ** torch.randint(-4, -1, (200, 1)) for _ in range(2))
    values = numbers * d.half().float() + m.half().float()
    assert same_bits(dequantize_nm(*find_grid(values)), values)
    for leading in ((2, 100), (200, 1)):
        found = find_grid(values.view(*leading, k))
        assert found[0].shape == (*leading, k // 2)
        assert found[1].shape == (*leading, -(-k // 16))
        assert torch.equal(dequantize_nm(*found), values.view(*leading, k))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_where_nothing_is_lost(dtype):
    values = (torch.randint(0, 16, (20, 48)) * 2.0**-7 - 0.0625).to(dtype)
    codes, scales = find_grid(values)
    assert same_bits(dequantize_nm(codes, scales, dtype), values)
    rounded = dequantize_nm(*nearest_grid(torch.randn(20, 48))).to(dtype)  # from float32
    assert (find_grid(rounded) is None) == (dtype != torch.float64)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values[7, 20].copy_(torch.nextafter(values[7, 20], torch.tensor(INF))),
        lambda values: values[39, 47].fill_(NAN),
        lambda values: values[0, 0].fill_(INF),
        lambda values: values[3, 5].mul_(20),  # more than 15 steps
        lambda values: values[12, 32:].normal_(),
    ],
)
def test_one_value_beside_the_grid(change):
    values = dequantize_nm(*nearest_grid(torch.randn(40, 48)))
    assert find_grid(values) is not None
    change(values)
    assert find_grid(values) is None


def test_what_has_no_grid_is_rounded():
    values = torch.randn(64, 96)
    assert find_grid(values) is None
    assert encode_nm(values, 4)[1].dtype == torch.float32
    assert encode_nm(dequantize_nm(*nearest_grid(values)), 8)[0].dtype == torch.int8
    assert find_grid(values[:, :0]) is find_grid(values[:0]) is find_grid(values[:, :3]) is None
    assert encode_nm(values[:0], 4)[0].shape == (0, 48)


def test_scales():
    d, m = torch.tensor([1.0, -2.0, 0.0]), torch.tensor([-0.5, 65504.0, -0.0])
    assert grid_scales(d, m).tolist() == [0xB8003C00 - 2**32, 0x7BFFC000, 0x80000000 - 2**32]
    assert all(same_bits(a, b.half()) for a, b in zip(grid_numbers(grid_scales(d, m)), (d, m), strict=True))
