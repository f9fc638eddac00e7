"""A tiny pruned model, dense and packed."""

import pytest
import torch
from pruned import packed_copy


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The dense and the packed folder of a tiny llama in fp32."""
    return packed_copy(tmp_path_factory.mktemp("llama"), dtype=torch.float32)
