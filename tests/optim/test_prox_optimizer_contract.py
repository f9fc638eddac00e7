"""ProxOptimizer keeps the contract of torch.optim.Optimizer, point by point."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import INPUTS, assert_same, loss_of, tiny_model, train, weights

from proxsparse.optim import ProxOptimizer
from proxsparse.patterns import NMPattern

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")


def test_is_an_optimizer_that_shares_everything_with_its_base():
    model = tiny_model()
    base = AdamW(model.parameters())
    optimizer = ProxOptimizer(base, reg_lambda=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)

    def assert_shared():
        assert optimizer.param_groups is base.param_groups
        assert optimizer.state is base.state
        assert optimizer.defaults is base.defaults

    assert_shared()
    train(model, optimizer, 1)
    assert base.state[model[0].weight]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert_shared()
    base.load_state_dict(base.state_dict())
    assert_shared()
    optimizer.zero_grad(set_to_none=False)
    assert not model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("on_base", [False, True], ids=["on the wrapper", "on the base"])
def test_lr_scheduler_drives_the_base_without_a_warning(on_base):
    model = tiny_model()
    base = SGD(model.parameters(), lr=1.0)
    if on_base:
        scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = ProxOptimizer(base, reg_lambda=0.1)
    if not on_base:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        for _ in range(2):
            train(model, optimizer, 1)
            scheduler.step()
    assert base.param_groups[0]["lr"] == 0.25


def test_closure_gets_the_frozen_gradient_and_its_loss_is_returned():
    def run(with_closure: bool):
        model = tiny_model()
        optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01), 0.05, frozen_lambda=0.4)
        optimizer.set_metric(model[0].weight, torch.rand(8, generator=torch.Generator().manual_seed(2)) + 0.5)

        def closure():
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(4):
            if with_closure:
                expected = loss_of(model)
                assert torch.equal(optimizer.step(closure), expected)
            else:
                closure()
                assert optimizer.step() is None
        return weights(model)

    assert_same(run(with_closure=True), run(with_closure=False))


@pytest.mark.parametrize("metric", [False, True], ids=["plain", "metric"])
def test_lbfgs_evaluates_the_closure_many_times(metric):
    model = tiny_model()
    parameters = [model[0].weight, model[2].weight]
    optimizer = ProxOptimizer(
        torch.optim.LBFGS(parameters, lr=0.5, max_iter=8, line_search_fn="strong_wolfe"), 1e-3, frozen_lambda=1e-3
    )
    if metric:
        optimizer.set_metric(model[0].weight, torch.rand(8) + 0.5)
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


def test_hooks_fire_once_and_after_the_prox():
    model = tiny_model()
    base = SGD(model.parameters(), lr=0.1)
    fired = []
    base.register_step_pre_hook(lambda opt, args, kwargs: fired.append(("pre of the base", opt)))
    optimizer = ProxOptimizer(base, reg_lambda=100.0)
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
    assert fired == [
        ("global pre", optimizer),
        ("pre of the base", optimizer),
        ("post", True),
        ("global post", optimizer),
    ]


def test_state_dict_hooks_fire_once():
    model = tiny_model()
    optimizer = ProxOptimizer(SGD(model.parameters(), lr=0.1), reg_lambda=0.1)
    fired = []
    optimizer.register_state_dict_pre_hook(lambda opt: fired.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: fired.append("state_dict post"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: fired.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda opt: fired.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert fired == ["state_dict pre", "state_dict post", "load pre", "load post"]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_grad_scaler_skips_the_prox_with_the_step(fused):
    model, twin = tiny_model().float(), tiny_model().float()
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01, fused=fused), 0.5, frozen_lambda=0.3)
    unscaled = ProxOptimizer(AdamW(twin.parameters(), lr=0.01, fused=fused), 0.5, frozen_lambda=0.3)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def scaled_step(factor: float):
        optimizer.zero_grad()
        scaler.scale(model(INPUTS.float()).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    before = weights(model)
    scaled_step(torch.inf)
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["prox_step"] == 0
    assert not hasattr(optimizer, "found_inf")
    for _ in range(3):
        scaled_step(1.0)
        unscaled.zero_grad()
        twin(INPUTS.float()).square().mean().backward()
        unscaled.step()
    assert optimizer.param_groups[0]["prox_step"] == 3
    for w, expected in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-5)


def test_swapped_parameters_are_the_ones_that_step():
    model = tiny_model()
    optimizer = ProxOptimizer(AdamW(model.parameters(), lr=0.01), reg_lambda=100.0, frozen_lambda=0.1)
    optimizer.set_metric(model[2].weight, torch.rand(12) + 0.5)
    old = model[0].weight
    old_value = old.detach().clone()
    model[0].weight = nn.Parameter(old_value.clone())  # as accelerate does for FSDP2
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 1)
    assert torch.equal(old, old_value)
    assert NMPattern(2, 4).is_feasible(model[0].weight)
    assert old not in optimizer.state
