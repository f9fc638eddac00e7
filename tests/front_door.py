"""What the tests of the Python front door share."""

import torch

TEXTS = [f"Document {i}. The quick brown fox jumps over the lazy dog. " * 3 for i in range(20)]
TOKENS = [torch.arange(i, i + 32) for i in range(8)]
FEW = {"num_samples": 4, "seq_len": 32}


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}
