"""The packed form of 2:4 weights, and codes of 8 and 4 bits for its values, on every backend of this machine."""

import itertools

import pytest
import torch
from ops.cases import DTYPES, bits, each_dtype, feasible

from proxsparse.ops import dequantize_nm, pack_nm, quantize_nm, registry, unpack_nm
from proxsparse.reference import pack, quantize

OP = "pack_nm"
NAN = float("nan")


def kept_places(block):
    """The rule, for one block of numbers: nonzero or NaN first, then -0.0, then +0.0; then the lower place."""

    def rank(place):
        number = block[place]
        return 0 if number != 0 else 1 if str(float(number)) == "-0.0" else 2, place

    return sorted(sorted(range(4), key=rank)[:2])


@each_dtype
def test_every_block_of_zeros_numbers_and_nan(dtype, device, require):
    blocks = torch.tensor(list(itertools.product([0.0, -0.0, -1.5, NAN], repeat=4)), dtype=dtype)
    allowed = (blocks != 0).sum(-1) <= 2
    require("pack_nm", blocks.to(device))
    for block in blocks[~allowed]:
        with pytest.raises(ValueError, match="1 of 1 blocks have more than 2 nonzeros, the first is block 0"):
            pack_nm(block.to(device, copy=True))
    blocks = blocks[allowed]
    values, indices = pack_nm(blocks.to(device))
    dense = unpack_nm(values, indices)
    for block, of_block, byte, back in zip(blocks, values, indices.tolist(), dense, strict=True):
        places = kept_places(block.tolist())
        expected = torch.zeros(4, dtype=dtype)
        expected[places] = block[places]
        assert byte == [sum(place << 2 * j for j, place in enumerate(places))]
        assert torch.equal(bits(of_block), bits(block[places]))
        assert torch.equal(bits(back), bits(expected))


@each_dtype
def test_unpacking_gives_the_bits_of_a_weight_without_minus_zero_also_from_strided_tensors(dtype, device, require):
    """What is packed is that of the reference for any weight: test_every_op.py."""
    require("pack_nm", torch.zeros(1, 4, dtype=dtype, device=device))
    for shape in (*((3, 4 * count) for count in range(1, 35)), (5, 508), (5, 516), (2, 3, 8)):
        weight = feasible(shape, dtype, shape[-1])
        plus = weight.where(weight != 0, 0.0)
        packed = pack_nm(plus.to(device))
        for parts in (packed, [torch.stack([part, part], -1)[..., 0] for part in packed]):
            assert torch.equal(bits(unpack_nm(*parts)), bits(plus)), shape


def test_threads_and_repeated_memory_change_nothing(device):
    weight = feasible((999, 264), torch.bfloat16, 0)
    expected, before = pack.pack_nm(weight), torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found = pack_nm(weight.to(device))
            back = unpack_nm(*found)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(bits(found[0]), bits(expected[0]))
        assert torch.equal(found[1].cpu(), expected[1])
        assert torch.equal(bits(back), bits(pack.unpack_nm(*expected)))
    repeated = weight[:1, :4].to(device).expand(5, 4)
    assert torch.equal(bits(pack_nm(repeated)[0]), bits(pack_nm(repeated.contiguous())[0]))


def test_an_infeasible_weight_is_refused_in_the_words_of_the_reference(device):
    weight = feasible((40, 1024), torch.float32, 0)
    weight[7, 8:12] = 1.0
    weight[9, 1020:] = 1.0
    message = "2 of 10240 blocks have more than 2 nonzeros, the first is block 2 of row 7; prune it to 2:4 first"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        pack_nm(weight.to(device))
    assert str(error.value) == f"weight of shape [40, 1024]: {message}"


# ------------------------------------------------------------------------------------------ codes of 8 and 4 bits

KERNELS = [name for name in registry.list_backends("quantize_nm") if name != "reference"]
each_form = pytest.mark.parametrize(("bits_of", "dtype"), list(itertools.product((8, 4), DTYPES)), ids=str)


def random_values(*shape, dtype=torch.float32):
    """Values of very different rows, also rows and groups of zeros."""
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    values[-1], values[0, 32:64] = 0, 0
    return values.to(dtype)


