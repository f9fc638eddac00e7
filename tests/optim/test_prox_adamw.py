"""What a step of ProxAdamW computes: what ProxOptimizer(AdamW) computes, within rounding."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from training import INPUTS, assert_same, tiny_model, train, weights

from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.ops import prox_nm
from proxsparse.optim.schedules import linear_ramp
from proxsparse.patterns import NMPattern

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

ADAMW = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
PROX = {
    "plain": {"reg_lambda": 0.1},
    "without prox": {"reg_lambda": 0.0},
    "1:4": {"reg_lambda": 0.1, "pattern": "1:4"},
    "4:8": {"reg_lambda": 0.5, "pattern": "4:8"},
    "frozen": {"reg_lambda": 0.05, "frozen_lambda": 0.2, "frozen_eps": 0.05},
    "schedule": {"reg_lambda": 0.2, "frozen_lambda": 0.1, "reg_schedule": linear_ramp(15)},
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}
TINY = 1e-30  # a learning rate that leaves the prox alone


def wide_model(dtype: torch.dtype) -> nn.Sequential:
    """Every number of input features is a multiple of 8."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)).to(dtype)


def assert_close(w: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last digits of float64."""
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-15)


def train_wide(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs = INPUTS.to(model[0].weight.dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("metric", [False, True], ids=["w", "metric"])
@pytest.mark.parametrize("prox", PROX.values(), ids=PROX)
def test_trajectory_is_that_of_prox_optimizer(prox, metric, dtype):
    model, twin = wide_model(dtype), wide_model(dtype)
    fused = ProxAdamW(model.parameters(), **ADAMW, **prox)
    wrapped = ProxOptimizer(AdamW(twin.parameters(), **ADAMW), **prox)
    if metric and prox["reg_lambda"] > 0:
        fused.set_metric(model[0].weight, torch.linspace(0.5, 2, 8, dtype=dtype))
        wrapped.set_metric(twin[0].weight, torch.linspace(0.5, 2, 8, dtype=dtype))
    rounds = 1 if prox.get("pattern") == "4:8" else 5  # whose general solver is slow
    for _ in range(4):
        train_wide(model, fused, rounds)
        train_wide(twin, wrapped, rounds)
        for w, expected in zip(weights(model), weights(twin), strict=True):
            torch.testing.assert_close(w, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            assert torch.equal(w == 0, expected == 0)
    assert prox["reg_lambda"] == 0 or (model[0].weight == 0).any(), "the prox has something to do"
    assert fused.param_groups[0]["prox_step"] == wrapped.param_groups[0]["prox_step"] == 4 * rounds
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert fused.state[p].keys() == wrapped.state[q].keys()
        for key, value in fused.state[p].items():
            torch.testing.assert_close(value, wrapped.state[q][key], rtol=1e-4, atol=TOLERANCE[dtype])


def test_without_prox_it_is_adamw():
    model, twin = tiny_model(), tiny_model()
    fused, plain = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=0), AdamW(twin.parameters(), **ADAMW)
    train(model, fused, 20)
    train(twin, plain, 20)
    for w, expected in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(w, expected, rtol=1e-13, atol=1e-13)


def test_lambda_is_not_multiplied_by_lr():
    model = tiny_model()
    before = model[0].weight.detach().clone()
    train(model, ProxAdamW(model.parameters(), lr=TINY, reg_lambda=0.5), 1)
    assert_close(model[0].weight, prox_nm(before, 0.5))


def test_a_large_lambda_makes_every_block_feasible():
    model = tiny_model()
    train(model, ProxAdamW(model.parameters(), lr=1e-3, reg_lambda=100.0), 3)
    assert NMPattern(2, 4).is_feasible(model[0].weight)
    assert (model[0].weight == 0).any()
    assert not model[0].weight[model[0].weight == 0].signbit().any(), "zeros are +0.0"


def test_parameters_without_gradient_are_left_alone_and_vectors_take_adamw():
    model, twin = tiny_model(), tiny_model()
    model[2].weight.requires_grad_(False)
    before = weights(model)
    fused = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=5.0)
    train(model, fused, 1)
    train(twin, AdamW(twin.parameters(), **ADAMW), 1)
    assert torch.equal(model[2].weight, before[2])
    assert model[2].weight not in fused.state
    torch.testing.assert_close(model[0].bias, twin[0].bias, rtol=1e-12, atol=0)
    assert not torch.allclose(model[0].weight, twin[0].weight)


def test_groups_override_the_defaults():
    model = tiny_model()
    before = weights(model)
    groups = [
        {"params": [model[0].weight], "pattern": NMPattern(1, 4), "reg_lambda": 0.7},
        {"params": [model[2].weight], "reg_lambda": 0},
        {"params": [model[0].bias, model[2].bias], "lr": 0.5},
    ]
    optimizer = ProxAdamW(groups, lr=TINY, reg_lambda=0.2, frozen_lambda=0.5)
    train(model, optimizer, 1)
    assert_close(model[0].weight, prox_nm(before[0], 0.7, "1:4"))
    assert torch.equal(model[2].weight, before[2]), "reg_lambda=0 takes the group out"
    assert "pretrained" not in optimizer.state[model[2].weight]
    torch.testing.assert_close((model[0].bias - before[1]).abs(), torch.full_like(before[1], 0.5), rtol=1e-4, atol=0)
    assert [(group["pattern"], group["reg_lambda"]) for group in optimizer.param_groups] == [
        ("1:4", 0.7),
        ("2:4", 0),
        ("2:4", 0.2),
    ]


def test_schedule_counts_the_steps_of_the_group():
    model = tiny_model()
    seen = []
    optimizer = ProxAdamW(
        model.parameters(), lr=TINY, reg_lambda=1.0, reg_schedule=lambda step: seen.append(step) or 0.25
    )
    before = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert_close(model[0].weight, prox_nm(prox_nm(before, 0.25), 0.25))
    assert seen == [0, 1]


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_at_lr_zero_the_moments_move_and_no_weight_does(lr, dtype):
    model = tiny_model().to(dtype)
    optimizer = ProxAdamW(
        model.parameters(), lr=lr, weight_decay=0.1, reg_lambda=1.0, frozen_lambda=0.1, seed=3,
        stochastic_rounding=dtype == torch.bfloat16,
    )  # fmt: skip
    optimizer.set_metric(model[0].weight, torch.rand(8) + 0.1)
    before = weights(model)
    train_wide(model, optimizer, 2)
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["prox_step"] == 0
    assert optimizer.state[model[0].weight]["step"] == 2
    assert optimizer.state[model[0].weight]["exp_avg"].any()


def test_lr_may_be_a_tensor():
    model, twin = tiny_model(), tiny_model()
    train(model, ProxAdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), reg_lambda=0.1), 3)
    train(twin, ProxAdamW(twin.parameters(), lr=0.01, reg_lambda=0.1), 3)
    assert_same(weights(model), weights(twin))


def test_pretrained_is_the_first_value_and_kept_only_for_the_frozen_term():
    model = tiny_model()
    before = weights(model)
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, frozen_lambda=0.3)
    train(model, optimizer, 3)
    assert torch.equal(optimizer.state[model[0].weight]["pretrained"], before[0])
    assert "pretrained" not in optimizer.state[model[0].bias]
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    train(model, optimizer, 1)
    assert all("pretrained" not in state for state in optimizer.state.values())


def test_the_gradient_is_left_as_it_is():
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, frozen_lambda=0.3)
    optimizer.set_metric(model[0].weight, torch.rand(8) + 0.5)
    train(model, optimizer, 2)
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.grad, gradient)


def test_metric_can_be_taken_off_and_is_a_copy():
    model, twin = tiny_model(), tiny_model()
    optimizer, plain = (ProxAdamW(m.parameters(), lr=0.01, reg_lambda=0.1) for m in (model, twin))
    scale = torch.rand(8) + 0.5
    optimizer.set_metric(model[0].weight, scale)
    scale.fill_(7.0)
    assert optimizer.param_groups[0]["prox_scale"][0].max() < 2
    optimizer.set_metric(model[0].weight, None)
    train(model, optimizer, 2)
    train(twin, plain, 2)
    assert_same(weights(model), weights(twin))


def test_strided_parameters():
    weight = torch.randn(12, 8, dtype=torch.float64)
    plain, strided = nn.Parameter(weight.clone()), nn.Parameter(weight.T.contiguous().T)
    for parameter in (plain, strided):
        optimizer = ProxAdamW([parameter], lr=0.01, reg_lambda=0.3)
        for step in range(3):
            parameter.grad = torch.cos(weight + step)
            optimizer.step()
    assert not strided.is_contiguous()
    assert torch.equal(plain, strided)
