"""Which kernel serves a call: fastest first, falling back aloud, and an explicit choice that never falls back."""

import warnings

import pytest
import torch

from proxsparse import nm_mask, prox_nm, prox_nm_, reference, use_backend
from proxsparse.ops import registry


def always(*arguments):
    """Supports everything."""
    return None


def never(*arguments):
    """Supports nothing, for a reason."""
    return "the moon is not full; remedy: wait"


@pytest.fixture
def table(monkeypatch):
    """An empty kernel table, nothing announced yet, no choice from the environment."""
    monkeypatch.setattr(registry, "_kernels", {})
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.delenv("PROXSPARSE_BACKEND", raising=False)


def add(backend, supports):
    """A kernel of the op "toy" that returns its backend's name."""
    registry.register_kernel("toy", backend, supports=supports)(lambda *arguments: backend)


def served_by(tensor=None):
    """The backend that `select` picks for "toy"."""
    tensor = torch.zeros(4) if tensor is None else tensor
    return registry.select("toy", tensor).run(tensor)


def test_the_fastest_of_a_device_serves_whatever_the_order_of_registration(table):
    for backend in ("reference", "cpp", "triton"):
        add(backend, always)
    assert [kernel.backend for kernel in registry.kernels("toy")] == ["triton", "cpp", "reference"]
    assert registry.ops() == ["toy"]
    assert served_by() == "cpp"  # triton only interprets on a CPU: that has to be asked for
    assert served_by(torch.zeros(4, device="meta")) == "reference"
    assert registry.AUTOMATIC["cuda"] == ("triton", "cuda", "reference")


def test_reference_is_the_last_resort_of_every_op():
    assert registry.BACKENDS[-1] == "reference"
    for op in registry.ops():
        last = registry.kernels(op)[-1]
        assert last.backend == "reference"
        assert last.supports(torch.zeros(1, 8), 1.0, 2, 4, None) is None


def test_another_devices_backend_is_passed_over_in_silence(table):
    add("triton", never)  # nobody expects triton on a CPU
    add("cpp", always)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served_by() == "cpp"


def test_a_fallback_warns_once_with_the_reason(table):
    add("cpp", never)
    add("reference", always)
    with pytest.warns(UserWarning, match=r"toy.*cpp.*the moon is not full; remedy: wait"):
        assert served_by() == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served_by() == "reference"


def test_another_reason_is_another_warning(table):
    reasons = iter(["too cold", "too dark", "too dark"])
    add("cpp", lambda *arguments: next(reasons))
    add("reference", always)
    for reason in ("too cold", "too dark"):
        with pytest.warns(UserWarning, match=reason):
            served_by()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served_by()


def test_no_backend_at_all_is_an_error(table):
    add("triton", never)
    with pytest.raises(RuntimeError, match=r"toy: no backend supports a torch.float32 tensor on cpu"):
        served_by()


def test_supports_sees_the_arguments_of_the_call(table):
    add("cpp", lambda tensor, n: None if n == 2 else f"only 2, not {n}")
    add("reference", always)
    assert registry.select("toy", torch.zeros(4), 2).backend == "cpp"
    with pytest.warns(UserWarning, match="only 2, not 3"):
        assert registry.select("toy", torch.zeros(4), 3).backend == "reference"


def by_context(backend, monkeypatch):
    """Choose with `use_backend`."""
    return use_backend(backend)


def by_environment(backend, monkeypatch):
    """Choose with PROXSPARSE_BACKEND."""
    monkeypatch.setenv("PROXSPARSE_BACKEND", backend)
    return use_backend(None)


@pytest.mark.parametrize("choose", [by_context, by_environment])
def test_an_explicit_choice_is_obeyed(table, monkeypatch, choose):
    add("cpp", always)
    add("reference", always)
    with choose("reference", monkeypatch):
        assert served_by() == "reference"


@pytest.mark.parametrize("choose", [by_context, by_environment])
def test_an_explicit_choice_never_falls_back(table, monkeypatch, choose):
    add("cpp", never)
    add("reference", always)
    message = r"toy: backend 'cpp' .*the moon is not full.*unset PROXSPARSE_BACKEND or use_backend"
    with choose("cpp", monkeypatch), pytest.raises(RuntimeError, match=message):
        served_by()
    with choose("triton", monkeypatch), pytest.raises(RuntimeError, match=r"'triton'.*no kernel for this op.*unset"):
        served_by()


def test_an_unknown_backend_is_refused_with_the_known_ones(table, monkeypatch):
    known = ", ".join(registry.BACKENDS)
    with pytest.raises(ValueError, match=rf"use_backend='abacus'.*{known}"), use_backend("abacus"):
        pass
    monkeypatch.setenv("PROXSPARSE_BACKEND", "abacus")
    add("reference", always)
    with pytest.raises(ValueError, match=rf"PROXSPARSE_BACKEND='abacus'.*{known}"):
        served_by()
    with pytest.raises(ValueError, match=rf"'abacus'.*{known}"):
        add("abacus", always)


def test_the_choice_ends_with_its_block_and_the_inner_one_wins(table, monkeypatch):
    for backend in ("triton", "cpp", "reference"):
        add(backend, always)
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    assert served_by() == "reference"
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


def test_the_public_functions_obey_the_choice():
    weight = torch.randn(3, 8)
    with use_backend("reference"):
        assert torch.equal(prox_nm(weight, 0.7), reference.prox_nm(weight, 0.7))
        assert torch.equal(nm_mask(weight), reference.nm_mask(weight))
    with use_backend("triton"), pytest.raises(RuntimeError, match="nm_mask: backend 'triton'"):
        nm_mask(weight)


def test_a_refused_call_leaves_the_weight(monkeypatch):
    weight = torch.randn(3, 16)
    before = weight.clone()
    monkeypatch.setenv("PROXSPARSE_BACKEND", "cpp")
    with pytest.raises(RuntimeError, match="cpp"):
        prox_nm_(weight, 0.7, "4:8")
    assert torch.equal(weight, before)
