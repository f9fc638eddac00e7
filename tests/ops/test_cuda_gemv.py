"""csrc/cuda/gemv.h without a GPU: the kernel on the CPU, tensor cores after the PTX ISA; results against float64."""

import ctypes
import itertools

import pytest
import torch
from ops.on_cpu import TYPES, address, codes_of, fenced, survives
from torch import Tensor

from proxsparse.reference import pack, quantize

# (out_features, in_features): whole steps of 256 columns, parts of one, tiles that do not fill up, rows of W that no
# 16-byte access fits, a single block.
SHAPES = [(64, 1024), (32, 320), (7, 64), (33, 576), (40, 260), (9, 12), (1, 4), (50, 1288)]


@pytest.fixture
def gemv(cuda_library):
    """gemv(x, values, indices, bias, processors, generation, code, launch..., scales) -> y, by csrc/cuda/gemv.h."""

    def run(
        x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None = None, processors=132, generation=9, code=90,
        warps=0, splits=0, tiles=0, dependent=False, scales: Tensor | None = None,
    ):  # fmt: skip
        y = torch.empty(len(x), len(values), dtype=x.dtype)
        status = cuda_library.gemv(
            *(address(tensor) for tensor in (x, values, indices, scales, bias, y)),
            *(len(x), len(values), x.shape[1], TYPES.index(x.dtype), codes_of(values, scales)),
            *(warps, splits, tiles, dependent, processors, generation, code),
        )
        assert status == 0
        return y

    return run


@pytest.fixture
def launched(cuda_library):
    """launched() -> warps of a thread block, thread blocks, splits, dependent: of the latest launch of a kernel."""

    def latest() -> tuple[int, int, int, bool]:
        numbers = (ctypes.c_int * 4)()
        cuda_library.launched(numbers)
        threads, blocks, splits, dependent = numbers
        return threads // 32, blocks, splits, bool(dependent)

    return latest


def layer(rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16):
    """x, a packed weight with every pattern of zeros, and the weight."""
    weight = torch.randn(out_features, in_features // 4, 4)
    weight *= torch.rand(weight.shape).argsort(-1) < torch.randint(0, 3, weight.shape[:2]).unsqueeze(-1)
    weight = weight.view(out_features, in_features).to(dtype)
    return torch.randn(rows, in_features).to(dtype), *pack.pack_nm(weight), weight


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Rounded once from sums in fp32."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().T
    allowed = torch.finfo(y.dtype).eps / 2 * exact.abs() + 1e-6 * magnitude + 1e-7
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_of_rows_and_every_tail(shape, gemv):
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 3, 4, 5, 8, 11, 16):
            x, values, indices, weight = layer(rows, *shape, dtype)
            bias = torch.randn(shape[0]).to(dtype) if rows % 2 else None
            check(gemv(x, values, indices, bias), x, weight, bias)


@pytest.mark.parametrize(("processors", "generation"), [(1, 9), (2, 9), (8, 9), (132, 9), (108, 8), (148, 10)])
def test_however_the_work_is_split(processors, generation, gemv):
    """Few processors: 8 warps a thread block; many: clusters of up to 8, where the GPU has them."""
    for rows in (2, 16):
        x, values, indices, weight = layer(rows, 40, 5 * 1024 + 64)
        y = gemv(x, values, indices, None, processors, generation)
        check(y, x, weight)
        assert torch.equal(y, gemv(x, values, indices, None, processors, generation))


