"""Tiny random language models, and calibration batches of one document each."""

import pytest
import torch
from tiny_models import COMMON, MODELS

transformers = pytest.importorskip("transformers")


@pytest.fixture
def tiny_model():
    """name of MODELS -> the model with random weights; the same name gives the same weights."""

    def make(name: str = "llama", dtype: torch.dtype = torch.float32):
        model_type, settings = MODELS[name]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **settings})
        return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()

    return make


@pytest.fixture
def batches():
    """Documents of 17, 9 and 12 tokens, one a batch."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 96, (1, length), generator=generator) for length in (17, 9, 12)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()} for ids in documents]
