"""The prox of a list of weights: each as `prox_nm_` would, whatever the mixture."""

import pytest
import torch
from ops.blocks import random_blocks
from ops.on_each_backend import assert_alike

from proxsparse import prox_nm
from proxsparse.ops import prox_nm_list_

OP = "prox_nm_list_"


def mixture(device) -> tuple[list[torch.Tensor], list[float]]:
    """Every dtype, several sizes and layouts, an empty weight, and lambda = 0."""
    weights = [
        random_blocks(96, 0.7, seed=seed).view(16, 24).to(device, dtype)
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16))
    ]
    weights += [weights[0].clone().T[::2], torch.zeros(0, 8, device=device), weights[1].clone()[:3, :4]]
    return weights, [0.7, 0.2, 1.5, 0.0, 0.05, 0.3, 0.4, 3.0]


def assert_as_alone(weight: torch.Tensor, alone: torch.Tensor) -> None:
    """The same bits; on a GPU the list is another program."""
    if weight.is_cuda and weight.numel():
        assert_alike(weight, alone)
    else:
        assert torch.equal(weight, alone)


@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_each_weight_is_changed_as_if_alone(pattern, device):
    weights, reg_lambdas = mixture(device)
    expected = [prox_nm(w, reg_lambda, pattern) for w, reg_lambda in zip(weights, reg_lambdas, strict=True)]
    versions = [weight._version for weight in weights]
    prox_nm_list_(weights, reg_lambdas, pattern)
    for weight, other, version, reg_lambda in zip(weights, expected, versions, reg_lambdas, strict=True):
        assert_as_alone(weight, other)
        assert (weight._version > version) == (reg_lambda != 0 and weight.numel() != 0)


def test_again_with_other_values_in_the_same_memory(device):
    """What a backend may keep of a list holds for other contents and other lambdas."""
    weights, reg_lambdas = mixture(device)
    for factor in (1.0, 0.5):
        for seed, weight in enumerate(weights):
            blocks = random_blocks(max(1, weight.numel() // 4), 0.7, seed=10 + seed).to(device, weight.dtype)
            weight.copy_(blocks[: weight.numel() // 4].view(weight.shape))
        lambdas = [factor * reg_lambda for reg_lambda in reg_lambdas]
        expected = [prox_nm(w, reg_lambda) for w, reg_lambda in zip(weights, lambdas, strict=True)]
        prox_nm_list_(weights, lambdas)
        for weight, other in zip(weights, expected, strict=True):
            assert_as_alone(weight, other)


def test_the_reference_serves_other_patterns():
    weights = [random_blocks(20, 0.7, m=8, n=4, seed=seed).float() for seed in range(2)]
    expected = [prox_nm(weight, 0.7, "4:8") for weight in weights]
    prox_nm_list_(weights, [0.7, 0.7], "4:8")
    assert all(torch.equal(weight, other) for weight, other in zip(weights, expected, strict=True))


def test_nothing_to_do():
    prox_nm_list_([], [])


@pytest.mark.parametrize(
    ("weights", "reg_lambdas", "message"),
    [
        ([torch.ones(2, 8)], [0.1, 0.2], "1 weights and 2 lambdas"),
        ([torch.ones(2, 8)] * 2, [0.1, 0.2], "twice"),
        ([torch.ones(2, 8), torch.ones(2, 6)], [0.1, 0.2], r"weights\[1\].*multiple of 4"),
        ([torch.ones(2, 8), torch.ones(2, 8)], [0.1, -0.2], r"weights\[1\].*-0.2"),
        ([torch.ones(2, 8), torch.ones(2, 8).int()], [0.1, 0.2], r"weights\[1\].*int32"),
    ],
)
def test_bad_input_is_refused_before_anything_changes(weights, reg_lambdas, message):
    with pytest.raises(ValueError, match=message):
        prox_nm_list_(weights, reg_lambdas)
    assert all((weight == 1).all() for weight in weights)
