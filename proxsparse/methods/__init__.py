"""Pruning methods, one file each: every module of this folder is imported here, so that it can register itself."""

import importlib
import pkgutil

from proxsparse.methods.registry import (
    Method,
    compute_masks,
    get_method,
    list_methods,
    prune_,
    register_layer_method,
    register_method,
)

__all__ = [
    "Method",
    "compute_masks",
    "get_method",
    "list_methods",
    "prune_",
    "register_layer_method",
    "register_method",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
