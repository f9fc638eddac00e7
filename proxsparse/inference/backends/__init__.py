"""Who multiplies by a packed weight: a table of backends, one file each, imported here so that they register.

All of them read the one packed copy (`reference.pack`: values [out, in/2], uint8 indices [out, ceil(in/8)]), so that
a layer can change its backend with the number of rows and its checkpoint never needs a conversion. A backend whose
library reads a form of its own has `prepare`, and a layer of that backend holds both. cuSPARSELt needs it; CUTLASS can
also derive its form in each call.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Backend:
    """One row of the table.

    supports(x, values): None, or the reason why not, for x [rows, in_features] and values [out_features, k]; looks
        at dtypes, devices and shapes only, so that it can be asked about meta tensors
    linear(x, values, indices, bias, prepared) -> [rows, out_features] in x's dtype: x W^T + bias, accumulated in fp32
        at least. x is contiguous and of values' dtype; bias [out_features] of that dtype or None
    prepare(values, indices) -> the backend's own form, one tensor; None: it reads the packed form itself
    prepare_is_optional: `linear` also takes prepared=None, and then derives its form in each call
    """

    name: str
    supports: Callable[[Tensor, Tensor], str | None]
    linear: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    prepare: Callable[[Tensor, Tensor], Tensor] | None = None
    prepare_is_optional: bool = False

    @property
    def needs_prepared(self) -> bool:
        """Whether `linear` requires its own form."""
        return self.prepare is not None and not self.prepare_is_optional


_backends: dict[str, Backend] = {}


def register_backend(name: str, supports: Callable, prepare: Callable | None = None, prepare_is_optional: bool = False):
    """Decorator: add a `linear` to the table, with the other members of its `Backend`."""

    def add(linear: Callable) -> Callable:
        _backends[name] = Backend(name, supports, linear, prepare, prepare_is_optional)
        return linear

    return add


def backends() -> list[str]:
    """The names of all backends."""
    return sorted(_backends)


def backend(name: str) -> Backend:
    """The row of that name. Raises ValueError for an unknown one."""
    if name not in _backends:
        raise ValueError(f"inference backend {name!r}: no such backend; choose from auto, {', '.join(backends())}")
    return _backends[name]


def pad_rows(x: Tensor, step: int) -> Tensor:
    """x with rows of zeros up to a multiple of `step`; x itself, not a copy, if there is nothing to add."""
    missing = -len(x) % step
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
