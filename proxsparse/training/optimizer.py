"""The optimizer of mask learning, its learning rates and lambda_1."""

import math

import torch
from torch import Tensor, nn

from proxsparse.optim import ProxAdamW
from proxsparse.optim.schedules import linear_ramp
from proxsparse.run.config import TrainConfig
from proxsparse.runtime import sharding
from proxsparse.training.learnable_layer import LearnableLayer


def layer_lambda(weight: Tensor, config: TrainConfig) -> float:
    """lambda_1 of a layer: absolute, or R / mean|w| (in the activation metric mean|c * w| is 1)."""
    if config.reg_lambda is not None:
        return config.reg_lambda
    if config.metric == "activation":
        return config.reg_lambda_rel
    mean = mean_size(weight)
    return config.reg_lambda_rel / mean if mean > 0 else 0.0


def mean_size(weight: Tensor) -> float:
    """mean|w| over the whole weight."""
    return sharding.mean_of_shards(sharding.local(weight.detach()).float().abs(), weight).item()


def prox_adamw(model: nn.Module, learned: dict[str, LearnableLayer], config: TrainConfig, steps: int) -> ProxAdamW:
    """AdamW with the prox on what learns in the layers; also says which parameters learn (requires_grad).

    With --precision bf16 the moments are bfloat16 too, as torch's AdamW keeps them, and all is rounded stochastically
    (or learned in fp32 masters): rounding to nearest would lose much of the prox, which moves a weight by 1 to 3 units
    in the last place. With a metric every weight that is not pruned steps in units of its own mean magnitude, so that
    one dimensionless learning rate fits all.
    """
    prunable = {id(one.layer.weight): one for one in learned.values()}
    in_metric = any(one.scale is not None for one in learned.values())
    groups = []
    for name, parameter in model.named_parameters():
        one = prunable.get(id(parameter))
        parameter.requires_grad_(one is not None or config.update == "all")
        weight = parameter if one is None else one.weight
        group = {"params": [(name, weight)], "lr": config.learning_rate, "reg_lambda": 0.0, "frozen_lambda": 0.0}
        if one is not None:
            group |= {"reg_lambda": layer_lambda(weight, config), "frozen_lambda": config.frozen_lambda}
        elif in_metric:
            group["lr"] *= mean_size(parameter)
        if parameter.requires_grad:
            groups.append(group)
    bf16 = config.precision == "bf16"
    optimizer = ProxAdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        reg_lambda=0.0,
        pattern=config.pattern,
        frozen_eps=config.frozen_eps,
        reg_schedule=REG_SCHEDULES[config.reg_schedule](steps),
        moment_dtype=MOMENT_DTYPES[config.moment_dtype or ("bf16" if bf16 else "fp32")],
        master_weights=config.master_weights,
        stochastic_rounding=bf16 and not config.master_weights,
        seed=config.seed,
    )
    for one in learned.values():
        if one.scale is not None:
            optimizer.set_scale(one.weight, one.scale)
    return optimizer


def weights_of(optimizer: ProxAdamW) -> dict[str, Tensor]:
    """Parameter name -> what the optimizer moves for it."""
    groups = optimizer.param_groups
    return {
        name: weight for group in groups for name, weight in zip(group["param_names"], group["params"], strict=True)
    }


MOMENT_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
REG_SCHEDULES = {"constant": lambda steps: None, "linear": linear_ramp}
DECAYS = {  # share of the steps after the warm-up that is done -> factor of the learning rate
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}


def lr_factor(step: int, steps: int, config: TrainConfig) -> float:
    """Factor of the learning rate at `step`, from 0: linear warm-up, then the decay; never 0 before the last step."""
    warmup = int(config.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    return DECAYS[config.lr_scheduler_type]((step - warmup) / max(1, steps - warmup))


def set_rates_(optimizer: ProxAdamW, factor: float) -> None:
    """The learning rate of every group becomes its first one times the factor."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


def reg_lambda_range(optimizer: ProxAdamW) -> dict[str, float]:
    """The smallest and the largest lambda_1 of the layers."""
    lambdas = [group["reg_lambda"] for group in optimizer.param_groups if group["reg_lambda"]] or [0.0]
    return {"min": min(lambdas), "max": max(lambdas)}
