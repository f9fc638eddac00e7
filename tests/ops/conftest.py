"""What is built once for all tests of the ops."""

import pytest
from ops.on_cpu import build


@pytest.fixture(scope="session")
def linear_library(tmp_path_factory):
    """The kernels of csrc/cuda for packed weights as C functions, built for this CPU."""
    return build(tmp_path_factory.mktemp("cuda_on_cpu"), "linear", "gemv.cu", "pack.cu", "metadata.cu")
