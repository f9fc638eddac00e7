"""What only the Triton kernels have: programs that solve several pieces, and the table of a list.

test_triton_prox.py runs this file in a process of its own: on the CPU with TRITON_INTERPRET=1, which has to be set
before triton is imported; without it, on a GPU. What every backend must do is in test_prox.py and the others.
"""

import pytest
import torch
from ops.blocks import random_blocks
from ops.cases import bits
from ops.on_each_backend import INTERPRETED

from proxsparse.triton_kernels import prox, prox_list_n4_, prox_n4_

DEVICE = "cpu" if INTERPRETED else "cuda"
LAMBDA = 0.7  # not a float32 number: a rounded one would show in float64


def result(weight, reg_lambda=LAMBDA, n=2):
    """The prox of a copy, by the kernel."""
    new = weight.clone().to(DEVICE)
    prox_n4_(new, reg_lambda, n, None)
    return new.cpu()


def test_what_the_kernel_cannot_serve_is_refused():
    for weight, n in ((torch.ones(2, 6), 2), (torch.ones(4, 8).t(), 2), (torch.tensor(1.0), 2), (torch.ones(2, 8), 3)):
        with pytest.raises(ValueError, match=r"weight of shape|n=3"):
            prox_n4_(weight.to(DEVICE), LAMBDA, n, None)
    with pytest.raises(ValueError, match=r"float64.*list of torch.float32"):
        prox_list_n4_([torch.ones(2, 8, device=DEVICE), torch.ones(2, 8, device=DEVICE).double()], [0.1, 0.1], 2)


@pytest.mark.parametrize("size", [0.05, 1.0])  # solved by coordinate descent; by the three candidates
def test_a_program_that_solves_several_pieces(size, monkeypatch):
    """More pieces than programs, and the last one is not full."""
    weight = size * random_blocks(24, LAMBDA, seed=5).float().view(2, 48)
    expected = {reg_lambda: result(weight, reg_lambda) for reg_lambda in (LAMBDA, 0.1)}
    monkeypatch.setattr(prox, "BLOCKS_IN_INTERPRETER", 8)
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", 64)
    torch.testing.assert_close(result(weight), expected[LAMBDA], rtol=1e-4, atol=1e-5)
    weights = [weight.clone().to(DEVICE) for _ in range(2)]
    prox_list_n4_(weights, [*expected], 2)
    for new, old in zip(weights, expected.values(), strict=True):
        torch.testing.assert_close(new.cpu(), old, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "dtype"), [(1, torch.float32), (2, torch.float64), (2, torch.bfloat16)], ids=str)
def test_a_list_is_every_weight_alone(n, dtype, monkeypatch):
    """Sizes below, at and above a row of the table, sizes and addresses that are no multiple of 16, and lambda = 0."""
    monkeypatch.setattr(prox, "BLOCKS_IN_INTERPRETER", 32)
    row = 2 * 4 * prox.blocks_per_program(torch.empty(0, dtype=dtype, device=DEVICE), 2**20)  # of two programs
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", row)
    counts = (16, row, 41 * row // 16, 20, 25 * row // 16, 32)
    memory = [random_blocks(-(-count // 4) + 1, LAMBDA, seed=count).flatten() for count in counts]
    weights = [m[:-4].to(dtype).to(DEVICE).view(-1, 4) for m in memory[:5]] + [memory[5].to(dtype).to(DEVICE)[1:33]]
    lambdas = [0.7, 0.02, 2.0, 0.7, 0.0, 0.3]
    expected = [result(weight.cpu(), x, n) for weight, x in zip(weights, lambdas, strict=True)]
    prox_list_n4_(weights, lambdas, n)
    found, expected = (torch.cat([tensor.cpu().flatten() for tensor in part]) for part in (weights, expected))
    # On a GPU they are two programs, and the compiler may join other multiplications and additions in each.
    assert (bits(found) != bits(expected)).double().mean() <= (1e-3 if DEVICE == "cuda" else 0)


def test_a_table_is_kept_until_something_changes():
    weights = [torch.randn(8, 16, device=DEVICE) for _ in range(2)]
    prox.table_of.cache_clear()
    for reg_lambda in (0.3, 0.3, 0.4):  # each call finds other weights in the same memory
        expected = [result(weights[0].cpu(), reg_lambda), result(weights[1].cpu(), 0.1)]
        prox_list_n4_(weights, [reg_lambda, 0.1], 2)
        assert all(torch.equal(bits(weight), bits(other)) for weight, other in zip(weights, expected, strict=True))
    assert (prox.table_of.cache_info().misses, prox.table_of.cache_info().hits) == (2, 1)
