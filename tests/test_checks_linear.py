"""The checks of packed weights that gpu_suite.py runs: right kernels pass, wrong ones are found."""

import contextlib

import checking
import checks_linear
import gpu_checks
import pytest
import torch

from proxsparse.ops import registry, tuning
from proxsparse.ops.backends import cuda
from proxsparse.reference import pack

CPU = checking.Place(torch.device("cpu"), "cpp", small=True)


def outcomes(op: str) -> list[str]:
    return [
        gpu_checks.outcome(check, CPU, seed=3) for check in checking.CHECKS if check.op == op and check.concerns("cpp")
    ]


def dense(x, values, indices, bias, prepared):
    """What is right."""
    weight = pack.unpack_nm(values, indices)
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


def replace_kernel(monkeypatch, backend: str, run) -> None:
    """`run` multiplies in the place of the kernel of `backend`, and supports everything."""
    kernel = registry.Kernel(backend, run, supports=lambda x, values: None)
    monkeypatch.setitem(registry._kernels["sparse_linear"], backend, kernel)


@pytest.mark.parametrize("linear", [dense, forgets_the_bias, swaps_two_places, reads_beyond])
def test_the_checks_find_a_wrong_product(linear, monkeypatch):
    replace_kernel(monkeypatch, "cpp", linear)
    assert outcomes("sparse_linear") == ["passed" if linear is dense else "failed"]


def right(op: str) -> registry.Kernel:
    return registry.get_kernel(op, "reference")


def keeps_the_last_two(weight, n, m):
    """Right for blocks with two nonzeros."""
    values, indices = right("pack_nm").run(weight.flip(-1), n, m)
    places = 3 - pack.unpack_places(indices, values.shape[-1]).flip(-1)
    return values.flip(-1), pack.pack_places(places)


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


@pytest.mark.parametrize("name", ["cusparselt", "gemv"])
def test_two_calls_may_differ_of_nvidias_kernels_alone(name, monkeypatch):
    """By as little as another order of the sum gives."""
    calls = []

    def differs(x, values, indices, bias, prepared):
        calls.append(len(x))
        y = dense(x, values, indices, bias, prepared)
        return torch.nextafter(y, torch.full_like(y, torch.inf)) if len(calls) % 2 else y

    replace_kernel(monkeypatch, name, differs)
    check = checks_linear.check_linear
    if name == "cusparselt":
        assert check(CPU, name, (3,), (torch.float32,)) == "12 products, 12 of which differ in a second call"
    else:
        with pytest.raises(AssertionError, match="two calls differ"):
            check(CPU, name, (3,), (torch.float32,))


def test_every_tile_is_checked(monkeypatch):
    tiles, device = [], torch.device("cpu")

    def linear(x, values, indices, bias, prepared):
        tiles.append(tuning.launch_parameters("cutlass", torch.bfloat16, device, (1, 1, 1)).get("tile"))
        return dense(x, values, indices, bias, prepared)

    replace_kernel(monkeypatch, "cutlass", linear)
    monkeypatch.setattr(checks_linear, "tiles", lambda device: ["64x32", "128x256"])
    monkeypatch.setattr(checks_linear, "check_graph", lambda *arguments: None)
    assert "128x256: " in checks_linear.cutlass_tiles(CPU)
    assert set(tiles) == {None, "64x32", "128x256"}


@pytest.mark.parametrize("wrong", [False, True])
def test_dependent_launches_are_compared_with_calls_one_after_the_other(wrong, monkeypatch):
    """Without a GPU: replaying a graph makes its result again, or forgets that x has changed."""
    early, chains = [], []

    def linear(x, values, indices, bias, prepared):
        early.append(cuda._dependent.get())
        y = dense(x, values, indices, bias, prepared)
        chains.append((x, y, values, indices))
        return y

    class Graph:
        def replay(self):
            if not wrong:
                for x, y, values, indices in self.calls:
                    y.copy_(dense(x, values, indices, None, None))

    @contextlib.contextmanager
    def capture(graph):
        before = len(chains)
        yield
        graph.calls = chains[before:]

    replace_kernel(monkeypatch, "gemv", linear)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    if wrong:
        with pytest.raises(AssertionError, match="1 rows: a replay"):
            checks_linear.gemv_dependent(CPU)
    else:
        checks_linear.gemv_dependent(CPU)
        assert early.count(True) == 2 * 2 * 8  # of two numbers of rows, a chain at once and a captured one
