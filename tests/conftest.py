"""What every test gets: fixed seeds, and memory in which a forgotten write shows."""

import random

import numpy
import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seeds():
    """The same random numbers whichever tests ran before."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unwritten_memory_shows():
    """torch.empty returns NaN (True for bool, the maximum for integers), in Python and in C++ alike.

    torch does this only in its deterministic mode; `warn_only` keeps operations without a deterministic version usable.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
