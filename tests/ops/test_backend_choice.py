"""Which kernel serves a call: fastest first, falling back with a warning, and an explicit choice that never does."""

import importlib.util
import re
import warnings

import pytest
import torch
from ops.on_each_backend import OnGPU

from proxsparse import nm_mask, prox_nm, prox_nm_, reference, use_backend
from proxsparse.ops import registry
from proxsparse.ops.backends import cuda, cutlass, gemv, triton


def always(*arguments):
    return None


def never(*arguments):
    return "the moon is not full; remedy: wait"


@pytest.fixture
def table(monkeypatch):
    """An empty kernel table, nothing announced yet, no choice from the environment."""
    monkeypatch.setattr(registry, "_kernels", {})
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.delenv("PROXSPARSE_BACKEND", raising=False)


def add(backend, supports=always, op="toy"):
    """A kernel of the op that returns its backend's name."""
    registry.register_kernel(op, backend, supports=supports)(lambda *arguments: backend)


def served_by(tensor=None, *arguments):
    """The backend that `select` picks for "toy", without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return registry.select("toy", torch.zeros(4) if tensor is None else tensor, *arguments).backend


def test_the_fastest_of_a_device_serves_whatever_the_order_of_registration(table):
    for backend in ("reference", "cpp", "triton"):
        add(backend)
    assert registry.list_backends("toy") == ["cpp", "triton", "reference"]
    assert served_by() == "cpp"  # triton only interprets on a CPU: that has to be asked for
    assert served_by(torch.zeros(4, device="meta")) == "reference"
    assert registry.AUTOMATIC["cuda"] == ("triton", "cuda", "reference")


def test_ops_and_backends_are_listed_and_an_unknown_one_is_refused(table, monkeypatch):
    add("cpp")
    add("gemv", op="another")
    assert registry.list_ops() == ["another", "toy"]
    assert registry.list_backends() == ["cpp", "gemv"]
    assert registry.get_kernel("toy", "cpp").run() == "cpp"
    with pytest.raises(ValueError, match=r"toy: no such backend 'gemv'; choose from auto, cpp"):
        registry.get_kernel("toy", "gemv")
    with pytest.raises(ValueError, match=r"use_backend='abacus'.*cpp, gemv"), use_backend("abacus"):
        pass
    monkeypatch.setenv("PROXSPARSE_BACKEND", "abacus")
    with pytest.raises(ValueError, match=r"PROXSPARSE_BACKEND='abacus'.*cpp, gemv"):
        served_by()


def test_the_reference_of_every_op_supports_everything():
    for op in registry.list_ops():
        arguments = (torch.zeros(2, 4),) if op == "sparse_linear" else (1.0, 2, 4, None)
        assert registry.get_kernel(op, "reference").supports(torch.zeros(1, 8), *arguments) is None


def test_a_fallback_warns_once_for_each_reason_and_another_devices_backend_never(table):
    reasons = ["too cold", "too dark"]
    add("triton", never)  # nobody expects triton on a CPU
    with pytest.raises(RuntimeError, match=r"toy: no backend supports a torch.float32 tensor on cpu"):
        served_by()
    add("cpp", lambda tensor, number: reasons[number])
    add("reference")
    for number, reason in enumerate(reasons):
        with pytest.warns(UserWarning, match=f"toy.*cpp.*{reason}"):
            assert registry.select("toy", torch.zeros(4), number).backend == "reference"
        assert served_by(None, number) == "reference"


def by_context(backend, monkeypatch):
    return use_backend(backend)


def by_environment(backend, monkeypatch):
    monkeypatch.setenv("PROXSPARSE_BACKEND", backend)
    return use_backend(None)


@pytest.mark.parametrize("choose", [by_context, by_environment])
def test_an_explicit_choice_is_obeyed_and_never_falls_back(table, monkeypatch, choose):
    add("cpp")
    add("gemv", never)
    add("reference")
    with choose("reference", monkeypatch):
        assert served_by() == "reference"
    message = r"toy: backend 'gemv' .*the moon is not full.*unset PROXSPARSE_BACKEND or use_backend"
    with choose("gemv", monkeypatch), pytest.raises(RuntimeError, match=message):
        served_by()


@pytest.mark.parametrize("choose", [by_context, by_environment])
def test_an_op_without_a_kernel_on_the_chosen_backend_is_served_by_another_with_one_warning(table, monkeypatch, choose):
    """Or no run could finish: a run takes many ops, and most backends have kernels for a few."""
    add("cpp")
    add("triton", op="another")
    with choose("triton", monkeypatch):
        with pytest.warns(UserWarning, match=r"toy: backend 'triton' has no kernel for this op; using the auto"):
            assert registry.select("toy", torch.zeros(4)).backend == "cpp"
        assert served_by() == "cpp"


def test_the_backend_of_a_call_comes_before_every_other_choice(table, monkeypatch):
    add("cpp")
    add("gemv", never)
    monkeypatch.setenv("PROXSPARSE_BACKEND", "gemv")
    with use_backend("gemv"):
        assert registry.explicit_kernel("toy", backend="cpp").backend == "cpp"
    with use_backend("cpp"):
        assert registry.explicit_kernel("toy").backend == "cpp"
        with pytest.raises(RuntimeError, match=r"toy: backend 'gemv' .*the moon is not full.*choose backend='auto'"):
            registry.explicit_kernel("toy", backend="gemv")
    monkeypatch.delenv("PROXSPARSE_BACKEND")
    assert registry.explicit_kernel("toy") is None


def test_the_choice_ends_with_its_block_and_the_inner_one_wins(table, monkeypatch):
    for backend in ("triton", "cpp", "reference"):
        add(backend)
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    with use_backend("cpp"):
        assert served_by() == "cpp"
        with use_backend("triton"):
            assert served_by() == "triton"
        with pytest.raises(KeyError), use_backend("triton"):
            raise KeyError
        assert served_by() == "cpp"
    assert served_by() == "reference"
    monkeypatch.setenv("PROXSPARSE_BACKEND", "")
    assert served_by() == "cpp"


def test_the_public_functions_obey_the_choice(monkeypatch):
    weight = torch.randn(3, 16)
    before = weight.clone()
    with use_backend("reference"):
        assert torch.equal(prox_nm(weight, 0.7), reference.prox_nm(weight, 0.7))
        assert torch.equal(nm_mask(weight), reference.nm_mask(weight))
    with use_backend("cpp"), pytest.raises(RuntimeError, match="cpp"):
        prox_nm_(weight, 0.7, "4:8")
    assert torch.equal(weight, before)
    monkeypatch.setattr(registry, "_announced", set())
    for backend in ("triton", "cuda"):
        with use_backend(backend), pytest.warns(UserWarning, match=f"nm_mask: backend '{backend}' has no kernel"):
            assert torch.equal(nm_mask(weight), reference.nm_mask(weight))


# ------------------------------------------------------------------------------------------ an order for the arguments


# ------------------------------------------------------------------------------------------ AMD's GPUs


def test_no_cuda_kernel_is_chosen_on_amd(monkeypatch):
    """There `device.type` is "cuda", too, and the capability of an MI300 is (9, 4)."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(cuda, "_missing", None)
    monkeypatch.setattr(cutlass, "_missing", None)
    weight, x = OnGPU(32, 64), OnGPU(8, 64)
    reason = r"NVIDIA GPUs, .* AMD GPUs \(ROCm 6.4.2\)"
    for op, arguments in {"prox_nm_": (0.1, 2, 4, None), "prox_nm_list_": (2, 4), "pack_nm": (2, 4)}.items():
        assert re.search(reason, registry.get_kernel(op, "cuda").supports(weight, *arguments)), op
    for backend in (gemv, cutlass):
        assert re.search(reason, backend._supports(x, weight)), backend


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_serves_amd(monkeypatch):
    """Without inline assembly: triton_rocm_cases.py compiles the kernels for gfx942."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    assert triton._supports(OnGPU(32, 64), 2, 4) is None
