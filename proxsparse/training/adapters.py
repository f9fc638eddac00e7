"""Low-rank adapters of pruned layers that respect the mask, with peft: W + M * (alpha / r) B A.

peft's own adapters add B A to all weights, so that merging them would fill the zeros. Here the mask M is applied in
the forward pass, so the loss is that of the merged model. Source of the adapters: Hu et al. 2021, arXiv 2106.09685.
"""

import importlib.util

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.runtime.distributed import launched_world_size

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
            return nn.functional.linear(x, self.merged_weight(), self.base_layer.bias)

        def merged_weight(self) -> Tensor:
            """W + M * (alpha / r) B A, where M is 0 for every zero of W, also for zeros that the pattern may keep."""
            weight = self.base_layer.weight
            return weight + torch.where(weight != 0, self.get_delta_weight(ADAPTER).to(weight.dtype), 0.0)

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
def merge_adapters_(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    """W <- W + M * (alpha / r) B A; the layers are in their places again."""
    for name, layer in layers.items():
        adapter = model.get_submodule(name)
        layer.weight.copy_(adapter.merged_weight())
        model.set_submodule(name, layer)
