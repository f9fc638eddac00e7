"""W0 under the mask of a learned weight on every backend of this machine: the bits of the composed operations."""

import pytest
import torch
from ops.blocks import LAYOUTS, random_blocks

from proxsparse import NMPattern, nm_mask
from proxsparse.ops import masked_weight_, registry

OP = "masked_weight_"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# (weight, pretrained): equal, what kernels convert, what the op converts
PAIRS = [*((dtype, dtype) for dtype in DTYPES), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
each_pair = pytest.mark.parametrize(("dtype", "pretrained_dtype"), PAIRS, ids=str)
NAN, INF = float("nan"), float("inf")
NUMBERS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0, 1e-30])


def composed(weight, pretrained, scale=None, pattern="2:4"):
    """The op in five passes: |c * w| with the sign of w * W0, its mask, W0 there."""
    pretrained = pretrained.to(weight.dtype)
    score = (weight if scale is None else weight * scale) * pretrained.sign()
    with registry.use_backend("reference"):
        return torch.where(nm_mask(score, pattern), pretrained, 0.0)


def assert_same_bits(result, expected):
    assert result.dtype == expected.dtype
    assert torch.equal(result.contiguous().view(torch.uint8).cpu(), expected.contiguous().view(torch.uint8).cpu())


def blocks(count: int, dtype: torch.dtype, seed: int, width: int = 4) -> torch.Tensor:
    """Random blocks; a third of them has ties, and a third zeros, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, width, generator=generator)
    weight[: count // 3] = torch.randint(-2, 3, (count // 3, width), generator=generator).float()
    places = torch.randint(len(NUMBERS), (count // 3, width), generator=generator)
    weight[count - count // 3 :] = NUMBERS[places]
    return weight[torch.randperm(count, generator=generator)].to(dtype)


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
@pytest.mark.parametrize("with_scale", [True, False])
@each_pair
def test_the_bits_are_those_of_the_composed_operations(dtype, pretrained_dtype, with_scale, pattern, device):
    weight, pretrained = blocks(30_000, dtype, 1).view(100, -1), blocks(30_000, pretrained_dtype, 2).view(100, -1)
    scale = torch.rand(1200, generator=torch.Generator().manual_seed(3)) + 0.1 if with_scale else None
    expected = composed(weight, pretrained, scale, pattern)
    weight, pretrained = weight.to(device), pretrained.to(device)
    before, out = weight.clone(), torch.full_like(weight, NAN)
    scale = scale if scale is None else scale.to(device)
    assert masked_weight_(out, weight, pretrained, scale, pattern) is out
    assert_same_bits(out, expected)
    assert_same_bits(weight, before)


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), lambda base: base[:0]])
def test_layouts(layout, device):
    weight, pretrained, out = (layout(random_blocks(144, 1.0, seed=seed).view(24, 24).to(device)) for seed in range(3))
    scale = torch.linspace(2, 1, weight.shape[-1], device=device)
    expected = composed(weight.cpu(), pretrained.cpu(), scale.cpu())
    masked_weight_(out, weight, pretrained, scale)
    assert_same_bits(out, expected)


def test_sizes_that_no_vector_register_divides_and_empty_weights(device):
    for count in (*range(1, 41), 255, 256, 257, 1025):
        weight, pretrained = blocks(count, torch.float32, count), blocks(count, torch.float32, 5)
        flat, out = weight.to(device).flatten(), torch.full((4 * count,), NAN, device=device)
        masked_weight_(out, flat, pretrained.to(device).flatten())
        assert_same_bits(out, composed(weight, pretrained).flatten())
    for shape in ((0, 8), (3, 0), (2, 0, 4)):
        empty = torch.zeros(shape, device=device)
        assert masked_weight_(empty, empty, empty).shape == shape


@each_pair
def test_tensors_at_any_address(dtype, pretrained_dtype, device):
    """Each of them aligned to 16 bytes or not, rows that no vector register divides, and what lies around `out`."""

    def placed(tensor: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.full((tensor.numel() + 16,), NAN, dtype=tensor.dtype, device=device)
        part = memory[start : start + tensor.numel()].view(tensor.shape)
        return memory, part.copy_(tensor)

    for rows, columns in ((1, 4), (3, 12), (5, 260), (2, 1536)):
        numbers = blocks(rows * columns // 4, dtype, 8), blocks(rows * columns // 4, pretrained_dtype, 9)
        weight, pretrained = (tensor.view(rows, columns) for tensor in numbers)
        scale = 0.1 + torch.rand(columns, generator=torch.Generator().manual_seed(10))
        expected = composed(weight, pretrained, scale)
        for starts in ((8, 8, 8, 8), (1, 8, 8, 8), (8, 3, 8, 8), (8, 8, 5, 8), (8, 8, 8, 1)):
            tensors = (torch.zeros_like(weight), weight, pretrained, scale)
            (memory, out), *inputs = map(placed, tensors, starts)
            masked_weight_(out, *(part for _, part in inputs))
            assert_same_bits(out, expected)
            assert memory[: starts[0]].isnan().all(), (rows, columns, starts)
            assert memory[starts[0] + out.numel() :].isnan().all(), (rows, columns, starts)


def test_other_patterns():
    for pattern in ("1:2", "2:6", "4:8", "3:5"):
        m = NMPattern.parse(pattern).m
        weight, pretrained, scale = blocks(300, torch.float32, 6, m), blocks(300, torch.float32, 7, m), torch.rand(m)
        with registry.use_backend("reference"):
            out = masked_weight_(torch.empty_like(weight), weight, pretrained, scale, pattern)
        assert_same_bits(out, composed(weight, pretrained, scale, pattern))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(3, 130)] * 3, r"weight of shape \[3, 130\].*multiple of 4.*exclude"),
        ([torch.zeros(2, 8, dtype=torch.int64)] * 3, "torch.int64.*convert"),
        ([torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 4)], r"out is .*\[2, 8\].*must be float32 \[2, 4\]"),
        ([torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(8)], r"pretrained is .*\[8\].*must be .*\[2, 8\]"),
        ([torch.zeros(2, 8)] * 3 + [torch.zeros(4)], r"scale is .*\[4\].*must be .*\[8\]"),
        ([torch.zeros(2, 8).half(), torch.zeros(2, 8), torch.zeros(2, 8)], "out is torch.float16.*must be float32"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_remedy(tensors, message):
    with pytest.raises(ValueError, match=message):
        masked_weight_(*tensors)
