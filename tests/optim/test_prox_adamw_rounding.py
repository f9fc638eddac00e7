"""ProxAdamW in bfloat16: what rounding to nearest loses, masters, stochastic rounding, dtypes of the state, seeds."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from training import ADAMW, ROUNDINGS, assert_same, loss_of, tiny_model, train, weights, with_everything

from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.ops import prox_nm_
from proxsparse.optim.prox_adamw import call_seed

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

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

    assert (trained(torch.bfloat16, prox_adamw) == 1.75).all(), "to nearest, all of it is lost"
    assert (trained(torch.bfloat16, lambda params: ProxOptimizer(AdamW(params, lr=1e-30), SHRINK)) == 1.75).all()
    stochastic = trained(torch.bfloat16, partial(prox_adamw, stochastic_rounding=True))
    assert 1.75 - stochastic.mean().item() == pytest.approx(shrink, rel=0.03)
    assert stochastic.std() < 6 * ULP
    master = trained(torch.bfloat16, partial(prox_adamw, master_weights=True))
    assert (master - exact).abs().max() <= ULP / 2 * 1.001
    assert (trained(torch.float32, prox_adamw) - exact).abs().max() < 1e-3 * ULP


@pytest.mark.parametrize("first", [1.0, 0.0], ids=["from above", "from zero"])
def test_moments_in_bfloat16_reach_their_mean_by_stochastic_rounding_only(first):
    """exp_avg_sq gains (1 - beta2) * (g^2 - exp_avg_sq) a step, a thousandth of what is missing.

    To nearest it stops where that is less than half a unit in the last place.
    """
    steps, g = 2000, 0.5
    parameter = nn.Parameter(torch.zeros(256))
    optimizer = ProxAdamW([parameter], lr=0.0, reg_lambda=0.0, moment_dtype=torch.bfloat16)
    exact = g**2 + (first - g**2) * 0.999**steps
    nearest = torch.tensor(first, dtype=torch.bfloat16)
    for step in range(steps):
        parameter.grad = torch.full_like(parameter, g)
        optimizer.step()
        if step == 0 and first:
            optimizer.state[parameter]["exp_avg_sq"].fill_(first)
        nearest = (0.999 * nearest.float() + 0.001 * g**2).bfloat16()
    state = optimizer.state[parameter]
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(exact, rel=0.02)
    assert state["exp_avg"].double().mean().item() == pytest.approx(g, rel=0.01)
    assert abs(nearest.item() / exact - 1) > 0.3, "to nearest it would have stopped"


def test_a_trajectory_in_bfloat16_follows_that_in_float32():
    def loss_after(dtype, **rounding):
        model = tiny_model(dtype=dtype)
        train(model, ProxAdamW(model.parameters(), lr=1e-2, reg_lambda=1e-3, **rounding), 150)
        return loss_of(model.double()).item()

    full = loss_after(torch.float32)
    assert loss_after(torch.bfloat16, master_weights=True) == pytest.approx(full, rel=0.05, abs=0.01)
    narrow = loss_after(torch.bfloat16, stochastic_rounding=True, moment_dtype=torch.bfloat16)
    assert narrow == pytest.approx(full, rel=0.1, abs=0.02)


# ------------------------------------------------------------------------------------------- the state


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


def state_of(optimizer: torch.optim.Optimizer) -> dict:
    """A state dict that further steps do not change."""
    return copy.deepcopy(optimizer.state_dict())


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


def test_an_outdated_master_is_made_again():
    """AdamW passes `master` on, in bfloat16, while it moves the weight: to continue from it would undo that."""
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


# ------------------------------------------------------------------------------------------- seeds


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


def test_every_call_has_a_seed_of_its_own():
    seeds = {call_seed(seed, number, step) for seed in range(5) for number in range(50) for step in range(1, 51)}
    assert len(seeds) == 5 * 50 * 50
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) > 12_450, "the lower half alone tells most of them apart"
    assert call_seed(-1, 0, 1) == call_seed(2**64 - 1, 0, 1) != call_seed(1, 0, 1)
    ones = sum(seed.bit_count() for seed in seeds) / len(seeds)
    assert ones == pytest.approx(32, abs=0.2)


def test_one_bit_of_the_input_changes_half_of_the_seed():
    seed, bits = call_seed(7, 3, 11), [1 << i for i in range(20)]
    others = [x for b in bits for x in (call_seed(7 ^ b, 3, 11), call_seed(7, 3 ^ b, 11), call_seed(7, 3, 11 ^ b))]
    assert sum((seed ^ other).bit_count() for other in others) / len(others) == pytest.approx(32, abs=4 / 3)
