"""Both optimizers are saved, resumed bit for bit and copied with everything they hold, in every way of rounding."""

import copy
import pickle

import pytest
import torch
from torch.optim import AdamW
from training import OPTIMIZERS, assert_same, each_optimizer, each_setup, tiny_model, train, weights, with_everything

from proxsparse import ProxAdamW
from proxsparse.optim.schedules import linear_ramp

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")


@each_setup
def test_resume_is_bit_identical(dtype, make, tmp_path):
    model = tiny_model(dtype=dtype)
    optimizer = with_everything(make, model)
    optimizer.param_groups[0]["seed"] = 2**64 - 3  # of no int64; nothing to ProxOptimizer
    train(model, optimizer, 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    train(model, optimizer, 3)

    resumed = tiny_model(seed=7, dtype=dtype)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other = make(resumed.parameters(), lr=0.5, reg_lambda=9.9, reg_schedule=linear_ramp(6), pattern="1:4")
    other.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    assert other.param_groups[0]["prox_step"] == 3
    train(resumed, other, 3)
    assert_same(weights(resumed), weights(model))
    for parameter, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[expected].items():
            loaded = other.state[parameter][key]
            assert torch.equal(loaded, value), key
            assert (loaded.dtype, loaded.device) == (value.dtype, value.device)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@each_setup
def test_copies_go_on_like_the_original(dtype, make, copied):
    model = tiny_model(dtype=dtype)
    optimizer = with_everything(make, model)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train(model, optimizer, 2)
    twin, twin_optimizer = copied((model, optimizer))
    assert repr(twin_optimizer).split("linear")[0] == repr(optimizer).split("linear")[0]
    train(model, optimizer, 2)
    train(twin, twin_optimizer, 2)
    assert_same(weights(twin), weights(model))


@each_optimizer
def test_the_state_of_a_plain_optimizer_loads_and_the_other_way_round(make):
    model = tiny_model()
    plain = AdamW(model.parameters(), lr=0.02)
    train(model, plain, 2)
    optimizer = make(model.parameters(), reg_lambda=0.6, pattern="1:4", frozen_lambda=0.1)
    optimizer.load_state_dict(plain.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["reg_lambda"], group["pattern"], group["prox_step"]) == (0.02, 0.6, "1:4", 0)
    before = weights(model)
    train(model, optimizer, 1)
    assert torch.equal(optimizer.state[model[0].weight]["pretrained"], before[0])
    assert optimizer.state[model[0].weight]["step"] == 3
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state[model[0].weight]["step"] == 3
    train(model, plain, 1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


BAD_SETTINGS = [
    ({"pattern": "4:2"}, "pattern 4:2"),
    ({"pattern": "1:3"}, "multiple of 3"),
    ({"reg_lambda": -1.0}, "reg_lambda=-1.0"),
    ({"prox_scale": [torch.ones(5)] * 4}, r"metric of shape \[5\]"),
]
BAD_FOR_ADAMW = [
    ({"amsgrad": True}, "amsgrad=True: ProxAdamW computes plain AdamW only"),
    ({"betas": (0.9, 2.0)}, "betas="),
]


@pytest.mark.parametrize(
    ("make", "bad", "message"),
    [(make, *case) for make in OPTIMIZERS.values() for case in BAD_SETTINGS]
    + [(ProxAdamW, *case) for case in BAD_FOR_ADAMW],
)
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
