"""One file per backend: every module of this folder is imported here, so that its kernels register themselves."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
