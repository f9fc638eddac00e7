"""What the state of ProxAdamW is, and its exchange with torch's AdamW and ProxOptimizer(AdamW)."""

import copy
from functools import partial

import pytest
import torch
from torch.optim import Adam, AdamW
from training import ADAMW, ROUNDINGS, assert_same, prox_optimizer, tiny_model, train, weights, with_everything

from proxsparse import ProxAdamW

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    """A state dict that further steps do not change."""
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(("dtype", "rounding"), ROUNDINGS.values(), ids=ROUNDINGS)
def test_dtypes_of_the_state(dtype, rounding):
    model = tiny_model(dtype=dtype)
    optimizer = with_everything(partial(ProxAdamW, **rounding), model)
    train(model, optimizer, 1)
    state = optimizer.state[model[0].weight]
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    assert {key: value.dtype for key, value in state.items()} == {
        "step": torch.float32,
        "exp_avg": rounding.get("moment_dtype", arithmetic),
        "exp_avg_sq": rounding.get("moment_dtype", arithmetic),
        "pretrained": dtype,
    } | ({"master": torch.float32} if "master_weights" in rounding else {})
    assert state["step"].device.type == "cpu"
    assert state["step"].shape == ()


def test_another_seed_gives_another_trajectory_and_the_seed_is_saved():
    def run(seed, load=None):
        model = tiny_model(dtype=torch.bfloat16)
        optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, stochastic_rounding=True, seed=seed)
        if load:
            optimizer.load_state_dict(load)
        train(model, optimizer, 3)
        return weights(model), optimizer

    first, optimizer = run(1)
    assert_same(run(1)[0], first)
    assert not torch.equal(run(2)[0][0], first[0])
    fresh = state_of(optimizer) | {"state": {}}
    assert_same(run(2, load=fresh)[0], first)


# ------------------------------------------------------------------------------------------- exchange

OTHERS = {
    "AdamW": partial(AdamW, **ADAMW),
    "AdamW, foreach": partial(AdamW, **ADAMW, foreach=True),
    "AdamW, fused": partial(AdamW, **ADAMW, fused=True),
    "ProxOptimizer": partial(prox_optimizer, **ADAMW, reg_lambda=0.1),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_the_trajectory_goes_on_after_an_exchange(make):
    """Ours, then the other, then ours, as if one had done it all; `prox` of the other or none."""
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


def test_moments_of_bfloat16_weights_keep_their_digits():
    """torch's own load_state_dict would round all of them to the dtype of the weights."""
    model = tiny_model(dtype=torch.bfloat16)
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, master_weights=True)
    train(model, optimizer, 2)
    saved = state_of(optimizer)
    other = ProxAdamW(model.parameters(), reg_lambda=0.1, master_weights=True)
    other.load_state_dict(saved)
    for key in ("exp_avg", "exp_avg_sq", "master"):
        kept = other.state[model[0].weight][key]
        assert torch.equal(kept, saved["state"][0][key])
        assert not torch.equal(kept, kept.bfloat16().float()), "the test would not see the rounding"


def test_the_moment_dtype_of_the_optimizer_decides():
    model = tiny_model(dtype=torch.float32)
    wide = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    narrow = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, moment_dtype=torch.bfloat16)
    train(model, wide, 2)
    narrow.load_state_dict(state_of(wide))
    state, expected = narrow.state[model[0].weight], wide.state[model[0].weight]
    assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"].bfloat16())
    wide.load_state_dict(state_of(narrow))
    assert wide.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_a_master_that_was_left_behind_is_made_anew():
    """AdamW passes `master` on, in bfloat16, while it moves the weight: to go on from it would undo that."""
    model = tiny_model(dtype=torch.bfloat16)
    ours = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=1e-6, master_weights=True)
    plain = AdamW(model.parameters(), **ADAMW)
    train(model, ours, 2)
    old = weights(model)
    plain.load_state_dict(state_of(ours))
    train(model, plain, 20)
    before = weights(model)
    ours.load_state_dict(state_of(plain))
    train(model, ours, 1)
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


def test_an_entry_of_no_parameter_is_passed_on():
    model = tiny_model()
    optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    train(model, optimizer, 1)
    saved = state_of(optimizer)
    saved["state"]["of the user"] = {"note": 1}
    optimizer.load_state_dict(saved)
    assert optimizer.state["of the user"] == {"note": 1}


def test_the_state_of_another_method_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        with_everything(ProxAdamW, model).load_state_dict(Adam(model.parameters()).state_dict())
