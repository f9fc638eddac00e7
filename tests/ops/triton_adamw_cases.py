"""What the fused step in Triton has to do; test_triton_prox.py runs this file in a process of its own.

On the CPU that process has TRITON_INTERPRET=1, which has to be set before triton is imported; without it, on a GPU.
The judge is the reference op, whose own test (test_adamw_prox.py) judges every backend, this one included, on a GPU.
"""

import os

import pytest
import torch

from proxsparse import use_backend
from proxsparse.ops import adamw_prox_
from proxsparse.ops.tuning import use_launch_parameters
from proxsparse.triton_kernels import ADAMW_PROX_LAUNCHES, prox

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
NUMBERS = {"step": 3, "lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
CHANGED = (0, 2, 3, 4)  # weight, moments, master
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def problem(shape, dtype, moment, master=False, pretrained=False, scale=False):
    """weight, grad, exp_avg, exp_avg_sq, master, pretrained, scale in the middle of a training."""
    weight = torch.randn(shape, dtype=F64)
    return [
        weight.to(dtype),
        (0.3 * torch.randn(shape)).to(dtype),
        (0.2 * torch.randn(shape)).to(moment),
        (0.01 + torch.rand(shape)).to(moment),
        weight.float() if master else None,
        (weight + 0.1 * torch.randn(shape)).to(dtype) if pretrained else None,
        torch.logspace(-0.5, 0.5, shape[-1]).to(F64 if dtype == F64 else F32) if scale else None,
    ]


def stepped(tensors, backend, **options):
    """The tensors after the step of `backend`; the arguments stay."""
    device = DEVICE if backend == "triton" else "cpu"
    new = [None if tensor is None else tensor.clone().to(device) for tensor in tensors]
    with use_backend(backend):
        adamw_prox_(*new, **NUMBERS | options)
    return [None if tensor is None else tensor.cpu() for tensor in new]


CASES = {
    "plain": (F32, F32, {}),
    "double": (F64, F64, {"pretrained": True, "scale": True}),
    "bf16": (BF16, F32, {"scale": True}),
    "bf16 moments": (BF16, BF16, {"pretrained": True}),
    "master": (BF16, F32, {"master": True, "scale": True, "pretrained": True}),
    "fp16 master": (F16, BF16, {"master": True}),
}


@pytest.mark.parametrize("seed", [None, 2**63 + 12345], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("pattern", "reg_lambda"), [("2:4", 0.0), ("2:4", 0.02), ("2:4", 0.6), ("1:4", 0.5)])
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_reference(case, pattern, reg_lambda, seed):
    """Up to rounding; where that decides (half a unit, two minimisers that nearly tie) the outcome may be another."""
    dtype, moment, parts = CASES[case]
    tensors = problem((5, 132), dtype, moment, **parts)
    options = {"pattern": pattern, "reg_lambda": reg_lambda, "seed": seed}
    options["frozen_lambda"] = 0.3 if "pretrained" in parts else 0.0
    results, wanted = (stepped(tensors, backend, **options) for backend in ("triton", "reference"))
    for i in CHANGED:
        if results[i] is not None:
            tolerance = 1e-12 if dtype == F64 else 2e-5
            off = (results[i].double() - wanted[i].double()).abs() > tolerance * (1 + wanted[i].double().abs())
            assert off.double().mean() <= 0.01, i


@pytest.mark.parametrize("count", [1, 3, 7, 8, 33, 130])
def test_any_number_of_weights_without_the_prox(count, monkeypatch):
    monkeypatch.setattr(prox, "BLOCKS_IN_INTERPRETER", 8)  # several programs, the last one not full
    tensors = problem((count,), BF16, BF16, master=True, pretrained=True)
    options = {"reg_lambda": 0.0, "frozen_lambda": 0.3, "seed": 7}
    results, wanted = (stepped(tensors, backend, **options) for backend in ("triton", "reference"))
    for i in CHANGED:
        torch.testing.assert_close(results[i], wanted[i], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("launch", [{"blocks": 8}, {"blocks": 64}] if DEVICE == "cpu" else ADAMW_PROX_LAUNCHES, ids=str)
def test_launch_parameters_change_nothing_but_the_speed(launch):
    tensors = problem((5, 132), BF16, F32, scale=True)
    options = {"reg_lambda": 0.6, "seed": 7}
    wanted = stepped(tensors, "triton", **options)
    with use_launch_parameters("adamw_prox", **launch):
        results = stepped(tensors, "triton", **options)
    for i in CHANGED[:3]:
        torch.testing.assert_close(results[i].float(), wanted[i].float(), rtol=1e-2, atol=1e-4)


def test_the_hash_is_that_of_the_reference():
    """A step that moves nothing by itself: what the random bits make of the moments and the weight, bit for bit."""
    tensors = problem((40, 64), F32, F32)
    tensors = [tensors[0].bfloat16(), torch.zeros(40, 64, dtype=BF16), tensors[2].bfloat16(), tensors[3].bfloat16()]
    for seed in (0, 1, 12345, 2**63 + 98765, -3):
        results, wanted = (
            stepped([*tensors, None, None, None], backend, reg_lambda=0.0, seed=seed, betas=(0.75, 0.5), lr=0.0)
            for backend in ("triton", "reference")
        )
        for i in CHANGED[:3]:
            assert torch.equal(results[i].view(torch.int16), wanted[i].view(torch.int16)), (seed, i)
        assert not torch.equal(results[2], (0.75 * tensors[2].float()).bfloat16()), "not rounded at random"
