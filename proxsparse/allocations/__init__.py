"""Layer allocations: which N:M pattern every decoder block gets, so that together they keep what one for all would.

An allocation gives a wish for every decoder block, a real number: how many of every m weights to keep in its layers.
`nearest_counts` turns the wishes into integers that meet the budget. A decoder block moves as a whole, and m is the
same everywhere. Every module of this package is imported here, so that it can register itself.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
