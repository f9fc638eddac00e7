"""csrc/cuda/gemv.h as nvcc compiles it, on this CPU (tests/ptx); results against float64.

tests/ptx checks that every access stays within the tensors and is aligned.
"""

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from proxsparse.ops.backends import cuda
from proxsparse.reference import pack, quantize, windows

pytestmark = pytest.mark.slow  # nvcc and g++ compile for minutes

# (out_features, in_features): whole steps of 256 columns, parts of one, tiles that do not fill up, rows of W that no
# 16-byte access fits, a single block.
SHAPES = [(64, 1024), (32, 320), (7, 64), (33, 576), (40, 260), (9, 12), (1, 4)]
BITS = [16, 8, 4]
DTYPES = [torch.bfloat16, torch.float16]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]  # in the order of Dtype in csrc/calls.h


def layer(bits, rows: int, out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16):
    """x; values or codes, indices and scales of a packed weight with every pattern of zeros; the weight in float64.

    All codes are equally likely, among them -128. With 4 bits scales have both signs, and a weight is rounded.
    """
    weight = torch.randn(out_features, in_features // 4, 4)
    weight *= torch.rand(weight.shape).argsort(-1) < torch.randint(0, 3, weight.shape[:2]).unsqueeze(-1)
    weight = weight.view(out_features, in_features).to(dtype)
    x, (values, indices), scales = torch.randn(rows, in_features).to(dtype), pack.pack_nm(weight), None
    if bits != 16:
        dtype_of_codes, size = quantize.CODES[bits], in_features // (2 if bits == 8 else 4)
        values = torch.randint(-128, 128, (out_features, size)).to(dtype_of_codes)
        scales = torch.empty(quantize.shape_of_scales(values)).uniform_(0.01, 0.1).to(dtype)
        if bits == 4:
            scales *= torch.randint(0, 2, scales.shape) * 2 - 1
        kept = quantize.dequantize(values, scales.double() if bits == 8 else scales)
        weight = pack.unpack_nm(kept, indices)
    return x, values, indices, scales, weight.double()


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Rounded once from sums in fp32."""
    exact = x.double() @ weight.T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.abs().T
    allowed = torch.finfo(y.dtype).eps / 2 * exact.abs() + 1e-6 * magnitude + 1e-7
    assert ((y.double() - exact).abs() <= allowed).all()


class GemvCall(ctypes.Structure):
    """GemvCall in csrc/cuda/launch.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "values", "indices", "bias", "y")]
    _fields_ += [(name, ctypes.c_int) for name in ("rows", "out_features", "in_features", "x_features", "m", "dtype")]
    _fields_ += [(name, ctypes.c_int) for name in ("warps", "splits", "tiles")]
    _fields_ += [("dependent", ctypes.c_bool), ("codes", ctypes.c_int), ("scales", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_uint32) for name in ("x_blocks", "reciprocal")]


@pytest.fixture
def launch(cuda_on_cpu):
    """launch(x, values, indices, scales, warps=0, splits=0, tiles=0, dependent=False) -> y, and what was launched.

    That is: warps of a thread block, thread blocks, splits, dependent.
    """

    def run(x, values, indices, scales=None, warps=0, splits=0, tiles=0, dependent=False):
        library = cuda._C.load("gemv", x, values)
        y, pointers = x.new_empty(len(x), len(values)), [t.data_ptr() for t in (x, values, indices)]
        codes = 0 if scales is None else 1 if values.dtype == torch.int8 else 2
        sizes = len(x), len(values), x.shape[1], x.shape[1], 4, TYPES.index(x.dtype)
        call = GemvCall(*pointers, 0, y.data_ptr(), *sizes, warps, splits, tiles, dependent, codes)
        call.scales = 0 if scales is None else scales.data_ptr()
        name = "_ZN10proxsparse3gpu11launch_gemvERKNS0_8GemvCallEP11CUstream_st"
        with cuda_on_cpu.memory(x, values, indices, scales, y):
            assert library[name](ctypes.byref(call), None) == 0
        return y, launched(cuda_on_cpu)

    return run


def launched(gpu) -> tuple[int, int, int, bool]:
    """Warps of a thread block, thread blocks, splits, dependent: of the latest launch."""
    _, call = gpu.launches[-1]
    return call.block[0] // 32, call.grid[0] * call.grid[1], call.cluster[1], bool(call.dependent)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_tail(shape, bits, cuda_on_cpu):
    for rows, dtype in ((1, torch.bfloat16), (3, torch.float16), (8, torch.bfloat16), (13, torch.float16)):
        x, values, indices, scales, weight = layer(bits, rows, *shape, dtype)
        bias = torch.randn(shape[0]).to(dtype) if rows % 2 else None
        check(cuda.gemv(x, values, indices, bias, scales), x, weight, bias)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("m", [4, 6, 8, 10])
