"""Applies masks to a pretrained model in memory."""

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError


@torch.no_grad()
def apply_masks_(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """W <- W where the mask keeps, +0 elsewhere, in place; layers without a mask are unchanged.

    Args:
        masks: layer name -> bool [out_features, in_features], True = kept.
    Raises:
        InputError: no mask, or a layer that the model does not have in this shape; the model is then unchanged.
    """
    if not masks:
        raise InputError("the mask file has no masks; give the masks.safetensors of a run")
    modules = dict(model.named_modules())
    for name, mask in masks.items():
        layer = modules.get(name)
        weight = layer.weight if isinstance(layer, nn.Linear) else None
        if weight is None or weight.shape != mask.shape:
            has = "no such linear layer" if weight is None else f"shape {list(weight.shape)}"
            raise InputError(
                f"masks of another model: layer {name} has shape {list(mask.shape)}, the model has {has}; give masks "
                "of this model"
            )
    for name, mask in masks.items():
        weight = modules[name].weight
        # a kept -0.0 becomes +0.0 too
        weight.copy_(torch.where(mask.to(weight.device) & (weight != 0), weight, 0.0))
