"""A folder that `proxsparse prune` has written."""

import pytest
from commands import pruned


@pytest.fixture(scope="session")
def pruned_dir(tmp_path_factory, tiny_llama):
    return pruned(tiny_llama, tmp_path_factory.mktemp("runs") / "llama")
