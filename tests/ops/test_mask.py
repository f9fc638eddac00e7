"""The N:M mask on every backend of this machine: ties, NaN, infinity; blocks of all kinds are in test_every_op.py."""

import pytest
import torch
from ops.cases import each_dtype, hard
from ops.on_each_backend import backends_of

from proxsparse import nm_mask

NAN, INF = float("nan"), float("inf")
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
each_place = pytest.mark.parametrize("place", backends_of("nm_mask"))


@each_place
@each_dtype
def test_ties_nan_of_either_sign_and_infinity(dtype, place, serve):
    device = serve("nm_mask", place)
    for score, kept in TIES:
        score = torch.tensor([score], dtype=dtype, device=device)
        for signed in (score, torch.where(score.isnan(), score.copysign(-score.new_ones(1)), score)):
            assert nm_mask(signed)[0].nonzero().flatten().tolist() == list(kept), score


@each_place
def test_a_score_that_repeats_in_memory(place, serve):
    device = serve("nm_mask", place)
    score = hard((1, 8), torch.float32, 21)
    assert torch.equal(nm_mask(score.to(device).expand(5, 8)).cpu(), nm_mask(score).expand(5, 8))
