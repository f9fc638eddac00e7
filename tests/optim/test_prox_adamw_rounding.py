"""Why bfloat16 needs a master or stochastic rounding: what a step is too small to show, and what becomes of it."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from proxsparse import ProxAdamW, ProxOptimizer
from proxsparse.ops import prox_nm_
from proxsparse.optim.prox_adamw import call_seed

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

STEPS = 64
ULP = 2.0**-7  # of a bfloat16 weight in [1, 2)


def small_shrink() -> tuple[torch.Tensor, float]:
    """Blocks (w, w, w, w) with w = 1.75 and the lambda that shrinks each by a quarter of a unit in the last place.

    Where all four are equal every weight loses 3 * lambda * w^2 a step.
    """
    weight = torch.full((64, 64), 1.75)
    return weight, 0.25 * ULP / (3 * 1.75**2)


def train(dtype: torch.dtype, optimizer_of) -> torch.Tensor:
    """The weight after STEPS of the prox alone: gradient zero, learning rate as small as can be."""
    weight, reg_lambda = small_shrink()
    parameter = nn.Parameter(weight.to(dtype))
    optimizer = optimizer_of([parameter], reg_lambda)
    for _ in range(STEPS):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return parameter.detach().double()


def prox_adamw(**setup):
    return lambda parameters, reg_lambda: ProxAdamW(parameters, lr=1e-30, reg_lambda=reg_lambda, **setup)


def test_a_quarter_of_an_ulp_a_step_is_lost_to_nearest_and_kept_in_the_mean():
    weight, reg_lambda = small_shrink()
    exact = weight.double()
    for _ in range(STEPS):
        prox_nm_(exact, reg_lambda)
    shrink = 1.75 - exact.mean().item()
    assert shrink > 10 * ULP, "there is something to lose"

    assert (train(torch.bfloat16, prox_adamw()) == 1.75).all(), "to nearest, all of it is lost"
    wrapped = train(torch.bfloat16, lambda p, reg_lambda: ProxOptimizer(AdamW(p, lr=1e-30), reg_lambda))
    assert (wrapped == 1.75).all()

    stochastic = train(torch.bfloat16, prox_adamw(stochastic_rounding=True))
    assert 1.75 - stochastic.mean().item() == pytest.approx(shrink, rel=0.03)
    assert stochastic.std() < 6 * ULP

    master = train(torch.bfloat16, prox_adamw(master_weights=True))
    assert (master - exact).abs().max() <= ULP / 2 * 1.001
    assert (train(torch.float32, prox_adamw()) - exact).abs().max() < 1e-3 * ULP


@pytest.mark.parametrize("start", ["from above", "from zero"])
def test_moments_in_bfloat16_reach_their_mean_by_stochastic_rounding_only(start):
    """exp_avg_sq gains (1 - beta2) * (g^2 - exp_avg_sq) a step, a thousandth of what is missing.

    To nearest it stands still from where that is less than half a unit in the last place.
    """
    steps, g = 2000, 0.5
    parameter = nn.Parameter(torch.zeros(256))
    optimizer = ProxAdamW([parameter], lr=0.0, reg_lambda=0.0, moment_dtype=torch.bfloat16)
    first = 0.0 if start == "from zero" else 1.0
    exact = g**2 + (first - g**2) * 0.999**steps
    nearest = torch.tensor(first, dtype=torch.bfloat16)
    for step in range(steps):
        parameter.grad = torch.full_like(parameter, g)
        optimizer.step()
        if step == 0 and start == "from above":
            optimizer.state[parameter]["exp_avg_sq"].fill_(first)
        nearest = (0.999 * nearest.float() + 0.001 * g**2).bfloat16()
    state = optimizer.state[parameter]
    assert state["exp_avg_sq"].dtype == state["exp_avg"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(exact, rel=0.02)
    assert state["exp_avg"].double().mean().item() == pytest.approx(g, rel=0.01)
    assert abs(nearest.item() / exact - 1) > 0.3, "to nearest it would have stalled"


def test_equal_parameters_are_rounded_differently():
    """Each by its number over all groups, so that roundings do not add up."""
    parameters = [nn.Parameter(torch.randn(16, 16).bfloat16()) for _ in range(3)]
    for parameter in parameters:
        parameter.data.copy_(parameters[0])
        parameter.grad = torch.ones_like(parameter)
    split = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    ProxAdamW(split, lr=1e-3, reg_lambda=0.1, stochastic_rounding=True).step()
    first, second, third = (parameter.detach() for parameter in parameters)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert not torch.equal(second, third)


def test_a_trajectory_in_bfloat16_follows_that_in_float32():
    """Linear regression on a 2:4 problem: the loss with stochastic rounding is near that with masters and float32."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, 16, generator=generator)
    target = inputs @ torch.randn(16, 8, generator=generator)

    def loss_after(dtype, **setup):
        torch.manual_seed(0)
        layer = nn.Linear(16, 8, bias=False).to(dtype)
        optimizer = ProxAdamW(layer.parameters(), lr=1e-2, reg_lambda=1e-3, **setup)
        for _ in range(150):
            optimizer.zero_grad()
            (layer(inputs.to(dtype)).float() - target).square().mean().backward()
            optimizer.step()
        return (inputs @ layer.weight.float().T - target).square().mean().item()

    full = loss_after(torch.float32)
    assert loss_after(torch.bfloat16, master_weights=True) == pytest.approx(full, rel=0.05, abs=0.01)
    narrow = loss_after(torch.bfloat16, stochastic_rounding=True, moment_dtype=torch.bfloat16)
    assert narrow == pytest.approx(full, rel=0.1, abs=0.02)


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
