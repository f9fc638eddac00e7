"""ProxAdamW: the trajectory of ProxOptimizer(AdamW) within rounding, in one pass; its state; what it refuses."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from training import ADAMW, assert_same, loss_of, prox_optimizer, tiny_model, train, weights, with_everything

from proxsparse import ProxAdamW

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

PROX = {
    "plain": {"reg_lambda": 0.1},
    "without prox": {"reg_lambda": 0.0},
    "1:4": {"reg_lambda": 0.1, "pattern": "1:4"},
    "4:8": {"reg_lambda": 0.5, "pattern": "4:8"},
    "frozen": {"reg_lambda": 0.05, "frozen_lambda": 0.2, "frozen_eps": 0.05},
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


def test_defaults():
    defaults = ProxAdamW(tiny_model().parameters(), reg_lambda=0.1).defaults
    assert (defaults["lr"], defaults["betas"]) == (1e-3, (0.9, 0.999))
    assert (defaults["eps"], defaults["weight_decay"]) == (1e-8, 0.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["w", "scaled"])
@pytest.mark.parametrize("prox", PROX.values(), ids=PROX)
def test_trajectory_is_that_of_prox_optimizer(prox, scaled, dtype):
    model, twin = (tiny_model(5, dtype) for _ in range(2))
    fused, wrapped = ProxAdamW(model.parameters(), **ADAMW, **prox), prox_optimizer(twin.parameters(), **ADAMW, **prox)
    if scaled and prox["reg_lambda"] > 0:
        fused.set_scale(model[0].weight, torch.linspace(0.5, 2, 8, dtype=dtype))
        wrapped.set_scale(twin[0].weight, torch.linspace(0.5, 2, 8, dtype=dtype))
    rounds = 1 if prox.get("pattern") == "4:8" else 5  # the general solver is slow
    for _ in range(4):
        train(model, fused, rounds)
        train(twin, wrapped, rounds)
        torch.testing.assert_close(weights(model), weights(twin), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for w, expected in zip(weights(model), weights(twin), strict=True):
            assert torch.equal(w == 0, expected == 0)
    assert prox["reg_lambda"] == 0 or (model[0].weight == 0).any(), "the prox has something to do"
    assert fused.param_groups[0]["prox_step"] == wrapped.param_groups[0]["prox_step"] == 4 * rounds
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert fused.state[p].keys() == wrapped.state[q].keys()
        for key, value in fused.state[p].items():
            torch.testing.assert_close(value, wrapped.state[q][key], rtol=1e-4, atol=TOLERANCE[dtype])


def test_lr_may_be_a_tensor():
    model, twin = tiny_model(), tiny_model()
    train(model, ProxAdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), reg_lambda=0.1), 3)
    train(twin, ProxAdamW(twin.parameters(), lr=0.01, reg_lambda=0.1), 3)
    assert_same(weights(model), weights(twin))


def test_the_gradient_is_not_changed():
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, frozen_lambda=0.3)
    optimizer.set_scale(model[0].weight, torch.rand(8) + 0.5)
    train(model, optimizer, 2)
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.grad, gradient)


def test_strided_parameters():
    weight = torch.randn(12, 8, dtype=torch.float64)
    plain, strided = nn.Parameter(weight.clone()), nn.Parameter(weight.T.contiguous().T)
    for parameter in (plain, strided):
        optimizer = ProxAdamW([parameter], lr=0.01, reg_lambda=0.3)
        for step in range(3):
            parameter.grad = torch.cos(weight + step)
            optimizer.step()
    assert not strided.is_contiguous()
    assert torch.equal(plain, strided)


def test_two_optimizers_of_one_model_do_not_touch_each_others_parameters():
    model = tiny_model()
    ours, theirs = ProxAdamW([model[0].weight], reg_lambda=0.1), SGD([model[2].weight], lr=0.1)
    before = weights(model)
    loss_of(model).backward()
    ours.step()
    assert_same(weights(model)[1:], before[1:])
    theirs.step()
    assert AdamW([model[0].bias]).state_dict()["state"] == {}


def test_a_compiled_step_is_the_eager_one():
    """Traced, every parameter after the first would step with the state of another."""
    model, twin = tiny_model(), tiny_model()
    optimizer, plain = (ProxAdamW(m.parameters(), lr=0.01, reg_lambda=0.3) for m in (model, twin))
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        loss_of(model).backward()
        compiled()
        optimizer.zero_grad()
    train(twin, plain, 3)
    assert_same(weights(model), weights(twin))


# ------------------------------------------------------------------------------------------- exchange of states

OTHERS = {
    "AdamW": partial(AdamW, **ADAMW),
    "AdamW, foreach": partial(AdamW, **ADAMW, foreach=True),
    "AdamW, fused": partial(AdamW, **ADAMW, fused=True),
    "ProxOptimizer": partial(prox_optimizer, **ADAMW, reg_lambda=0.1),
}


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    """A state dict that further steps do not change."""
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_optimizers_that_exchange_their_states_step_as_one(make):
    model, twin = tiny_model(), tiny_model()
    whole = make(twin.parameters())
    reg_lambda = whole.param_groups[0].get("reg_lambda", 0.0)
    ours, other = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=reg_lambda, seed=5), make(model.parameters())
    assert set(other.param_groups[0]) <= set(ours.param_groups[0])
    ours.load_state_dict(whole.state_dict())  # before any step: settings only
    assert [ours.param_groups[0][key] for key in ("seed", "foreach", "fused")] == [5, None, None]
    for previous, present in ((None, ours), (ours, other), (other, ours), (ours, other)):
        if previous is not None:
            present.load_state_dict(state_of(previous))
        train(model, present, 3)
        train(twin, whole, 3)
        torch.testing.assert_close(weights(model), weights(twin), rtol=1e-12, atol=1e-12)
    assert ours.state[model[0].weight]["step"].device.type == "cpu"
    assert other.state[model[0].weight]["step"] == 12
    assert reg_lambda == 0 or other.param_groups[0]["prox_step"] == 12


def test_load_hooks_see_plain_tensors_and_unknown_entries_are_kept():
    model, seen = tiny_model(), []
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    train(model, optimizer, 1)
    saved = state_of(optimizer)
    saved["state"]["of the user"] = {"note": 1}
    optimizer.load_state_dict(saved)
    assert optimizer.state["of the user"] == {"note": 1}

    def before(_optimizer, state_dict):
        seen.append(state_dict["state"][0]["exp_avg"].shape)
        return state_dict | {"state": {}}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(len(opt.state)))
    optimizer.load_state_dict(state_of(optimizer))
    train(model, optimizer, 1)
    assert seen == [(24, 8), 0]


def test_the_state_of_another_method_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        with_everything(ProxAdamW, model).load_state_dict(Adam(model.parameters()).state_dict())


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
def test_bad_settings_of_adamw_and_of_rounding_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ProxAdamW(tiny_model().parameters(), **{"reg_lambda": 1.0} | arguments)


def test_roundings_that_do_not_suit_the_weights_are_refused():
    half, bf16 = nn.Parameter(torch.ones(2, 4).half()), nn.Parameter(torch.ones(2, 4).bfloat16())
    with pytest.raises(ValueError, match=r"\[2, 4\] is torch.float16.*master_weights=True"):
        ProxAdamW([bf16, half], reg_lambda=0.1, stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"\[2, 4\].*stochastic_rounding=True or master_weights=True"):
        ProxAdamW([bf16], reg_lambda=0.1, moment_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"complex64.*convert"):
        ProxAdamW([nn.Parameter(torch.ones(2, 4, dtype=torch.complex64))], reg_lambda=0.1)
    for options in ({"stochastic_rounding": True}, {"master_weights": True}):  # float32 needs neither, accepts both
        ProxAdamW([bf16, nn.Parameter(torch.ones(4))], reg_lambda=0.1, moment_dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_variants_of_adamw_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=True.*plain AdamW only"):
        ProxAdamW([{"params": tiny_model().parameters(), option: True}], reg_lambda=0.1)


def test_sparse_gradients_and_other_dtypes_are_refused_before_anything_moves():
    layer, other = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4)
    optimizer = ProxAdamW([*other.parameters(), *layer.parameters()], reg_lambda=0.1)
    other(layer(torch.tensor([1, 2]))).sum().backward()
    before = weights(other)
    with pytest.raises(ValueError, match=r"\[6, 8\] has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert_same(weights(other), before)
    assert not optimizer.state

    model = tiny_model(dtype=torch.bfloat16)
    model[2].weight.grad_dtype = torch.float32
    optimizer = ProxAdamW(model.parameters(), reg_lambda=0.1, stochastic_rounding=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter, dtype=parameter.grad_dtype)
    before = weights(model)
    with pytest.raises(ValueError, match=r"\[4, 24\] is torch.bfloat16, but its gradient is torch.float32"):
        optimizer.step()
    assert_same(weights(model), before)
