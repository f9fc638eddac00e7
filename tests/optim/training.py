"""A tiny regression problem, and the optimizers that the tests train it with."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from proxsparse import ProxAdamW, ProxOptimizer, nm_mask

INPUTS = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """8 and 24 input features: whole blocks of 4 and of 8."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4)).to(dtype)


def loss_of(model: nn.Module) -> torch.Tensor:
    inputs = INPUTS.to(model[0].weight.dtype)
    return (model(inputs) - inputs[:, :4].sin()).square().mean()


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def masks_of(model: nn.Sequential) -> dict[nn.Parameter, torch.Tensor]:
    return {p: p.detach() != 0 for p in model.parameters() if p.ndim == 2}


def assert_held(masks: dict[nn.Parameter, torch.Tensor], optimizer: Optimizer | None = None) -> None:
    """Pruned weights are +0.0, with zero gradients and moments; all kept weights are nonzero."""
    for weight, kept in masks.items():
        assert torch.equal(weight != 0, kept)
        assert not weight[~kept].signbit().any(), "+0.0"
        state = optimizer.state.get(weight, {}).values() if optimizer else ()
        for value in [*state, weight.grad]:
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                assert not value[~kept].any()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters; sharded ones are gathered."""
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in full]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


ADAMW = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def prox_optimizer(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=None, **prox):
    """ProxOptimizer(AdamW) with the arguments of ProxAdamW."""
    return ProxOptimizer(AdamW(params, lr, betas, eps, weight_decay, fused=fused), **prox)


OPTIMIZERS = {"ProxOptimizer": prox_optimizer, "ProxAdamW": ProxAdamW}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

ROUNDINGS = {  # of ProxAdamW: dtype of the weights, arguments
    "float64": (torch.float64, {}),
    "float32": (torch.float32, {"moment_dtype": torch.bfloat16}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16, master": (torch.bfloat16, {"master_weights": True, "moment_dtype": torch.bfloat16}),
    "bfloat16, stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "all stochastic": (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.bfloat16}),
    "float16, master": (torch.float16, {"master_weights": True}),
}
SETUPS = {"ProxOptimizer": (torch.float64, prox_optimizer)} | {
    name: (dtype, partial(ProxAdamW, **rounding)) for name, (dtype, rounding) in ROUNDINGS.items()
}
each_setup = pytest.mark.parametrize(("dtype", "make"), SETUPS.values(), ids=SETUPS)


def with_everything(make: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """The optimizer, ProxAdamW with the frozen-weight term and a scaling."""
    first, *others = model.parameters()
    optimizer = make([{"params": [first]}, {"params": others}], **ADAMW, reg_lambda=0.3)
    if isinstance(optimizer, ProxAdamW):
        optimizer.param_groups[0] |= {"prox_scale": torch.linspace(0.5, 2, 8), "frozen_lambda": 0.05}
    return optimizer


def pruned_model(pattern: str = "2:4", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = tiny_model(dtype=dtype)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.where(nm_mask(layer.weight.abs(), pattern), layer.weight, -0.0))
    return model


def flat() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(64))
    parameter._is_flat_param = True  # how FSDP1 marks its flat parameters
    return parameter
