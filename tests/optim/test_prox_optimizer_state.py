"""ProxOptimizer is saved, resumed, copied and shown with everything it holds."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from training import assert_same, tiny_model, train, weights

from proxsparse.optim import ProxOptimizer
from proxsparse.optim.schedules import linear_ramp

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")


def make_optimizer(model: nn.Module) -> ProxOptimizer:
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01), 0.3, frozen_lambda=0.2, reg_schedule=linear_ramp(6))
    optimizer.set_metric(model[0].weight, torch.linspace(0.5, 2, 8))
    return optimizer


def test_resume_is_bit_identical(tmp_path):
    model = tiny_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    train(model, optimizer, 3)

    resumed = tiny_model(seed=7)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    other = ProxOptimizer(AdamW(resumed.parameters(), lr=0.5), 9.9, "1:4", reg_schedule=linear_ramp(6))
    other.load_state_dict(saved["optimizer"])
    assert other.param_groups[0]["prox_step"] == 3
    train(resumed, other, 3)
    assert_same(weights(resumed), weights(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_like_the_original(copied):
    model = tiny_model()
    optimizer = make_optimizer(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train(model, optimizer, 2)
    twin, twin_optimizer = copied((model, optimizer))
    assert twin_optimizer.state is twin_optimizer.base_optimizer.state
    assert twin_optimizer.base_optimizer is not optimizer.base_optimizer
    train(model, optimizer, 2)
    train(twin, twin_optimizer, 2)
    assert_same(weights(twin), weights(model))


def test_the_state_of_a_plain_optimizer_loads_and_the_other_way_round():
    model = tiny_model()
    plain = AdamW(model.parameters(), lr=0.02)
    train(model, plain, 2)
    optimizer = ProxOptimizer(AdamW(model.parameters()), reg_lambda=0.6, pattern="1:4")
    optimizer.load_state_dict(plain.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["reg_lambda"], group["pattern"], group["prox_step"]) == (0.02, 0.6, "1:4", 0)
    train(model, optimizer, 1)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state[model[0].weight]["step"] == 3
    train(model, plain, 1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


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


@pytest.mark.parametrize("on_base", [False, True], ids=["on the wrapper", "on the base"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pattern": "4:2"}, "pattern 4:2"),
        ({"pattern": "1:3"}, "multiple of 3"),
        ({"reg_lambda": -1.0}, "reg_lambda=-1.0"),
        ({"prox_scale": [torch.ones(5)] * 4}, r"metric of shape \[5\]"),
    ],
)
def test_a_state_with_bad_settings_is_refused_before_anything_is_loaded(bad, message, on_base):
    model = tiny_model()
    optimizer = make_optimizer(model)
    saved = optimizer.state_dict()
    train(model, optimizer, 1)
    saved["param_groups"][0] |= bad
    group, state = optimizer.param_groups[0], dict(optimizer.state)
    before = dict(group)
    with pytest.raises(ValueError, match=message):
        (optimizer.base_optimizer if on_base else optimizer).load_state_dict(saved)
    assert optimizer.param_groups[0] is group
    assert group == before
    assert optimizer.state == state


def test_repr_is_one_line_a_group():
    lines = repr(make_optimizer(tiny_model())).splitlines()
    assert lines[0].startswith("ProxOptimizer(AdamW")
    assert lines[1].startswith("  group 0: 4 parameters, lr=0.01, reg_lambda=0.3, pattern=2:4")
    assert len(lines) == 3
