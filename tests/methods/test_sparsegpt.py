"""SparseGPT against a textbook OBS loop, and against the masks of the other methods."""

import pytest
import torch
from layer_cases import correlated_inputs, layer_and_statistics

from proxsparse import NMPattern, prune_
from proxsparse.methods.sparsegpt import InputGram, prune_sparsegpt


def textbook_obs(weight, hessian, n, m):
    """Optimal brain surgery, one column at a time, the inverse of the remaining Hessian computed again each time."""
    weight, mask = weight.clone(), torch.ones_like(weight, dtype=torch.bool)
    columns = weight.shape[1]
    inverse_diagonal = torch.stack([torch.linalg.inv(hessian[j:, j:])[0, 0] for j in range(columns)])
    for j in range(columns):
        if j % m == 0:
            score = weight[:, j : j + m].square() / inverse_diagonal[j : j + m]
            for row in range(weight.shape[0]):
                mask[row, j + score[row].argsort()[: m - n]] = False
        inverse = torch.linalg.inv(hessian[j:, j:])
        error = torch.where(mask[:, j], 0.0, weight[:, j]) / inverse[0, 0]
        weight[:, j:] -= error[:, None] * inverse[0]
        weight[:, j][~mask[:, j]] = 0
    return mask, weight


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
@pytest.mark.parametrize("chunk", [8, 12, 128])
def test_equals_the_textbook_loop(pattern, chunk):
    layer, gram = layer_and_statistics(InputGram, correlated_inputs(300, 40))
    pattern = NMPattern.parse(pattern)
    hessian = gram.hessian()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    expected_mask, expected = textbook_obs(layer.weight, hessian, pattern.n, pattern.m)
    mask, updated = prune_sparsegpt(layer.weight, gram, pattern, chunk=chunk)
    assert torch.equal(mask, expected_mask)
    torch.testing.assert_close(torch.where(mask, updated, 0.0), expected, rtol=1e-9, atol=1e-12)


def test_the_hessian_is_that_of_the_mean_squared_error_in_float32_or_better():
    inputs = correlated_inputs(300, 8)
    _, gram = layer_and_statistics(InputGram, inputs)
    expected = torch.func.hessian(lambda w: (inputs @ w).square().mean())(torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(gram.hessian(), expected)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert layer_and_statistics(InputGram, inputs.to(dtype))[1].hessian().dtype == torch.float32


def test_mask_only(tiny_model, batches):
    """The kept weights are the pretrained ones, so the later decoder blocks see other inputs than with the update."""
    model, dense = tiny_model(), dict(tiny_model().named_parameters())
    masks = prune_(model, "sparsegpt", batches, update_weights=False)
    for name, mask in masks.items():
        assert torch.equal(model.get_submodule(name).weight, torch.where(mask, dense[f"{name}.weight"], 0.0)), name
    first = "model.layers.0.self_attn.q_proj"
    assert torch.equal(masks[first], prune_(tiny_model(), "sparsegpt", batches)[first])


def test_autocast_does_not_reach_the_hessian(tiny_model, batches):
    """In the first decoder block only the inputs of the first layers are what they are without autocast."""
    first = "model.layers.0.self_attn.q_proj"
    expected = prune_(tiny_model(), "sparsegpt", batches, include=[first])[first]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(prune_(tiny_model(), "sparsegpt", batches, include=[first])[first], expected)


@pytest.mark.parametrize("damping", [0.01, 0.0])
def test_a_dead_feature_is_pruned_first(damping):
    inputs = correlated_inputs(300, 16)
    inputs[:, [1, 6, 7]] = 0
    layer, gram = layer_and_statistics(InputGram, inputs)
    mask, updated = prune_sparsegpt(layer.weight, gram, NMPattern(2, 4), damping=damping)
    assert not mask[:, [1, 6, 7]].any()
    assert updated.isfinite().all()
