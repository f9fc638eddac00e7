"""The table of launch parameters: the nearest size, no table, and parameters that are forced for a measurement."""

import torch

from proxsparse.ops import tuning

CPU = torch.device("cpu")


def parameters(*size: int, kernel: str = "gemv", dtype=torch.bfloat16) -> dict:
    return tuning.launch_parameters(kernel, dtype, CPU, size)


def test_the_nearest_size_decides_and_what_was_not_measured_has_no_parameters(tuned, monkeypatch, tmp_path):
    tuned("gemv bfloat16", {"4096x4096x1": {"warps": 8}, "4096x4096x16": {"warps": 4}})
    assert parameters(2048, 4096, 3) == {"warps": 8}
    assert parameters(4096, 4096, 9) == {"warps": 4}
    assert parameters(4096, 4096, 1, dtype=torch.float16) == parameters(4096, kernel="prox") == {}
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "absent.json")
    tuning.forget()
    assert parameters(4096, 4096, 1) == {}


def test_forced_parameters_hold_in_their_block_alone(tuned):
    tuned("gemv bfloat16", {"1x1x1": {"warps": 8}})
    with tuning.use_launch_parameters("gemv", warps=2, splits=4), tuning.use_launch_parameters("prox", blocks=64):
        assert parameters(1, 1, 1) == {"warps": 2, "splits": 4}
        assert parameters(1, kernel="prox") == {"blocks": 64}
    assert parameters(1, 1, 1) == {"warps": 8}
