"""Low-rank adapters of pruned layers that respect the mask, with peft: W + M * (alpha / r) B A.

peft's own adapters add B A to all weights, so that merging them would fill the zeros. Here the mask M is applied in
the forward pass, so the loss is that of the merged model. Source of the adapters: Hu et al. 2021, arXiv 2106.09685.
"""

import importlib.util

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.runtime.distributed import launched_world_size
from proxsparse.training.held_layer import HeldLayer

ADAPTER = "recovery"
PREFIX = "lora_"  # in the names of peft's parameters


def check_adapters() -> None:
    """Raises InputError if peft is not installed, or with several processes."""
    if importlib.util.find_spec("peft") is None:
        raise InputError("--train lora: the package peft is not installed; run: pip install peft")
    if (world_size := launched_world_size()) > 1:
        raise InputError(f"--train lora: not supported on {world_size} processes; use one process, or --train kept")


def attach_adapters_(model: nn.Module, layers: dict[str, nn.Linear], rank: int, seed: int) -> None:
    """Puts adapters of this rank, with alpha = 2 rank, around the layers; B = 0, so the outputs do not change."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear

    class MaskedLinear(Linear):
        """peft's adapter of a linear layer, whose update is zero where the weight is zero."""

        def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
            weight, bias = self.base_layer.weight, self.base_layer.bias
            update = self.get_delta_weight(ADAPTER).to(weight.dtype)
            return nn.functional.linear(x, weight + torch.where(weight != 0, update, 0.0), bias)

    names = list(layers)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0)
    config._register_custom_module({nn.Linear: MaskedLinear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """The weights A and B of all adapters in the model."""
    return [weight for name, weight in model.named_parameters() if PREFIX in name]


@torch.no_grad()
def merge_adapters_(model: nn.Module, held: dict[str, HeldLayer]) -> None:
    """W <- W + M * (alpha / r) B A; the layers are in their places again."""
    for name, one in held.items():
        adapter = model.get_submodule(name)
        update = adapter.get_delta_weight(ADAPTER)
        one.layer.weight.add_(torch.where(one.held, update, 0.0).to(one.layer.weight.dtype))
        model.set_submodule(name, one.layer)
