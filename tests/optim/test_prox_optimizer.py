"""What a step of ProxOptimizer computes: the frozen-weight gradient, the step of the base, the prox; and failures."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from training import assert_same, loss_of, tiny_model, train, weights

from proxsparse.ops import prox_nm, prox_nm_
from proxsparse.optim import ProxOptimizer, param_groups
from proxsparse.optim.schedules import cosine_ramp, linear_ramp
from proxsparse.reference import frozen_penalty

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")

BASES = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw": partial(AdamW, lr=0.01),
    "adamw-fused": partial(AdamW, lr=0.01, fused=True),
}


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


def test_the_prox_of_all_groups_is_one_call_for_each_pattern(monkeypatch):
    model, calls = tiny_model(), []
    before = weights(model)
    call = param_groups.prox_nm_list_
    monkeypatch.setattr(param_groups, "prox_nm_list_", lambda *arguments: calls.append(arguments) or call(*arguments))
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


def test_schedules():
    assert [linear_ramp(4)(step) for step in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert [cosine_ramp(4)(step) for step in (0, 2, 4, 9)] == pytest.approx([0, 0.5, 1, 1])
    with pytest.raises(ValueError, match="steps=0"):
        linear_ramp(0)


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


def test_a_late_gradient_finds_the_state_of_the_base_uninitialised():
    model = tiny_model()
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01), 0.01, frozen_lambda=0.1)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    train(model, optimizer, 1)  # the other parameters get their first gradient now
    assert {"exp_avg", "pretrained"} <= optimizer.state[model[2].weight].keys()


@pytest.mark.parametrize("metric", [False, True], ids=["plain", "metric"])
def test_lbfgs_evaluates_the_closure_many_times(metric):
    model = tiny_model()
    parameters = [model[0].weight, model[2].weight]
    optimizer = ProxOptimizer(
        LBFGS(parameters, lr=0.5, max_iter=8, line_search_fn="strong_wolfe"), 1e-3, frozen_lambda=1e-3
    )
    if metric:
        optimizer.set_scale(model[0].weight, torch.rand(8) + 0.5)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(calls) > 9
    assert loss_of(model).item() < calls[0] / 4


# ------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("in_closure", [False, True])
def test_a_step_that_raises_does_not_leave_the_weights_in_the_metric(in_closure):
    class Failing(SGD):
        def step(self, closure=None):
            closure and closure()
            raise RuntimeError("out of memory")

    model = tiny_model()
    optimizer = ProxOptimizer(Failing(model.parameters(), lr=0.1), 0.1)
    optimizer.set_scale(model[0].weight, torch.full((8,), 4.0))
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step((lambda: loss_of(model)) if in_closure else None)
    assert_same(weights(model), before)


def test_a_metric_that_cannot_be_entered_leaves_the_others_entered_before_it():
    model = tiny_model()
    optimizer = ProxOptimizer(SGD([model[0].weight, model[2].weight], lr=0.1), 0.1)
    optimizer.set_scale(model[0].weight, torch.full((8,), 4.0))
    optimizer.set_scale(model[2].weight, torch.full((12,), 4.0))
    other = nn.Parameter(torch.ones(4, 16))
    optimizer.param_groups[0]["params"][1] = other
    model[0].weight.grad, other.grad = torch.ones(12, 8).double(), torch.ones(4, 16)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight.grad, torch.ones(12, 8).double())


@pytest.mark.parametrize("metric", [False, True], ids=["frozen term", "metric"])
def test_a_sparse_gradient_takes_no_dense_term(metric):
    layer = nn.Embedding(6, 8, sparse=True)
    optimizer = ProxOptimizer(SGD(layer.parameters(), lr=0.1), 0.1)
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()  # the prox alone can do with it
    if metric:
        optimizer.set_scale(layer.weight, torch.full((8,), 4.0))
    else:
        optimizer.param_groups[0]["frozen_lambda"] = 0.2
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"\[6, 8\] has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
