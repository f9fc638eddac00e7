"""Copying and casting weights, and the pretrained weights under masks."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.mask_files import check_masks
from proxsparse.models.checks import require_changeable, uncompiled
from proxsparse.models.layers import stored_weight
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.runtime.sharding import local


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight where the mask keeps, +0.0 elsewhere; a kept -0.0 becomes +0.0 too."""
    return torch.where(mask.to(weight.device) & (weight != 0), weight, 0.0)


@torch.no_grad()
def apply_masks_(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """W <- W where the mask keeps, +0 elsewhere, in place; layers without a mask are unchanged.

    As in `prune_`, Conv1D modules and fused experts become nn.Linear layers.

    Args:
        masks: layer name -> bool [out_features, in_features], True = kept.
    Raises:
        InputError: no mask, one that is not bool, or a layer that the model does not have in this shape, whose weight
            is computed from other parameters, or is that of an embedding too; no weight is then changed.
    """
    require_changeable(model)
    check_masks(masks)
    model = uncompiled(model)
    modules = dict(model.named_modules())
    if not all(isinstance(modules.get(name), nn.Linear) for name in masks):
        modules = dict(unfold_linears_(model).named_modules())
    others = {
        id(weight): name
        for name, module in modules.items()
        if not isinstance(module, nn.Linear)
        for weight in module._parameters.values()
    }
    for name, mask in masks.items():
        layer, shape = modules.get(name), f"shape {list(mask.shape)}"
        is_linear = isinstance(layer, nn.Linear)
        has = f"shape {list(stored_weight(name, layer).shape)}" if is_linear else "no such linear layer"
        if has != shape:
            what = f"layer {name} has {shape}, the model has {has}"
            raise InputError(f"masks of another model: {what}; give masks of this model")
        if tied := others.get(id(layer.weight)):
            raise InputError(f"masks: the weight of {name} is also that of {tied}; leave its mask out")
    for name, mask in masks.items():
        modules[name].weight.copy_(masked(modules[name].weight, mask))


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
    model: nn.Module, pretrained: dict[str, Tensor], masks: dict[str, Tensor], trained: Collection[str] = ()
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
            weight = masked(weight, mask)
        if hasattr(parameter, "to_local"):
            local(parameter).copy_(weight)
        else:
            parameter.data = weight.to(parameter.device, copy=True)
