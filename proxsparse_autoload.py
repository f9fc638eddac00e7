"""Lets transformers load packed checkpoints in programs that do not import proxsparse.

`import torch` calls `register` (entry point group torch.backends, of which torch loads every member), and so does
`import proxsparse`. It must cost nothing and never fail: it only waits for the import of transformers. The first packed
checkpoint that is loaded then imports the loader. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns the entry point off, as for all
such packages.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable

QUANT_METHOD = "proxsparse"
LOADER = "proxsparse.integrations.transformers_quantizer"  # by name, as entry points are: this module must stay light


def register() -> None:
    """Makes `from_pretrained` of transformers load packed checkpoints.

    The first module has the table of formats. If its import is what imports torch, the table does not exist yet; the
    second module is imported later, by every model.
    """
    for name in ("transformers.quantizers", "transformers.modeling_utils"):
        after_import(name, offer)


def after_import(name: str, act: Callable[[], None]) -> None:
    """Calls `act` after the module `name` is imported: now if it already is, else when it is imported."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds one module as Python would, calls `act` after the module was executed, and removes itself."""

    def __init__(self, name: str, act: Callable[[], None]):
        self.name, self.act = name, act

    def find_spec(self, name: str, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_act(module) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.act()

        spec.loader.exec_module = execute_then_act
        return spec


def offer() -> None:
    """Puts a stand-in into transformers' table of formats, unless the loader is there."""
    known = table()
    if known is not None:
        known.setdefault(QUANT_METHOD, PackedLater)


def withdraw() -> None:
    """Removes the stand-in: transformers refuses to register a format twice."""
    known = table()
    if known is not None and known.get(QUANT_METHOD) is PackedLater:
        del known[QUANT_METHOD]


def table() -> dict | None:
    """transformers' table of formats by name; None in a version that has none."""
    module = sys.modules.get("transformers.quantizers.auto")
    return getattr(module, "AUTO_QUANTIZATION_CONFIG_MAPPING", None)


class PackedLater:
    """Stands for the quantization_config of packed checkpoints until the first of them is loaded."""

    @staticmethod
    def from_dict(*arguments, **keywords):
        """Imports the loader, which takes this place, and passes the call on."""
        return importlib.import_module(LOADER).PackedConfig.from_dict(*arguments, **keywords)
