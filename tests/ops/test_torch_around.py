"""Every op on every backend inside torch: opcheck, and torch.compile without a graph break."""

import re

import pytest
import torch
from ops.blocks import random_blocks
from ops.conftest import CALLS
from ops.on_each_backend import backends_of

from proxsparse import nm_mask, prox_nm_
from proxsparse.ops import adamw_prox_, masked_weight_, pack_nm, prox_nm_list_

NUMBERS = {"step": 3, "lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def checked(op: str, device: torch.device) -> list[tuple]:
    """Arguments for opcheck: contiguous and strided tensors, with and without the optional ones."""
    first, second, third = (random_blocks(6, 0.7, seed=seed).float().to(device) for seed in range(3))
    scale = torch.ones(4, device=device)
    if op == "prox_nm_":
        return [(first, 0.7, 2, 4, None), (first, 0.7, 1, 4, scale), (first.T[:, :4], 0.7, 2, 4, scale)]
    if op == "prox_nm_list_":
        return [([first, second, third], [0.7, 0.0, 0.1], 2, 4)]
    if op == "adamw_prox_":
        numbers = (3, 0.05, 0.9, 0.99, 1e-6, 0.1, 0.6, 2, 4)
        moments, half = (second.bfloat16(), third.square().bfloat16()), first.bfloat16()
        plain = (first, second, *moments, None, None, None, *numbers, 0.0, 0.1, None)
        return [plain, (half, half.clone(), *moments, first, half.clone(), scale, *numbers, 0.2, 0.1, -5)]
    if op == "masked_weight_":
        strided = (first.T[:, :4], second.T[:, :4], third.bfloat16().T[:, :4])
        return [(first, second, third, None, 2, 4), (*strided, scale, 1, 4)]
    if op == "nm_mask":
        return [(first, 2, 4), (first.T[:, :4], 2, 4)]
    weight = torch.where(nm_mask(first.abs()), first, 0.0)
    return [(weight, 2, 4), (weight.view(2, 3, 4).transpose(0, 1), 2, 4)]


def prox(w):
    moved = w * 2
    prox_nm_(moved, 0.35)
    prox_nm_(w, 0.7)
    return moved + w


def prox_list(w, other):
    moved = w * 2
    prox_nm_list_([moved, other], [0.35, 0.7])
    return moved + other


def step(w, grad, exp_avg, exp_avg_sq):
    moved = w * 2
    for weight in (moved, w):
        adamw_prox_(weight, grad, exp_avg, exp_avg_sq, reg_lambda=0.6, **NUMBERS)
    return moved + w


def snap(w):
    return torch.where(nm_mask(w.abs()), w, 0.0)


def under_mask(out, weight, pretrained):
    moved = out * 2
    masked_weight_(moved, weight, pretrained)
    return masked_weight_(out, pretrained, weight) + moved


def unpacked_twice(values, indices):
    return 2 * torch.ops.proxsparse.unpack_nm(values, indices, 2, 4)


COMPILED = {
    "prox_nm_": (prox, 1),
    "prox_nm_list_": (prox_list, 2),
    "adamw_prox_": (step, 4),
    "nm_mask": (snap, 1),
    "masked_weight_": (under_mask, 3),
}
every_op = pytest.mark.parametrize(
    ("op", "place"),
    [
        pytest.param(op, *place.values, id=f"{op}-{place.id}", marks=place.marks)
        for op in CALLS
        for place in backends_of(op)
    ],
)


@every_op
def test_opcheck(op, place, serve):
    device = serve(op, place)
    for arguments in checked(op, device):
        torch.library.opcheck(getattr(torch.ops.proxsparse, op).default, arguments)
        if op == "pack_nm":
            torch.library.opcheck(torch.ops.proxsparse.unpack_nm.default, (*pack_nm(arguments[0]), 2, 4))


@every_op
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(compiler, op, place, serve):
    function, count = COMPILED.get(op, (unpacked_twice, 0))
    tensors = [random_blocks(6, 0.7, seed=seed).float().abs().to(serve(op, place)) for seed in range(count)]
    tensors = tensors or pack_nm(snap(torch.randn(3, 12, device=serve(op, place))))
    plain, compiled = ([tensor.clone() for tensor in tensors] for _ in range(2))
    torch.compiler.reset()
    re.purge()  # as in a new process
    result = torch.compile(function, fullgraph=True, backend=compiler)(*compiled)
    assert torch.equal(result, function(*plain))
    assert all(torch.equal(x, y) for x, y in zip(plain, compiled, strict=True))
