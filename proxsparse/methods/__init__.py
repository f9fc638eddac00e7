"""Pruning methods, one file each. Importing this package imports all of them, which registers them."""

import importlib
import pkgutil

from proxsparse.methods.registry import Method, get_method, list_methods, register_layer_method, register_method

__all__ = ["Method", "get_method", "list_methods", "register_layer_method", "register_method"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
