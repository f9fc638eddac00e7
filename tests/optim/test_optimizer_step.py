"""What a step of both optimizers computes, beyond the comparison of their trajectories."""

import pytest
import torch
from torch.optim import AdamW
from training import (
    ADAMW,
    assert_same,
    each_optimizer,
    each_setup,
    loss_of,
    tiny_model,
    train,
    weights,
    with_everything,
)

from proxsparse.ops import prox_nm
from proxsparse.patterns import NMPattern

pytestmark = pytest.mark.filterwarnings("ignore:.* not on the cpp backend")

TINY = 1e-30  # a learning rate at which the prox alone moves the weights


def assert_close(w: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-15)


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
def test_groups_override_the_defaults(make):
    model = tiny_model()
    before = weights(model)
    groups = [
        {"params": [model[0].weight], "pattern": NMPattern(1, 4), "reg_lambda": 0.7},
        {"params": [model[2].weight], "reg_lambda": 0},
        {"params": [model[0].bias, model[2].bias], "lr": 0.5},
    ]
    optimizer = make(groups, lr=TINY, reg_lambda=0.2, frozen_lambda=0.5)
    train(model, optimizer, 1)
    assert_close(model[0].weight, prox_nm(before[0], 0.7, "1:4"))
    assert torch.equal(model[2].weight, before[2]), "reg_lambda=0 excludes the group"
    assert "pretrained" not in optimizer.state[model[2].weight]
    torch.testing.assert_close((model[0].bias - before[1]).abs(), torch.full_like(before[1], 0.5), rtol=1e-4, atol=0)
    found = [(group["pattern"], group["reg_lambda"]) for group in optimizer.param_groups]
    assert found == [("1:4", 0.7), ("2:4", 0), ("2:4", 0.2)]


@each_optimizer
def test_lambda_is_that_of_the_group_at_each_step_and_is_not_multiplied_by_lr(make):
    model = tiny_model()
    optimizer = make(model.parameters(), lr=TINY, reg_lambda=0.25)
    before = weights(model)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["reg_lambda"] = 0.125
    train(model, optimizer, 1)
    assert_close(model[0].weight, prox_nm(prox_nm(before[0], 0.25), 0.125))
    assert optimizer.param_groups[0]["prox_step"] == 2


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
@each_setup
def test_at_lr_zero_the_moments_move_and_no_weight_does(dtype, make, lr):
    model = tiny_model(dtype=dtype)
    optimizer = make(model.parameters(), lr=lr, weight_decay=0.1, reg_lambda=1.0, frozen_lambda=0.1)
    optimizer.set_scale(model[0].weight, torch.rand(8) + 0.1)
    before = weights(model)
    train(model, optimizer, 2)
    assert_same(weights(model), before)
    assert optimizer.param_groups[0]["prox_step"] == 0
    assert optimizer.state[model[0].weight]["step"] == 2
    assert optimizer.state[model[0].weight]["exp_avg"].any()


@each_optimizer
def test_the_first_value_is_kept_only_for_the_frozen_term(make):
    model = tiny_model()
    before = weights(model)
    optimizer = make(model.parameters(), lr=0.01, reg_lambda=0.1, frozen_lambda=0.3)
    train(model, optimizer, 3)
    assert torch.equal(optimizer.state[model[0].weight]["pretrained"], before[0])
    assert "pretrained" not in optimizer.state[model[0].bias]
    optimizer = make(model.parameters(), lr=0.01, reg_lambda=0.1)
    train(model, optimizer, 1)
    assert all("pretrained" not in state for state in optimizer.state.values())


@each_optimizer
def test_a_scaling_is_copied_belongs_to_its_parameter_and_can_be_removed(make):
    model, twin = tiny_model(), tiny_model()
    optimizer, plain = (make(m.parameters(), lr=0.02, reg_lambda=0.3) for m in (model, twin))
    scale = torch.rand(8) + 0.5
    optimizer.set_scale(model[0].weight, scale)
    optimizer.set_scale(model[2].weight, torch.rand(24) + 0.5)
    optimizer.set_scale(model[2].weight, None)
    scale.fill_(7.0)
    assert optimizer.param_groups[0]["prox_scale"][0].max() < 2
    train(model, optimizer, 1)
    train(twin, plain, 1)
    assert not torch.allclose(model[0].weight, twin[0].weight)
    assert_same(weights(model)[1:], weights(twin)[1:])


@each_optimizer
def test_a_closure_gets_the_frozen_gradient_and_its_loss_is_returned(make):
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