@each_form
@pytest.mark.parametrize("backend", KERNELS)
def test_codes_match_reference_there_and_back(backend, bits_of, dtype, compiled):
    for k in (0, 2, 6, 30, 32, 34, 64, 258):
        values = random_values(5, k, dtype=dtype)
        codes, scales = quantize.quantize(values, bits_of)
        kernel = registry.get_kernel("quantize_nm", backend)
        assert kernel.supports(values, bits_of) is None
        for found, expected in zip(kernel.run(values, bits_of), (codes, scales), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        back = registry.get_kernel("dequantize_nm", backend).run(codes, scales)
        assert torch.equal(back, quantize.dequantize(codes, scales))


@each_form
def test_every_value_gets_the_nearest_code(bits_of, dtype):
    values = random_values(6, 96, dtype=dtype)
    codes, scales = quantize_nm(values, bits_of)
    exact = dequantize_nm(codes, scales.double())
    step = scales.double().abs() if bits_of == 8 else scales.double().abs().repeat_interleave(32, -1)
    clipped = exact.abs() >= 7 * step if bits_of == 4 else exact.abs() >= 127 * step
    assert ((exact - values.double()).abs() <= step * (0.5 + 1e-2) + 1e-9)[~clipped].all()
    error = (exact - values.double()).norm() / values.double().norm()
    assert error < (0.015 if bits_of == 8 else 0.14)
    assert (exact[values == 0] == 0).all()
    near_the_largest = torch.full((1, 4), torch.finfo(dtype).max / 2, dtype=dtype)
    assert dequantize_nm(*quantize_nm(near_the_largest, bits_of)).isfinite().all()
    torch.library.opcheck(torch.ops.proxsparse.quantize_nm, (values, bits_of))
    torch.library.opcheck(torch.ops.proxsparse.dequantize_nm, (codes, scales))


def test_no_code_is_clipped_where_the_scales_of_float16_are_subnormal(compiled):
    values = (torch.rand(200, 64).half() * torch.logspace(-7, -2, 200)[:, None]).half()
    codes, scales = quantize_nm(values, 8)
    assert (scales < 6e-5).any()
    error = (dequantize_nm(codes, scales.double()) - values.double()).abs()
    assert (error <= scales.double() * 0.5001).all()


def test_nan_has_no_code_from_unwritten_memory(compiled):
    compiled.quantize_nm(bad := torch.full((1, 32), NAN), codes := torch.ones(1, 16).byte(), bad[:, :1].clone())
    assert not codes.any()


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


def test_a_better_scale_than_the_largest_value_gives():
    """The search reduces the squared error of normal values by at least 5%."""
    values = torch.randn(256, 256)
    groups = values.unflatten(-1, (-1, 32))
    plain = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    codes = (groups / plain).round().clamp(-8, 7)
    error = (dequantize_nm(*quantize_nm(values, 4)) - values).square().sum()
    assert error < 0.95 * (codes * plain - groups).square().sum()


# ------------------------------------------------------------------------------------------ refusals

ONES, BYTES, NIBBLES = torch.ones(2, 4), torch.ones(2, 64).char(), torch.ones(2, 64).byte()


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (quantize_nm, (ONES, 2), "bits=2: values can have 8 or 4 bits"),
        (quantize_nm, (ONES[:, :3], 4), r"\[2, 3\]: 4-bit codes need an even number"),
        (quantize_nm, (ONES.char(), 8), "values has dtype torch.int8"),
        (quantize_nm, (torch.tensor([[1.0, NAN]]), 8), "NaN, infinity or a magnitude above 1.7e"),
        (quantize_nm, (torch.full((1, 2), 65504.0).half(), 8), "a magnitude above 3.28e"),
        (dequantize_nm, (BYTES, ONES[:, :2]), r"scales of shape \[2, 2\].* need the shape \[2, 1\]"),
        (dequantize_nm, (NIBBLES, ONES[:, :2]), r"need the shape \[2, 4\]"),
        (dequantize_nm, (BYTES.float(), ONES[:, :1]), "codes are torch.float32"),
        (dequantize_nm, (BYTES, ONES[:, :1].int()), "scales has dtype torch.int32"),
        (dequantize_nm, (BYTES, ONES[:, :1] * NAN), "NaN or infinite; the file is damaged"),
        (dequantize_nm, (BYTES * -128, ONES[:, :1]), "codes contain -128"),
        (dequantize_nm, (BYTES * 99, torch.full((2, 1), 1e4).half()), "codes times scales are NaN or infinite"),
    ],
)
def test_values_without_codes_and_damaged_codes_are_refused(call, arguments, message):
    with pytest.raises(ValueError, match=message):
        call(*arguments)


PACKED = {"weight": torch.zeros(3, 12), "values": torch.zeros(3, 6), "indices": torch.zeros(3, 2).byte()}
CODED = {"values": torch.ones(3, 8), "codes": torch.zeros(3, 8).char(), "scales": torch.zeros(3, 1)}
UNFIT = [
    (PACKED, {"weight": torch.zeros(3, 10)}, r"shape \[3, 10\]: in_features must be a multiple of 4"),
    (PACKED, {"values": torch.zeros(3, 5)}, r"values of shape \[3, 5\].*must be .* of shape \[3, 6\]"),
    (PACKED, {"values": torch.zeros(6, 3).T}, "values .* must be a contiguous Float tensor .* on cpu"),
    (PACKED, {"indices": torch.zeros(3, 2)}, "indices of shape .* and dtype Float"),
    (CODED, {"codes": torch.zeros(3, 6).char()}, r"codes of shape \[3, 6\]"),
    (CODED, {"scales": torch.zeros(3)}, r"scales of shape \[3\].*\[3, 1\]"),
    (CODED, {"scales": torch.zeros(3, 1).double()}, "values of shape .* Float .* Double"),
    (CODED, {"values": torch.zeros(8, 3).T}, "must be a contiguous"),
    (CODED, {"values": torch.zeros(3, 7), "codes": torch.zeros(3, 3).byte()}, "even number of values"),
]


@pytest.mark.parametrize(("good", "changed", "message"), UNFIT)
def test_the_compiled_kernels_refuse_what_does_not_fit(compiled, good, changed, message):
    for kernel in ("pack_24", "unpack_24") if good is PACKED else ("quantize_nm", "dequantize_nm"):
        with pytest.raises(ValueError, match=message):
            getattr(compiled, kernel)(**good | changed)
