"""Codes of 8 and 4 bits: their format, what is lost, and every backend of this machine against the reference."""

import pytest
import torch

from proxsparse.ops import dequantize_nm, quantize_nm, registry
from proxsparse.reference import quantize

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BACKENDS = [name for name in registry.list_backends("quantize_nm") if name != "reference"]
each_form = pytest.mark.parametrize(("bits", "dtype"), [(bits, dtype) for bits in (8, 4) for dtype in DTYPES], ids=str)


def random_values(*shape, dtype=torch.float32):
    """Values of very different rows, also rows and groups of zeros."""
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    values[-1], values[0, 32:64] = 0, 0
    return values.to(dtype)


@each_form
@pytest.mark.parametrize("k", [0, 2, 6, 30, 32, 34, 64, 258])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_reference(backend, k, bits, dtype, compiled):
    values = random_values(5, k, dtype=dtype)
    codes, scales = quantize.quantize(values, bits)
    kernel = registry.get_kernel("quantize_nm", backend)
    assert kernel.supports(values, bits) is None
    for found, expected in zip(kernel.run(values, bits), (codes, scales), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    back = registry.get_kernel("dequantize_nm", backend).run(codes, scales)
    assert torch.equal(back, quantize.dequantize(codes, scales))


@each_form
def test_every_value_gets_the_nearest_code(bits, dtype):
    values = random_values(6, 96, dtype=dtype)
    codes, scales = quantize_nm(values, bits)
    exact = dequantize_nm(codes, scales.double())
    step = scales.double().abs() if bits == 8 else scales.double().abs().repeat_interleave(32, -1)
    clipped = exact.abs() >= 7 * step if bits == 4 else exact.abs() >= 127 * step
    assert ((exact - values.double()).abs() <= step * (0.5 + 1e-2) + 1e-9)[~clipped].all()
    error = (exact - values.double()).norm() / values.double().norm()
    assert error < (0.015 if bits == 8 else 0.14)
    assert (exact[values == 0] == 0).all()


def test_no_code_is_clipped_where_the_scales_of_float16_are_subnormal(compiled):
    values = (torch.rand(200, 64).half() * torch.logspace(-7, -2, 200)[:, None]).half()
    codes, scales = quantize_nm(values, 8)
    assert (scales < 6e-5).any()
    error = (dequantize_nm(codes, scales.double()) - values.double()).abs()
    assert (error <= scales.double() * 0.5001).all()


def test_values_near_the_largest_number(compiled):
    for dtype in DTYPES:
        values = torch.full((1, 4), torch.finfo(dtype).max / 2, dtype=dtype)
        for bits in (8, 4):
            assert dequantize_nm(*quantize_nm(values, bits)).isfinite().all()
    compiled.quantize_nm(bad := torch.full((1, 32), torch.nan), codes := torch.ones(1, 16).byte(), bad[:, :1].clone())
    assert not codes.any()  # nothing is read from memory that was not written


@pytest.mark.parametrize("largest", range(1, 9))
def test_four_bits_find_codes_and_scales_again(largest):
    codes = torch.randint(-largest + 1, largest, (40, 64)).float()
    codes[:, 5], codes[:, 40] = -largest, largest - (largest == 8)
    scales = torch.rand(40, 2).bfloat16().float() + 0.5
    values = codes * scales.repeat_interleave(32, -1)
    assert torch.equal(dequantize_nm(*quantize_nm(values, 4)), values)


def test_the_bytes():
    codes, scales = quantize_nm(torch.tensor([[-8.0, 7.0, 1.0, 0.0, -1.0, 3.0]]), 4)
    assert codes.tolist() == [[0x78, 0x01, 0x3F]]
    assert scales.tolist() == [[1.0]]
    codes, scales = quantize_nm(torch.tensor([[-127.0, 63.6, 0.4]]), 8)
    assert (codes.tolist(), scales.tolist()) == ([[-127, 64, 0]], [[1.0]])


@pytest.mark.parametrize(
    ("values", "bits", "message"),
    [
        (torch.ones(2, 4), 2, "bits=2: values can have 8 or 4 bits"),
        (torch.ones(2, 3), 4, r"\[2, 3\]: 4-bit codes need an even number"),
        (torch.ones(2, 4, dtype=torch.int8), 8, "values has dtype torch.int8"),
        (torch.tensor([[1.0, torch.nan]]), 8, "NaN, infinity or a magnitude above 1.7e"),
        (torch.tensor([[1.0, torch.inf]]), 4, "NaN, infinity or a magnitude"),
        (torch.full((1, 2), 65504.0, dtype=torch.half), 8, "a magnitude above 3.28e"),
        (torch.tensor(1.0), 8, r"values of shape \[\]"),
    ],
)
def test_values_without_codes_are_refused(values, bits, message):
    with pytest.raises(ValueError, match=message):
        quantize_nm(values, bits)


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (torch.ones(2, 64, dtype=torch.int8), torch.ones(2, 2), r"scales of shape \[2, 2\].* need the shape \[2, 1\]"),
        (torch.ones(2, 64, dtype=torch.uint8), torch.ones(2, 2), r"need the shape \[2, 4\]"),
        (torch.ones(2, 64), torch.ones(2, 1), "codes are torch.float32"),
        (torch.ones(2, 64, dtype=torch.int8), torch.ones(2, 1).int(), "scales has dtype torch.int32"),
        (torch.ones(2, 64, dtype=torch.int8), torch.full((2, 1), torch.nan), "NaN or infinity; the file is damaged"),
        (torch.full((2, 64), -128, dtype=torch.int8), torch.ones(2, 1), "codes contain -128"),
        (torch.full((2, 64), 99, dtype=torch.int8), torch.full((2, 1), 1e4).half(), "codes times scales overflow"),
        (torch.ones(2, 64, dtype=torch.uint8), torch.ones(2, 4).int(), "scales has dtype torch.int32"),
    ],
)
def test_codes_that_are_damaged_are_refused(codes, scales, message):
    with pytest.raises(ValueError, match=message):
        dequantize_nm(codes, scales)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.zeros(3, 6, dtype=torch.int8)}, r"codes of shape \[3, 6\]"),
        ({"codes": torch.zeros(3, 8)}, r"codes of shape \[3, 8\].* Byte"),
        ({"scales": torch.zeros(3)}, r"scales of shape \[3\].*\[3, 1\]"),
        ({"scales": torch.zeros(3, 1).double()}, "values of shape .* Float .* Double"),
        ({"values": torch.zeros(8, 3).T}, "must be a contiguous"),
        ({"values": torch.zeros(3, 7), "codes": torch.zeros(3, 3, dtype=torch.uint8)}, "even number of values"),
        ({"scales": torch.zeros(3, 1).int()}, r"(codes of shape \[3, 8\].* Byte|values .* Float .* Int)"),
    ],
)
def test_the_kernels_refuse_what_does_not_fit(changed, message, compiled):
    good = {"values": torch.ones(3, 8), "codes": torch.zeros(3, 8, dtype=torch.int8), "scales": torch.zeros(3, 1)}
    for kernel in (compiled.quantize_nm, compiled.dequantize_nm):
        with pytest.raises(ValueError, match=message):
            kernel(**good | changed)


@pytest.mark.parametrize("bits", [8, 4])
def test_opcheck(bits):
    values = torch.randn(3, 64)
    torch.library.opcheck(torch.ops.proxsparse.quantize_nm, (values, bits))
    torch.library.opcheck(torch.ops.proxsparse.dequantize_nm, quantize_nm(values, bits))


def test_a_better_scale_than_the_largest_value_gives():
    """The search reduces the squared error of normal values by at least 5%."""
    values = torch.randn(256, 256)
    groups = values.unflatten(-1, (-1, 32))
    plain = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    codes = (groups / plain).round().clamp(-8, 7)
    assert (dequantize_nm(*quantize_nm(values, 4)) - values).square().sum() < 0.95 * (
        (codes * plain - groups).square().sum()
    )
