"""ProxAdamW keeps the contract of torch.optim.Optimizer, and refuses what it cannot serve before anything moves."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import INPUTS, assert_same, loss_of, tiny_model, train, weights

import proxsparse
from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.optim.prox_adamw import call_seed
from proxsparse.patterns import NMPattern

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")


def test_is_an_optimizer_by_its_public_name():
    optimizer = proxsparse.ProxAdamW(tiny_model().parameters(), reg_lambda=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (1e-3, (0.9, 0.999))
    assert (optimizer.defaults["eps"], optimizer.defaults["weight_decay"]) == (1e-8, 0.0)


def test_lr_scheduler_drives_it():
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=1.0, reg_lambda=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        train(model, optimizer, 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_closure_is_evaluated_with_gradients_and_its_loss_returned():
    model, twin = tiny_model(), tiny_model()
    optimizer, plain = (ProxAdamW(m.parameters(), lr=0.01, reg_lambda=0.1) for m in (model, twin))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    expected = loss_of(model)
    assert torch.equal(optimizer.step(closure), expected)
    train(twin, plain, 1)
    assert_same(weights(model), weights(twin))


def test_hooks_fire_once_and_after_the_prox():
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=0.1, reg_lambda=100.0)
    fired = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: fired.append("pre"))
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
    assert fired == [("global pre", optimizer), "pre", ("post", True), ("global post", optimizer)]


def test_grad_scaler_skips_the_step():
    model, twin = tiny_model().float(), tiny_model().float()
    optimizer, unscaled = (ProxAdamW(m.parameters(), lr=0.01, reg_lambda=0.5) for m in (model, twin))
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
    assert not optimizer.state
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
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=100.0, frozen_lambda=0.1)
    optimizer.set_metric(model[2].weight, torch.rand(12) + 0.5)
    old = model[0].weight
    old_value = old.detach().clone()
    model[0].weight = nn.Parameter(old_value.clone())  # as accelerate does for FSDP2
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 1)
    assert torch.equal(old, old_value)
    assert NMPattern(2, 4).is_feasible(model[0].weight)
    assert old not in optimizer.state


def test_added_groups_are_completed_and_checked():
    model = tiny_model()
    optimizer = ProxAdamW([model[0].weight], lr=0.1, reg_lambda=0.2)
    optimizer.add_param_group({"params": [model[2].weight], "pattern": "1:4"})
    assert optimizer.param_groups[1]["reg_lambda"] == 0.2
    with pytest.raises(ValueError, match=r"reg_lambda > 0, of shape \[3, 6\].*multiple of 4.*exclude"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 6))]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 6))], "reg_lambda": 0})


def test_repr_is_one_line_a_group():
    lines = repr(ProxAdamW(tiny_model().parameters(), lr=0.01, reg_lambda=0.3)).splitlines()
    assert lines[0].startswith("ProxAdamW(")
    assert lines[1].startswith("  group 0: 4 parameters, lr=0.01, reg_lambda=0.3, pattern=2:4")
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
        ({"lr": -1.0}, r"lr=-1.0 must be"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"eps": -1e-8}, r"eps=-1e-08"),
        ({"weight_decay": math.inf}, r"weight_decay=inf"),
        ({"seed": 1.5}, r"seed=1.5 must be an integer"),
        ({"moment_dtype": torch.float16}, r"moment_dtype=torch.float16 must be torch.bfloat16, or None"),
        ({"stochastic_rounding": True, "master_weights": True}, r"choose one of the two"),
        ({"stochastic_rounding": True}, r"stochastic_rounding=True is for bfloat16 weights, and there are none"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProxAdamW(tiny_model().parameters(), **{"reg_lambda": 1.0} | arguments)


def test_ways_of_rounding_that_do_not_fit_are_refused():
    half, bf16 = nn.Parameter(torch.ones(2, 4).half()), nn.Parameter(torch.ones(2, 4).bfloat16())
    with pytest.raises(ValueError, match=r"\[2, 4\] is torch.float16.*master_weights=True"):
        ProxAdamW([bf16, half], reg_lambda=0.1, stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"\[2, 4\].*stochastic_rounding=True or with master_weights=True"):
        ProxAdamW([bf16], reg_lambda=0.1, moment_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"complex64.*convert"):
        ProxAdamW([nn.Parameter(torch.ones(2, 4, dtype=torch.complex64))], reg_lambda=0.1)
    for options in ({"stochastic_rounding": True}, {"master_weights": True}):  # float32 needs neither and takes both
        ProxAdamW([bf16, nn.Parameter(torch.ones(4))], reg_lambda=0.1, moment_dtype=torch.bfloat16, **options)


def test_bad_parameters_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"\[8, 6\].*multiple of 4"):
        ProxAdamW(nn.Linear(6, 8).parameters(), reg_lambda=0.1)
    with pytest.raises(ValueError, match=r"nothing to prune.*ZeRO"):
        ProxAdamW([model[0].bias], reg_lambda=0.1)
    flat = nn.Parameter(torch.ones(64))
    flat._is_flat_param = True  # how FSDP1 marks its flat parameters
    with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
        ProxAdamW([flat], reg_lambda=0.1)
    with pytest.raises(ValueError, match="ProxAdamW has a prox step of its own"):
        ProxOptimizer(ProxAdamW(model.parameters(), reg_lambda=0.1), 0.1)


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_variants_of_adamw_are_refused(option):
    model = tiny_model()
    with pytest.raises(ValueError, match=f"{option}=True.*plain AdamW only"):
        ProxAdamW([{"params": model.parameters(), option: True}], reg_lambda=0.1)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(9), r"shape \[9\].*8 input features"),
        (torch.ones(8, dtype=torch.int64), r"int64"),
        (torch.zeros(8), r"from 0\.0 to 0\.0.*number > 0"),
    ],
)
def test_bad_metrics_are_refused(scale, message):
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), reg_lambda=0.1)
    with pytest.raises(ValueError, match=message):
        optimizer.set_metric(model[0].weight, scale)
    with pytest.raises(ValueError, match=r"\[12\] is not pruned"):
        optimizer.set_metric(model[0].bias, torch.ones(12))


@pytest.mark.parametrize("factor", [-1.0, math.nan, math.inf])
def test_a_bad_factor_of_the_schedule_is_refused_before_anything_moves(factor):
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=0.1, reg_lambda=0.3, reg_schedule=lambda step: factor if step else 1.0)
    train(model, optimizer, 1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(ValueError, match=rf"reg_schedule\(1\) is {factor}.*finite and >= 0"):
        train(model, optimizer, 1)
    assert_same(weights(model), before)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], state[0]["exp_avg"])
    assert optimizer.param_groups[0]["prox_step"] == 1


def test_a_sparse_gradient_is_refused_before_anything_moves():
    layer, other = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4)
    optimizer = ProxAdamW([*other.parameters(), *layer.parameters()], reg_lambda=0.1)
    other(layer(torch.tensor([1, 2]))).sum().backward()
    before = weights(other)
    with pytest.raises(ValueError, match=r"\[6, 8\] has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert_same(weights(other), before)
    assert not optimizer.state


# ------------------------------------------------------------------------------------------- seeds


def test_every_call_has_a_seed_of_its_own():
    seeds = {call_seed(seed, number, step) for seed in range(5) for number in range(50) for step in range(1, 51)}
    assert len(seeds) == 5 * 50 * 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 12_450, "the lower half alone tells most of them apart"
    assert call_seed(-1, 0, 1) == call_seed(2**64 - 1, 0, 1) != call_seed(1, 0, 1)
    ones = sum(f"{seed:064b}".count("1") for seed in seeds) / len(seeds)
    assert ones == pytest.approx(32, abs=0.2)


def test_one_bit_of_the_input_changes_half_of_the_seed():
    flips = [
        (call_seed(7, 3, 11) ^ call_seed(7 ^ (1 << bit), 3, 11)).bit_count()
        + (call_seed(7, 3, 11) ^ call_seed(7, 3 ^ (1 << bit), 11)).bit_count()
        + (call_seed(7, 3, 11) ^ call_seed(7, 3, 11 ^ (1 << bit))).bit_count()
        for bit in range(20)
    ]
    assert sum(flips) / len(flips) == pytest.approx(96, abs=4)


def test_an_optimizer_goes_with_another_one():
    """Two optimizers, one model: neither touches the other's parameters."""
    model = tiny_model()
    ours, theirs = ProxAdamW([model[0].weight], reg_lambda=0.1), SGD([model[2].weight], lr=0.1)
    before = weights(model)
    loss_of(model).backward()
    ours.step()
    assert_same(weights(model)[1:], before[1:])
    theirs.step()
    assert AdamW([model[0].bias]).state_dict()["state"] == {}
