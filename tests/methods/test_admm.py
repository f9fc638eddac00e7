"""ADMM against a literal, slow form of the paper's algorithm, against least squares, and against the other methods."""

import math

import pytest
import torch
from layer_cases import correlated_inputs, layer_and_statistics

from proxsparse import NMPattern
from proxsparse.errors import InputError
from proxsparse.methods import prune_
from proxsparse.methods.admm import prune_admm
from proxsparse.methods.sparsegpt import InputGram, prune_sparsegpt
from proxsparse.methods.wanda import FeatureNorms, prune_wanda


def literal_admm(weight, inputs, n, m):
    """Column vectors as in the paper, entry by entry, constants written out."""
    columns = weight.T.clone()  # [in_features, out_features]
    norm = torch.stack([feature.square().sum().sqrt() + 1e-8 for feature in inputs.T])
    gram = torch.einsum("ti,tj->ij", inputs / norm, inputs / norm)
    gram = gram + 0.1 * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    dense = columns * norm[:, None]
    w, u = dense.clone(), torch.zeros_like(dense)
    for step in range(20):
        if step < 15:
            wanted = (m - n) / m * (1 - (1 - (step + 1) / 15) ** 3)
            mask = literal_mask((w + u).abs(), n, m, round(wanted * w.numel(), 9))
        z = (w + u) * mask
        u = u + (w - z)
        w = torch.linalg.solve(gram + torch.eye(len(gram), dtype=gram.dtype), gram @ dense + z - u)
    return mask.T, ((w + u) * mask / norm[:, None]).T


def literal_mask(score, n, m, prune):
    """The int(prune) smallest of all scores that are not among the n largest of their m are pruned."""
    free = []
    for column in range(score.shape[1]):
        for block in range(0, score.shape[0], m):
            ranked = sorted(range(block, block + m), key=lambda row, c=column: score[row, c].item())
            free += [(score[row, column].item(), row, column) for row in ranked[: m - n]]
    mask = torch.ones_like(score, dtype=torch.bool)
    for _, row, column in sorted(free)[: int(prune)]:
        mask[row, column] = False
    return mask


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4", "4:8"])
def test_equals_the_literal_form(pattern):
    inputs = correlated_inputs(300, 40)
    layer, gram = layer_and_statistics(InputGram, inputs)
    pattern = NMPattern.parse(pattern)
    mask, updated = prune_admm(layer.weight, gram, pattern)
    expected_mask, expected = literal_admm(layer.weight, inputs, pattern.n, pattern.m)
    assert torch.equal(mask, expected_mask)
    assert (pattern.blocks(mask).sum(-1) == pattern.n).all()
    torch.testing.assert_close(torch.where(mask, updated, 0.0), expected, rtol=1e-9, atol=1e-12)


def test_many_iterations_solve_the_masked_least_squares():
    inputs = correlated_inputs(300, 24)
    layer, gram = layer_and_statistics(InputGram, inputs)
    mask, updated = prune_admm(layer.weight, gram, NMPattern(2, 4), iterations=2000, damping=0.0)
    for row, kept in enumerate(mask):
        target = inputs @ layer.weight[row]
        optimum = torch.linalg.lstsq(inputs[:, kept], target[:, None]).solution[:, 0]
        torch.testing.assert_close(updated[row, kept], optimum, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_output_error_than_other_methods(dtype):
    inputs = correlated_inputs(500, 64, dtype)
    layer, gram = layer_and_statistics(InputGram, inputs, out_features=32)
    _, norms = layer_and_statistics(FeatureNorms, inputs, out_features=32)
    dense, pattern = layer.weight, NMPattern(2, 4)
    admm_mask, admm = prune_admm(dense, gram, pattern)
    sparsegpt_mask, sparsegpt = prune_sparsegpt(dense, gram, pattern)
    wanda_mask, _ = prune_wanda(dense, norms, pattern)

    def error(mask, weight):
        difference = dense - torch.where(mask, weight.to(dtype), 0.0)
        return (difference.double() @ inputs.double().T).norm().item()

    assert admm.dtype == torch.float32
    assert error(admm_mask, admm) < 0.9 * error(sparsegpt_mask, sparsegpt)
    assert error(admm_mask, admm) < 0.5 * error(wanda_mask, dense)
    assert error(admm_mask, admm) < 0.5 * error(admm_mask, dense)  # the update, not only the mask


def test_a_dead_feature_is_pruned_first():
    inputs = correlated_inputs(300, 16)
    inputs[:, [1, 6, 7]] = 0
    layer, gram = layer_and_statistics(InputGram, inputs)
    mask, updated = prune_admm(layer.weight, gram, NMPattern(2, 4))
    assert not mask[:, [1, 6, 7]].any()
    assert updated.isfinite().all()


def test_a_block_of_dead_features_stays_finite_and_sparse():
    inputs = correlated_inputs(300, 16, torch.float32)
    inputs[:, 4:8] = 0
    layer, gram = layer_and_statistics(InputGram, inputs)
    mask, updated = prune_admm(layer.weight, gram, NMPattern(2, 4))
    assert (NMPattern(2, 4).blocks(mask).sum(-1) == 2).all()
    torch.testing.assert_close(updated[:, 4:8][mask[:, 4:8]], layer.weight[:, 4:8][mask[:, 4:8]])


def test_a_singular_gram_matrix_names_the_layer_and_the_remedy(tiny_model, batches):
    one_token = [{name: tensor[:, :1] for name, tensor in batches[0].items()}]
    with pytest.raises(
        InputError, match=r"layers\.0\.self_attn\.q_proj: .*damping=0.0 and rho=1e-30; .*larger damping"
    ):
        prune_(tiny_model(), "admm", one_token, damping=0.0, rho=1e-30)


@pytest.mark.parametrize("mask_iterations", [0, 21])
def test_the_mask_must_have_time_to_become_sparse(mask_iterations, tiny_model, batches):
    words = rf"--mask_iterations {mask_iterations}: must be from 1 to --iterations 20"
    with pytest.raises(InputError, match=words):
        prune_(tiny_model(), "admm", batches, mask_iterations=mask_iterations)


@pytest.mark.parametrize("option", [{"damping": math.inf}, {"damping": -0.05}, {"rho": 0.0}, {"rho": math.nan}])
def test_constants_that_would_make_weights_of_nan_are_refused(option, tiny_model, batches):
    ((name, value),) = option.items()
    with pytest.raises(InputError, match=rf"--{name} {value}: must be a finite number >=? 0"):
        prune_(tiny_model(), "admm", batches, **option)
