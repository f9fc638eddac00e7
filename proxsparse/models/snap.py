"""Copying and casting weights, and restoring the pretrained weights under masks."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from proxsparse.runtime.sharding import local


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter on the CPU, in its own dtype, from which `snap_` restores it exactly."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


@torch.no_grad()
def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters to `dtype`, but not the buffers, such as rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def snap_(
    model: nn.Module,
    pretrained: dict[str, Tensor],
    masks: dict[str, Tensor],
    trained: Collection[str] = (),
) -> None:
    """W <- W0 where the mask keeps, +0 elsewhere; parameters without a mask become W0. In place.

    Args:
        pretrained: parameter name -> W0, from `copy_weights` or `sharding.shard_and_move_`. The dtype is restored too,
            except in a sharded model. Parameters that are not in the dict are unchanged.
        masks: layer name -> bool [out_features, in_features]; {} restores the dense model.
        trained: names of parameters that keep their current values, rounded to the dtype of W0, instead of becoming W0.
    """
    for name, weight in pretrained.items():
        parameter = model.get_parameter(name)
        mask = masks.get(name.removesuffix(".weight"))
        if name in trained:
            weight = local(parameter.detach()).to("cpu", weight.dtype)
        if mask is not None:
            weight = torch.where(mask.to(weight.device) & (weight != 0), weight, 0.0)  # a kept -0.0 becomes +0.0 too
        if hasattr(parameter, "to_local"):
            local(parameter).copy_(weight)
        else:
            parameter.data = weight.to(parameter.device, copy=True)
