"""`auto` of `sparse_linear`: the measured table decides, the next backend serves what one refuses, with a cache."""

import json
import warnings

import pytest
import torch
from pruned import pruned_linear

from proxsparse import SparseLinear
from proxsparse.ops import choice, registry
from proxsparse.ops.registry import Kernel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def empty_cache():
    """No test sees the choices of another."""
    choice.clear_cache()
    yield
    choice.clear_cache()


@pytest.fixture
def table(monkeypatch, tmp_path):
    """table({shape: {rows: order}}) -> the three kernels that exist; the order was measured for float32 on this CPU."""
    kernels = {name: Kernel(name, None, lambda x, values: None) for name in ("fast", "faster", "reference")}
    monkeypatch.setitem(registry._kernels, "sparse_linear", kernels)
    monkeypatch.setattr(registry, "_warned", set())

    def write(fastest: dict) -> dict:
        kind = {"float32": {"measured": {}, "fastest": fastest}}
        file = tmp_path / f"measured{len(list(tmp_path.iterdir()))}.json"
        file.write_text(json.dumps({choice.device_kind(CPU): kind}))
        monkeypatch.setattr(choice, "MEASURED", file)
        return kernels

    return write


def chosen(rows: int, out_features: int, in_features: int, dtype=torch.float32, device="cpu") -> str:
    x = torch.empty(rows, in_features, dtype=dtype, device=device)
    return choice.choose(x, torch.empty(out_features, in_features // 2, dtype=dtype, device=device)).backend


def test_the_nearest_shape_and_rows_decide(table):
    table(
        {
            "64x64": {"1": "fast > reference", "16": "faster > reference", "256": "reference > faster"},
            "64x1024": {"1": "faster > fast > reference"},
        }
    )
    assert [chosen(rows, 64, 64) for rows in (0, 1, 3, 5, 16, 63, 65, 9999)] == (
        ["fast"] * 3 + ["faster"] * 3 + ["reference"] * 2
    )
    assert chosen(1, 32, 128) == "fast"
    assert chosen(1, 128, 1024) == "faster"
    assert chosen(64, 16, 4096) == "faster"


def test_what_a_backend_refuses_goes_to_the_next(table):
    kernels = table({"8x8": {"1": "gone > faster > fast > reference"}})
    assert chosen(1, 8, 8) == "faster"
    kernels["faster"] = Kernel("faster", None, lambda x, values: "not today")
    choice.clear_cache()
    assert chosen(1, 8, 8) == "fast"


def warnings_of(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_a_backend_that_is_missing_is_announced_once(table):
    kernels = table({"8x8": {"1": "faster > fast > reference"}})
    kernels["faster"] = Kernel("faster", None, lambda x, values: "it is not installed; remedy: install it")
    assert warnings_of(lambda: chosen(1, 8, 8)) == [
        "sparse_linear: not on the faster backend (it is not installed; remedy: install it); using a slower backend"
    ]
    assert warnings_of(lambda: (chosen(2, 8, 8), chosen(1, 16, 8), choice.clear_cache(), chosen(1, 8, 8))) == []


def test_a_backend_that_refuses_this_size_alone_is_passed_over_in_silence(table):
    def few_rows_of_many_features(x, values):
        small = values.shape[1] < 32 and "too few features"
        return f"not {len(x)} rows" if len(x) > 16 else small or None

    kernels = table({"8x8": {"1": "faster > fast"}})
    kernels["faster"] = Kernel("faster", None, few_rows_of_many_features)
    assert warnings_of(lambda: [chosen(rows, 8, size) for rows in (1, 99) for size in (8, 64)]) == []
    assert chosen(1, 8, 64) == "faster"
    assert chosen(1, 8, 8) == chosen(99, 8, 64) == "fast"


def test_without_a_measurement_a_stated_order(monkeypatch, tmp_path, table):
    table({"8x8": {"1": "faster"}})
    assert chosen(1, 8, 8, torch.bfloat16) == "reference"  # no cpp among these three
    monkeypatch.setattr(choice, "MEASURED", tmp_path / "nothing.json")
    assert choice.order(CPU, torch.float32, 1, (8, 8)) == ["cpp", "reference"]
    assert chosen(1, 8, 8, device="meta") == "reference"


def test_the_committed_table_names_its_origin_and_backends_that_exist():
    for dtypes in json.loads(choice.MEASURED.read_text()).values():
        for entry in dtypes.values():
            assert {"device", "torch", "commit", "command", "results"} <= entry["measured"].keys()
            orders = [names.split(choice.ORDER) for rows in entry["fastest"].values() for names in rows.values()]
            assert all("reference" in names for names in orders)
            assert {name for names in orders for name in names} <= set(registry.list_backends("sparse_linear"))


def test_a_call_that_was_met_is_not_decided_again_and_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(choice, "MAX_CHOICES", 8)
    for rows in range(1, 40):
        chosen(rows, 8, 8)
    assert len(choice._choices) <= 8
    x, values = torch.empty(3, 64), torch.empty(32, 32)
    found = choice.choose(x, values)
    monkeypatch.setattr(choice, "supported_kernel", lambda x, values: None)
    assert choice.choose(torch.empty(3, 64), values) is found
    assert choice.choose(torch.empty(4, 64), values) is None


def test_auto_chooses_inside_a_compiled_graph():
    layer = SparseLinear.from_linear(pruned_linear(8, 4))
    x = torch.randn(5, 8)
    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x))
    torch.testing.assert_close(layer(x), x @ layer.dense_weight().T + layer.bias)
