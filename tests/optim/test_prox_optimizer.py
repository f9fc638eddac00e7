"""ProxOptimizer: base step, prox; what it shares with its base; refusals."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW
from training import assert_same, loss_of, tiny_model, train, weights

from proxsparse import ProxAdamW
from proxsparse.ops import prox_nm_
from proxsparse.optim import ProxOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")

BASES = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw": partial(AdamW, lr=0.01),
    "adamw-fused": partial(AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
@pytest.mark.parametrize("pattern", ["2:4", "6:8"])
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


def test_lbfgs_evaluates_the_closure_many_times():
    model, calls = tiny_model(), []
    base = LBFGS([model[0].weight, model[2].weight], lr=0.5, max_iter=8, line_search_fn="strong_wolfe")
    optimizer = ProxOptimizer(base, 1e-3)

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


def assert_shared(optimizer: ProxOptimizer, base: AdamW) -> None:
    for name in ("param_groups", "state", "defaults"):
        assert getattr(optimizer, name) is getattr(base, name)


def test_everything_is_shared_with_the_base():
    model = tiny_model()
    base = AdamW(model.parameters())
    optimizer = ProxOptimizer(base, reg_lambda=0.1)
    assert_shared(optimizer, base)
    train(model, optimizer, 1)
    assert base.state[model[0].weight]["step"] == 1
    for loaded in (optimizer, base):
        loaded.load_state_dict(loaded.state_dict())
        assert_shared(optimizer, base)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.base_optimizer is not base
        assert_shared(twin, twin.base_optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert not model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None


def test_bad_bases_are_refused():
    model = tiny_model()
    base = SGD(model.parameters(), lr=0.1)
    wrapped = ProxOptimizer(base, 0.1)
    prepared = object.__new__(type("Prepared", (SGD,), {}))  # as of accelerate: does not call torch's __init__
    for bad, error, message in (
        (prepared, TypeError, r"Prepared; pass a plain .*accelerator\.prepare .* afterwards"),
        (model, TypeError, r"Sequential; pass a plain torch\.optim\.Optimizer"),
        (wrapped, TypeError, "ProxOptimizer"),
        (ProxAdamW(model.parameters(), reg_lambda=0.1), ValueError, "ProxAdamW already has a prox step"),
        (base, ValueError, "already wrapped; create a new"),
    ):
        with pytest.raises(error, match=message):
            ProxOptimizer(bad, 0.5, "1:4")
    assert (base.param_groups[0]["reg_lambda"], base.param_groups[0]["pattern"]) == (0.1, "2:4")


@pytest.mark.parametrize(
    ("last", "arguments", "message"),
    [
        ({}, {"pattern": "1:3"}, "multiple of 3"),
        ({"reg_lambda": -1.0}, {}, "reg_lambda=-1.0"),
        ({}, {"reg_lambda": -2.0}, "reg_lambda=-2.0"),
    ],
)
def test_a_wrap_that_raises_leaves_the_base_as_it_was(last, arguments, message):
    first, second = nn.Parameter(torch.ones(3, 12)), nn.Parameter(torch.ones(3, 8))
    base = SGD([{"params": [first]}, {"params": [second]} | last], lr=0.1)
    before = copy.deepcopy(base.defaults), [list(group) for group in base.param_groups]
    with pytest.raises(ValueError, match=message):
        ProxOptimizer(base, **{"reg_lambda": 0.1} | arguments)
    assert (base.defaults, [list(group) for group in base.param_groups]) == before
    base.param_groups[1].pop("reg_lambda", None)
    ProxOptimizer(base, 0.5, "1:4")
    assert (base.param_groups[0]["reg_lambda"], base.param_groups[0]["pattern"]) == (0.5, "1:4")
