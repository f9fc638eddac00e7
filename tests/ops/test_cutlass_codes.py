"""Products of codes of 8 bits: the rounding, what is handed to the kernels, and what is refused."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.on_each_backend import SECOND_GPU, OnGPU
from pruned import pruned_weight, quantized

from proxsparse.ops import dequantize_nm, pack_nm
from proxsparse.ops.backends import cutlass, cutlass_codes
from proxsparse.ops.backends.cutlass_codes import FP8, INT8, Kind, fp8_weight, quantize_rows
from proxsparse.reference.pack import unpack_nm

KINDS = [INT8, FP8]
MULTIPLY = {INT8: cutlass_codes.sparse_linear_int8, FP8: cutlass_codes.sparse_linear_fp8}
FORMS = [(INT8, 8), (INT8, 9), (FP8, 9)]  # with the major compute capability
name_of = lambda form: getattr(form, "name", None)  # noqa: E731
SOURCES = (Path(__file__).parents[2] / "csrc" / "cutlass").glob("sm*_*8_*.cu")
BUILT = [(int(source.stem[2:4]), source.stem.partition("_")[2]) for source in SOURCES]


def packed_as(kind: Kind, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, indices and scales of a 2:4 weight."""
    if kind is INT8:
        return quantized(weight, 8)[:3]
    values, indices = pack_nm(weight)
    codes, scales = fp8_weight(values)
    return codes, indices, scales


def exact(kind: Kind, x: torch.Tensor, codes, indices, scales, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """y with x and W rounded to codes, in float64, and the largest sum of magnitudes of its products."""
    x_codes, x_scales = quantize_rows(x, kind)
    rounded = x_codes.double() * x_scales.double()[:, None]
    weight = unpack_nm(codes.double(), indices) * scales.double()
    y = torch.nn.functional.linear(rounded, weight, None if bias is None else bias.double())
    return y, torch.nn.functional.linear(rounded.abs(), weight.abs()).max()


@pytest.fixture
def gpu(monkeypatch):
    """gpu(major): cuda has this compute capability, and all tiles of csrc/cutlass are built."""

    def choose(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    monkeypatch.setattr(cutlass, "missing", lambda: None)
    monkeypatch.setattr(cutlass, "_C", SimpleNamespace(gemm_codes=None, tiles_codes=lambda: BUILT))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    return choose


# ------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_rows_are_rounded_to_the_nearest_code(kind):
    """int8 to half a step; e4m3 to half of the last of its 4 bits, below 2^-6 to half of 2^-9."""
    x = torch.cat([torch.randn(50, 256), 1e-3 * torch.randn(50, 256), torch.zeros(1, 256)]).bfloat16()
    codes, scales = quantize_rows(x, kind)
    assert codes.dtype == kind.dtype
    assert codes.float().abs().amax(-1).tolist() == [kind.largest] * 100 + [0]
    step = torch.full_like(x, 0.5).double() if kind is INT8 else 2**-4 * (x.double() / scales[:, None]).nan_to_num()
    error = (codes.double() * scales.double()[:, None] - x.double()).abs()
    assert (error <= 1.0001 * step.abs().clamp(min=2**-10) * scales.double()[:, None]).all()


def test_a_weight_of_codes_is_rounded_to_e4m3_as_its_values():
    codes, _, scales, _ = quantized(pruned_weight((8, 64), torch.bfloat16), 8)
    found, of_rows = fp8_weight(codes, scales)
    assert of_rows.shape == (8, 1)
    assert of_rows.dtype == FP8.scales
    assert torch.equal(of_rows * 448, dequantize_nm(codes, scales).float().abs().amax(-1, keepdim=True))
    assert torch.equal(found.view(torch.int8), fp8_weight(dequantize_nm(codes, scales))[0].view(torch.int8))
    assert found.shape == codes.shape


@pytest.mark.parametrize(("kind", "most"), [(INT8, 0.02), (FP8, 0.05)], ids=name_of)
def test_rounding_changes_y_by_a_few_percent(kind, most):
    """Of normally distributed numbers: 1% with int8, 4% with e4m3, relative to the standard deviation of y."""
    weight, x = pruned_weight((128, 2048), torch.bfloat16), torch.randn(64, 2048).bfloat16()
    y, _ = exact(kind, x, *packed_as(kind, weight), None)
    unrounded = x.double() @ weight.double().T
    assert (y - unrounded).square().mean().sqrt() <= most * unrounded.std()


# ------------------------------------------------------------------------------------------ calls


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("kind", "major"), FORMS, ids=name_of)
def test_what_is_handed_to_the_kernel(kind, major, with_bias, gpu, monkeypatch):
    """For sm_80 rows are padded to 16, and y^T is turned. The metadata have the order of the GPU."""
    gpu(major)
    codes, indices, scales = packed_as(kind, pruned_weight((96, 384), torch.bfloat16))
    tiles = []

    def gemm_codes(architecture, tile, values, metadata, w_scales, x, x_scales, bias, y, stream):
        tiles.append((tile, len(x)))
        equation = cutlass_codes.metadata_sm90 if architecture == 90 else cutlass_codes.metadata_sm80
        assert torch.equal(metadata, equation(indices))
        assert w_scales.dtype == kind.scales
        product = (x.double() @ unpack_nm(values.double(), indices).T) * x_scales[:, None] * w_scales.double().T
        product = product if bias is None else product + bias
        y.copy_(product.T if architecture == 80 else product)

    monkeypatch.setattr(cutlass, "_C", SimpleNamespace(gemm_codes=gemm_codes))
    monkeypatch.setattr(cutlass_codes, "missing", lambda kind, x, values: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    bias = torch.randn(96).bfloat16() if with_bias else None
    for rows in (1, 13, 300):
        x = torch.randn(rows, 384).bfloat16()
        y = MULTIPLY[kind](x, codes, indices, scales, bias)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), exact(kind, x, codes, indices, scales, bias)[0], rtol=4e-3, atol=1e-4)
    large = "128x256" if (kind, major) == (INT8, 9) else "128x128"
    assert tiles == [
        ("64x64", 16 if major == 8 else 1),
        ("64x64", 16 if major == 8 else 13),
        (large, 304 if major == 8 else 300),
    ]


