"""The Triton kernels as compiled for sm_90, on this CPU (tests/ptx); results against the reference in float64."""

import dataclasses

import pytest
import torch
from ops.blocks import random_blocks
from ops.cases import CASES, adamw_in_float64, assert_close, assert_matches, copied, step_, step_problem
from ops.on_each_backend import assert_alike

pytest.importorskip("triton")
from ptx.gpu import GPU, require_compilers
from ptx.triton_launch import Kernel

from proxsparse import prox_nm_, reference
from proxsparse.ops import prox_nm_list_, registry, use_backend
from proxsparse.triton_kernels import adamw_prox, masked_weight, prox

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
KERNELS = {
    "prox_n4": prox,
    "prox_wide": prox,
    "prox_list": prox,
    "adamw_prox": adamw_prox,
    "masked_weight": masked_weight,
}
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The backend "triton" serves tensors of the CPU. Returns the emulated GPU."""
    require_compilers("g++")
    gpu = GPU()
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, f"{name}_kernel", Kernel(gpu, getattr(module, f"{name}_kernel")))
    for table in registry._kernels.values():
        if "triton" in table:
            kernel = dataclasses.replace(table["triton"], supports=lambda *_: None)
            monkeypatch.setitem(table, "triton", kernel)
    with use_backend("triton"):
        yield gpu


@pytest.mark.parametrize(
    ("dtype", "n", "scaled", "shape"),
    [
        (BF16, 2, False, (7, 1040)),
        pytest.param(F32, 2, False, (3, 44), marks=slow),
        pytest.param(F16, 1, False, (5, 1040), marks=slow),
        pytest.param(BF16, 2, True, (5, 1040), marks=slow),
        pytest.param(F64, 2, False, (5, 1040), marks=slow),
    ],
    ids=str,
)
def test_hard_blocks(dtype, n, scaled, shape):
    """More pieces than programs; the last one is not full."""
    weight = random_blocks(shape[0] * shape[1] // 4, 0.7).view(shape).to(dtype)
    scale = 0.5 + torch.rand(shape[1], dtype=F64 if dtype == F64 else F32) if scaled else None
    expected = reference.prox_nm(weight.double(), 0.7, f"{n}:4", None if scale is None else scale.double())
    assert_alike(prox_nm_(weight, 0.7, f"{n}:4", scale), expected, dtype)


@slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("AdamW and prox, everything given", F32),
        ("AdamW and prox, everything given", BF16),
        ("AdamW and prox, everything given", F64),
        ("AdamW", F16),
        ("AdamW and prox, 6:8", BF16),
        ("prox, 4:6, scaled", F32),
        ("prox, 8:10, scaled", BF16),
        ("masked weight, 6:8, scaled", BF16),
        ("masked weight, scaled", F32),
        ("masked weight, scaled", F64),
        ("masked weight, 1:4, W0 of another dtype", F32),
        ("masked weight, 1:4, W0 of another dtype", F16),
    ],
)
def test_matches_reference(name, dtype):
    case = CASES[name]
    inputs = case.inputs((7, 276), dtype, seed=1)
    assert_matches(case, case.call(copied(inputs)), inputs, dtype)


@slow
@pytest.mark.parametrize("options", [{}, {"moment": BF16, "parts": ("scale", "pretrained")}], ids=str)
def test_a_step_with_stochastic_rounding(options):
    tensors = step_problem((7, 276), BF16, **options)
    exact, moments = adamw_in_float64(tensors), tensors["exp_avg"].dtype
    step_(tensors, reg_lambda=0.0, seed=2**63 + 12345)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert_close(tensors[name], exact[name], BF16, name, stochastic=name == "weight" or moments == BF16)


@slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_prox_of_a_list(dtype, gpu, monkeypatch):
    """Sizes below, at and above a row of the table, sizes and addresses that are no multiple of 16, and lambda = 0."""
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", 4096)
    memory = [random_blocks(count // 4 + 1, 0.7, seed=count).flatten()[:count] for count in (16, 4096, 9984, 20, 32)]
    weights, reg_lambdas = [m.to(dtype).view(-1, 4) for m in memory], [0.7, 0.02, 2.0, 0.7, 0.0]
    expected = [reference.prox_nm(w.double(), x) for w, x in zip(weights, reg_lambdas, strict=True)]
    with gpu.memory(weights):
        prox_nm_list_(weights, reg_lambdas)
    for weight, other in zip(weights, expected, strict=True):
        assert_alike(weight, other, dtype)


def test_an_empty_weight_launches_nothing(gpu):
    prox.prox_n4_(torch.zeros(0, 8), 0.7, 2, None)
    assert gpu.launches == []
