"""The kernels of each op, one per backend, and the rule that selects one of them for a call.

The dispatcher of torch has one kernel per dispatch key, so every op registers one selector (`select`), which uses the
table of kernels. The automatic choice falls back to the next kernel with a warning. An explicit choice never falls
back; ops without a kernel of the chosen backend use the automatic choice.
"""

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch

AUTO = "auto"
# The backends that the automatic choice tries on a device, fastest first; on other devices only the reference. The
# interpreter of Triton runs on a CPU only if it is chosen explicitly. `sparse_linear` has its own automatic choice.
AUTOMATIC = {"cpu": ("cpp", "reference"), "cuda": ("triton", "cuda", "reference")}


@dataclass(frozen=True)
class Kernel:
    """The kernel of one backend for one op.

    Attributes:
        backend: the name of the backend.
        run: run(*args) computes the op.
        supports: supports(*args) -> None, or the reason why the kernel does not support the call.
        prepare: only for `sparse_linear`: prepare(values, indices) -> what `run` otherwise computes from the packed
            weight in every call, one tensor; None if there is nothing to prepare.
        direct: only for `sparse_linear`, see `ops.sparse_linear.direct`.
        run_list: only for `prox_nm_` and `adamw_prox_`: runs many calls in few launches, see `ops.prox` and
            `ops.adamw_prox_list`.
        windows: only for `sparse_linear`: whether `run` takes x without `reference.windows.expand`, and m.
    """

    backend: str
    run: Callable
    supports: Callable[..., str | None]
    prepare: Callable | None = None
    direct: Callable | None = None
    run_list: Callable | None = None
    windows: bool = False


_kernels: dict[str, dict[str, Kernel]] = {}
_chosen: ContextVar[str | None] = ContextVar("proxsparse_backend", default=None)
_warned: set[tuple[str, ...]] = set()


def define_op(name: str, schema: str, fake: Callable = lambda *arguments: None) -> Callable:
    """Decorator: the function becomes the op `proxsparse::name` on all devices.

    `fake` returns its results for fake tensors; the default is that of an op in place.
    """

    def add(run: Callable) -> Callable:
        torch.library.define(f"proxsparse::{name}", schema)
        torch.library.impl(f"proxsparse::{name}", "CompositeExplicitAutograd", run)
        torch.library.register_fake(f"proxsparse::{name}", fake)
        return run

    return add


def register_kernel(op: str, backend: str, supports: Callable[..., str | None] = lambda *args: None, **others: object):
    """Decorator that registers a function as the kernel of `backend` for `op`; see `Kernel` for the other arguments."""

    def add(run: Callable) -> Callable:
        _kernels.setdefault(op, {})[backend] = Kernel(backend, run, supports, **others)
        return run

    return add


def import_extension(name: str, newest: str, remedy: str) -> tuple[ModuleType | None, str | None]:
    """(a compiled extension, None), or (None, why it cannot be used); `newest`: the function that was added last."""
    try:
        extension = importlib.import_module(name)
    except ImportError as error:
        return None, f"the compiled extension is missing ({error}); remedy: {remedy}"
    if not hasattr(extension, newest):
        return None, f"{name} belongs to another version of proxsparse; remedy: reinstall proxsparse"
    return extension, None


def list_backends(op: str | None = None) -> list[str]:
    """The backends that have a kernel for `op`, or for any op; in alphabetical order, the reference last."""
    names = _kernels[op] if op else set().union(*_kernels.values())
    return sorted(names, key=lambda name: (name == "reference", name))


def find_kernel(op: str, backend: str) -> Kernel | None:
    return _kernels[op].get(backend)


def get_kernel(op: str, backend: str) -> Kernel:
    """The kernel of `backend` for `op`. Raises ValueError if there is none."""
    if backend not in _kernels[op]:
        raise ValueError(f"{op}: no such backend {backend!r}; choose from {', '.join([AUTO, *list_backends(op)])}")
    return _kernels[op][backend]


@contextlib.contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Within the block every op in this thread uses `backend` or raises; None restores the automatic choice.

    An op without a kernel of `backend` (`nm_mask` on "triton") uses the automatic choice, with one warning. The same
    applies to packed layers (`SparseLinear`) with backend="auto". A layer with another backend keeps it.

    Raises:
        ValueError: the backend is unknown.
    """
    token = _chosen.set(None if backend is None else _checked(backend, "use_backend"))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_backend() -> str | None:
    """The explicit choice: `use_backend`, else the environment variable PROXSPARSE_BACKEND, else None."""
    from_environment = os.environ.get("PROXSPARSE_BACKEND") or None
    return _chosen.get() or (from_environment and _checked(from_environment, "PROXSPARSE_BACKEND"))


def _checked(backend: str, source: str) -> str:
    if not any(backend in table for table in _kernels.values()):
        raise ValueError(f"{source}={backend!r}: no such backend; choose from {', '.join(list_backends())}")
    return backend


def explicit_kernel(op: str, *args, backend: str = AUTO) -> Kernel | None:
    """The kernel of the explicitly chosen backend: `backend`, or `chosen_backend()` if `backend` is "auto".

    None if no backend was chosen, or, with one warning, if `chosen_backend()` has no kernel for `op`.

    Raises:
        ValueError: `op` has no kernel of `backend`.
        RuntimeError: the kernel does not support these arguments; the message contains the reason.
    """
    remedy = "choose backend='auto'"
    if backend == AUTO:
        chosen, remedy = chosen_backend(), "unset PROXSPARSE_BACKEND or use_backend to let proxsparse choose"
        if chosen is None:
            return None
        if chosen not in _kernels[op]:
            warn_once(f"{op}: backend {chosen!r} has no kernel for this op; using the automatic choice", op, chosen)
            return None
        backend = chosen
    kernel = get_kernel(op, backend)
    if reason := kernel.supports(*args):
        raise RuntimeError(
            f"{op}: backend {backend!r} was chosen explicitly but does not support this call: {reason}; {remedy}"
        )
    return kernel


def select(op: str, tensor, *args) -> Kernel:
    """The kernel of `op` for these arguments; the device of `tensor` decides which backends are tried.

    Raises:
        RuntimeError: the explicitly chosen backend does not support the call; the message contains the reason.
    """
    kernel = explicit_kernel(op, tensor, *args)
    if kernel is not None:
        return kernel
    for backend in AUTOMATIC.get(tensor.device.type, ("reference",)):
        if backend in _kernels[op]:
            kernel = _kernels[op][backend]
            reason = kernel.supports(tensor, *args)
            if reason is None:
                return kernel
            warn_fallback(op, backend, reason)
    raise RuntimeError(f"{op}: no backend supports a {tensor.dtype} tensor on {tensor.device}; convert or move it")


def warn_fallback(op: str, backend: str, reason: str) -> None:
    """Warns that a slower backend is used; once for each reason, not for each op."""
    warn_once(f"{op}: not on the {backend} backend ({reason}); using a slower backend", backend, reason)


def warn_once(message: str, *key: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, stacklevel=4)
