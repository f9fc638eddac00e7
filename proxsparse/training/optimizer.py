"""The optimizer of the mask training, its learning rate and lambda_1."""

import math

import torch
from torch import Tensor, nn

from proxsparse.optim import ProxAdamW
from proxsparse.optim.param_groups import pruned_parameters
from proxsparse.runtime import sharding
from proxsparse.training.learnable_layer import LearnableLayer
from proxsparse.training.options import MILDER_STEP, LearningOptions, LoopOptions


def layer_lambda(weight: Tensor, options: LearningOptions) -> float:
    """lambda_1 of a layer: --reg_lambda, or --reg_lambda_rel / mean|w| (the mean of scaled weights is 1)."""
    if options.reg_lambda is not None:
        return options.reg_lambda
    if options.masked:
        return options.reg_lambda_rel
    mean = sharding.mean_of_shards(sharding.local(weight.detach()).float().abs(), weight).item()
    return options.reg_lambda_rel / mean if mean > 0 else 0.0


def prox_adamw(model: nn.Module, learned: dict[str, LearnableLayer], options: LearningOptions) -> ProxAdamW:
    """AdamW with the prox on the learned weights of the layers; also sets requires_grad of all parameters.

    By default the moments of bf16 weights are bf16, as in torch's AdamW, and weights and moments are rounded
    stochastically (with --master_weights, fp32 copies are learned instead). Rounding to nearest would lose much of the
    prox, which changes a weight by 1 to 3 units in the last place. With --objective paper all weights are trained.
    """
    prunable = {id(layer.layer.weight): layer for layer in learned.values()}
    groups = []
    for name, parameter in model.named_parameters():
        layer = prunable.get(id(parameter))
        # under masks, training the other weights would make the loss differ from that of the saved model
        parameter.requires_grad_(layer is not None or not options.masked)
        if layer is not None:
            share = MILDER_STEP if options.masked and layer.pattern.density > 0.5 else 1
            reg_lambda = share * layer_lambda(layer.weight, options)
            group = {"params": [(name, layer.weight)], "lr": share * options.learning_rate, "reg_lambda": reg_lambda}
            group |= {"frozen_lambda": options.frozen_lambda, "prox_scale": layer.scale, "pattern": layer.pattern}
            groups.append(group)
        elif parameter.requires_grad:
            groups.append({"params": [(name, parameter)], "lr": options.learning_rate})
    optimizer = adamw(groups, options, options.frozen_eps)
    pruned = {weight for group in optimizer.param_groups for weight in pruned_parameters(group)}
    for layer in learned.values():  # the optimizer updates m, unless W0 is on another device or there is no prox
        if layer.masked and layer.weight in pruned and layer.pretrained.device == layer.weight.device:
            optimizer.masked[layer.weight] = layer.layer.weight, layer.pretrained
    return optimizer


def adamw(groups: list[dict], options: LoopOptions, frozen_eps: float = 0.1) -> ProxAdamW:
    """AdamW with the options of the loop; the prox acts on groups with reg_lambda > 0."""
    bf16 = any(weight.dtype == torch.bfloat16 for group in groups for _, weight in group["params"])
    return ProxAdamW(
        groups,
        weight_decay=options.weight_decay,
        reg_lambda=0.0,
        frozen_eps=frozen_eps,
        moment_dtype=MOMENT_DTYPES[options.moment_dtype or ("bf16" if bf16 else "fp32")],
        master_weights=options.master_weights,
        stochastic_rounding=bf16 and not options.master_weights,
        seed=options.seed,
    )


def weights_of(optimizer: ProxAdamW) -> dict[str, Tensor]:
    """Parameter name -> the tensor that the optimizer updates for it."""
    groups = optimizer.param_groups
    return {
        name: weight for group in groups for name, weight in zip(group["param_names"], group["params"], strict=True)
    }


MOMENT_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
DECAYS = {  # finished share of the steps after the warm-up -> factor of the learning rate
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}


def whole(steps: float) -> int:
    """The whole steps in a product of decimal fractions: 29 for 0.29 * 100, which is 28.999999999999996."""
    return int(round(steps, 6))


def lr_factor(step: int, steps: int, options: LearningOptions) -> float:
    """Factor of the learning rate at `step`, from 0: linear warm-up, then the decay; never 0 before the last step."""
    warmup = whole(options.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    return DECAYS[options.lr_scheduler_type]((step - warmup) / max(1, steps - warmup))
