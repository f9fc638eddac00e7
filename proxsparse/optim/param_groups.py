"""What a param group says about the prox: its settings, who is pruned, and the metric. Plain functions on groups.

Next to the base optimizer's keys a group holds `SETTINGS`: plain values, so that they pass through `state_dict` and
distributed checkpoints. `prox_scale` is None or a list beside `params` (one metric or None each). It is not in `state`,
because torch's optimizers and distributed checkpointing take any entry there for "already initialised".
"""

import math
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer

from proxsparse.ops.adamw_prox import check_frozen
from proxsparse.ops.prox import check_reg_lambda
from proxsparse.ops.prox_list import prox_nm_list_
from proxsparse.optim.schedules import Schedule
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.reference import frozen_penalty_grad
from proxsparse.runtime.sharding import local

SETTINGS = ("reg_lambda", "pattern", "frozen_lambda", "frozen_eps", "prox_scale", "prox_step")


def first_settings(reg_lambda: float, pattern: PatternLike, frozen_lambda: float, frozen_eps: float) -> dict:
    """What a group without settings of its own starts with: a value for each of `SETTINGS`."""
    values = (reg_lambda, str(NMPattern.parse(pattern)), frozen_lambda, frozen_eps, None, 0)
    return dict(zip(SETTINGS, values, strict=True))


def check_group(group: dict) -> None:
    """Stores `pattern` as text; raises ValueError for a setting or a parameter that the prox cannot serve."""
    check_reg_lambda(group["reg_lambda"])
    check_frozen(group["frozen_lambda"], group["frozen_eps"])
    group["pattern"] = str(NMPattern.parse(group["pattern"]))
    for parameter, scale in pruned_parameters(group):
        if scale is not None:
            check_scale(local(parameter), scale)


def check_something_to_prune(param_groups: Iterable[dict]) -> None:
    """Raises ValueError if groups ask for the prox but no parameter of theirs takes it."""
    active = [group for group in param_groups if group["reg_lambda"] > 0]
    if active and not any(list(pruned_parameters(group)) for group in active):
        raise ValueError(
            "there is nothing to prune: no parameter with reg_lambda > 0 has two or more dimensions (frameworks "
            "that flatten parameters, such as DeepSpeed ZeRO, are not supported: shard with FSDP2's fully_shard)"
        )


def complete_state(
    optimizer: Optimizer,
    state_dict: dict,
    keys: Iterable[str] = SETTINGS,
    check: Callable[[dict], None] = check_group,
) -> dict:
    """The state dict, with the settings that the state of a plain optimizer lacks taken from the present groups.

    Raises:
        ValueError: for a setting that `check` refuses, before anything is loaded.
    """
    saved = list(state_dict["param_groups"])
    for i, group in enumerate(optimizer.param_groups[: len(saved)]):
        if len(saved[i]["params"]) == len(group["params"]):  # else the base refuses it, with a message of its own
            checked = {key: group[key] for key in keys} | saved[i] | {"params": group["params"]}
            check(checked)
            saved[i] = checked | {
                "params": saved[i]["params"],
                "prox_scale": beside(group["params"], checked["prox_scale"]),
            }
    return state_dict | {"param_groups": saved}


def beside(parameters: list[Tensor], scales: list[Tensor | None] | None) -> list[Tensor | None] | None:
    """The metrics on the devices of their parameters: a state loaded to the CPU would be copied at every step."""
    if scales is None:
        return None
    return [
        scale if scale is None or parameter.is_meta else scale.to(parameter.device)
        for parameter, scale in zip(parameters, scales, strict=True)
    ]