@pytest.mark.parametrize("rows", [1, 4, 8, 13])
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_every_launch_parameter_gives_the_same_product(tiles, rows, gemv, launched):
    x, values, indices, weight = layer(rows, 150, 2 * 1024 + 320)
    for warps, splits in itertools.product((4, 8, 16), (1, 2, 4, 8)):
        check(gemv(x, values, indices, warps=warps, splits=splits, tiles=tiles), x, weight)
        groups = 1 if rows <= 4 else 2 if rows <= 8 else 4
        most = 8 if tiles == 4 and groups > 1 else 16  # registers
        row_blocks = -(-150 // (8 * tiles * groups))
        assert launched() == (min(warps, most), row_blocks * splits, splits, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"warps": 32, "splits": 16, "tiles": 64}, (16, 5 * 8, 8)),
        ({"warps": 1, "splits": 3, "tiles": 3}, (1, 10 * 3, 3)),
        ({"warps": -1, "splits": -1, "tiles": -1}, (4, 5 * 8, 8)),  # as 0: its own plan
    ],
    ids=str,
)
def test_what_a_gpu_cannot_run_is_replaced(given, expected, gemv, launched):
    x, values, indices, weight = layer(1, 150, 8 * 1024, torch.float16)
    check(gemv(x, values, indices, **given), x, weight)
    assert launched()[:3] == expected
    x, values, indices, weight = layer(9, 150, 1024, torch.float16)
    check(gemv(x, values, indices, **given), x, weight)
    assert launched()[0] % 4 == 0  # four warps share x
    check(gemv(x, values, indices, **given, generation=8, code=80), x, weight)
    assert launched()[2] == 1


def test_dependent_launch_and_clusters_only_where_the_code_has_the_instructions(gemv, launched):
    """A kernel without them would not wait for the one before, and y would miss the sums of other thread blocks.

    Code for compute capability 8.0 on a GPU of 9.0: compiled by the driver.
    """
    x, values, indices, weight = layer(6, 40, 5 * 1024 + 64)
    for processors, generation, code, splits in ((1, 9, 90, 1), (132, 9, 90, 8), (132, 9, 80, 1), (132, 8, 80, 1)):
        for dependent in (False, True):
            y = gemv(x, values, indices, None, processors, generation, code, dependent=dependent)
            check(y, x, weight)
            assert launched()[2:] == (splits, dependent and code == 90)


def test_one_block_at_every_place(gemv):
    """Each weight alone meets its own number of x: all columns of two steps, every place of a block."""
    x = torch.arange(1, 513).view(1, 512).to(torch.float16)  # exact
    for place in range(4):
        weight = torch.zeros(128, 512, dtype=torch.float16)
        weight[torch.arange(128), 4 * torch.arange(128) + place] = 1
        assert torch.equal(gemv(x, *pack.pack_nm(weight))[0], x[0, place::4])


def test_a_number_that_is_not_finite_stays_in_its_row(gemv):
    for dtype in (torch.bfloat16, torch.float16):
        x, values, indices, _ = layer(3, 20, 200, dtype)
        x[1, 17] = float("nan")
        values[5, 40:44] = float("inf")
        y = gemv(x, values, indices)
        fine = torch.ones(3, 20, dtype=torch.bool)
        fine[:, 5] = fine[1] = False
        assert y[fine].isfinite().all()
        assert not y[:, 5].isfinite().any()


