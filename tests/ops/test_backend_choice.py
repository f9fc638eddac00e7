"""Which kernel serves a call: fastest first, falling back with a warning, and an explicit choice that never does."""

import importlib.util
import re
import types
import warnings

import pytest
import torch

from proxsparse import nm_mask, prox_nm, prox_nm_, reference, use_backend
from proxsparse.ops import registry
from proxsparse.ops.backends import cuda, cusparselt, cutlass, gemv, triton
from proxsparse.ops.prox import TYPICAL_MAGNITUDE, fastest_first
from proxsparse.ops.tuning import use_launch_parameters


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
    monkeypatch.setattr(registry, "_orders", {})
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.delenv("PROXSPARSE_BACKEND", raising=False)


def add(backend, supports, op="toy"):
    """A kernel of the op that returns its backend's name."""
    registry.register_kernel(op, backend, supports=supports)(lambda *arguments: backend)


def served_by(tensor=None):
    """The backend that `select` picks for "toy"."""
    tensor = torch.zeros(4) if tensor is None else tensor
    return registry.select("toy", tensor).run(tensor)


def test_the_fastest_of_a_device_serves_whatever_the_order_of_registration(table):
    for backend in ("reference", "cpp", "triton"):
        add(backend, always)
    assert registry.list_backends("toy") == ["cpp", "triton", "reference"]
    assert served_by() == "cpp"  # triton only interprets on a CPU: that has to be asked for
    assert served_by(torch.zeros(4, device="meta")) == "reference"
    assert registry.AUTOMATIC["cuda"] == ("triton", "cuda", "reference")


def test_ops_and_backends_are_listed_and_an_unknown_one_is_refused(table):
    add("cpp", always)
    add("gemv", always, op="another")
    assert registry.list_ops() == ["another", "toy"]
    assert registry.list_backends() == ["cpp", "gemv"]
    assert registry.get_kernel("toy", "cpp").run() == "cpp"
    with pytest.raises(ValueError, match=r"toy: no such backend 'gemv'; choose from auto, cpp"):
        registry.get_kernel("toy", "gemv")


def test_the_reference_of_every_op_supports_everything():
    for op in registry.list_ops():
        arguments = (torch.zeros(2, 4),) if op == "sparse_linear" else (1.0, 2, 4, None)
        assert registry.get_kernel(op, "reference").supports(torch.zeros(1, 8), *arguments) is None


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


@pytest.mark.parametrize("choose", [by_context, by_environment])
def test_an_op_without_a_kernel_on_the_chosen_backend_is_served_by_another_with_one_warning(table, monkeypatch, choose):
    """Or no run could finish: a run takes many ops, and most backends have kernels for a few."""
    add("cpp", always)
    add("reference", always)
    add("triton", always, op="another")
    with choose("triton", monkeypatch):
        with pytest.warns(UserWarning, match=r"toy: backend 'triton' has no kernel for this op, the automatic choice"):
            assert served_by() == "cpp"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert served_by() == "cpp"


def test_an_unknown_backend_is_refused_with_the_known_ones(table, monkeypatch):
    add("reference", always)
    add("cpp", always, op="another")
    known = "cpp, reference"
    with pytest.raises(ValueError, match=rf"use_backend='abacus'.*{known}"), use_backend("abacus"):
        pass
    monkeypatch.setenv("PROXSPARSE_BACKEND", "abacus")
    with pytest.raises(ValueError, match=rf"PROXSPARSE_BACKEND='abacus'.*{known}"):
        served_by()


def test_the_backend_of_a_call_comes_before_every_other_choice(table, monkeypatch):
    add("cpp", always)
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


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_mask_is_found_whatever_backend_was_chosen_for_the_prox(backend, monkeypatch):
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.setenv("PROXSPARSE_BACKEND", backend)
    weight = torch.randn(3, 8)
    with pytest.warns(UserWarning, match=f"nm_mask: backend '{backend}' has no kernel"):
        assert torch.equal(nm_mask(weight), reference.nm_mask(weight))


def test_a_refused_call_leaves_the_weight(monkeypatch):
    weight = torch.randn(3, 16)
    before = weight.clone()
    monkeypatch.setenv("PROXSPARSE_BACKEND", "cpp")
    with pytest.raises(RuntimeError, match="cpp"):
        prox_nm_(weight, 0.7, "4:8")
    assert torch.equal(weight, before)


# ------------------------------------------------------------------------------------------ an order for the arguments


def test_an_op_may_choose_the_order_by_its_arguments(table):
    for backend in ("cpp", "reference"):
        add(backend, always)
    registry.register_order("toy")(lambda backends, tensor, large: backends[::-1] if large else backends)
    assert registry.select("toy", torch.zeros(4), False).backend == "cpp"
    assert registry.select("toy", torch.zeros(4), True).backend == "reference"
    with use_backend("cpp"):
        assert registry.select("toy", torch.zeros(4), True).backend == "cpp"


def order(reg_lambda, scale=None, n=2, m=4, device="cuda"):
    """Of the backends for a weight that cannot be read: the choice may not look at it."""
    weight = types.SimpleNamespace(dtype=torch.bfloat16, device=torch.device(device), numel=lambda: 4096)
    return fastest_first(registry.AUTOMATIC[device], weight, reg_lambda, n, m, scale)


def test_cuda_comes_before_triton_from_the_measured_strength_on():
    usual, cuda_first = ("triton", "cuda", "reference"), ("cuda", "triton", "reference")
    with use_launch_parameters("prox_backend", cuda_from=0.25):
        assert order(0.24 / TYPICAL_MAGNITUDE) == usual
        assert order(0.26 / TYPICAL_MAGNITUDE) == cuda_first
        assert order(0.24, scale=torch.ones(4)) == usual
        assert order(0.26, scale=torch.ones(4)) == cuda_first
        assert order(1e6, n=1) == order(1e6, m=8) == usual  # another solver
        assert order(1e6, device="cpu") == ("cpp", "reference")
    with use_launch_parameters("prox_backend"):
        assert order(1e6) == usual  # nothing measured


# ------------------------------------------------------------------------------------------ AMD's GPUs


class OnGpu:
    """What `supports` asks of a tensor on a GPU."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype, *shape: int):
        self.dtype, self.shape = dtype, shape

    def __len__(self):
        return self.shape[0]


def test_no_cuda_kernel_is_chosen_on_amd(monkeypatch):
    """There `device.type` is "cuda", too, and the capability of an MI300 is (9, 4)."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(cuda, "_missing", None)
    monkeypatch.setattr(cutlass, "_missing", None)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    weight, x = OnGpu(torch.bfloat16, 32, 64), OnGpu(torch.bfloat16, 8, 64)
    reason = r"NVIDIA's GPUs, .* AMD's \(ROCm 6.4.2\)"
    for op, arguments in {"prox_nm_": (0.1, 2, 4, None), "prox_nm_list_": (2, 4), "pack_nm": (2, 4)}.items():
        assert re.search(reason, registry.get_kernel(op, "cuda").supports(weight, *arguments)), op
    for backend in (gemv, cutlass, cusparselt):
        assert re.search(reason, backend._supports(x, weight)), backend


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_serves_amd(monkeypatch):
    """Without inline assembly: triton_rocm_cases.py compiles the kernels for gfx942."""
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    assert triton._supports(OnGpu(torch.bfloat16, 32, 64), 2, 4) is None
