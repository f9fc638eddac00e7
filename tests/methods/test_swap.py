"""The swap search against brute force: it goes downhill, and it ends where no block has a better mask."""

from itertools import combinations

import pytest
import torch
from layer_cases import correlated_inputs, layer_and_statistics

from proxsparse import NMPattern, nm_mask
from proxsparse.errors import InputError
from proxsparse.methods.block_masks import block_masks
from proxsparse.methods.sparsegpt import InputGram
from proxsparse.methods.swap import improve_mask, prune_swap
from proxsparse.methods.wanda import prune_wanda
from proxsparse.models.feature_norms import FeatureNorms


def error_of(mask, weight, inputs):
    """||P X||_F^2 of every row, P = what the mask prunes; [out_features]."""
    return (torch.where(mask, 0.0, weight).double() @ inputs.double().T).square().sum(1)


def single_block_changes(mask, pattern):
    """Every mask of one row, bool [in_features], that differs from `mask` in one block at most."""
    for block in range(0, len(mask), pattern.m):
        for kept in combinations(range(pattern.m), pattern.n):
            other = mask.clone()
            other[block : block + pattern.m] = torch.isin(torch.arange(pattern.m), torch.tensor(kept))
            yield other


def case(features, out_features=6):
    inputs = correlated_inputs(400, features)
    return inputs, *layer_and_statistics(InputGram, inputs, out_features)


@pytest.mark.parametrize(
    ("pattern", "features"),
    [("2:4", 24), ("1:4", 24), ("3:4", 24), ("4:8", 24), ("4:8", 8)],  # 8: exact, a row is a block
)
def test_no_change_of_one_block_is_better(pattern, features):
    inputs, layer, gram = case(features)
    pattern = NMPattern.parse(pattern)
    mask, new_weight = prune_swap(layer.weight, gram, pattern)
    assert new_weight is None
    assert (pattern.blocks(mask).sum(-1) == pattern.n).all()
    error = error_of(mask, layer.weight, inputs)
    for row, found in enumerate(error):
        others = torch.stack(list(single_block_changes(mask[row], pattern)))
        assert error_of(others, layer.weight[row], inputs).min() >= found * (1 - 1e-12)


def test_every_sweep_lowers_the_error_until_it_stops():
    inputs, layer, gram = case(144, out_features=16)
    masks = [prune_swap(layer.weight, gram, NMPattern(2, 4), sweeps=sweeps)[0] for sweeps in range(12)]
    errors = torch.stack([error_of(mask, layer.weight, inputs) for mask in masks])
    assert (errors.diff(dim=0) <= 1e-12 * errors[0]).all()
    assert errors[1].sum() < 0.7 * errors[0].sum()
    assert torch.equal(masks[-1], masks[-2])
    assert not torch.equal(masks[1], masks[2])  # one sweep is not enough, so the loop is put to use


def test_the_start_is_wandas_mask_and_uncorrelated_inputs_leave_it():
    inputs, layer, gram = case(24)
    wanda, _ = prune_wanda(layer.weight, layer_and_statistics(FeatureNorms, inputs)[1], NMPattern(2, 4))
    assert torch.equal(prune_swap(layer.weight, gram, NMPattern(2, 4), sweeps=0)[0], wanda)
    gram.sums = gram.sums.diagonal().diag()
    assert torch.equal(prune_swap(layer.weight, gram, NMPattern(2, 4))[0], wanda)


@pytest.mark.parametrize("pattern", ["2:4", "3:4"])
def test_ties_keep_the_present_choice(pattern):
    pattern = NMPattern.parse(pattern)
    weight, gram = torch.ones(3, 16), torch.ones(16, 16)  # every mask of a block has the same error
    start = nm_mask(torch.rand(3, 16, generator=torch.Generator().manual_seed(0)), pattern)
    assert torch.equal(improve_mask(weight, gram, start, pattern), start)


def test_float32_ends_and_is_as_good_as_float64():
    inputs, layer, gram = case(256, out_features=32)
    inputs = inputs + 30  # features with a large common mean: much cancels
    gram.sums = inputs.T @ inputs
    exact, _ = prune_swap(layer.weight, gram, NMPattern(2, 4), sweeps=100)
    gram.sums = gram.sums.float()
    masks = [prune_swap(layer.weight.float(), gram, NMPattern(2, 4), sweeps=sweeps)[0] for sweeps in (0, 99, 100)]
    assert torch.equal(masks[1], masks[2])
    start, found, best = (error_of(mask, layer.weight, inputs).sum() for mask in (masks[0], masks[2], exact))
    assert found < 0.1 * start
    assert found < 1.1 * best


def test_block_masks_lists_them_all_once():
    rows = [[c == "1" for c in row] for row in ("1100", "1010", "1001", "0110", "0101", "0011")]
    assert block_masks(NMPattern(2, 4)).tolist() == rows
    many = block_masks(NMPattern(4, 8))
    assert len(many.unique(dim=0)) == 70
    assert (many.sum(1) == 4).all()
    with pytest.raises(InputError, match=r"pattern 16:32: a block has 601080390 .* smaller blocks"):
        block_masks(NMPattern(16, 32))
