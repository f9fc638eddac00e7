"""The benchmarks of packed layers and models: what they count, wrong kernels, and the table of `auto`."""

import json
from dataclasses import replace

import linear_speed
import pytest
import torch
from lib import common, measure, random_models

from proxsparse.inference.linear import SparseLinear
from proxsparse.ops import choice, registry, unpack_nm
from proxsparse.ops.registry import Kernel

CPU = torch.device("cpu")
KERNELS = dict(registry._kernels["sparse_linear"])
QUICK = ["--devices", "cpu", "--seconds", "0", "--repetitions", "1"]


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """rows_of(*flags) -> the rows of linear_speed, and its exit code; they go to a folder of the test."""
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)

    def run(*flags):
        code = linear_speed.main([*QUICK, *flags])
        return common.read_rows(tmp_path / "linear_speed.jsonl"), code

    yield run
    choice.clear_cache()


def only(monkeypatch, *others: Kernel) -> None:
    """These kernels of sparse_linear and the reference are all there are."""
    named = {kernel.backend: kernel for kernel in (KERNELS["reference"], *others)}
    monkeypatch.setitem(registry._kernels, "sparse_linear", named)


def new(run) -> Kernel:
    return Kernel("new", run, supports=lambda x, values: None)


def right(x, values, indices, bias, prepared):
    return x @ unpack_nm(values, indices).T


def broken(*arguments):
    raise RuntimeError("no such\nkernel")


LAST = torch.tensor([-1])
WRONG = {
    "wrong: its error is": lambda *arguments: right(*arguments).index_put((LAST, LAST), torch.ones(1), accumulate=True),
    "wrong: its error is nan": lambda *arguments: right(*arguments) * torch.nan,
    "RuntimeError: no such kernel": broken,
}


@pytest.mark.parametrize("note", WRONG)
def test_a_wrong_backend_gets_a_note_and_no_time(note, rows_of, monkeypatch):
    only(monkeypatch, new(WRONG[note]))
    rows, code = rows_of("--bits", "16", "--shapes", "16x64", "--rows", "1", "7", "--dtypes", "float32")
    notes = [row["note"] for row in rows if row["backend"] == "new" and "p50_ms" not in row]
    assert code == 1
    assert len(notes) == 2
    assert all(found.startswith(note) for found in notes)


def row(backend: str, ms: float, **others) -> dict:
    """A row of linear_speed.jsonl."""
    where = {"device": "a CPU", "torch": "2.13", "commit": "abc", "command": "python b.py", "when": "2026-01-02"}
    point = {"device_kind": "cpu", "dtype": "float32", "weights": "8x16", "rows": 4, "state": "cold"}
    return where | point | {"backend": backend, "p50_ms": ms, "times_dense": 1 / ms} | others


def test_the_table_of_auto_holds_the_fastest_by_the_newest_row_of_each_backend(monkeypatch):
    committed = linear_speed.choice_table(common.read_rows(common.results_file("linear_speed")))
    assert json.loads(json.dumps(committed)) == json.loads(choice.MEASURED.read_text())
    only(monkeypatch, *(replace(new(None), backend=name) for name in ("a", "b")))
    rows = [
        row("a", 1.0, when="2026-01-01", commit="old"),
        *(row("a", 3.0), row("b", 2.0), row("reference", 4.0), row("dense", 0.1), row("b:prepared", 0.3)),
        *(row("a", 5.0, rows=16), row("reference", 4.0, rows=16), row("gone", 1.0, rows=16)),
        row("b", 9.0, rows=32, when="2026-01-01", times_dense=2.0),  # measured alone, on a busy machine
        *(row("a", 5.0, rows=32, times_dense=1.5), row("reference", 8.0, rows=32, times_dense=0.9)),
        row("a", 0.1, state="warm"),
        {key: value for key, value in row("reference", 1.0).items() if key != "p50_ms"} | {"note": "wrong"},
    ]
    table = linear_speed.choice_table(rows)["cpu"]["float32"]
    assert table["fastest"] == {"8x16": {"4": "b > a > reference", "16": "reference", "32": "b > a > reference"}}
    assert table["measured"]["commit"] == "abc"


def test_both_forms_of_a_random_model_have_the_same_weights():
    dense, sparse = (random_models.random_model("tiny", 3, torch.float32, CPU, form) for form in (False, True))
    packed = {name: layer for name, layer in sparse.named_modules() if isinstance(layer, SparseLinear)}
    assert len(packed) == 7 * 3
    assert all(torch.equal(layer.dense_weight(), dense.get_submodule(name).weight) for name, layer in packed.items())
    tensors = [*dense.parameters(), *dense.buffers(), *sparse.parameters(), *sparse.buffers()]
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in tensors)
    tokens = torch.randint(260, (2, 9))
    torch.testing.assert_close(sparse(tokens).logits, dense(tokens).logits)
