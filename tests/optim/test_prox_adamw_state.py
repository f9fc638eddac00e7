"""The state of ProxAdamW: saved, resumed bit for bit, and exchanged with torch's AdamW and ProxOptimizer(AdamW)."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW
from training import INPUTS, assert_same, tiny_model, train, weights

from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.optim.schedules import linear_ramp

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

ADAMW = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
SETUPS = {
    "float64": (torch.float64, {}),
    "float32": (torch.float32, {"moment_dtype": torch.bfloat16}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, master": (torch.bfloat16, {"master_weights": True, "moment_dtype": torch.bfloat16}),
    "bfloat16, stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "all stochastic": (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.bfloat16}),
    "float16, master": (torch.float16, {"master_weights": True}),
}
each_setup = pytest.mark.parametrize(("dtype", "setup"), SETUPS.values(), ids=SETUPS)


def train_in(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """As `train`, in the dtype of the model."""
    inputs = INPUTS.to(model[0].weight.dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()


def make_optimizer(model: nn.Module, **setup) -> ProxAdamW:
    optimizer = ProxAdamW(
        model.parameters(), **ADAMW, reg_lambda=0.3, frozen_lambda=0.05, reg_schedule=linear_ramp(6), **setup
    )
    optimizer.set_metric(model[0].weight, torch.linspace(0.5, 2, 8))
    return optimizer


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    """A state dict that further steps do not change."""
    return copy.deepcopy(optimizer.state_dict())


@each_setup
def test_resume_is_bit_identical(dtype, setup, tmp_path):
    model = tiny_model().to(dtype)
    optimizer = make_optimizer(model, seed=2**64 - 3, **setup)
    train_in(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    train_in(model, optimizer, 3)

    resumed = tiny_model(seed=7).to(dtype)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other = ProxAdamW(resumed.parameters(), lr=0.5, reg_lambda=9.9, reg_schedule=linear_ramp(6), pattern="1:4", **setup)
    other.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    assert other.param_groups[0]["prox_step"] == 3
    train_in(resumed, other, 3)
    assert_same(weights(resumed), weights(model))
    for parameter, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[expected].items():
            loaded = other.state[parameter][key]
            assert torch.equal(loaded, value), key
            assert (loaded.dtype, loaded.device) == (value.dtype, value.device)


@each_setup
def test_dtypes_of_the_state(dtype, setup):
    model = tiny_model().to(dtype)
    optimizer = make_optimizer(model, **setup)
    train_in(model, optimizer, 1)
    state = optimizer.state[model[0].weight]
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": setup.get("moment_dtype", arithmetic),
        "exp_avg_sq": setup.get("moment_dtype", arithmetic),
        "pretrained": dtype,
    } | ({"master": torch.float32} if "master_weights" in setup else {})
    assert state["step"].device.type == "cpu"
    assert state["step"].shape == ()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@each_setup
def test_copies_go_on_like_the_original(dtype, setup, copied):
    model = tiny_model().to(dtype)
    optimizer = make_optimizer(model, **setup)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train_in(model, optimizer, 2)
    twin, twin_optimizer = copied((model, optimizer))
    assert repr(twin_optimizer).split("linear")[0] == repr(optimizer).split("linear")[0]
    train_in(model, optimizer, 2)
    train_in(twin, twin_optimizer, 2)
    assert_same(weights(twin), weights(model))


def test_another_seed_gives_another_trajectory_and_the_seed_is_saved():
    def run(seed, load=None):
        model = tiny_model().bfloat16()
        optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, stochastic_rounding=True, seed=seed)
        if load:
            optimizer.load_state_dict(load)
        train_in(model, optimizer, 3)
        return weights(model), optimizer

    first, optimizer = run(1)
    assert_same(run(1)[0], first)
    assert not torch.equal(run(2)[0][0], first[0])
    fresh = state_of(optimizer) | {"state": {}}
    assert_same(run(2, load=fresh)[0], first)


# ------------------------------------------------------------------------------------------- exchange

OTHERS = {
    "AdamW": lambda model: AdamW(model.parameters(), **ADAMW),
    "AdamW, fused": lambda model: AdamW(model.parameters(), **ADAMW, fused=True),
    "ProxOptimizer": lambda model: ProxOptimizer(AdamW(model.parameters(), **ADAMW), 0.1),
}


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    for w, expected in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(w, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_the_trajectory_goes_on_after_an_exchange(make):
    """Ours, then the other, then ours, as if one had done it all; `prox` of the other or none."""
    model, twin = tiny_model(), tiny_model()
    whole = make(twin)
    reg_lambda = whole.param_groups[0].get("reg_lambda", 0.0)
    ours, other = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=reg_lambda), make(model)
    assert set(other.param_groups[0]) <= set(ours.param_groups[0])
    for previous, present in ((None, ours), (ours, other), (other, ours), (ours, other)):
        if previous is not None:
            present.load_state_dict(state_of(previous))
        train(model, present, 3)
        train(twin, whole, 3)
        assert_close(model, twin)
    assert ours.state[model[0].weight]["step"].device.type == "cpu"
    assert other.state[model[0].weight]["step"] == 12
    assert reg_lambda == 0 or other.param_groups[0]["prox_step"] == 12


def test_settings_that_a_plain_state_lacks_stay():
    model = tiny_model()
    plain = AdamW(model.parameters(), lr=0.02, foreach=True)
    train(model, plain, 2)
    optimizer = ProxAdamW(model.parameters(), reg_lambda=0.6, pattern="1:4", frozen_lambda=0.1, seed=5)
    optimizer.load_state_dict(plain.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["reg_lambda"], group["pattern"], group["prox_step"]) == (0.02, 0.6, "1:4", 0)
    assert (group["seed"], group["foreach"]) == (5, None)
    before = weights(model)
    train(model, optimizer, 1)
    assert torch.equal(optimizer.state[model[0].weight]["pretrained"], before[0])
    assert optimizer.state[model[0].weight]["step"] == 3


def test_moments_of_bfloat16_weights_keep_their_digits():
    """torch's own load_state_dict would round all of them to the dtype of the weights."""
    model = tiny_model().bfloat16()
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, master_weights=True)
    train_in(model, optimizer, 2)
    saved = state_of(optimizer)
    other = ProxAdamW(model.parameters(), reg_lambda=0.1, master_weights=True)
    other.load_state_dict(saved)
    for key in ("exp_avg", "exp_avg_sq", "master"):
        kept = other.state[model[0].weight][key]
        assert torch.equal(kept, saved["state"][0][key])
        assert not torch.equal(kept, kept.bfloat16().float()), "the test would not see the rounding"


