"""csrc/cuda/gemv.h as nvcc compiles it, on this CPU (tests/ptx); results against float64.

tests/ptx checks that every access stays within the tensors and is aligned.
"""

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


def launched(gpu) -> tuple[int, int, int]:
    """Warps of a thread block, thread blocks, splits: of the latest launch."""
    _, call = gpu.launches[-1]
    return call.block[0] // 32, call.grid[0] * call.grid[1], call.cluster[1]


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


@pytest.mark.parametrize(
    ("processors", "generation", "parameters"),  # as `launched`, for 2 and for 16 rows of x
    [
        (1, 9, [(8, 2, 1), (16, 1, 1)]),
        (8, 9, [(6, 8, 4), (12, 8, 8)]),
        (132, 9, [(3, 16, 8), (12, 8, 8)]),
        (108, 8, [(16, 2, 1), (16, 1, 1)]),
        (148, 10, [(3, 16, 8), (12, 8, 8)]),
    ],
)
def test_however_the_work_is_split(processors, generation, parameters, cuda_on_cpu, monkeypatch):
    """Few processors: 8 warps a thread block; many: clusters of up to 8, where the GPU has them."""
    device = cuda_on_cpu.device | {"processors": processors, "generation": generation}
    monkeypatch.setattr(cuda_on_cpu, "device", device)
    for rows, expected in zip((2, 16), parameters, strict=True):
        x, values, indices, _, weight = layer(16, rows, 40, 5 * 1024 + 64)
        y = cuda.gemv(x, values, indices, None)
        check(y, x, weight)
        assert launched(cuda_on_cpu) == expected
        assert torch.equal(y, cuda.gemv(x, values, indices, None))


def test_clusters_only_where_the_code_has_the_instructions(cuda_on_cpu, monkeypatch):
    """Without them, y would miss the sums of other thread blocks.

    Code for compute capability 8.0 on a GPU of 9.0: compiled by the driver.
    """
    x, values, indices, _, weight = layer(16, 6, 40, 5 * 1024 + 64)
    for processors, generation, code, splits in ((1, 9, 90, 1), (132, 9, 90, 8), (132, 9, 80, 1), (132, 8, 80, 1)):
        device = {"processors": processors, "generation": generation, "code": code}
        monkeypatch.setattr(cuda_on_cpu, "device", cuda_on_cpu.device | device)
        check(cuda.gemv(x, values, indices, None), x, weight)
        assert launched(cuda_on_cpu)[2] == splits


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
