"""Layer allocations: choose the N:M pattern of every decoder block; together they keep as many weights as one pattern.

An allocation returns a target for every decoder block, a real number: how many of every m weights its layers keep.
`nearest_counts` rounds the targets to integers that meet the budget. All layers of a decoder block have the same
pattern, and m is the same everywhere. Importing this package imports all of its modules, which registers them.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
