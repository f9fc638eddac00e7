"""A callback for the import of an optional package: `import proxsparse` requires only torch."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable


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
