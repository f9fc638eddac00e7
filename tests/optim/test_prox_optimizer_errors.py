"""What ProxOptimizer refuses, and that a refusal or a failure leaves weights, groups and base as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from training import assert_same, loss_of, tiny_model, train, weights

from proxsparse.optim import ProxOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")


def test_added_groups_are_completed_and_checked():
    model = tiny_model()
    optimizer = ProxOptimizer(SGD([model[0].weight], lr=0.1), reg_lambda=0.2)
    optimizer.add_param_group({"params": [model[2].weight], "pattern": "1:4"})
    assert optimizer.param_groups[1]["reg_lambda"] == 0.2
    with pytest.raises(ValueError, match=r"reg_lambda > 0, of shape \[3, 6\].*multiple of 4.*exclude"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 6))]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 6))], "reg_lambda": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reg_lambda": -1.0}, r"reg_lambda=-1.0 must be a finite number >= 0"),
        ({"reg_lambda": float("nan")}, r"reg_lambda=nan"),
        ({"reg_lambda": 1.0, "frozen_lambda": -2}, r"frozen_lambda=-2"),
        ({"reg_lambda": 1.0, "frozen_eps": 0}, r"frozen_eps=0 must be"),
        ({"reg_lambda": 1.0, "pattern": "4:2"}, r"pattern 4:2"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProxOptimizer(SGD(tiny_model().parameters(), lr=0.1), **arguments)


def test_bad_optimizers_and_parameters_are_refused():
    model = tiny_model()
    with pytest.raises(TypeError, match=r"Sequential: pass a plain torch\.optim\.Optimizer"):
        ProxOptimizer(model, 0.1)
    with pytest.raises(TypeError, match="ProxOptimizer"):
        ProxOptimizer(ProxOptimizer(SGD(model.parameters(), lr=0.1), 0.1), 0.1)
    with pytest.raises(ValueError, match=r"\[8, 6\].*multiple of 4"):
        ProxOptimizer(SGD(nn.Linear(6, 8).parameters(), lr=0.1), 0.1)
    with pytest.raises(ValueError, match="nothing to prune"):
        ProxOptimizer(SGD([model[0].bias], lr=0.1), 0.1)
    flat = nn.Parameter(torch.ones(64))
    flat._is_flat_param = True  # how FSDP1 marks its flat parameters
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
        ProxOptimizer(SGD([flat], lr=0.1), 0.1)


def test_a_base_is_wrapped_once():
    base = SGD(tiny_model().parameters(), lr=0.1)
    ProxOptimizer(base, 0.1)
    with pytest.raises(ValueError, match="wrapped already; make a new one"):
        ProxOptimizer(base, 0.5, "1:4")
    assert (base.param_groups[0]["reg_lambda"], base.param_groups[0]["pattern"]) == (0.1, "2:4")


@pytest.mark.parametrize(
    ("last", "arguments", "message"),
    [
        ({}, {"pattern": "1:3"}, "multiple of 3"),
        ({"frozen_eps": -1.0}, {}, "frozen_eps=-1.0"),
        ({}, {"frozen_lambda": -1.0}, "frozen_lambda=-1.0"),
    ],
)
def test_a_wrap_that_raises_leaves_the_base_as_it_was(last, arguments, message):
    first, second = nn.Parameter(torch.ones(3, 12)), nn.Parameter(torch.ones(3, 8))
    base = SGD([{"params": [first]}, {"params": [second]} | last], lr=0.1)
    before = copy.deepcopy(base.defaults), [list(group) for group in base.param_groups]
    with pytest.raises(ValueError, match=message):
        ProxOptimizer(base, 0.1, **arguments)
    assert (base.defaults, [list(group) for group in base.param_groups]) == before
    base.param_groups[1].pop("frozen_eps", None)
    ProxOptimizer(base, 0.5, "1:4")
    assert (base.param_groups[0]["reg_lambda"], base.param_groups[0]["pattern"]) == (0.5, "1:4")


@pytest.mark.parametrize("in_closure", [False, True])
def test_a_step_that_raises_does_not_leave_the_weights_in_the_metric(in_closure):
    class Failing(SGD):
        def step(self, closure=None):
            closure and closure()
            raise RuntimeError("out of memory")

    model = tiny_model()
    optimizer = ProxOptimizer(Failing(model.parameters(), lr=0.1), 0.1)
    optimizer.set_metric(model[0].weight, torch.full((8,), 4.0))
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step((lambda: loss_of(model)) if in_closure else None)
    assert_same(weights(model), before)


def test_a_metric_that_cannot_be_entered_leaves_the_others_entered_before_it():
    model = tiny_model()
    optimizer = ProxOptimizer(SGD([model[0].weight, model[2].weight], lr=0.1), 0.1)
    optimizer.set_metric(model[0].weight, torch.full((8,), 4.0))
    optimizer.set_metric(model[2].weight, torch.full((12,), 4.0))
    other = nn.Parameter(torch.ones(4, 16))
    optimizer.param_groups[0]["params"][1] = other
    model[0].weight.grad, other.grad = torch.ones(12, 8).double(), torch.ones(4, 16)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight.grad, torch.ones(12, 8).double())


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_a_bad_factor_of_the_schedule_is_refused_before_anything_moves(factor):
    model = tiny_model()
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.1), 0.3, reg_schedule=lambda step: factor if step else 1.0)
    train(model, optimizer, 1)
    before, moments = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=rf"reg_schedule\(1\) is {factor}.*finite and >= 0"):
        train(model, optimizer, 1)
    assert_same(weights(model), before)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments[0]["exp_avg"])
    assert optimizer.param_groups[0]["prox_step"] == 1


@pytest.mark.parametrize("metric", [False, True], ids=["frozen term", "metric"])
def test_a_sparse_gradient_takes_no_dense_term(metric):
    layer = nn.Embedding(6, 8, sparse=True)
    optimizer = ProxOptimizer(SGD(layer.parameters(), lr=0.1), 0.1)
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()  # the prox alone can do with it
    if metric:
        optimizer.set_metric(layer.weight, torch.full((8,), 4.0))
    else:
        optimizer.param_groups[0]["frozen_lambda"] = 0.2
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"\[6, 8\] has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
