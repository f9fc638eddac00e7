"""One layer, its calibration inputs and what a method collects of them, for the tests of single methods."""

import torch
from torch import nn

from proxsparse.models.layers import prunable_layers


def correlated_inputs(tokens, features, dtype=torch.float64):
    """[tokens, features] from a few common factors plus noise, with feature scales that differ."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(tokens, features // 4, generator=generator, dtype=torch.float64)
    loading = torch.randn(features // 4, features, generator=generator, dtype=torch.float64)
    noise = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    scale = torch.rand(features, generator=generator, dtype=torch.float64) + 0.2
    return ((factors @ loading + noise) * scale).to(dtype)


def layer_and_statistics(statistics, inputs, out_features=6):
    torch.manual_seed(3)
    layer = nn.Linear(inputs.shape[1], out_features, bias=False, dtype=inputs.dtype).requires_grad_(False)
    collected = statistics(layer)
    for part in inputs.split(100):
        collected.add(part)
    return layer, collected


def output_error(dense, inputs, mask, updated=None):
    """||X (W - W')^T||_F of the pruned weight W', in its own precision."""
    pruned = torch.where(mask, dense if updated is None else updated.to(dense.dtype), 0.0)
    return ((dense - pruned).double() @ inputs.double().T).norm().item()


@torch.no_grad()
def hooked_inputs(model, batches):
    """Layer name -> one [tokens, in_features] a batch, by plain hooks on plain forward passes."""
    seen, handles = {name: [] for name in prunable_layers(model)}, []
    for name, layer in prunable_layers(model).items():
        hook = lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2))  # noqa: E731
        handles.append(layer.register_forward_pre_hook(hook))
    for batch in batches:
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    for handle in handles:
        handle.remove()
    return seen
