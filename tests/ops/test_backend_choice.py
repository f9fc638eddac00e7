"""Which kernel serves a call: the fastest, falling back with a warning; an explicit choice never falls back."""

import functools
import importlib.util
import json
import re
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ops.on_each_backend import OnGPU

from proxsparse import use_backend
from proxsparse.ops import choice, registry
from proxsparse.ops.backends import cuda, cutlass, gemv, triton
from proxsparse.ops.registry import Kernel

kernel_of = functools.partial(registry.get_kernel, "sparse_linear")
CPU, BF16, F32 = torch.device("cpu"), torch.bfloat16, torch.float32
REASON = "the moon is not full; remedy: wait"


@pytest.fixture
def table(monkeypatch):
    """An empty kernel table, nothing announced yet, no choice from the environment."""
    monkeypatch.setattr(registry, "_kernels", {})
    monkeypatch.setattr(registry, "_warned", set())
    monkeypatch.delenv("PROXSPARSE_BACKEND", raising=False)


def add(*backends, supports=lambda *_: None, op="toy"):
    """Kernels of the op that return their backend's name."""
    for backend in backends:
        registry.register_kernel(op, backend, supports=supports)(lambda *_, backend=backend: backend)


never = functools.partial(add, supports=lambda *_: REASON)


def served_by(tensor=None, *arguments):
    """The backend that `select` picks for "toy", without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return registry.select("toy", torch.zeros(4) if tensor is None else tensor, *arguments).backend


def test_the_fastest_of_a_device_serves_whatever_the_order_of_registration(table):
    add("reference", "cpp", "triton")
    assert registry.list_backends("toy") == ["cpp", "triton", "reference"]
    assert served_by() == "cpp"  # triton only interprets on a CPU: that has to be asked for
    assert served_by(torch.zeros(4, device="meta")) == "reference"
    assert registry.AUTOMATIC["cuda"] == ("triton", "cuda", "reference")


def test_backends_are_listed_and_an_unknown_one_is_refused(table, monkeypatch):
    add("cpp")
    add("gemv", op="another")
    assert registry.list_backends() == ["cpp", "gemv"]
    with pytest.raises(ValueError, match=r"toy: no such backend 'gemv'; choose from auto, cpp"):
        registry.get_kernel("toy", "gemv")
    with pytest.raises(ValueError, match=r"use_backend='abacus'.*cpp, gemv"), use_backend("abacus"):
        pass
    monkeypatch.setenv("PROXSPARSE_BACKEND", "abacus")
    with pytest.raises(ValueError, match=r"PROXSPARSE_BACKEND='abacus'.*cpp, gemv"):
        served_by()


def test_a_fallback_warns_once_for_each_reason_and_another_devices_backend_never(table):
    reasons = ["too cold", "too dark"]
    never("triton")  # nobody expects triton on a CPU
    with pytest.raises(RuntimeError, match=r"toy: no backend supports a torch.float32 tensor on cpu"):
        served_by()
    add("cpp", supports=lambda tensor, number: reasons[number])
    add("reference")
    for number, reason in enumerate(reasons):
        with pytest.warns(UserWarning, match=f"toy.*cpp.*{reason}"):
            assert registry.select("toy", torch.zeros(4), number).backend == "reference"
        assert served_by(None, number) == "reference"


@pytest.mark.parametrize("by", ["context", "environment"])
def test_an_explicit_choice_is_obeyed_and_never_falls_back(table, monkeypatch, by):
    def choose(backend):
        if by == "context":
            return use_backend(backend)
        monkeypatch.setenv("PROXSPARSE_BACKEND", backend)
        return nullcontext()

    add("cpp", "reference")
    never("gemv")
    add("triton", op="another")
    with choose("reference"):
        assert served_by() == "reference"
    message = rf"toy: backend 'gemv' .*{REASON}.*unset PROXSPARSE_BACKEND or use_backend"
    with choose("gemv"), pytest.raises(RuntimeError, match=message):
        served_by()
    with choose("triton"):  # a run takes many ops, and most backends have kernels for a few
        with pytest.warns(UserWarning, match=r"toy: backend 'triton' has no kernel for this op; using the auto"):
            assert registry.select("toy", torch.zeros(4)).backend == "cpp"
        assert served_by() == "cpp"


def test_the_backend_of_a_call_comes_first_then_the_innermost_block_then_the_environment(table, monkeypatch):
    add("triton", "cpp", "reference")
    never("gemv")
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    with use_backend("cpp"):
        assert registry.explicit_kernel("toy", backend="reference").backend == "reference"
        with pytest.raises(RuntimeError, match=rf"toy: backend 'gemv' .*{REASON}.*choose backend='auto'"):
            registry.explicit_kernel("toy", backend="gemv")
        with use_backend("triton"):
            assert served_by() == "triton"
        with pytest.raises(KeyError), use_backend("triton"):
            raise KeyError
        assert served_by() == "cpp"
    assert served_by() == "reference"
    monkeypatch.setenv("PROXSPARSE_BACKEND", "")
    assert served_by() == "cpp"
    assert registry.explicit_kernel("toy") is None


# ------------------------------------------------------------------------------------------ "auto" of sparse_linear


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measured({shape: {rows: order}}, name=supports) -> kernels that exist; measured for float32 on this CPU."""
    choice.clear_cache()

    def write(fastest: dict, **supports) -> dict:
        kernels = {name: Kernel(name, None, lambda *_: None) for name in ("fast", "faster", "reference")}
        kernels |= {name: Kernel(name, None, function) for name, function in supports.items()}
        monkeypatch.setitem(registry._kernels, "sparse_linear", kernels)
        monkeypatch.setattr(registry, "_warned", set())
        file = tmp_path / "measured.json"
        file.write_text(json.dumps({choice.device_kind(CPU): {"float32": {"measured": {}, "fastest": fastest}}}))
        monkeypatch.setattr(choice, "MEASURED", file)
        return kernels

    yield write
    choice.clear_cache()


