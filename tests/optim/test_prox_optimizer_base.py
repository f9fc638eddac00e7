"""ProxOptimizer and its base are one optimizer, and a wrap that is refused leaves the base as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from training import tiny_model, train

from proxsparse import ProxAdamW, ProxOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")


def test_everything_is_shared_with_the_base():
    model = tiny_model()
    base = AdamW(model.parameters())
    optimizer = ProxOptimizer(base, reg_lambda=0.1)

    def assert_shared(optimizer: ProxOptimizer, base: AdamW):
        assert optimizer.param_groups is base.param_groups
        assert optimizer.state is base.state
        assert optimizer.defaults is base.defaults

    assert_shared(optimizer, base)
    train(model, optimizer, 1)
    assert base.state[model[0].weight]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert_shared(optimizer, base)
    base.load_state_dict(base.state_dict())
    assert_shared(optimizer, base)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.base_optimizer is not base
        assert_shared(twin, twin.base_optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert not model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None


@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_a_scheduler_and_a_hook_of_the_base_go_on_when_it_is_wrapped():
    model, fired = tiny_model(), []
    base = SGD(model.parameters(), lr=1.0)
    base.register_step_pre_hook(lambda opt, args, kwargs: fired.append(opt))
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = ProxOptimizer(base, reg_lambda=0.1)
    for _ in range(2):
        train(model, optimizer, 1)
        scheduler.step()
    assert base.param_groups[0]["lr"] == 0.25
    assert fired == [optimizer, optimizer]


def test_a_plain_state_loaded_into_the_base_keeps_the_settings_of_every_group():
    model = tiny_model()
    split = [{"params": [model[0].weight]}, {"params": [model[2].weight], "reg_lambda": 0}]
    optimizer = ProxOptimizer(AdamW(split, lr=0.01), reg_lambda=0.6)
    plain = AdamW([{"params": [model[0].weight]}, {"params": [model[2].weight]}], lr=0.02)
    twin = copy.deepcopy(optimizer)
    for wrapped in (optimizer, twin):
        wrapped.base_optimizer.load_state_dict(plain.state_dict())
        assert [(group["lr"], group["reg_lambda"]) for group in wrapped.param_groups] == [(0.02, 0.6), (0.02, 0)]
    train(model, optimizer, 1)
    assert optimizer.param_groups[0]["prox_step"] == 1


def test_bad_bases_are_refused():
    model = tiny_model()
    with pytest.raises(TypeError, match=r"Sequential: pass a plain torch\.optim\.Optimizer"):
        ProxOptimizer(model, 0.1)
    with pytest.raises(TypeError, match="ProxOptimizer"):
        ProxOptimizer(ProxOptimizer(SGD(model.parameters(), lr=0.1), 0.1), 0.1)
    with pytest.raises(ValueError, match="ProxAdamW has a prox step of its own"):
        ProxOptimizer(ProxAdamW(model.parameters(), reg_lambda=0.1), 0.1)


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
