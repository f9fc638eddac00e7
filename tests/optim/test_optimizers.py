"""Both optimizers: what a step computes, the contract of torch.optim.Optimizer, what they refuse."""

import copy
import math
import pickle
from functools import partial

import pytest
import tiny_models as language_models
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import (
    ADAMW,
    OPTIMIZERS,
    assert_same,
    each_optimizer,
    each_setup,
    flat,
    loss_of,
    prox_optimizer,
    tiny_model,
    train,
    weights,
    with_everything,
)

from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.ops import prox_nm
from proxsparse.patterns import NMPattern

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")
TINY = 1e-30  # a learning rate at which the prox alone moves the weights


def assert_close(w: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-15)


# ------------------------------------------------------------------------------------------- what a step computes


@each_optimizer
def test_parameters_without_gradient_do_not_move_and_vectors_take_adamw(make):
    model, twin = tiny_model(), tiny_model()
    model[2].weight.requires_grad_(False)
    before = weights(model)
    optimizer = make(model.parameters(), **ADAMW, reg_lambda=5.0)
    train(model, optimizer, 1)
    train(twin, AdamW(twin.parameters(), **ADAMW), 1)
    assert torch.equal(model[2].weight, before[2])
    assert model[2].weight not in optimizer.state
    for layer, plain in ((model[0], twin[0]), (model[2], twin[2])):
        torch.testing.assert_close(layer.bias, plain.bias, rtol=1e-12, atol=0)
    assert not torch.allclose(model[0].weight, twin[0].weight)


@each_optimizer
def test_groups_override_the_defaults_at_each_step_and_lambda_is_not_multiplied_by_lr(make):
    model = tiny_model()
    before = weights(model)
    groups = [
        {"params": [model[0].weight], "pattern": NMPattern(1, 4), "reg_lambda": 0.7},
        {"params": [model[2].weight], "reg_lambda": 0},
        {"params": [model[0].bias, model[2].bias], "lr": 0.5},
    ]
    optimizer = make(groups, lr=TINY, reg_lambda=0.2)
    train(model, optimizer, 1)
    assert_close(model[0].weight, prox_nm(before[0], 0.7, "1:4"))
    assert torch.equal(model[2].weight, before[2]), "reg_lambda=0 excludes the group"
    torch.testing.assert_close((model[0].bias - before[1]).abs(), torch.full_like(before[1], 0.5), rtol=1e-4, atol=0)
    found = [(group["pattern"], group["reg_lambda"]) for group in optimizer.param_groups]
    assert found == [("1:4", 0.7), ("2:4", 0), ("2:4", 0.2)]
    optimizer.param_groups[0]["reg_lambda"], optimizer.param_groups[1]["reg_lambda"] = 0.125, 0.3
    before = weights(model)
    train(model, optimizer, 1)
    assert_close(model[0].weight, prox_nm(before[0], 0.125, "1:4"))
    assert_close(model[2].weight, prox_nm(before[2], 0.3))
    assert optimizer.param_groups[0]["prox_step"] == 2


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@each_setup
def test_at_lr_zero_the_moments_move_and_no_weight_does(dtype, make, lr):
    model = tiny_model(dtype=dtype)
    optimizer = make(model.parameters(), lr=lr, weight_decay=0.1, reg_lambda=1.0)
    before = weights(model)
    train(model, optimizer, 2)
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["prox_step"] == 0
    assert optimizer.state[model[0].weight]["step"] == 2
    assert optimizer.state[model[0].weight]["exp_avg"].any()


@each_optimizer
def test_a_learning_rate_may_be_a_tensor_of_one_element(make):
    runs = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)):
        model = tiny_model()
        train(model, make([{"params": list(model.parameters()), "lr": lr}], reg_lambda=0.1), 2)
        runs.append(weights(model))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(runs[2], runs[0], rtol=1e-12, atol=1e-12)


@each_optimizer
def test_the_loss_of_a_closure_is_returned(make):
    model, twin = tiny_model(), tiny_model()
    optimizer, plain = with_everything(make, model), with_everything(make, twin)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(4):
        expected = loss_of(model)
        assert torch.equal(optimizer.step(closure), expected)
        plain.zero_grad()
        loss_of(twin).backward()
        assert plain.step() is None
    assert_same(weights(model), weights(twin))


# ------------------------------------------------------------------------------------------- torch around it


