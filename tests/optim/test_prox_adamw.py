"""ProxAdamW: the trajectory of ProxOptimizer(AdamW) within rounding, bfloat16, seeds, its state, what it refuses."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW
from training import ADAMW, ROUNDINGS, assert_same, loss_of, prox_optimizer, tiny_model, train, weights, with_everything

from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.ops import masked_weight_, prox_nm_, use_backend
from proxsparse.optim.prox_adamw import call_seed
from proxsparse.reference import frozen_penalty

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")
BF16 = torch.bfloat16
PROX = {"plain": {"reg_lambda": 0.1}, "without prox": {"reg_lambda": 0.0}, "4:8": {"reg_lambda": 0.5, "pattern": "4:8"}}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prox", PROX.values(), ids=PROX)
def test_trajectory_matches_prox_optimizer(prox, dtype):
    model, twin = (tiny_model(5, dtype) for _ in range(2))
    fused, wrapped = ProxAdamW(model.parameters(), **ADAMW, **prox), prox_optimizer(twin.parameters(), **ADAMW, **prox)
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


def test_the_scaled_step_is_the_plain_step_on_v():
    """v = c * w, with a scaling c from 0.1 to 10."""
    weight = nn.Parameter(torch.randn(6, 16, dtype=torch.float64))
    scale = torch.logspace(-1, 1, 16, dtype=torch.float64)[torch.randperm(16)]
    v = nn.Parameter(scale * weight.detach())
    on_v = ProxAdamW([v], lr=0.02, weight_decay=0.1, reg_lambda=0.3)
    on_w = ProxAdamW([{"params": [weight], "prox_scale": scale}], lr=0.02, weight_decay=0.1, reg_lambda=0.3)
    for gradient in torch.randn(5, 6, 16, dtype=torch.float64):
        weight.grad, v.grad = gradient.clone(), gradient / scale
        on_w.step()
        on_v.step()
    torch.testing.assert_close(weight * scale, v, rtol=1e-11, atol=1e-12)
    assert torch.equal(weight == 0, v == 0)
    assert (v == 0).any()


@pytest.mark.parametrize("reg_lambda", [0.3, 0.0])
def test_after_a_step_the_masked_weight_is_w0_under_the_new_mask(reg_lambda):
    """With the scale of the group; also after the state was loaded, and if lambda has become 0."""
    weight, w0 = nn.Parameter(torch.randn(6, 16)), torch.randn(6, 16)
    scale, out = torch.logspace(-1, 1, 16)[torch.randperm(16)], torch.empty(6, 16)
    optimizer = ProxAdamW([{"params": [weight], "prox_scale": scale}], lr=0.1, reg_lambda=0.3)
    optimizer.masked[weight] = out, w0
    for gradient in torch.randn(3, 6, 16):
        weight.grad = gradient
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["reg_lambda"] = reg_lambda
        assert torch.equal(out, masked_weight_(torch.empty(6, 16), weight.detach(), w0, scale))


def test_a_step_that_is_refused_changes_nothing():
    """Neither the weights of the groups before, nor counters."""
    first, second = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))
    optimizer = ProxAdamW([{"params": [first]}, {"params": [second]}], lr=0.1, reg_lambda=0.3)
    before = first.detach().clone()
    for parameter in (first, second):
        parameter.grad = torch.ones(4, 8)
    optimizer.masked[second] = torch.empty(4, 9), torch.empty(4, 8)
    with pytest.raises(ValueError, match="out is"):
        optimizer.step()
    assert torch.equal(first, before)
    assert [optimizer.state[parameter]["step"].item() for parameter in (first, second)] == [0, 0]
    assert [group["prox_step"] for group in optimizer.param_groups] == [0, 0]


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_frozen_term_is_a_penalty_in_the_loss(backend):
    model, twin = tiny_model(), tiny_model()
    for one in (model, twin):
        one[0].weight.data[0, :2] = torch.tensor([0.0, -0.0])
    frozen = {"frozen_lambda": 0.2, "frozen_eps": 0.05}
    ours = ProxAdamW(model.parameters(), **ADAMW, reg_lambda=0.05, **frozen)
    plain = ProxAdamW(twin.parameters(), **ADAMW, reg_lambda=0.05)
    pretrained = [weight for weight in weights(twin) if weight.ndim == 2]
    for _ in range(5):
        with use_backend(backend):
            train(model, ours, 1)
        plain.zero_grad()
        penalties = map(frozen_penalty, (twin[0].weight, twin[2].weight), pretrained, (0.05, 0.05))
        (loss_of(twin) + 0.2 * sum(penalties)).backward()
        plain.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-10, atol=1e-12)
    kept = [state["pretrained"] for state in ours.state.values() if "pretrained" in state]
    assert_same(kept, pretrained)


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


# ------------------------------------------------------------------------------------------- bfloat16

STEPS = 64
ULP = 2.0**-7  # of a bfloat16 weight in [1, 2)
SHRINK = 0.25 * ULP / (3 * 1.75**2)  # the lambda that shrinks a block of four times 1.75 by ULP / 4 a step


def test_a_quarter_of_an_ulp_a_step_is_lost_to_nearest_and_kept_in_the_mean():
    """Only the prox moves the weights: the gradient is zero and the learning rate tiny."""

    def trained(dtype, make):
        parameter = nn.Parameter(torch.full((64, 64), 1.75, dtype=dtype))
        optimizer = make([parameter])
        for _ in range(STEPS):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return parameter.detach().double()

    prox_adamw = partial(ProxAdamW, lr=1e-30, reg_lambda=SHRINK)
    exact = torch.full((64, 64), 1.75, dtype=torch.float64)
    for _ in range(STEPS):
        prox_nm_(exact, SHRINK)
    shrink = 1.75 - exact.mean().item()
    assert shrink > 10 * ULP, "there is something to lose"
    assert (trained(BF16, prox_adamw) == 1.75).all(), "to nearest, all of it is lost"
    assert (trained(BF16, lambda params: ProxOptimizer(AdamW(params, lr=1e-30), SHRINK)) == 1.75).all()
    stochastic = trained(BF16, partial(prox_adamw, stochastic_rounding=True))
    assert 1.75 - stochastic.mean().item() == pytest.approx(shrink, rel=0.03)
    assert stochastic.std() < 6 * ULP
    master = trained(BF16, partial(prox_adamw, master_weights=True))
    assert (master - exact).abs().max() <= ULP / 2 * 1.001
    assert (trained(torch.float32, prox_adamw) - exact).abs().max() < 1e-3 * ULP


def test_a_seed_repeats_a_run_and_is_saved():
    def run(seed, load=None):
        model = tiny_model(dtype=BF16)
        optimizer = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, stochastic_rounding=True, seed=seed)
        if load:
            optimizer.load_state_dict(load)
        train(model, optimizer, 3)
        return weights(model), optimizer

    first, optimizer = run(1)
    assert_same(run(1)[0], first)
    assert not torch.equal(run(2)[0][0], first[0])
    assert_same(run(2, load=state_of(optimizer) | {"state": {}})[0], first)


def test_equal_parameters_are_rounded_differently():
    """Each by its number over all groups, so that roundings do not add up."""
    value = torch.randn(16, 16).bfloat16()
    parameters = [nn.Parameter(value.clone()) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    split = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    ProxAdamW(split, lr=1e-3, reg_lambda=0.1, stochastic_rounding=True).step()
    assert not any(torch.equal(parameters[i], parameters[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


# ------------------------------------------------------------------------------------------- the state


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    """A state dict that further steps do not change."""
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(("dtype", "rounding"), ROUNDINGS.values(), ids=ROUNDINGS)
def test_dtypes_of_the_state(dtype, rounding):
    model = tiny_model(dtype=dtype)
    optimizer = with_everything(partial(ProxAdamW, **rounding), model)
    train(model, optimizer, 1)
    state = optimizer.state[model[0].weight]
    moments = rounding.get("moment_dtype", torch.float64 if dtype == torch.float64 else torch.float32)
    expected = {"step": torch.float32, "exp_avg": moments, "exp_avg_sq": moments, "pretrained": dtype}
    expected |= {"master": torch.float32} if "master_weights" in rounding else {}
    assert {key: value.dtype for key, value in state.items()} == expected
    assert state["step"].device.type == "cpu"
    assert state["step"].shape == ()


def test_the_moment_dtype_of_the_optimizer_decides():
    model = tiny_model(dtype=torch.float32)
    wide = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1)
    narrow = ProxAdamW(model.parameters(), lr=0.01, reg_lambda=0.1, moment_dtype=BF16)
    train(model, wide, 2)
    narrow.load_state_dict(state_of(wide))
    state, expected = narrow.state[model[0].weight], wide.state[model[0].weight]
    assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"].bfloat16())
    wide.load_state_dict(state_of(narrow))
    assert wide.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_an_outdated_master_is_made_again():
    """AdamW passes `master` on, in bfloat16, while it moves the weight: to continue from it would undo that."""
    model = tiny_model(dtype=BF16)
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


OTHERS = {
    "AdamW": partial(AdamW, **ADAMW),
    "AdamW, foreach": partial(AdamW, **ADAMW, foreach=True),
    "AdamW, fused": partial(AdamW, **ADAMW, fused=True),
    "ProxOptimizer": partial(prox_optimizer, **ADAMW, reg_lambda=0.1),
}


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


# ------------------------------------------------------------------------------------------- refusals


def parameter(dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("parameters", "arguments", "message"),
    [
        ([parameter()], {"lr": -1.0}, r"lr=-1.0 must be"),
        ([parameter()], {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ([parameter()], {"eps": -1e-8}, r"eps=-1e-08"),
        ([parameter()], {"weight_decay": math.inf}, r"weight_decay=inf"),
        ([parameter()], {"eps": "0.1"}, r"eps='0.1' must be"),
        ([parameter()], {"betas": 0.9}, r"betas=0.9 must be two numbers"),
        ([parameter()], {"frozen_lambda": -2}, r"frozen_lambda=-2"),
        ([parameter()], {"frozen_eps": 0}, r"frozen_eps=0 must be"),
        ([parameter()], {"seed": 1.5}, r"seed=1.5 must be an integer"),
        ([parameter()], {"seed": True}, r"seed=True must be an integer"),
        ([parameter()], {"stochastic_rounding": True}, r"is for bfloat16 weights, and there are none"),
        ([parameter()], {"moment_dtype": torch.float16}, r"moment_dtype=torch.float16 must be torch.bfloat16, or None"),
        ([parameter()], {"stochastic_rounding": True, "master_weights": True}, r"choose one of the two"),
        ([parameter(BF16), parameter(torch.half)], {"stochastic_rounding": True}, r"is torch.float16.*master_weights"),
        ([parameter(BF16)], {"moment_dtype": BF16}, r"\[2, 4\].*stochastic_rounding=True or master_weights=True"),
        ([parameter(torch.complex64)], {}, r"complex64.*convert"),
        *(
            ([{"params": [parameter()], option: True}], {}, f"{option}=True.*plain AdamW only")
            for option in ("amsgrad", "maximize", "differentiable")
        ),
        *(
            ([{"params": [parameter()], "prox_scale": scale}], {}, words)
            for scale, words in (
                (torch.ones(9), r"shape \[9\].*shape \[4\]"),
                (torch.ones(4, dtype=torch.int64), "int64"),
                (torch.zeros(4), r"from 0\.0 to 0\.0.*finite and > 0"),
            )
        ),
    ],
)
def test_bad_settings_are_refused(parameters, arguments, message):
    with pytest.raises(ValueError, match=message):
        ProxAdamW(parameters, **{"reg_lambda": 1.0} | arguments)


@pytest.mark.parametrize("option", ["stochastic_rounding", "master_weights"])
def test_float32_parameters_beside_bfloat16_accept_both_roundings(option):
    ProxAdamW([parameter(BF16), nn.Parameter(torch.ones(4))], reg_lambda=0.1, moment_dtype=BF16, **{option: True})


def test_a_seed_of_numpy_is_saved_as_a_number_of_python():
    (group,) = ProxAdamW([parameter()], reg_lambda=0.1, seed=np.int64(3)).state_dict()["param_groups"]
    assert type(group["seed"]) is int


def test_a_model_in_place_of_its_parameters_is_refused():
    with pytest.raises(TypeError, match=r"params is a Sequential: pass its parameters\(\) .*optimizers=\(ProxAdamW"):
        ProxAdamW(tiny_model(), reg_lambda=1.0)


def test_the_state_of_another_method_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        ProxAdamW(model.parameters(), reg_lambda=0.1).load_state_dict(Adam(model.parameters()).state_dict())


def test_sparse_gradients_and_other_dtypes_are_refused_before_anything_moves():
    layer, other = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4)
    optimizer = ProxAdamW([*other.parameters(), *layer.parameters()], reg_lambda=0.1)
    other(layer(torch.tensor([1, 2]))).sum().backward()
    before = weights(other)
    with pytest.raises(ValueError, match=r"\[6, 8\] has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert_same(weights(other), before)
    assert not optimizer.state

    model = tiny_model(dtype=BF16)
    model[2].weight.grad_dtype = torch.float32
    optimizer = ProxAdamW(model.parameters(), reg_lambda=0.1, stochastic_rounding=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p, dtype=p.grad_dtype)
    before = weights(model)
    with pytest.raises(ValueError, match=r"grad is torch.float32 \[4, 24\].*must be bfloat16.*convert it"):
        optimizer.step()
    assert_same(weights(model), before)


def test_every_call_has_a_random_seed_of_its_own():
    seeds = {call_seed(seed, number, step) for seed in range(5) for number in range(50) for step in range(1, 51)}
    assert len(seeds) == 5 * 50 * 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 12_450, "the lower half alone tells most of them apart"
    assert call_seed(-1, 0, 1) == call_seed(2**64 - 1, 0, 1) != call_seed(1, 0, 1)
    assert sum(seed.bit_count() for seed in seeds) / len(seeds) == pytest.approx(32, abs=0.2)
    seed, flips = call_seed(7, 3, 11), [1 << i for i in range(20)]  # one bit of the input changes half of the seed
    others = [x for b in flips for x in (call_seed(7 ^ b, 3, 11), call_seed(7, 3 ^ b, 11), call_seed(7, 3, 11 ^ b))]
    assert sum((seed ^ other).bit_count() for other in others) / len(others) == pytest.approx(32, abs=4 / 3)