@pytest.mark.parametrize("at_end", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_beyond_the_tensors_is_touched(shape, at_end, gemv):
    for rows in (1, 5, 16):
        x, values, indices, _ = layer(rows, *shape)
        inputs = [fenced(tensor, at_end) for tensor in (x, values, indices, torch.randn(shape[0]).to(x.dtype))]
        assert survives(lambda: gemv(*inputs))  # noqa: B023 it runs at once


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_any_alignment(offset, gemv):
    """Of the weight; x begins at a multiple of 8 bytes, which proxsparse/ops/backends/cuda.py sees to."""
    x, values, indices, weight = layer(2, 24, 512)

    def moved(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    check(gemv(x, moved(values), moved(indices)), x, weight)


# ------------------------------------------------------------------------------------------ codes of 8 and 4 bits


BITS = [8, 4]


def layer_of_codes(bits, rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16):
    """x, codes, indices and scales of a packed weight, and the weight that is multiplied, in float64.

    All codes are equally likely, among them -128. With 4 bits scales have both signs, and a weight is rounded.
    """
    x, _, indices, _ = layer(rows, out_features, in_features, dtype)
    dtype_of_codes, size = quantize.CODES[8 if bits == 8 else 4], in_features // (2 if bits == 8 else 4)
    codes = torch.randint(-128, 128, (out_features, size)).to(dtype_of_codes)
    shape = quantize.shape_of_scales(codes)
    scales = torch.empty(shape).uniform_(0.01, 0.1).to(dtype)
    if bits != 8:
        scales *= torch.randint(0, 2, scales.shape) * 2 - 1
    kept = quantize.dequantize(codes, scales.double() if bits == 8 else scales)
    return x, codes, indices, scales, pack.unpack_nm(kept, indices).double()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_of_every_shape(shape, bits, gemv):
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (1, 4, 7, 16):
            x, codes, indices, scales, weight = layer_of_codes(bits, rows, *shape, dtype)
            bias = torch.randn(shape[0]).to(dtype) if rows % 2 else None
            check(gemv(x, codes, indices, bias, scales=scales), x, weight, bias)


@pytest.mark.parametrize("bits", BITS)
def test_codes_for_every_number_of_rows(bits, gemv):
    for rows in range(1, 17):
        x, codes, indices, scales, weight = layer_of_codes(bits, rows, 33, 576)
        check(gemv(x, codes, indices, scales=scales), x, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", quantize.CODES)
def test_every_code_alone_at_every_place(bits, dtype, gemv):
    """Each code meets its own number of x and the scale of its own columns: y is their product, rounded once."""
    columns, codes_of = 512, 2**bits
    x, row = torch.arange(1, columns + 1).view(1, columns).to(dtype), torch.arange(256)
    code = row % codes_of - codes_of // 2
    for place in range(4):
        column = 4 * ((row + 37 * place) % 128) + place
        weight = torch.zeros(256, columns, dtype=torch.float64)
        weight[row, column] = code.double()
        values, indices = pack.pack_nm(weight)
        codes = values.to(torch.int8) if bits == 8 else quantize.pack_codes(values)
        scales = 2.0 ** torch.randint(-9, -3, quantize.shape_of_scales(codes))
        expected = x[0, column].double() * code * scales[row, column // 64 if bits == 4 else 0]
        y = gemv(x, codes, indices, scales=scales.to(dtype))
        assert torch.equal(y[0], expected.to(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_codes_with_every_launch_parameter(bits, gemv):
    x, codes, indices, scales, weight = layer_of_codes(bits, 13, 150, 2 * 1024 + 320)
    for rows, warps, splits, tiles in itertools.product((1, 8, 13), (4, 16), (1, 8), (1, 2, 4)):
        launch = {"warps": warps, "splits": splits, "tiles": tiles, "dependent": tiles == 2}
        check(gemv(x[:rows], codes, indices, scales=scales, **launch), x[:rows], weight)


@pytest.mark.parametrize("bits", quantize.CODES)
def test_the_largest_codes_do_not_overflow(bits, gemv):
    """A sum of codes times x exceeds float16; multiplied by the scales it does not."""
    codes = torch.full((8, 1024 * bits // 16), 127 if bits == 8 else 0x77).to(quantize.CODES[bits])
    _, indices = pack.pack_nm(torch.ones(8, 256, 4, dtype=torch.float16).mul_(torch.tensor([1, 1, 0, 0])).view(8, 1024))
    scales = torch.full(quantize.shape_of_scales(codes), 2.0**-12).half()
    x = torch.full((2, 1024), 16.0).half()
    expected = 512 * 16 * (127 if bits == 8 else 7) / 4096
    assert torch.equal(gemv(x, codes, indices, scales=scales), torch.full((2, 8), expected).half())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("at_end", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_beyond_the_codes_is_touched(shape, at_end, bits, gemv):
    for rows in (1, 16):
        x, codes, indices, scales, _ = layer_of_codes(bits, rows, *shape)
        inputs = [fenced(tensor, at_end) for tensor in (x, codes, indices)]
        of_codes = fenced(scales, at_end)
        assert survives(lambda: gemv(*inputs, scales=of_codes))  # noqa: B023 it runs at once


@pytest.mark.parametrize("bits", BITS)
def test_codes_of_any_alignment(bits, gemv):
    x, codes, indices, scales, weight = layer_of_codes(bits, 2, 24, 512)
    for offset in (1, 4, 8):
        memory = torch.empty(codes.numel() + offset, dtype=codes.dtype)
        moved = memory[offset:].view(codes.shape).copy_(codes)
        check(gemv(x, moved, indices, scales=scales), x, weight)
