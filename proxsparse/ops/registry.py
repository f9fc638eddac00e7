"""One op, many backends: a table of kernels per op, and the rule that selects one of them for a call.

The dispatcher of torch holds one kernel per dispatch key, so every op registers ONE selector (`select`), which looks
into the table. The automatic choice falls back to the next kernel with a warning. An explicit choice never falls back;
it applies to the ops that its backend has a kernel for, and the automatic choice serves the others.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

AUTO = "auto"
# The backends that the automatic choice tries on a device, fastest first; on other devices only the reference. Triton's
# interpreter runs on a CPU only after an explicit choice. An op can have another order (`register_order`), or, as
# `sparse_linear`, an automatic choice of its own.
AUTOMATIC = {"cpu": ("cpp", "reference"), "cuda": ("triton", "cuda", "reference")}


@dataclass(frozen=True)
class Kernel:
    """The kernel of one backend for one op.

    Attributes:
        backend: the name of the backend.
        run: run(*args) computes the op.
        supports: supports(*args) -> None, or the reason why the kernel cannot serve such a call.
        prepare: only for `sparse_linear`: prepare(values, indices) -> the weight in the backend's own form, one tensor;
            None if the kernel reads the packed form.
        prepare_is_optional: whether `run` also works without the prepared form; it is then derived in every call.
    """

    backend: str
    run: Callable
    supports: Callable[..., str | None]
    prepare: Callable | None = None
    prepare_is_optional: bool = False

    @property
    def needs_prepared(self) -> bool:
        """Whether `run` requires the prepared form."""
        return self.prepare is not None and not self.prepare_is_optional


_kernels: dict[str, dict[str, Kernel]] = {}
_orders: dict[str, Callable[..., tuple[str, ...]]] = {}
_chosen: ContextVar[str | None] = ContextVar("proxsparse_backend", default=None)
_announced: set[tuple[str, ...]] = set()


def register_kernel(
    op: str,
    backend: str,
    supports: Callable[..., str | None],
    prepare: Callable | None = None,
    prepare_is_optional: bool = False,
):
    """Decorator: add a function to the table of `op` as the kernel of `backend`; for the rest see `Kernel`."""

    def add(run: Callable) -> Callable:
        _kernels.setdefault(op, {})[backend] = Kernel(backend, run, supports, prepare, prepare_is_optional)
        return run

    return add


def register_order(op: str):
    """Decorator: `order(backends, *args)` sorts the backends of the automatic choice, fastest first, for these inputs.

    It must depend only on shapes, dtypes, devices and numbers: reading a tensor would wait for the GPU.
    """

    def add(order: Callable[..., tuple[str, ...]]) -> Callable[..., tuple[str, ...]]:
        _orders[op] = order
        return order

    return add


def list_ops() -> list[str]:
    """The names of all ops."""
    return sorted(_kernels)


def list_backends(op: str | None = None) -> list[str]:
    """The backends that have a kernel for `op`, or for any op; in alphabetical order, the reference last."""
    names = _kernels[op] if op else set().union(*_kernels.values())
    return sorted(names, key=lambda name: (name == "reference", name))


def get_kernel(op: str, backend: str) -> Kernel:
    """The kernel of `backend` for `op`. Raises ValueError if there is none."""
    if backend not in _kernels[op]:
        raise ValueError(f"{op}: no such backend {backend!r}; choose from {', '.join([AUTO, *list_backends(op)])}")
    return _kernels[op][backend]


@contextlib.contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Within the block every op of this thread runs on `backend` or raises; None returns to the automatic choice.

    An op that `backend` has no kernel for at all (`nm_mask` on "triton") gets the automatic choice, with one warning.
    The same holds for packed layers (`SparseLinear`) with backend="auto". A layer with another backend keeps it.

    Raises:
        ValueError: there is no such backend.
    """
    token = _chosen.set(None if backend is None else _checked(backend, "use_backend"))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_backend() -> str | None:
    """The explicit choice in force: `use_backend`, else the environment variable PROXSPARSE_BACKEND, else None."""
    from_environment = os.environ.get("PROXSPARSE_BACKEND") or None
    return _chosen.get() or (from_environment and _checked(from_environment, "PROXSPARSE_BACKEND"))


def _checked(backend: str, source: str) -> str:
    if not any(backend in table for table in _kernels.values()):
        raise ValueError(f"{source}={backend!r}: no such backend; choose from {', '.join(list_backends())}")
    return backend


def explicit_kernel(op: str, *args, backend: str = AUTO) -> Kernel | None:
    """The kernel of the backend that was chosen explicitly: `backend`, or for "auto" that of `chosen_backend`.

    None if no backend was chosen, or if the one of `chosen_backend` has no kernel for `op`, with one warning.

    Raises:
        ValueError: `op` has no kernel of `backend`.
        RuntimeError: the kernel does not support these arguments; the message has the reason and the remedy.
    """
    remedy = "choose backend='auto'"
    if backend == AUTO:
        chosen, remedy = chosen_backend(), "unset PROXSPARSE_BACKEND or use_backend to let proxsparse choose"
        if chosen is None:
            return None
        if chosen not in _kernels[op]:
            warn_once(f"{op}: backend {chosen!r} has no kernel for this op, the automatic choice serves it", op, chosen)
            return None
        backend = chosen
    kernel = get_kernel(op, backend)
    if reason := kernel.supports(*args):
        raise RuntimeError(
            f"{op}: backend {backend!r} was chosen explicitly but cannot serve this call: {reason}; {remedy}"
        )
    return kernel


def select(op: str, tensor, *args) -> Kernel:
    """The kernel that serves `op` for these arguments; the device of `tensor` decides which backends are tried.

    Raises:
        RuntimeError: the explicitly chosen backend does not support them; the message has the reason and the remedy.
    """
    kernel = explicit_kernel(op, tensor, *args)
    if kernel is not None:
        return kernel
    backends = AUTOMATIC.get(tensor.device.type, ("reference",))
    if op in _orders:
        backends = _orders[op](backends, tensor, *args)
    for backend in backends:
        if backend in _kernels[op]:
            kernel = _kernels[op][backend]
            reason = kernel.supports(tensor, *args)
            if reason is None:
                return kernel
            announce(op, backend, reason)
    raise RuntimeError(f"{op}: no backend supports a {tensor.dtype} tensor on {tensor.device}")


def announce(op: str, backend: str, reason: str) -> None:
    """One warning for each reason, for whichever op it occurs first."""
    warn_once(f"{op}: not on the {backend} backend, a slower one serves: {reason}", backend, reason)


def warn_once(message: str, *key: str) -> None:
    """A warning, unless there was one with this key."""
    if key not in _announced:
        _announced.add(key)
        warnings.warn(message, stacklevel=4)
