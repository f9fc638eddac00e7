"""csrc/cuda/pack.cu and metadata.cu without a GPU: bit for bit what the equations say, within their memory."""

import ctypes
import itertools

import pytest
import torch
from ops.on_cpu import address, fenced, survives
from torch import Tensor

from proxsparse import reference
from proxsparse.ops.backends import cutlass

BITS = {2: torch.int16, 4: torch.int32}
SHAPES = [(1, 4), (3, 12), (5, 8), (9, 260), (130, 64), (2, 1028)]
# architecture -> (out_features, in_features): whole tiles, and what sm_90 pads
TILED = {80: [(32, 64), (64, 192), (96, 320)], 90: [(64, 128), (128, 384), (8, 16), (72, 144), (200, 640)]}


def forms(weight: Tensor, fence: bool | None) -> tuple[Tensor, ...]:
    """Empty values, indices and flag of a weight; between fences if asked for."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns // 2, dtype=weight.dtype)
    tensors = values, torch.empty(rows, -(-columns // 8), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    return tensors if fence is None else tuple(fenced(tensor, fence) for tensor in tensors)


@pytest.fixture
def pack(linear_library):
    """pack(weight) -> values, indices, whether it was not 2:4; by csrc/cuda/pack.cu."""

    def run(weight: Tensor, fence: bool | None = None):
        values, indices, infeasible = forms(weight, fence)
        arguments = (address(tensor) for tensor in (weight, values, indices, infeasible))
        assert linear_library.pack(*arguments, ctypes.c_int64(len(weight)), weight.shape[1], weight.itemsize) == 0
        return values, indices, bool(infeasible)

    return run


@pytest.fixture
def unpack(linear_library):
    """unpack(values, indices) -> weight; by csrc/cuda/pack.cu."""

    def run(values: Tensor, indices: Tensor, weight: Tensor | None = None):
        weight = torch.empty(len(values), 2 * values.shape[1], dtype=values.dtype) if weight is None else weight
        arguments = (address(tensor) for tensor in (weight, values, indices, None))
        assert linear_library.pack(*arguments, ctypes.c_int64(len(weight)), weight.shape[1], weight.itemsize) == 0
        return weight

    return run


def every_block(dtype: torch.dtype) -> Tensor:
    """[rows, 260]: all blocks of 0, -0, a number and a NaN with at most two that are neither zero."""
    numbers = [0.0, -0.0, 1.5, float("nan")]
    blocks = [block for block in itertools.product(numbers, repeat=4) if sum(w != 0 for w in block) <= 2]
    count = -len(blocks) % 65
    weight = torch.tensor(blocks + blocks[:count], dtype=dtype).view(-1, 260)
    return torch.where(weight.isnan() & (torch.rand(weight.shape) < 0.5), -weight, weight)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.itemsize])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_pattern_of_zeros(dtype, pack, unpack):
    weight = every_block(dtype)
    values, indices, infeasible = pack(weight)
    expected = reference.pack.pack_nm(weight)
    assert not infeasible
    assert torch.equal(indices, expected[1])
    back, number = unpack(values, indices), ~weight.isnan()
    assert torch.equal(bits(back)[weight != 0], bits(weight)[weight != 0])  # a NaN with all its bits
    assert torch.equal(bits(back)[number], bits(reference.pack.unpack_nm(*expected))[number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_within_its_memory(shape, dtype, pack, unpack):
    weight = torch.randn(shape[0], shape[1] // 4, 4)
    weight = weight.where(torch.rand(weight.shape).argsort(-1) < 2, 0).view(shape).to(dtype)
    values, indices, _ = pack(weight)
    expected = reference.pack.pack_nm(weight)
    assert torch.equal(bits(values), bits(expected[0]))
    assert torch.equal(indices, expected[1])
    assert torch.equal(bits(unpack(values, indices)), bits(weight))
    for fence in (True, False):
        fences = [fenced(tensor, fence) for tensor in (weight, values, indices, torch.empty_like(weight))]
        assert survives(lambda: pack(fences[0], fence))  # noqa: B023 it runs at once
        assert survives(lambda: unpack(*fences[1:]))  # noqa: B023


def test_three_nonzeros_are_reported(pack):
    for place in range(4):
        weight = torch.ones(3, 40)
        weight.view(-1, 4)[:, :2] = 0
        assert not pack(weight)[2]
        weight[2, 36:] = torch.ones(4)
        weight[2, 36 + place] = 0
        assert pack(weight)[2]


# ------------------------------------------------------------------------------------------ metadata


@pytest.mark.parametrize(("architecture", "shape"), [(a, shape) for a in TILED for shape in TILED[a]], ids=str)
def test_metadata_is_what_the_equations_say(architecture, shape, linear_library):
    indices = torch.randint(0, 256, (shape[0], shape[1] // 8), dtype=torch.uint8)
    expected = {80: cutlass.metadata_sm80, 90: cutlass.metadata_sm90}[architecture](indices)
    metadata = torch.empty(cutlass.metadata_bytes(*shape, architecture), dtype=torch.uint8)

    def run(indices: Tensor, metadata: Tensor) -> None:
        assert linear_library.metadata(address(indices), address(metadata), *shape, architecture) == 0

    run(indices, metadata)
    assert torch.equal(metadata, expected)
    for at_end in (True, False):
        assert survives(lambda: run(fenced(indices, at_end), fenced(metadata, at_end)))  # noqa: B023 it runs at once