def pruned_parameters(group: dict) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(parameter, metric or None) for every parameter of two or more dimensions; none of them if reg_lambda is 0.

    Raises:
        ValueError: for a parameter whose weights here do not form whole blocks.
    """
    if group["reg_lambda"] == 0:
        return
    pattern = NMPattern.parse(group["pattern"])
    scales = group["prox_scale"] or [None] * len(group["params"])
    for parameter, scale in zip(group["params"], scales, strict=True):
        if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
            raise ValueError(
                f"parameter of shape {list(parameter.shape)} belongs to a flat parameter of FSDP1 "
                "(FullyShardedDataParallel), which cuts blocks; shard with FSDP2's fully_shard instead"
            )
        if parameter.ndim >= 2:
            pattern.check_blocks(parameter.shape, "parameter of a group with reg_lambda > 0,")
            if hasattr(parameter, "placements"):  # a call with any parameter would be compiled for each one
                check_shards(parameter, pattern)
            yield parameter, scale


def trained_parameters(group: dict) -> list[tuple[Tensor, Tensor | None]]:
    """Those of `pruned_parameters` that have a gradient: torch's optimizers leave the others alone, and so do we.

    Raises:
        ValueError: for a sparse gradient that would have to take a dense term or a metric.
    """
    trained = [(parameter, scale) for parameter, scale in pruned_parameters(group) if parameter.grad is not None]
    for parameter, scale in trained:
        if parameter.grad.is_sparse and (scale is not None or group["frozen_lambda"] > 0):
            raise ValueError(
                f"parameter of shape {list(parameter.shape)} has a sparse gradient, which takes no frozen-weight term "
                "and no metric: make its layer with sparse=False, or put it into a param group with reg_lambda=0"
            )
    return trained


def check_shards(parameter: Tensor, pattern: NMPattern) -> None:
    """Raises ValueError if the shards of a DTensor do not consist of whole blocks."""
    shape, last, placements = list(parameter.shape), parameter.ndim - 1, parameter.placements
    along = [i for i, placement in enumerate(placements) if getattr(placement, "dim", None) in (last, -1)]
    shards = math.prod(parameter.device_mesh.size(i) for i in along)
    if shards > 1 and math.ceil(shape[last] / shards) % pattern.m:
        raise ValueError(
            f"parameter of shape {shape}: {shards} shards along the last dimension cut its {pattern} blocks "
            f"(placements {placements}); shard another dimension, as fully_shard does, or use fewer shards"
        )


def check_scale(weight: Tensor, scale: Tensor) -> None:
    """Raises ValueError unless the metric holds one positive finite number for each input feature held here."""
    if scale.shape != weight.shape[-1:] or not scale.is_floating_point():
        raise ValueError(
            f"metric of shape {list(scale.shape)} and dtype {scale.dtype}: a weight with {weight.shape[-1]} input "
            "features on this device takes one floating-point number for each of them"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(
            f"metric with values from {scale.min().item()} to {scale.max().item()}: every input feature needs a finite "
            "number > 0; raise those of features that are never active to a small one"
        )


def set_scale(param_groups: Iterable[dict], parameter: Tensor, scale: Tensor | None) -> None:
    """Notes the metric, a copy of it, beside its parameter; raises ValueError for what `set_scale` says."""
    for group in param_groups:
        if any(parameter is pruned for pruned, _ in pruned_parameters(group)):
            if scale is not None:
                check_scale(local(parameter), scale)
                scale = scale.detach().to(parameter.device, copy=True)
            old = group["prox_scale"] or [None] * len(group["params"])
            group["prox_scale"] = [scale if p is parameter else c for p, c in zip(group["params"], old, strict=True)]
            return
    raise ValueError(
        f"parameter of shape {list(parameter.shape)} is not pruned: add it to a group with reg_lambda > 0 first"
    )


def learns(group: dict) -> bool:
    """False at lr = 0, where a step must not move the weights: distributed checkpointing runs one to create the state.

    A learning rate held on an accelerator counts as nonzero: to read it would stall the device.
    """
    lr = group.get("lr")
    on_accelerator = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return lr is None or on_accelerator or bool(lr != 0)


def add_frozen_gradients(group: dict, pretrained: dict[Tensor, Tensor], grad_scale: Tensor | None) -> None:
    """grad += lambda_2 * dReg_W0/dW (paper, section 3.1), times grad_scale where a GradScaler left that in `.grad`."""
    for parameter, _ in trained_parameters(group):
        term = frozen_penalty_grad(local(parameter), local(pretrained[parameter]), group["frozen_eps"])
        term = term if grad_scale is None else term * grad_scale
        local(parameter.grad).add_(term, alpha=group["frozen_lambda"])


def enter_metric(group: dict, entered: list[tuple[Tensor, Tensor, bool]]) -> None:
    """w <- c * w and g <- g / c for every parameter with a metric c; notes each in `entered`, for `leave_metric`.

    At lr = 0 the weights keep their bits and only the gradient changes, for the sake of the base's moments.
    """
    for parameter, scale in trained_parameters(group):
        if scale is not None:
            scale = scale.to(parameter.device)
            local(parameter.grad).div_(scale)
            if learns(group):
                local(parameter).mul_(scale)
            entered.append((parameter, scale, learns(group)))


def leave_metric(entered: list[tuple[Tensor, Tensor, bool]]) -> None:
    """Undoes `enter_metric` and empties the list."""
    while entered:
        parameter, scale, moved = entered.pop()
        local(parameter.grad).mul_(scale)
        if moved:
            local(parameter).div_(scale)


def reg_lambda_now(group: dict, schedule: Schedule | None) -> float:
    """lambda_1 of the group's next step; raises ValueError for a factor of the schedule that the prox cannot take."""
    factor = schedule(group["prox_step"]) if schedule else 1.0
    value = float(factor * group["reg_lambda"])
    if not 0 <= value < math.inf:
        raise ValueError(
            f"reg_schedule({group['prox_step']}) is {factor!r} and makes reg_lambda {value}: it must return factors "
            "that keep reg_lambda finite and >= 0"
        )
    return value


def prox_step(strengths: list[tuple[dict, float]]) -> None:
    """W <- prox_{lambda_1 Reg_{N:M}}(W) for the trained parameters of every (group, lambda_1); counts the step.

    One call of the op for each pattern: a launch for every weight would take longer than a small weight.
    """
    of_pattern: dict[str, dict[Tensor, float]] = {}
    for group, reg_lambda in strengths:
        parameters = of_pattern.setdefault(group["pattern"], {})
        parameters.update((parameter, reg_lambda) for parameter, _ in trained_parameters(group))
    for pattern, parameters in of_pattern.items():
        prox_nm_list_([local(parameter) for parameter in parameters], list(parameters.values()), pattern)
    for group, _ in strengths:
        group["prox_step"] += 1


def describe_group(group: dict) -> str:
    """One line for `repr`."""
    shown = [f"{key}={group[key]}" for key in ("lr", *SETTINGS) if key in group and key != "prox_scale"]
    metrics = sum(scale is not None for scale in group["prox_scale"] or ())
    return ", ".join([f"{len(group['params'])} parameters", *shown, f"metrics={metrics}"])
