"""ProxOptimizer.set_scale: the step acts on v = c * w, whatever the base optimizer."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from proxsparse.ops import prox_nm
from proxsparse.optim import ProxOptimizer
from proxsparse.reference import frozen_penalty_grad

pytestmark = pytest.mark.filterwarnings("ignore:prox_nm_. not on the cpp backend")

STEPS, ROWS, COLUMNS = 5, 6, 16
LR, LAMBDA = 0.02, 0.3


def problem(dtype=torch.float64) -> tuple[nn.Parameter, torch.Tensor, list[torch.Tensor]]:
    """A weight, a metric that spans two decades, and the gradients of STEPS steps."""
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=dtype))
    scale = torch.logspace(-1, 1, COLUMNS, dtype=dtype)[torch.randperm(COLUMNS)]
    return weight, scale, [torch.randn(ROWS, COLUMNS, dtype=dtype) for _ in range(STEPS)]


def run(optimizer: ProxOptimizer, weight: nn.Parameter, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("base", [SGD, Adam, AdamW])
def test_step_in_the_metric_is_the_plain_step_on_v(base):
    weight, scale, gradients = problem()
    v = nn.Parameter(scale * weight.detach())
    options = {"lr": LR, "weight_decay": 0.1}
    on_v = ProxOptimizer(base([v], **options), LAMBDA)
    on_w = ProxOptimizer(base([weight], **options), LAMBDA)
    on_w.set_scale(weight, scale)
    run(on_v, v, [gradient / scale for gradient in gradients])
    run(on_w, weight, gradients)
    torch.testing.assert_close(weight * scale, v, rtol=1e-11, atol=1e-12)
    assert torch.equal(weight == 0, v == 0)
    assert (v == 0).any()


def test_adamw_in_the_metric_takes_the_step_lr_over_c_in_every_column():
    weight, scale, gradients = problem()
    w, m, s = weight.detach().clone(), torch.zeros(ROWS, COLUMNS).double(), torch.zeros(ROWS, COLUMNS).double()
    beta1, beta2, decay = 0.9, 0.95, 0.1
    optimizer = ProxOptimizer(AdamW([weight], lr=LR, betas=(beta1, beta2), eps=0, weight_decay=decay), LAMBDA)
    optimizer.set_scale(weight, scale)
    run(optimizer, weight, gradients)
    for t, gradient in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * gradient
        s = beta2 * s + (1 - beta2) * gradient.square()
        direction = (m / (1 - beta1**t)) / (s / (1 - beta2**t)).sqrt()
        w = prox_nm(w * (1 - LR * decay) - (LR / scale) * direction, LAMBDA, scale=scale)
    torch.testing.assert_close(weight.detach(), w, rtol=1e-9, atol=1e-11)


def test_frozen_gradient_is_taken_in_w():
    weight, scale, gradients = problem()
    scale = scale.sqrt()  # SGD's step is lr / c^2: keep it small
    optimizer = ProxOptimizer(SGD([weight], lr=LR), 1e-9, frozen_lambda=0.5, frozen_eps=0.2)
    optimizer.set_scale(weight, scale)
    pretrained = weight.detach().clone()
    run(optimizer, weight, gradients[:2])
    before = weight.detach().clone()
    run(optimizer, weight, gradients[2:3])
    gradient = gradients[2] + 0.5 * frozen_penalty_grad(before, pretrained, 0.2)
    torch.testing.assert_close(weight.detach(), before - LR * gradient / scale**2, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(weight.grad, gradient)


def test_powers_of_two_keep_the_bits_and_zeros_stay_positive():
    weight, _, _ = problem(torch.bfloat16)
    weight.data[:, ::4] = 0
    scale = torch.tensor([0.25, 2.0, 8.0, 1.0]).repeat(COLUMNS // 4)
    before = weight.detach().clone()
    optimizer = ProxOptimizer(SGD([weight], lr=LR), 1e-12)
    optimizer.set_scale(weight, scale)
    run(optimizer, weight, [torch.zeros_like(weight)])
    assert torch.equal(weight, before)
    assert not weight[:, ::4].signbit().any()
