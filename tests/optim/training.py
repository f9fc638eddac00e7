"""A tiny regression problem in float64 that the optimizer tests train on."""

import torch
from torch import nn

INPUTS = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tiny_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(INPUTS) - INPUTS[:, :4].sin()).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)
