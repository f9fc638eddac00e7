"""The checks of packed weights that gpu_suite.py runs: right kernels pass, wrong ones are found."""

import checking
import gpu_checks
import pytest
import torch

from proxsparse import packed
from proxsparse.inference import backends
from proxsparse.ops import registry

CPU = checking.Place(torch.device("cpu"), "cpp", small=True)


def outcomes(op: str) -> list[str]:
    return [
        gpu_checks.outcome(check, CPU, seed=3) for check in checking.CHECKS if check.op == op and check.concerns("cpp")
    ]


def dense(x, values, indices, bias, prepared):
    """What is right."""
    weight = packed.unpack_nm(values, indices)
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


def forgets_the_bias(x, values, indices, bias, prepared):
    return dense(x, values, indices, None, prepared)


def swaps_two_places(x, values, indices, bias, prepared):
    """In the last block alone."""
    pair = values[-1, -2:].flip(0)
    return dense(x, torch.cat([values.flatten()[:-2], pair]).view(values.shape), indices, bias, prepared)


def reads_beyond(x, values, indices, bias, prepared):
    """One value further than there is."""
    return dense(x, values, indices, bias, prepared) + 0 * x.as_strided((1,), (1,), x.storage_offset() + x.numel())


@pytest.mark.parametrize("linear", [dense, forgets_the_bias, swaps_two_places, reads_beyond])
def test_the_checks_find_a_wrong_product(linear, monkeypatch):
    row = backends.Backend("cpp", lambda x, values: None, linear)
    monkeypatch.setitem(backends._backends, "cpp", row)
    assert outcomes("sparse_linear") == ["passed" if linear is dense else "failed"]


def right(op: str) -> registry.Kernel:
    return next(kernel for kernel in registry.kernels(op) if kernel.backend == "reference")


def keeps_the_last_two(weight, n, m):
    """Right for blocks with two nonzeros."""
    values, indices = right("pack_nm").run(weight.flip(-1), n, m)
    places = 3 - packed.unpack_places(indices, values.shape[-1]).flip(-1)
    return values.flip(-1), packed.pack_places(places)


def packs_anything(weight, n, m):
    """Drops a third nonzero."""
    blocks = weight.unflatten(-1, (-1, 4)).clone()
    blocks[(blocks != 0).sum(-1) > 2] = 0
    return right("pack_nm").run(blocks.flatten(-2), n, m)


@pytest.mark.parametrize("pack", [None, keeps_the_last_two, packs_anything])
def test_the_checks_find_a_wrong_packing(pack, monkeypatch):
    for op, run in {"pack_nm": pack or right("pack_nm").run, "unpack_nm": right("unpack_nm").run}.items():
        kernel = registry.Kernel("cpp", run, supports=lambda *arguments: None)
        monkeypatch.setitem(registry._kernels, op, registry._kernels[op] | {"cpp": kernel})
    assert ("failed" in outcomes("pack_nm")) == (pack is not None)
