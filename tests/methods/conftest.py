"""Tiny random language models, and calibration batches of one document each."""

import pytest
import tiny_models
import torch

from proxsparse.models.unfold_linears import unfold_linears_


@pytest.fixture
def tiny_model():
    """name of MODELS -> the model with random weights, as load_model gives it: all linear layers are nn.Linear."""
    return lambda name="llama", dtype=torch.float32: unfold_linears_(tiny_models.tiny_model(name, dtype))


@pytest.fixture
def batches():
    """Documents of 17, 9 and 12 tokens, one a batch."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 96, (1, length), generator=generator) for length in (17, 9, 12)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()} for ids in documents]
