"""ProxOptimizer keeps the contract of torch.optim.Optimizer, point by point, and adds the prox and nothing else."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import INPUTS, assert_same, loss_of, tiny_model, train, weights

from proxsparse.ops import prox_nm, prox_nm_
from proxsparse.optim import ProxOptimizer
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


# ------------------------------------------------------------------------------------------- torch.optim's contract


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


# ------------------------------------------------------------------------------------------- errors


def test_added_groups_are_completed_and_checked():
    model = tiny_model()
    optimizer = ProxOptimizer(SGD([model[0].weight], lr=0.1), reg_lambda=0.2)
    optimizer.add_param_group({"params": [model[2].weight], "pattern": "1:4"})
    assert optimizer.param_groups[1]["reg_lambda"] == 0.2
    with pytest.raises(ValueError, match=r"\[3, 6\].*multiple of 4.*reg_lambda=0"):
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
