"""The N:M pattern: parsing, its invariants, and how it cuts a weight into blocks."""

import dataclasses

import pytest
import torch

from proxsparse import NMPattern
from proxsparse.patterns import pattern_of_mask


@pytest.mark.parametrize(("text", "n", "m"), [("2:4", 2, 4), (" 1 : 4 ", 1, 4), ("63:64", 63, 64)])
def test_parse(text, n, m):
    pattern = NMPattern.parse(text)
    assert (pattern.n, pattern.m, pattern.density, str(pattern)) == (n, m, n / m, f"{n}:{m}")
    assert NMPattern.parse(str(pattern)) == pattern
    assert NMPattern.parse(pattern) is pattern
    assert len({pattern, NMPattern(n, m), NMPattern(2, 8)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.n = 3


@pytest.mark.parametrize(
    "text", ["", "2/4", "2:4:8", "two:four", "-1:4", "2.0:4", "2:", ":4", "1000:2000", None, 24, (2, 4)]
)
def test_anything_else_is_refused_with_the_form(text):
    with pytest.raises(ValueError, match='is not of the form "N:M", such as "2:4"'):
        NMPattern.parse(text)


@pytest.mark.parametrize(("n", "m"), [(0, 4), (4, 4), (5, 4), (-1, 4), (2, 65), (0, 0)])
def test_impossible_numbers_are_refused_with_the_rule(n, m):
    with pytest.raises(ValueError, match=rf"{n}:{m}: needs 1 <= n < m <= 64"):
        NMPattern(n, m)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (0, 8), (3, 0)])
def test_blocks_are_a_view_along_the_last_dimension(shape):
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    blocks = NMPattern(2, 4).blocks(weight)
    assert blocks.shape == (*shape[:-1], shape[-1] // 4, 4)
    assert torch.equal(blocks.reshape(shape), weight)
    columns = torch.zeros(8, 3).T
    NMPattern(2, 4).blocks(columns).fill_(5)
    assert (columns == 5).all()


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [*(("2:4", shape) for shape in ((3, 131), (7,), (2,), ())), ("6:8", (3, 6)), ("1:4", (3, 130)), ("4:8", (4, 10))],
)
def test_a_width_that_no_blocks_fill_is_refused_with_the_remedy(pattern, shape):
    with pytest.raises(ValueError, match=rf"score of shape \[.*\].*must be a.* for {pattern} blocks; exclude"):
        NMPattern.parse(pattern).check_blocks(torch.Size(shape), "score")
    with pytest.raises(ValueError, match="weight of shape"):
        NMPattern.parse(pattern).blocks(torch.zeros(shape))


def test_an_even_remainder_of_a_row_is_in_no_block():
    weight = torch.arange(2 * 22).view(2, 22)
    for text, remainder in (("2:4", 2), ("4:6", 4), ("6:8", 6), ("8:10", 2)):
        pattern = NMPattern.parse(text)
        assert pattern.has_windows
        assert pattern.whole(22) == 22 - remainder
        assert torch.equal(pattern.blocks(weight).flatten(-2), weight[:, :-remainder])
    assert not any(NMPattern.parse(text).has_windows for text in ("1:4", "3:4", "1:3", "3:5", "4:8"))


def test_feasible_blocks_hold_at_most_n_nonzeros_and_nan_is_one():
    nan, pattern = float("nan"), NMPattern(2, 4)
    weight = torch.tensor([[1.0, 0, -2, 0, 0, 0, -0.0, 0], [1, 2, 3, 4, 0, 5, nan, 0], [1, 2, nan, 0, 0, -0.0, 4, 5]])
    assert pattern.nonzeros(weight).tolist() == pattern.nonzeros(weight != 0).tolist() == [[2, 0], [4, 2], [3, 2]]
    assert pattern.feasible_blocks(weight).tolist() == [[True, True], [False, True], [False, True]]
    assert NMPattern(4, 8).feasible_blocks(weight).tolist() == [[True], [False], [False]]
    feasible = [pattern.is_feasible(rows) for rows in (weight, weight[:1], weight[2:], weight[:0])]
    assert feasible == [False, True, False, True]
    assert not NMPattern(1, 4).is_feasible(weight[:1])
    assert NMPattern(2, 64).nonzeros(torch.ones(64)).tolist() == [64]
    assert pattern.nonzeros(weight[:0].T.reshape(0, 8)).shape == (0, 2)


def test_counting_takes_a_byte_a_weight():
    """torch adds bools as int64; the largest temporary of a bfloat16 weight would be four times the weight."""
    weight = torch.ones(256, 1024, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile:
        assert not NMPattern(2, 4).is_feasible(weight)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert 0 < largest <= weight.numel()


@pytest.mark.parametrize(("row", "pattern"), [("1010", "2:4"), ("100100", "2:6")])
def test_a_regular_mask_has_the_pattern_of_the_other_layers(row, pattern):
    mask = torch.tensor([[digit == "1" for digit in row * 24]] * 64)
    assert str(pattern_of_mask(mask)) == pattern