@pytest.mark.filterwarnings("error:.*lr_scheduler")
@each_optimizer
def test_schedulers_and_hooks_work_and_every_hook_fires_once(make):
    model, fired = tiny_model(), []
    optimizer = make(model.parameters(), lr=1.0, reg_lambda=100.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_pre_hook(lambda opt, *_: fired.append(("pre", opt)))
    optimizer.register_step_post_hook(
        lambda *_: fired.append(("post, after the prox", NMPattern(2, 4).is_feasible(model[0].weight)))
    )
    handles = [
        register_optimizer_step_pre_hook(lambda opt, *_: fired.append(("global pre", opt))),
        register_optimizer_step_post_hook(lambda opt, *_: fired.append(("global post", opt))),
    ]
    try:
        train(model, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    expected = [("global pre", optimizer), ("pre", optimizer), ("post, after the prox", True)]
    assert fired == [*expected, ("global post", optimizer)]
    zeros = model[0].weight[model[0].weight == 0]
    assert len(zeros) >= 24 * 4
    assert not zeros.signbit().any(), "zeros are +0.0"

    scheduler.step()
    train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25

    fired.clear()
    optimizer.register_state_dict_pre_hook(lambda *_: fired.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda *_: fired.append("state_dict post"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: fired.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: fired.append("load post"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert fired == ["state_dict pre", "state_dict post", "load pre", "load post"]


@pytest.mark.parametrize(
    ("make", "unscales"),
    [(prox_optimizer, False), (partial(prox_optimizer, fused=True), True), (ProxAdamW, False)],
    ids=["ProxOptimizer", "ProxOptimizer, fused base", "ProxAdamW"],
)
def test_grad_scaler_skips_the_prox_with_the_step(make, unscales):
    model, twin = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    optimizer, unscaled = (make(m.parameters(), lr=0.01, reg_lambda=0.5, weight_decay=0.01) for m in (model, twin))
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
    optimizer = make(model.parameters(), lr=0.01, reg_lambda=100.0)
    old, before = model[0].weight, weights(model)[0]
    model[0].weight = nn.Parameter(before.clone())  # as accelerate does for FSDP2
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 1)
    assert torch.equal(old, before)
    assert NMPattern(2, 4).is_feasible(model[0].weight)
    assert old not in optimizer.state


# ------------------------------------------------------------------------------------------- state


@each_setup
def test_resumed_and_copied_optimizers_continue_bit_for_bit(dtype, make, tmp_path):
    model = tiny_model(dtype=dtype)
    optimizer = with_everything(make, model)
    optimizer.param_groups[0]["seed"] = 2**64 - 3  # does not fit int64; ProxOptimizer ignores it
    StepLR(optimizer, 10)
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    twins = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for _, twin_optimizer in twins:
        assert repr(twin_optimizer) == repr(optimizer)

    saved, resumed = torch.load(tmp_path / "run.pt", weights_only=True), tiny_model(seed=7, dtype=dtype)
    first, *others = resumed.parameters()
    other = make([{"params": [first]}, {"params": others}], lr=0.5, reg_lambda=9.9, pattern="1:4")
    other.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    assert other.param_groups[0]["prox_step"] == 3
    train(model, optimizer, 3)
    for twin, twin_optimizer in [*twins, (resumed, other)]:
        train(twin, twin_optimizer, 3)
        assert_same(weights(twin), weights(model))
        for parameter, expected in zip(twin.parameters(), model.parameters(), strict=True):
            for key, value in optimizer.state[expected].items():
                loaded = twin_optimizer.state[parameter][key]
                assert torch.equal(loaded, value), key
                assert (loaded.dtype, loaded.device) == (value.dtype, value.device)


@each_optimizer
def test_a_plain_optimizer_loads_the_state_and_its_state_is_loaded(make):
    model = tiny_model()
    plain = AdamW(model.parameters(), lr=0.02)
    train(model, plain, 2)
    optimizer = make(model.parameters(), reg_lambda=0.6, pattern="1:4")
    optimizer.load_state_dict(plain.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["reg_lambda"], group["pattern"], group["prox_step"]) == (0.02, 0.6, "1:4", 0)
    train(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["step"] == 3
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state[model[0].weight]["step"] == 3
    train(model, plain, 1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


BAD_SETTINGS = [
    ({"pattern": "4:2"}, "pattern 4:2"),
    ({"pattern": "1:3"}, "multiple of 3"),
    ({"reg_lambda": -1.0}, "reg_lambda=-1.0 must be a finite number >= 0"),
]
BAD_STATES = [(make, *case) for make in OPTIMIZERS.values() for case in BAD_SETTINGS]
BAD_STATES += [
    (ProxAdamW, {"prox_scale": torch.ones(5)}, r"scale of shape \[5\]"),
    (ProxAdamW, {"amsgrad": True}, "amsgrad=True: ProxAdamW computes plain AdamW only"),
    (ProxAdamW, {"betas": (0.9, 2.0)}, "betas="),
]


@pytest.mark.parametrize(("make", "bad", "message"), BAD_STATES)
def test_a_state_with_bad_settings_is_refused_before_anything_is_loaded(make, bad, message):
    model = tiny_model()
    optimizer = with_everything(make, model)
    saved = optimizer.state_dict()
    train(model, optimizer, 1)
    saved["param_groups"][0] |= bad
    group, state = optimizer.param_groups[0], dict(optimizer.state)
    before, hooks = dict(group), dict(optimizer._optimizer_load_state_dict_pre_hooks)
    for loading in (optimizer, getattr(optimizer, "base_optimizer", optimizer)):
        with pytest.raises(ValueError, match=message):
            loading.load_state_dict(saved)
        assert optimizer.param_groups[0] is group
        assert group == before
        assert optimizer.state == state
        assert optimizer._optimizer_load_state_dict_pre_hooks == hooks


# ------------------------------------------------------------------------------------------- refusals


REFUSED = [(lambda: tiny_model().parameters(), *case) for case in BAD_SETTINGS]
REFUSED += [
    (lambda: tiny_model().parameters(), {"reg_lambda": math.nan}, r"reg_lambda=nan"),
    (lambda: nn.Linear(7, 8).parameters(), {}, r"\[8, 7\].*an even number of at least 4"),
    (lambda: [tiny_model()[0].bias], {}, r"nothing to prune.*ZeRO"),
    (lambda: [flat()], {}, r"FSDP1.*fully_shard"),
    (
        lambda: [nn.Parameter(torch.ones(4, 8, dtype=torch.complex64))],
        {},
        r"\[4, 8\].*complex64, for which there is no",
    ),
    *(
        (lambda: tiny_model().parameters(), {"reg_lambda": value}, "reg_lambda=.* must be a finite number")
        for value in (torch.tensor([1.0, 2.0]), "0.1", None)
    ),
]


@pytest.mark.parametrize(("parameters", "arguments", "message"), REFUSED)
@each_optimizer
def test_bad_settings_and_parameters_are_refused(make, parameters, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(parameters(), **{"reg_lambda": 1.0} | arguments)


@each_optimizer
def test_added_groups_are_completed_and_checked(make):
    model = tiny_model()
    optimizer = make([model[0].weight], lr=0.1, reg_lambda=0.2)
    optimizer.add_param_group({"params": [model[2].weight], "pattern": "1:4"})
    assert optimizer.param_groups[1]["reg_lambda"] == 0.2
    with pytest.raises(ValueError, match=r"reg_lambda > 0, of shape \[3, 7\].*an even number .*reg_lambda=0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 7))]})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 7))], "reg_lambda": 0})


@pytest.mark.parametrize("factor", [-1.0, math.nan, math.inf])
@each_optimizer
def test_an_invalid_lambda_of_a_group_is_refused_before_anything_moves(make, factor):
    model = tiny_model()
    optimizer = make(model.parameters(), lr=0.1, reg_lambda=0.3)
    train(model, optimizer, 1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["reg_lambda"] = factor
    with pytest.raises(ValueError, match=rf"reg_lambda={factor} of a param group: must be finite and >= 0"):
        train(model, optimizer, 1)
    assert_same(weights(model), before)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], state[0]["exp_avg"])
    assert optimizer.param_groups[0]["prox_step"] == 1


@each_optimizer
def test_a_step_in_a_capture_is_refused_before_anything_changes(make, monkeypatch):
    model = tiny_model()
    optimizer = make(model.parameters(), reg_lambda=0.5)
    loss_of(model).backward()
    before = weights(model) + [parameter.grad.clone() for parameter in model.parameters()]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = f"{type(optimizer).__name__}: step cannot be captured.*forward and backward"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same(before, weights(model) + [parameter.grad for parameter in model.parameters()])
    assert not optimizer.state
    assert all(group["prox_step"] == 0 for group in optimizer.param_groups)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    optimizer.step()
    assert optimizer.state


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", {"target_modules": ["q_proj"]}),
        ("mixtral", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),  # one wrapper in another
    ],
)
def test_adapters_are_not_pruned(kind, targets):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(language_models.tiny_model(kind), peft.LoraConfig(**targets))
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    with pytest.raises(ValueError, match="nothing to prune"):
        ProxOptimizer(AdamW(trained), reg_lambda=1.0, model=adapted)


@pytest.mark.filterwarnings("ignore:not pruned, because of the names")
@each_optimizer
def test_a_group_with_another_number_of_parameters_is_refused(make):
    model = tiny_model()
    optimizer = make([("embed", model[0].weight), ("proj", model[2].weight)], reg_lambda=1.0)
    optimizer.param_groups[0]["params"].append(model[0].bias)
    with pytest.raises(ValueError, match=r"3 parameters, but its prox_skip has 2 .*add_param_group, or give prox_skip"):
        train(model, optimizer, 1)
    optimizer.param_groups[0]["prox_skip"].append(True)
    train(model, optimizer, 1)