def chosen(rows: int, out_features: int, in_features: int, dtype=F32, device="cpu") -> str:
    x = torch.empty(rows, in_features, dtype=dtype, device=device)
    return choice.choose(x, torch.empty(out_features, in_features // 2, dtype=dtype, device=device)).backend


def warnings_of(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_the_nearest_shape_and_rows_decide(measured):
    of_small = {"1": "fast > reference", "16": "faster > reference", "256": "reference > faster"}
    measured({"64x64": of_small, "64x1024": {"1": "faster > fast > reference"}})
    expected = ["fast"] * 3 + ["faster"] * 3 + ["reference"] * 2
    assert [chosen(rows, 64, 64) for rows in (0, 1, 3, 5, 16, 63, 65, 9999)] == expected
    assert [chosen(1, 32, 128), chosen(1, 128, 1024), chosen(64, 16, 4096)] == ["fast", "faster", "faster"]


def test_a_backend_that_is_missing_is_warned_once_and_the_next_serves(measured):
    measured({"8x8": {"1": "gone > faster > fast > reference"}}, faster=lambda *_: "not installed; remedy: pip")
    message = "sparse_linear: not on the faster backend (not installed; remedy: pip); using a slower backend"
    assert warnings_of(lambda: chosen(1, 8, 8)) == [message]
    assert warnings_of(lambda: (chosen(2, 8, 8), chosen(1, 16, 8), choice.clear_cache(), chosen(1, 8, 8))) == []
    assert chosen(1, 8, 8) == "fast"


def test_a_backend_that_refuses_this_size_alone_is_passed_over_in_silence(measured):
    def few_rows_of_many_features(x, values, scales):
        small = values.shape[1] < 32 and "too few features"
        return f"not {len(x)} rows" if len(x) > 16 else small or None

    measured({"8x8": {"1": "faster > fast"}}, faster=few_rows_of_many_features)
    assert warnings_of(lambda: [chosen(rows, 8, size) for rows in (1, 99) for size in (8, 64)]) == []
    assert chosen(1, 8, 64) == "faster"
    assert chosen(1, 8, 8) == chosen(99, 8, 64) == "fast"


def test_without_a_measurement_a_stated_order(monkeypatch, tmp_path, measured):
    measured({"8x8": {"1": "faster"}})
    assert chosen(1, 8, 8, BF16) == "reference"  # no cpp among these three
    monkeypatch.setattr(choice, "MEASURED", tmp_path / "nothing.json")
    assert choice.order(CPU, F32, 1, (8, 8)) == ["cpp", "reference"]
    assert chosen(1, 8, 8, device="meta") == "reference"


def test_a_call_that_was_met_is_not_decided_again_and_the_memory_is_bounded(measured, monkeypatch):
    kernels = measured({"8x8": {"1": "fast"}})
    monkeypatch.setattr(choice, "MAX_CHOICES", 8)
    for rows in range(1, 40):
        chosen(rows, 8, 8)
    assert len(choice._choices) <= 8
    assert chosen(3, 64, 64) == "fast"
    kernels["fast"] = Kernel("fast", None, lambda *_: "not now")
    assert chosen(3, 64, 64) == "fast"
    assert chosen(4, 64, 64) != "fast"


# ------------------------------------------------------------------------------------------ GPUs that are not here


@pytest.fixture
def hopper(monkeypatch):
    """A GPU with everything that the backends need, but no compiled kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (cuda, cutlass):
        monkeypatch.setattr(module, "_C", SimpleNamespace(tiles=lambda: [(90, "64x32")]))
        monkeypatch.setattr(module, "_missing", None)


def on(device):
    """x and values on the CPU or "meta"."""
    return torch.empty(16, 128, dtype=BF16, device=device), torch.empty(16, 64, dtype=BF16, device=device)


def gpu(rows, in_features, out_features, dtype=BF16, codes=None):
    size = in_features // 4 if codes == torch.uint8 else in_features // 2
    return OnGPU(rows, in_features, dtype), OnGPU(out_features, size, codes or dtype)


ONLY = "supports only CUDA GPUs, but x is on {0} and the weight on {0}"


@pytest.mark.parametrize(
    ("name", "tensors", "reason"),
    [
        *((name, on(x), ONLY.format(x)) for name in ("cutlass", "gemv") for x in ("cpu", "meta")),
        ("gemv", gpu(16, 12, 7), "None"),
        ("gemv", gpu(17, 12, 7), "supports 1 to 16 rows, not 17"),
        ("gemv", gpu(0, 12, 7), "supports 1 to 16 rows, not 0"),
        ("gemv", gpu(1, 12, 7, F32), "supports bfloat16.*"),
        *(("gemv", gpu(16, 24, 7, codes=x), "None") for x in (torch.int8, torch.uint8)),
        *(("gemv", gpu(17, 24, 7, codes=x), "supports 1 to 16 rows.*") for x in (torch.int8, torch.uint8)),
        ("gemv", gpu(1, 24, 7, codes=torch.int16), ".*with a weight of torch.int16.*"),
        ("cutlass", gpu(20, 128, 48), "None"),
        ("cutlass", gpu(40, 128, 48), "its tile 64x64 was not built for this GPU; remedy: .*"),
    ],
)
def test_what_gpu_backends_support(name, tensors, reason, hopper):
    assert re.fullmatch(reason, str(kernel_of(name).supports(*tensors)))


def test_a_compiled_extension_of_another_commit_does_not_serve(monkeypatch):
    """A call with other arguments than the binding has would be a TypeError."""
    module = ModuleType("compiled")
    monkeypatch.setitem(sys.modules, "compiled", module)
    found, reason = registry.import_extension("compiled", "newest", "build it")
    assert found is None
    assert "another version" in reason
    module.newest = None
    assert registry.import_extension("compiled", "newest", "build it") == (module, None)
    found, reason = registry.import_extension("proxsparse._gone", "newest", "build it")
    assert found is None
    assert "is missing (No module named 'proxsparse._gone'); remedy: build it" in reason


def test_on_amd_triton_serves_and_no_cuda_kernel_does(monkeypatch):
    """There `device.type` is "cuda", too, and the capability of an MI300 is (9, 4). Triton without inline assembly."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(cuda, "_missing", None)
    monkeypatch.setattr(cutlass, "_missing", None)
    weight, x = OnGPU(32, 64), OnGPU(8, 64)
    reason = r"NVIDIA GPUs, .* AMD GPUs \(ROCm 6.4.2\)"
    for op, arguments in {"prox_nm_": (0.1, 2, 4), "pack_nm": ()}.items():
        assert re.search(reason, registry.get_kernel(op, "cuda").supports(weight, *arguments)), op
    for backend in (gemv, cutlass):
        assert re.search(reason, backend._supports(x, weight)), backend
    assert (triton._supports(weight, 2, 4) is None) == (importlib.util.find_spec("triton") is not None)


def test_the_committed_table_names_its_origin_and_backends_that_exist():
    for dtypes in json.loads(choice.MEASURED.read_text()).values():
        for entry in dtypes.values():
            assert {"device", "torch", "commit", "command", "results"} <= entry["measured"].keys()
            orders = [names.split(choice.ORDER) for rows in entry["fastest"].values() for names in rows.values()]
            assert all("reference" in names for names in orders)
            assert {name for names in orders for name in names} <= set(registry.list_backends("sparse_linear"))
