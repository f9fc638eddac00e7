"""One file per backend. Every module of this folder is imported here, which registers its kernels."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
