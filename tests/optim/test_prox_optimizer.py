"""What a step of ProxOptimizer computes: the frozen-weight gradient, the step of the base, the prox."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from training import assert_same, loss_of, tiny_model, train, weights

from proxsparse.ops import prox_nm, prox_nm_
from proxsparse.optim import ProxOptimizer, groups
from proxsparse.optim.schedules import cosine_ramp, linear_ramp
from proxsparse.patterns import NMPattern
from proxsparse.reference import frozen_penalty

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")

BASES = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw": partial(AdamW, lr=0.01),
    "adamw-fused": partial(AdamW, lr=0.01, fused=True),
}

# ------------------------------------------------------------------------------------------- what a step computes


@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
def test_step_is_base_step_then_prox(base, pattern):
    plain, wrapped = tiny_model(), tiny_model()
    base_optimizer = base(plain.parameters())
    optimizer = ProxOptimizer(base(wrapped.parameters()), reg_lambda=0.3, pattern=pattern)
    for _ in range(5):
        train(plain, base_optimizer, 1)
        for layer in (plain[0], plain[2]):
            prox_nm_(layer.weight.detach(), 0.3, pattern)
        train(wrapped, optimizer, 1)
    assert_same(weights(plain), weights(wrapped))


def test_lambda_is_not_multiplied_by_lr():
    model = tiny_model()
    before = model[0].weight.detach().clone()
    train(model, ProxOptimizer(SGD(model.parameters(), lr=1e-30), reg_lambda=0.5), 1)
    assert torch.equal(model[0].weight, prox_nm(before, 0.5)), "with a vanishing lr only the prox is left"


def test_a_large_lambda_makes_every_block_feasible():
    model = tiny_model()
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=1e-3), reg_lambda=100.0)
    assert not NMPattern(2, 4).is_feasible(model[0].weight)
    train(model, optimizer, 3)
    assert NMPattern(2, 4).is_feasible(model[0].weight)
    assert (model[0].weight == 0).any()
    assert not model[0].weight[model[0].weight == 0].signbit().any(), "zeros are +0.0"


def test_parameters_without_gradient_and_vectors_are_left_alone():
    model = tiny_model()
    model[2].weight.requires_grad_(False)
    before = weights(model)
    optimizer = ProxOptimizer(SGD(model.parameters(), lr=1e-30), reg_lambda=5.0)
    train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, before[0])
    assert_same(weights(model)[1:], before[1:])


def test_groups_override_the_defaults():
    model = tiny_model()
    before = weights(model)
    base = SGD(
        [
            {"params": [model[0].weight], "pattern": NMPattern(1, 4), "reg_lambda": 0.7},
            {"params": [model[2].weight], "reg_lambda": 0},
            {"params": [model[0].bias, model[2].bias]},
        ],
        lr=1e-30,
    )
    optimizer = ProxOptimizer(base, reg_lambda=0.2, frozen_lambda=0.5)
    train(model, optimizer, 1)
    assert torch.equal(model[0].weight, prox_nm(before[0], 0.7, "1:4"))
    assert torch.equal(model[2].weight, before[2]), "reg_lambda=0 takes the group out"
    assert "pretrained" not in optimizer.state[model[2].weight]
    assert [(group["pattern"], group["reg_lambda"]) for group in base.param_groups] == [
        ("1:4", 0.7),
        ("2:4", 0),
        ("2:4", 0.2),
    ]


def test_the_prox_of_all_groups_is_one_call_for_each_pattern(monkeypatch):
    model, calls = tiny_model(), []
    before = weights(model)
    call = groups.prox_nm_list_
    monkeypatch.setattr(groups, "prox_nm_list_", lambda *arguments: calls.append(arguments) or call(*arguments))
    other = torch.nn.Parameter(torch.randn(3, 8))
    other.grad = torch.zeros_like(other)
    settings = [
        {"params": [model[0].weight], "reg_lambda": 0.1},
        {"params": [other], "reg_lambda": 0.3, "pattern": "1:4"},
        {"params": [model[2].weight], "reg_lambda": 0.2},
    ]
    optimizer = ProxOptimizer(SGD(settings, lr=1e-30), reg_lambda=9.0)
    loss_of(model).backward()
    optimizer.step()
    assert [(lambdas, pattern) for _, lambdas, pattern in calls] == [([0.1, 0.2], "2:4"), ([0.3], "1:4")]
    assert torch.equal(model[0].weight, prox_nm(before[0], 0.1))
    assert torch.equal(model[2].weight, prox_nm(before[2], 0.2))
    assert [group["prox_step"] for group in optimizer.param_groups] == [1, 1, 1]


def test_schedule_counts_the_steps_of_the_group():
    model = tiny_model()
    seen = []
    optimizer = ProxOptimizer(
        SGD(model.parameters(), lr=1e-30), 1.0, reg_schedule=lambda step: seen.append(step) or 0.25
    )
    before = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, prox_nm(prox_nm(before, 0.25), 0.25))
    assert seen == [0, 1]
    assert optimizer.param_groups[0]["prox_step"] == 2


def test_schedules():
    assert [linear_ramp(4)(step) for step in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert [cosine_ramp(4)(step) for step in (0, 2, 4, 9)] == pytest.approx([0, 0.5, 1, 1])
    with pytest.raises(ValueError, match="steps=0"):
        linear_ramp(0)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_identity_at_lr_zero(lr):
    model = tiny_model()
    before = weights(model)
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=lr, foreach=False), reg_lambda=1.0, frozen_lambda=0.1)
    optimizer.set_metric(model[0].weight, torch.rand(8) + 0.1)
    train(model, optimizer, 2)
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["prox_step"] == 0


# ------------------------------------------------------------------------------------------- the frozen-weight term


def test_frozen_gradient_is_that_of_the_penalty():
    model = tiny_model()
    pretrained = weights(model)[0]
    optimizer = ProxOptimizer(SGD(model.parameters(), lr=0.1), 0.01, frozen_lambda=0.3, frozen_eps=0.05)
    train(model, optimizer, 3)
    assert torch.equal(optimizer.state[model[0].weight]["pretrained"], pretrained)

    w = model[0].weight.detach().clone().requires_grad_()
    (loss_gradient,) = torch.autograd.grad(loss_of(model), model[0].weight)
    (penalty_gradient,) = torch.autograd.grad(0.3 * frozen_penalty(w, pretrained, 0.05), w)
    train(model, optimizer, 1)
    torch.testing.assert_close(model[0].weight.grad, loss_gradient + penalty_gradient, rtol=1e-12, atol=1e-12)
    expected = prox_nm(w.detach() - 0.1 * (loss_gradient + penalty_gradient), 0.01)
    torch.testing.assert_close(model[0].weight.detach(), expected, rtol=1e-12, atol=1e-12)
    assert penalty_gradient.norm() > 1e-3 * loss_gradient.norm(), "the test would not see the term"


def test_pretrained_is_kept_only_for_the_frozen_term():
    model = tiny_model()
    optimizer = ProxOptimizer(SGD(model.parameters(), lr=0.1), reg_lambda=0.01)
    train(model, optimizer, 1)
    assert all("pretrained" not in state for state in optimizer.state.values())


def test_a_late_gradient_finds_the_state_of_the_base_uninitialised():
    model = tiny_model()
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01), 0.01, frozen_lambda=0.1)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    train(model, optimizer, 1)  # the other parameters get their first gradient now
    assert {"exp_avg", "pretrained"} <= optimizer.state[model[2].weight].keys()