def test_all_tiles_exist():
    assert {(a, f"{kind.name}_{tile}") for kind in KINDS for a in kind.tiles for _, tile in kind.tiles[a]} == set(BUILT)


def test_what_is_not_supported_is_named(gpu, monkeypatch):
    def refuses(kind, x, out_features, dtype=None):
        return cutlass_codes.missing(kind, OnGPU(*x), OnGPU(out_features, x[1] // 2, dtype or kind.dtype))

    gpu(8)
    assert refuses(INT8, (17, 384), 96) is None
    assert refuses(FP8, (17, 384), 96) == "supports GPUs of compute capability 9.0, not this GPU"
    for x, out_features in (((17, 320), 96), ((17, 384), 100), ((0, 384), 96)):
        assert "multiples of 32 output features and 128" in refuses(INT8, x, out_features)
    gpu(7)
    assert refuses(INT8, (17, 384), 96) == "supports GPUs of compute capability 8.0 or newer, not this GPU"
    gpu(9)
    for kind in KINDS:
        assert refuses(kind, (17, 160), 72) is None
        assert f"codes of {kind.dtype}" in refuses(kind, (17, 384), 96, torch.bfloat16)
        for x, out_features in (((17, 336), 96), ((17, 384), 100), ((0, 384), 96)):
            assert "multiples of 8 output features and 32" in refuses(kind, x, out_features)
        with pytest.raises(RuntimeError, match=f"sparse_linear_{kind.name}: supports only CUDA GPUs"):
            MULTIPLY[kind](torch.ones(1, 128), torch.ones(32, 64), None, None)
    cutlass._C.tiles_codes = lambda: []
    assert "its tile was not built for this GPU; remedy" in refuses(INT8, (17, 384), 96)
    monkeypatch.setattr(cutlass, "_C", SimpleNamespace())
    assert "another version" in refuses(FP8, (17, 384), 96)


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(96, 384), (160, 1152), (4096, 4096)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
@pytest.mark.parametrize("device", ["cuda", pytest.param("cuda:1", marks=SECOND_GPU)])
def test_products_of_codes_of_8_bits(device, kind, shape):
    """Sums of int8 are exact, so the error is that of scales in fp32 and of one rounding.

    The tensor cores add 256 products of e4m3 with at least 13 bits.
    """
    packed = [part.to(device) for part in packed_as(kind, pruned_weight(shape, torch.bfloat16))]
    bias = torch.randn(shape[0], device=device).bfloat16()
    for rows in (1, 17, 100, 129, 600):
        x = torch.randn(rows, shape[1], device=device).bfloat16()
        if reason := cutlass_codes.missing(kind, x, packed[0]):
            pytest.skip(reason)
        for added in (None, bias):
            y, (expected, largest) = MULTIPLY[kind](x, *packed, added), exact(kind, x, *packed, added)
            atol = 1e-4 if kind is INT8 else 2**-12 * largest.item()
            torch.testing.assert_close(y.double(), expected, rtol=4e-3, atol=atol)