def test_the_moment_dtype_of_the_optimizer_decides():
    model = tiny_model().float()
    wide = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    narrow = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, moment_dtype=torch.bfloat16)
    train_in(model, wide, 2)
    narrow.load_state_dict(state_of(wide))
    state, expected = narrow.state[model[0].weight], wide.state[model[0].weight]
    assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"].bfloat16())
    wide.load_state_dict(state_of(narrow))
    assert wide.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_a_master_that_was_left_behind_is_made_anew():
    """AdamW passes `master` on, in bfloat16, while it moves the weight: to go on from it would undo that."""
    model = tiny_model().bfloat16()
    ours = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=1e-6, master_weights=True)
    plain = AdamW(model.parameters(), **ADAMW)
    train_in(model, ours, 2)
    old = weights(model)
    plain.load_state_dict(state_of(ours))
    train_in(model, plain, 20)
    before = weights(model)
    ours.load_state_dict(state_of(plain))
    train_in(model, ours, 1)
    assert (before[0] - old[0]).abs().max() > 0.1, "the test would not see a return"
    assert (model[0].weight - before[0]).abs().max() < 0.03
    ours.load_state_dict(state_of(ours))
    assert "master" in ours.state[model[0].weight]
    stochastic = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=1e-6, stochastic_rounding=True)
    stochastic.load_state_dict(state_of(ours))
    assert "master" not in stochastic.state[model[0].weight]


def test_load_hooks_see_plain_tensors():
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    train(model, optimizer, 1)
    seen = []

    def before(_optimizer, state_dict):
        seen.append(state_dict["state"][0]["exp_avg"].shape)
        return state_dict | {"state": {}}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(len(opt.state)))
    for _ in range(2):
        optimizer.load_state_dict(state_of(optimizer)) if optimizer.state else train(model, optimizer, 1)
    assert seen == [(12, 8), 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pattern": "4:2"}, "pattern 4:2"),
        ({"pattern": "1:3"}, "multiple of 3"),
        ({"reg_lambda": -1.0}, "reg_lambda=-1.0"),
        ({"prox_scale": [torch.ones(5)] * 4}, r"metric of shape \[5\]"),
        ({"amsgrad": True}, "amsgrad=True: ProxAdamW computes plain AdamW only"),
        ({"betas": (0.9, 2.0)}, "betas="),
    ],
)
def test_a_state_with_bad_settings_is_refused_before_anything_is_loaded(bad, message):
    model = tiny_model()
    optimizer = make_optimizer(model)
    saved = optimizer.state_dict()
    train(model, optimizer, 1)
    saved["param_groups"][0] |= bad
    group, state = optimizer.param_groups[0], dict(optimizer.state)
    before = dict(group)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] is group
    assert group == before
    assert optimizer.state == state
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 0


def test_states_of_other_methods_and_other_groups_are_refused():
    model = tiny_model()
    optimizer = make_optimizer(model)
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        optimizer.load_state_dict(Adam(model.parameters()).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
