"""The N:M mask on every backend of this machine."""

import pytest
import torch
from ops.blocks import LAYOUTS, random_blocks

from proxsparse import NMPattern, nm_mask
from proxsparse.ops import registry

OP = "nm_mask"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")


def ranked(score: torch.Tensor, n: int) -> torch.Tensor:
    """Kept where fewer than n members of the block are larger, or equal and earlier; a NaN stands above all numbers."""
    score = torch.where(score.isnan(), INF, score.double())
    m = score.shape[-1]
    earlier = torch.ones(m, m, dtype=torch.bool).tril(-1)  # [i, j]: j comes before i
    mine, other = score[..., :, None], score[..., None, :]
    return ((other > mine) | ((other == mine) & earlier)).sum(-1) < n


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_keeps_the_largest_of_every_block(dtype, pattern, device):
    n = NMPattern.parse(pattern).n
    score = random_blocks(40_000, 1.0, seed=20).to(dtype)
    score[:2000] = torch.randint(-2, 3, (2000, 4)).to(dtype)
    score[2000:6000] = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0])[torch.randint(6, (4000, 4))].to(dtype)
    mask = nm_mask(score.view(-1, 400).to(device), pattern).cpu()
    assert mask.dtype == torch.bool
    assert mask.shape == (400, 400)
    assert (mask.view(-1, 4).sum(-1) == n).all()
    assert torch.equal(mask.view(-1, 4), ranked(score, n))


TIES = [
    ((1, 1, 1, 1), (0, 1)),
    ((0, 0, 0, 0), (0, 1)),
    ((0.0, -0.0, 0.0, -0.0), (0, 1)),
    ((-0.0, -0.0, 0.0, 0.0), (0, 1)),
    ((1, 2, 2, 2), (1, 2)),
    ((-3, -1, -2, -4), (1, 2)),
    ((5, NAN, 1, 7), (1, 3)),
    ((NAN, NAN, NAN, NAN), (0, 1)),
    ((1, NAN, NAN, NAN), (1, 2)),
    ((-INF, -INF, -INF, -INF), (0, 1)),
    ((-INF, 1, -INF, -2), (1, 3)),
    ((1, 2, INF, NAN), (2, 3)),
    ((INF, INF, NAN, 0), (0, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_nan_of_either_sign_and_infinity(dtype, device):
    for score, kept in TIES:
        score = torch.tensor([score], dtype=dtype, device=device)
        for signed in (score, torch.where(score.isnan(), score.copysign(-score.new_ones(1)), score)):
            assert nm_mask(signed)[0].nonzero().flatten().tolist() == list(kept), score


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), lambda base: base[:1, :4].expand(5, 4)])
def test_layouts(layout, device):
    score = layout(random_blocks(144, 1.0, seed=21).view(24, 24).to(device))
    before = score.clone()
    mask = nm_mask(score)
    assert mask.shape == score.shape
    assert torch.equal(mask.reshape(-1, 4).cpu(), ranked(score.reshape(-1, 4).cpu(), 2))
    assert torch.equal(score, before)


def test_sizes_that_no_vector_register_divides_and_empty_scores(device):
    score = random_blocks(40, 1.0, seed=22)
    for count in range(1, 41):
        part = score[:count]
        assert torch.equal(nm_mask(part.reshape(1, -1).to(device)).view(-1, 4).cpu(), ranked(part, 2)), count
    for shape in ((0, 8), (3, 0), (0,), (2, 0, 4)):
        mask = nm_mask(torch.zeros(shape, device=device))
        assert (mask.shape, mask.dtype) == (shape, torch.bool)


def test_other_patterns():
    for pattern in ("1:2", "2:6", "4:8", "3:5"):
        n, m = NMPattern.parse(pattern).n, NMPattern.parse(pattern).m
        score = torch.randint(-3, 4, (300, m)).double()
        with registry.use_backend("reference"):
            assert torch.equal(nm_mask(score, pattern), ranked(score, n))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (torch.zeros(3, 130), r"score of shape \[3, 130\].*multiple of 4.*exclude"),
        (torch.zeros(2, 8, dtype=torch.int64), "torch.int64.*convert"),
        (torch.zeros(2, 8, dtype=torch.bool), "torch.bool.*convert"),
    ],
)
def test_bad_input_is_refused_with_the_value_and_the_remedy(score, message):
    with pytest.raises(ValueError, match=message):
        nm_mask(score)
