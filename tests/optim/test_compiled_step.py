"""The compiled step of ProxOptimizer."""

import torch

from proxsparse import ProxOptimizer


def test_a_compiled_step_does_not_recompile_for_every_layer(caplog):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(12)])
    optimizer = ProxOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), reg_lambda=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        step()
    assert "recompile_limit" not in caplog.text
