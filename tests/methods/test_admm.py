"""ADMM against a literal, slow form of the paper's algorithm, against least squares, and against the other methods."""

import pytest
import torch
from layer_cases import correlated_inputs, layer_and_statistics, output_error

from proxsparse import NMPattern, prune_
from proxsparse.errors import InputError
from proxsparse.methods.admm import prune_admm
from proxsparse.methods.magnitude import prune_magnitude
from proxsparse.methods.sparsegpt import InputGram, prune_sparsegpt
from proxsparse.methods.wanda import prune_wanda
from proxsparse.models.feature_norms import FeatureNorms


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_output_error_than_other_methods(dtype):
    inputs, pattern = correlated_inputs(500, 64, dtype), NMPattern(2, 4)
    layer, gram = layer_and_statistics(InputGram, inputs, out_features=32)
    _, norms = layer_and_statistics(FeatureNorms, inputs, out_features=32)
    mask, admm = prune_admm(layer.weight, gram, pattern)
    assert admm.dtype == torch.float32
    sparsegpt_error = output_error(layer.weight, inputs, *prune_sparsegpt(layer.weight, gram, pattern))
    magnitude_error = output_error(layer.weight, inputs, *prune_magnitude(layer.weight, None, pattern))
    wanda_error = output_error(layer.weight, inputs, *prune_wanda(layer.weight, norms, pattern))
    admm_error = output_error(layer.weight, inputs, mask, admm)
    assert wanda_error < magnitude_error
    assert sparsegpt_error < 0.8 * wanda_error
    assert admm_error < 0.9 * sparsegpt_error
    assert admm_error < 0.5 * wanda_error
    assert admm_error < 0.5 * output_error(layer.weight, inputs, mask)  # the update, not only the mask


@pytest.mark.parametrize("dead", [[1, 6, 7], [4, 5, 6, 7]])
def test_dead_features_are_pruned_first_and_a_block_of_them_stays_finite_and_sparse(dead):
    inputs = correlated_inputs(300, 16, torch.float32)
    inputs[:, dead] = 0
    layer, gram = layer_and_statistics(InputGram, inputs)
    mask, updated = prune_admm(layer.weight, gram, NMPattern(2, 4))
    assert (NMPattern(2, 4).blocks(mask).sum(-1) == 2).all()
    assert updated.isfinite().all()
    if len(dead) < 4:
        assert not mask[:, dead].any()
    else:
        torch.testing.assert_close(updated[:, 4:8][mask[:, 4:8]], layer.weight[:, 4:8][mask[:, 4:8]])


def test_a_singular_matrix_names_the_layer_and_the_remedy(tiny_model, batches):
    two_tokens = {name: tensor[:1, :2] for name, tensor in batches[0].items()}
    words = r"layers\.0\.self_attn\.q_proj: .*damping=0.0 and rho=1e-30; .*increase damping"
    with pytest.raises(InputError, match=words):
        prune_(tiny_model(), "admm", [two_tokens], damping=0.0, rho=1e-30)
