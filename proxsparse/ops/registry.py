"""One op, many backends: a table of kernels per op, fastest first, and the rule that picks one.

The dispatcher of torch holds one kernel per dispatch key, so every op registers ONE selector (`select`) that looks
into the table. The automatic choice falls back to the next kernel with a warning. An explicit choice never falls back;
it applies to the ops that its backend has a kernel for, and the automatic choice serves the others.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

BACKENDS = ("triton", "cuda", "cpp", "reference")
# What the automatic choice tries on a device, fastest first; anywhere else the reference serves. Only an explicit
# choice runs Triton's interpreter on a CPU.
AUTOMATIC = {"cpu": ("cpp", "reference"), "cuda": ("triton", "cuda", "reference")}


@dataclass(frozen=True)
class Kernel:
    """What one backend offers for one op: `supports(*args)` is None, or the reason why not; `run(*args)` computes."""

    backend: str
    run: Callable
    supports: Callable[..., str | None]


_kernels: dict[str, dict[str, Kernel]] = {}
_orders: dict[str, Callable[..., tuple[str, ...]]] = {}
_chosen: ContextVar[str | None] = ContextVar("proxsparse_backend", default=None)
_announced: set[tuple[str, ...]] = set()


def register_kernel(op: str, backend: str, supports: Callable[..., str | None]):
    """Decorator: add a kernel to the table of `op`; `supports` stands beside it and takes the same arguments."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")

    def add(run: Callable) -> Callable:
        _kernels.setdefault(op, {})[backend] = Kernel(backend, run, supports)
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


def get_kernels(op: str) -> list[Kernel]:
    """The kernels of `op`, in the order of BACKENDS."""
    return [_kernels[op][backend] for backend in BACKENDS if backend in _kernels[op]]


def list_ops() -> list[str]:
    """The names of all registered ops."""
    return sorted(_kernels)


@contextlib.contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Within the block every op of this thread runs on `backend` or raises; None returns to the automatic choice.

    An op that `backend` has no kernel for at all (`nm_mask` on "triton") gets the automatic choice, with one warning.
    "cpp" and "reference" also apply to packed layers (`SparseLinear`) with backend="auto"; "triton" and "cuda" do not.
    A layer that was given a backend keeps it.

    Raises:
        ValueError: if there is no such backend.
    """
    token = _chosen.set(None if backend is None else _checked(backend, "use_backend"))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_backend() -> str | None:
    """The explicit choice in force: `use_backend`, else the environment's PROXSPARSE_BACKEND, else None."""
    from_environment = os.environ.get("PROXSPARSE_BACKEND") or None
    return _chosen.get() or (from_environment and _checked(from_environment, "PROXSPARSE_BACKEND"))


def _checked(backend: str, source: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"{source}={backend!r}: no such backend; choose from {', '.join(BACKENDS)}")
    return backend


def select(op: str, tensor, *args) -> Kernel:
    """The kernel that serves `op` for these arguments (`tensor` first, its device decides what is expected).

    Raises:
        RuntimeError: if the explicitly chosen backend does not support them; it names the reason and the remedy.
    """
    explicit = chosen_backend()
    if explicit is not None:
        kernel = _kernels[op].get(explicit)
        if kernel is not None:
            reason = kernel.supports(tensor, *args)
            if reason is None:
                return kernel
            raise RuntimeError(
                f"{op}: backend {explicit!r} was chosen explicitly but cannot serve this call: {reason}; "
                "unset PROXSPARSE_BACKEND or use_backend to let proxsparse choose"
            )
        warn_once(f"{op}: backend {explicit!r} has no kernel for this op, the automatic choice serves it", op, explicit)
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
    """One warning for each reason, whichever op met it first."""
    warn_once(f"{op}: not on the {backend} backend, a slower one serves: {reason}", backend, reason)


def warn_once(message: str, *key: str) -> None:
    """A warning, unless there was one with this key."""
    if key not in _announced:
        _announced.add(key)
        warnings.warn(message, stacklevel=4)