def test_windows_of_x(m, bits, cuda_on_cpu):
    """Patterns (m-2):m: whole blocks, a remainder that is dense, and padding, at the end of a step or within one."""
    for rows, in_features in ((1, 12 * m * 16), (3, 2 * m + 2), (9, 40 * m + m - 2), (16, 4098), (5, m - 2)):
        columns = windows.expanded_features(in_features, m)
        x, values, indices, scales, weight = layer(bits, rows, 24, columns)
        x = x[:, :in_features].contiguous()
        y = cuda.gemv(x, values, indices, None, scales, m)
        check(y, windows.expand(x, m), weight)


@pytest.mark.parametrize(("processors", "generation"), [(1, 9), (8, 9), (132, 9), (108, 8), (148, 10)])
def test_however_the_work_is_split(processors, generation, cuda_on_cpu, monkeypatch):
    """Few processors: 8 warps a thread block; many: clusters of up to 8, where the GPU has them."""
    monkeypatch.setattr(
        cuda_on_cpu, "device", cuda_on_cpu.device | {"processors": processors, "generation": generation}
    )
    for rows in (2, 16):
        x, values, indices, _, weight = layer(16, rows, 40, 5 * 1024 + 64)
        y = cuda.gemv(x, values, indices, None)
        check(y, x, weight)
        assert torch.equal(y, cuda.gemv(x, values, indices, None))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_every_launch_parameter_gives_the_same_product(tiles, bits, launch):
    x, values, indices, scales, weight = layer(bits, 13, 150, 2 * 1024 + 320)
    for rows, (warps, splits) in itertools.product((1, 8, 13) if bits == 16 else (13,), ((4, 8), (16, 1), (16, 2))):
        y, parameters = launch(x[:rows], values, indices, scales, warps, splits, tiles, dependent=tiles == 2)
        check(y, x[:rows], weight)
        groups = 1 if rows <= 4 else 2 if rows <= 8 else 4
        most = 8 if tiles == 4 and groups > 1 else 16  # registers
        row_blocks = -(-150 // (8 * tiles * groups))
        assert parameters == (min(warps, most), row_blocks * splits, splits, tiles == 2)


def test_dependent_launch_and_clusters_only_where_the_code_has_the_instructions(launch, cuda_on_cpu, monkeypatch):
    """A kernel without them would not wait for the one before, and y would miss the sums of other thread blocks.

    Code for compute capability 8.0 on a GPU of 9.0: compiled by the driver.
    """
    x, values, indices, _, weight = layer(16, 6, 40, 5 * 1024 + 64)
    for processors, generation, code, splits in ((1, 9, 90, 1), (132, 9, 90, 8), (132, 9, 80, 1), (132, 8, 80, 1)):
        device = {"processors": processors, "generation": generation, "code": code}
        monkeypatch.setattr(cuda_on_cpu, "device", cuda_on_cpu.device | device)
        for dependent in (False, True):
            y, parameters = launch(x, values, indices, dependent=dependent)
            check(y, x, weight)
            assert parameters[2:] == (splits, dependent and code == 90)


def test_a_number_that_is_not_finite_stays_in_its_row(cuda_on_cpu):
    x, values, indices, _, _ = layer(16, 3, 20, 200)
    x[1, 17] = float("nan")
    values[5, 40:44] = float("inf")
    y = cuda.gemv(x, values, indices, None)
    fine = torch.ones(3, 20, dtype=torch.bool)
    fine[:, 5] = fine[1] = False
    assert y[fine].isfinite().all()
    assert not y[:, 5].isfinite().any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_any_alignment(offset, bits, cuda_on_cpu):
    """Of x, the values and the indices; a launch is as fast as it can be if they begin at multiples of 16 bytes."""

    def moved(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    x, values, indices, scales, weight = layer(bits, 2, 24, 512)
    check(cuda.gemv(moved(x), moved(values), moved(indices), None, scales), x, weight)


# ------------------------------------------------------------------------------------------ codes of 8 and 4 bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", quantize.CODES)
def test_every_code_alone_at_every_place(bits, dtype, cuda_on_cpu):
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
        y = cuda.gemv(x, codes, indices, None, scales.to(dtype))
        assert torch.equal(y[0], expected.to(dtype))


@pytest.mark.parametrize("bits", quantize.CODES)
def test_the_largest_codes_do_not_overflow(bits, cuda_on_cpu):
    """A sum of codes times x exceeds float16; multiplied by the scales it does not."""
    codes = torch.full((8, 1024 * bits // 16), 127 if bits == 8 else 0x77).to(quantize.CODES[bits])
    _, indices = pack.pack_nm(torch.ones(8, 256, 4, dtype=torch.float16).mul_(torch.tensor([1, 1, 0, 0])).view(8, 1024))
    scales = torch.full(quantize.shape_of_scales(codes), 2.0**-12).half()
    x = torch.full((2, 1024), 16.0).half()
    expected = 512 * 16 * (127 if bits == 8 else 7) / 4096
    assert torch.equal(cuda.gemv(x, codes, indices, None, scales), torch.full((2, 8), expected).half())
