"""Both optimizers keep the contract of torch.optim.Optimizer, and refuse what they cannot serve."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import (
    OPTIMIZERS,
    assert_same,
    each_optimizer,
    loss_of,
    prox_optimizer,
    tiny_model,
    train,
    weights,
    with_everything,
)

from proxsparse import ProxAdamW
from proxsparse.patterns import NMPattern

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@each_optimizer
def test_lr_scheduler_drives_it_without_a_warning(make):
    model = tiny_model()
    optimizer = make(model.parameters(), lr=1.0, reg_lambda=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        train(model, optimizer, 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@each_optimizer
def test_hooks_fire_once_and_after_the_prox(make):
    model, fired = tiny_model(), []
    optimizer = make(model.parameters(), lr=0.1, reg_lambda=100.0)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: fired.append(("pre", opt)))
    optimizer.register_step_post_hook(
        lambda opt, args, kwargs: fired.append(("post", NMPattern(2, 4).is_feasible(model[0].weight)))
    )
    handles = [
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: fired.append(("global pre", opt))),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: fired.append(("global post", opt))),
    ]
    try:
        train(model, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert fired == [("global pre", optimizer), ("pre", optimizer), ("post", True), ("global post", optimizer)]


@each_optimizer
def test_state_dict_hooks_fire_once(make):
    optimizer, fired = make(tiny_model().parameters(), lr=0.1, reg_lambda=0.1), []
    optimizer.register_state_dict_pre_hook(lambda opt: fired.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: fired.append("state_dict post"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: fired.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: fired.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert fired == ["state_dict pre", "state_dict post", "load pre", "load post"]


@pytest.mark.parametrize(
    ("make", "unscales"),
    [(prox_optimizer, False), (partial(prox_optimizer, fused=True), True), (ProxAdamW, False)],
    ids=["ProxOptimizer", "ProxOptimizer, fused base", "ProxAdamW"],
)
def test_grad_scaler_skips_the_prox_with_the_step(make, unscales):
    model, twin = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    optimizer, unscaled = (
        make(m.parameters(), lr=0.01, reg_lambda=0.5, frozen_lambda=0.3, weight_decay=0.01) for m in (model, twin)
    )
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is unscales
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def scaled_step(factor: float):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    before = weights(model)
    scaled_step(torch.inf)
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["prox_step"] == 0
    assert unscales or not optimizer.state
    assert not hasattr(optimizer, "found_inf")
    for _ in range(3):
        scaled_step(1.0)
        train(twin, unscaled, 1)
    assert optimizer.param_groups[0]["prox_step"] == 3
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-5)


@each_optimizer
def test_swapped_parameters_are_the_ones_that_step(make):
    model = tiny_model()
    optimizer = make(model.parameters(), lr=0.01, reg_lambda=100.0, frozen_lambda=0.1)
    optimizer.set_scale(model[2].weight, torch.rand(12) + 0.5)
    old = model[0].weight
    old_value = old.detach().clone()
    model[0].weight = nn.Parameter(old_value.clone())  # as accelerate does for FSDP2
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 1)
    assert torch.equal(old, old_value)
    assert NMPattern(2, 4).is_feasible(model[0].weight)
    assert old not in optimizer.state


@each_optimizer
def test_added_groups_are_completed_and_checked(make):
    model = tiny_model()
    optimizer = make([model[0].weight], lr=0.1, reg_lambda=0.2)
    optimizer.add_param_group({"params": [model[2].weight], "pattern": "1:4"})
    assert optimizer.param_groups[1]["reg_lambda"] == 0.2
    with pytest.raises(ValueError, match=r"reg_lambda > 0, of shape \[3, 6\].*multiple of 4.*exclude"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 6))]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 6))], "reg_lambda": 0})


@pytest.mark.parametrize(
    ("make", "first"),
    [(prox_optimizer, "ProxOptimizer(AdamW, reg_schedule="), (ProxAdamW, "ProxAdamW(reg_schedule=")],
    ids=OPTIMIZERS,
)
def test_repr_is_one_line_a_group(make, first):
    lines = repr(with_everything(make, tiny_model())).splitlines()
    assert lines[0].startswith(first)
    assert lines[1].startswith("  group 0: 4 parameters, lr=0.02, reg_lambda=0.3, pattern=2:4")
    assert len(lines) == 3


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reg_lambda": -1.0}, r"reg_lambda=-1.0 must be a finite number >= 0"),
        ({"reg_lambda": math.nan}, r"reg_lambda=nan"),
        ({"frozen_lambda": -2}, r"frozen_lambda=-2"),
        ({"frozen_eps": 0}, r"frozen_eps=0 must be"),
        ({"pattern": "4:2"}, r"pattern 4:2"),
        ({"pattern": "1:3"}, r"multiple of 3"),
    ],
)
@each_optimizer
def test_bad_settings_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(tiny_model().parameters(), **{"reg_lambda": 1.0} | arguments)


@each_optimizer
def test_bad_parameters_are_refused(make):
    with pytest.raises(ValueError, match=r"\[8, 6\].*multiple of 4"):
        make(nn.Linear(6, 8).parameters(), reg_lambda=0.1)
    with pytest.raises(ValueError, match=r"nothing to prune.*ZeRO"):
        make([tiny_model()[0].bias], reg_lambda=0.1)
    flat = nn.Parameter(torch.ones(64))
    flat._is_flat_param = True  # how FSDP1 marks its flat parameters
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
        make([flat], reg_lambda=0.1)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(9), r"shape \[9\].*8 input features"),
        (torch.ones(8, dtype=torch.int64), r"int64"),
        (torch.zeros(8), r"from 0\.0 to 0\.0.*number > 0"),
        (torch.full((8,), torch.inf), r"from inf to inf"),
    ],
)
@each_optimizer
def test_bad_metrics_are_refused(make, scale, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        make(model.parameters(), reg_lambda=0.1).set_scale(model[0].weight, scale)


@each_optimizer
def test_metric_of_a_parameter_that_is_not_pruned_is_refused(make):
    model = tiny_model()
    excluded = {"params": [model[2].weight], "reg_lambda": 0}
    optimizer = make([{"params": model[0].parameters()}, excluded], reg_lambda=0.1)
    with pytest.raises(ValueError, match=r"\[12\] is not pruned"):
        optimizer.set_scale(model[0].bias, torch.ones(12))
    with pytest.raises(ValueError, match=r"\[4, 12\] is not pruned"):
        optimizer.set_scale(model[2].weight, torch.ones(12))


@pytest.mark.parametrize("factor", [-1.0, math.nan, math.inf])
@each_optimizer
def test_a_bad_factor_of_the_schedule_is_refused_before_anything_moves(make, factor):
    model = tiny_model()
    optimizer = make(model.parameters(), lr=0.1, reg_lambda=0.3, reg_schedule=lambda step: factor if step else 1.0)
    train(model, optimizer, 1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=rf"reg_schedule\(1\) is {factor}.*finite and >= 0"):
        train(model, optimizer, 1)
    assert_same(weights(model), before)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], state[0]["exp_avg"])
    assert optimizer.param_groups[0]["prox_step"] == 1
