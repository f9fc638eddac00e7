"""Tiny models and layers whose weights are 2:4: what everything packed starts from."""

import torch
from tiny_models import byte_tokenizer, tiny_model
from torch import nn

from proxsparse import nm_mask


@torch.no_grad()
def prune_(module: nn.Module, but: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Keeps the larger two of every four weights of all nn.Linear layers, but of those whose name has one of `but`."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not any(part in name for part in but):
            layer.weight.copy_(torch.where(nm_mask(layer.weight.abs()), layer.weight, 0.0))
    return module


def pruned_linear(in_features=24, out_features=7, bias=True, dtype=torch.float32) -> nn.Linear:
    """A 2:4 layer with random weights."""
    return prune_(nn.Linear(in_features, out_features, bias, dtype=dtype))


def pruned_model(name="llama", dtype=torch.float32):
    """The tiny model of that name, 2:4 but for lm_head."""
    return prune_(tiny_model(name, dtype))


def save_pruned_model(folder, name="llama", dtype=torch.bfloat16, **save_options):
    """The same as a folder, with a tokenizer."""
    pruned_model(name, dtype).save_pretrained(folder, **save_options)
    byte_tokenizer().save_pretrained(folder)
    return folder
