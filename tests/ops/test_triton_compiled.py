"""The Triton kernels as compiled for sm_90, on this CPU (tests/ptx); results against the reference in float64."""

import pytest
import torch
from ops.blocks import random_blocks
from ops.on_each_backend import assert_alike
from ops.test_adamw_prox import NUMBERS, assert_close, in_float64, problem
from ops.test_masked_weight import assert_same_bits, blocks, composed

pytest.importorskip("triton")
from ptx.gpu import GPU, require_compilers
from ptx.triton_launch import Kernel

from proxsparse import reference, triton_kernels
from proxsparse.triton_kernels import adamw_prox, masked_weight, prox

LAMBDA = 0.7
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Launches of the Triton kernels run on the emulated GPU."""
    require_compilers("g++")
    gpu = GPU()
    for module, name in (
        (prox, "prox_n4"),
        (prox, "prox_list"),
        (adamw_prox, "adamw_prox"),
        (masked_weight, "masked_weight"),
    ):
        monkeypatch.setattr(module, f"{name}_kernel", Kernel(gpu, getattr(module, f"{name}_kernel")))
    return gpu


SLOW = [(F32, 2, False, (3, 44)), (F16, 1, False, (5, 1040)), (BF16, 2, True, (5, 1040)), (F64, 2, False, (5, 1040))]


@pytest.mark.parametrize(
    ("dtype", "n", "scaled", "shape"),
    [(BF16, 2, False, (7, 1040)), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_prox(dtype, n, scaled, shape):
    """More pieces than programs; the last one is not full."""
    weight = random_blocks(shape[0] * shape[1] // 4, LAMBDA).view(shape).to(dtype)
    scale = 0.5 + torch.rand(shape[1], dtype=F64 if dtype == F64 else F32) if scaled else None
    exact = None if scale is None else scale.double()
    expected = reference.prox_nm(weight.double(), LAMBDA, f"{n}:4", exact)
    triton_kernels.prox_n4_(weight, LAMBDA, n, scale)
    assert_alike(weight, expected, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_prox_of_a_list(dtype, gpu, monkeypatch):
    """Sizes below, at and above a row of the table, sizes and addresses that are no multiple of 16, and lambda = 0."""
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", 4096)
    memory = [random_blocks(count // 4 + 1, LAMBDA, seed=count).flatten()[:count] for count in (16, 4096, 9984, 20, 32)]
    weights, reg_lambdas = [m.to(dtype).view(-1, 4) for m in memory], [0.7, 0.02, 2.0, 0.7, 0.0]
    expected = [reference.prox_nm(w.double(), x) for w, x in zip(weights, reg_lambdas, strict=True)]
    with gpu.memory(weights):
        triton_kernels.prox_list_n4_(weights, reg_lambdas, 2)
    for weight, other in zip(weights, expected, strict=True):
        assert_alike(weight, other, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options", "seed", "reg_lambda"),
    [
        (BF16, {}, 2**63 + 12345, 0.0),
        (BF16, {"moment": BF16, "parts": ("scale", "pretrained")}, 5, 0.0),
        (F16, {"parts": ("master",)}, None, 0.0),
        (F32, {"parts": ("scale", "pretrained")}, None, 0.6),
        (F64, {}, None, 0.6),
    ],
    ids=str,
)
def test_adamw_prox(dtype, options, seed, reg_lambda):
    tensors = problem((7, 276), dtype, **options)
    exact, masters = in_float64(tensors), "master" in tensors
    frozen = 0.3 if "pretrained" in tensors else 0.0
    names = ("weight", "grad", "exp_avg", "exp_avg_sq", "master", "pretrained", "scale")
    numbers = {name: value for name, value in NUMBERS.items() if name != "betas"}
    numbers |= {"beta1": NUMBERS["betas"][0], "beta2": NUMBERS["betas"][1], "frozen_eps": 0.1, "frozen_lambda": frozen}
    triton_kernels.adamw_prox_n4_(
        **{name: tensors.get(name) for name in names}, **numbers, reg_lambda=reg_lambda, n=2, seed=seed
    )
    for name in ("exp_avg", "exp_avg_sq") if reg_lambda else ("weight", "exp_avg", "exp_avg_sq"):
        rounded = seed is not None and tensors[name].dtype == BF16 and (name != "weight" or not masters)
        assert_close(tensors[name], exact[name], dtype, rounded)
    if reg_lambda:
        scale = tensors.get("scale")
        expected = reference.prox_nm(exact["weight"], reg_lambda, "2:4", None if scale is None else scale.double())
        assert_alike(tensors["weight"], expected, dtype)
    if masters:
        assert_close(tensors["master"], exact["weight"], F32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "pretrained_dtype", "scaled", "n"),
    [(F32, BF16, True, 2), (BF16, BF16, False, 2), (F64, F64, True, 1), (F16, F16, False, 2)],
    ids=str,
)
def test_masked_weight(dtype, pretrained_dtype, scaled, n):
    weight, pretrained = blocks(3300, dtype, 1).view(11, -1), blocks(3300, pretrained_dtype, 2).view(11, -1)
    scale = torch.rand(1200, dtype=F64 if dtype == F64 else F32) + 0.1 if scaled else None
    out = torch.full_like(weight, torch.nan)
    triton_kernels.masked_weight_n4_(out, weight, pretrained, scale, n)
    assert_same_bits(out, composed(weight, pretrained, scale, f"{n}:4"))


def test_an_empty_weight_launches_nothing(gpu):
    triton_kernels.prox_n4_(torch.zeros(0, 8), LAMBDA, 2, None)
    assert gpu.launches == []
