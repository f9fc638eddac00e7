"""Functions on param groups: the settings of the prox and the pruned parameters.

In addition to the keys of the base optimizer, a group contains `SETTINGS`: plain values, which `state_dict` and
distributed checkpoints can store. `prox_skip` is None or a list with a bool for each of `params`: True takes only the
base step.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxsparse.models.layers import body_modules, body_weights, fused_matrices
from proxsparse.ops.prox import check_reg_lambda, prox_nm_list_
from proxsparse.patterns import FLOAT_DTYPES, NMPattern, PatternLike
from proxsparse.runtime.sharding import local

SETTINGS = ("reg_lambda", "pattern", "prox_step", "prox_skip")
NOT_PRUNED = r"embed|lm_head|\bw[tp]e\b"  # in names of parameters
TALL = 8  # a matrix with this ratio of rows to columns is likely an embedding or lm_head


def first_settings(reg_lambda: float, pattern: PatternLike) -> dict:
    """The default value of each of `SETTINGS`."""
    return dict(zip(SETTINGS, (reg_lambda, str(NMPattern.parse(pattern)), 0, None), strict=True))


def check_group(group: dict) -> None:
    """Stores `pattern` as text; raises ValueError for a setting or parameter that the prox does not support."""
    check_reg_lambda(group["reg_lambda"])
    group["pattern"] = str(NMPattern.parse(group["pattern"]))
    list(pruned_parameters(group))


def check_something_to_prune(param_groups: Iterable[dict]) -> None:
    """Raises ValueError if there are groups with reg_lambda > 0, but none of their parameters can be pruned."""
    active = [group for group in param_groups if group["reg_lambda"] > 0]
    if active and not any(list(pruned_parameters(group)) for group in active):
        raise ValueError(
            "there is nothing to prune: no parameter with reg_lambda > 0 is a matrix to prune (with adapters such as "
            "LoRA they are frozen; frameworks that flatten parameters, such as DeepSpeed ZeRO, are not supported; "
            "shard with FSDP2's fully_shard)"
        )


def skip_others(groups: list[dict], chosen: list[bool], model: nn.Module | None) -> None:
    """Sets `prox_skip` for parameters that are not to be pruned, and warns where this was decided without `model`.

    Args:
        groups: with all settings; those with reg_lambda = 0 do not change.
        chosen: for each group, whether the caller gave it a reg_lambda: then without `model` it does not change.
        model: only the `body_weights` of this model are pruned.
    Raises:
        ValueError: a lambda is out of range, or the model has no layer to prune.
    """
    for group in groups:
        check_reg_lambda(group["reg_lambda"])
    active = [(group, given) for group, given in zip(groups, chosen, strict=True) if group["reg_lambda"] != 0]
    if active and model is not None:
        wanted = {id(weight) for weight in body_weights(model)}
        if not wanted:
            raise ValueError(
                f"model: {type(model).__name__} has no nn.Linear in its decoder blocks, so there is nothing to prune; "
                "for Conv1D modules, as in GPT-2, and fused experts use proxsparse.prune_"
            )
        modules = body_modules(getattr(model, "module", model))
        fused = [name for name, module in modules.items() if fused_matrices(module)]
        if fused:
            warnings.warn(
                f"not pruned: {len(fused)} modules with fused experts, such as {fused[0]}; to prune them, use "
                "proxsparse.prune_",
                stacklevel=3,
            )
        for group, _ in active:
            group["prox_skip"] = [id(parameter) not in wanted for parameter in group["params"]]
        return
    left, tall = [], []
    for group in (group for group, given in active if not given):
        if names := group.get("param_names"):
            skip = [bool(re.search(NOT_PRUNED, name)) for name in names]
            rows = zip(names, skip, group["params"], strict=True)
            left += [name for name, skipped, weight in rows if skipped and weight.ndim >= 2]
            group["prox_skip"] = skip if any(skip) else None
        else:
            tall += [list(p.shape) for p in group["params"] if p.ndim == 2 and p.shape[0] >= TALL * p.shape[1]]
    if left:
        warnings.warn(
            f"not pruned, because of the names: {', '.join(left)}; pass model= to select layers", stacklevel=3
        )
    if tall:
        warnings.warn(
            f"parameters of shapes {', '.join(map(str, tall))} are pruned, which may be embeddings or an lm_head; pass "
            "model= to prune only the linear layers of the decoder blocks, or give these a group with reg_lambda=0",
            stacklevel=3,
        )


def complete_state(
    optimizer: Optimizer,
    state_dict: dict,
    keys: Iterable[str] = SETTINGS,
    check: Callable[[dict], None] = check_group,
) -> dict:
    """Adds the settings that are missing in the state dict of a plain optimizer, from the groups of `optimizer`.

    Raises the ValueError of `check` before anything is loaded.
    """
    saved = list(state_dict["param_groups"])
    for i, group in enumerate(optimizer.param_groups[: len(saved)]):
        if len(saved[i]["params"]) == len(group["params"]):  # else the base raises an error
            checked = {key: group[key] for key in keys} | saved[i] | {"params": group["params"]}
            check(checked)
            saved[i] = checked | {"params": saved[i]["params"]}
    return state_dict | {"param_groups": saved}


def pruned_parameters(group: dict) -> Iterator[Tensor]:
    """Yields every parameter of two or more dimensions that is not in `prox_skip`.

    Nothing if reg_lambda is 0. Raises ValueError for a parameter, or a shard, that does not consist of whole blocks,
    and for a `prox_skip` of another length than `params`.
    """
    if group["reg_lambda"] == 0:
        return
    pattern = NMPattern.parse(group["pattern"])
    skip = group.get("prox_skip") or [False] * len(group["params"])
    if len(skip) != len(group["params"]):
        raise ValueError(
            f"a param group has {len(group['params'])} parameters, but its prox_skip has {len(skip)} bools; add "
            "parameters with add_param_group, or give prox_skip a bool for each of them, True = not pruned"
        )
    for parameter, skipped in zip(group["params"], skip, strict=True):
        if skipped:
            continue
        if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
            raise ValueError(
                f"parameter of shape {list(parameter.shape)} belongs to a flat parameter of FSDP1 "
                "(FullyShardedDataParallel), which splits blocks; shard with FSDP2's fully_shard instead"
            )
        if parameter.ndim >= 2:
            if parameter.requires_grad and parameter.dtype not in FLOAT_DTYPES:
                raise ValueError(
                    f"parameter of shape {list(parameter.shape)} has dtype {parameter.dtype}, for which there is no "
                    "prox; convert it, or give it a group with reg_lambda=0"
                )
            remedy = "give it a group with reg_lambda=0, or choose another pattern"
            pattern.check_blocks(parameter.shape, "parameter of a group with reg_lambda > 0,", remedy)
            # not for every parameter: the call would be compiled for each one
            if hasattr(parameter, "placements") and (shards := splits_blocks(parameter, pattern)):
                raise ValueError(
                    f"parameter of shape {list(parameter.shape)}: {shards} shards along the last dimension split its "
                    f"{pattern} blocks (placements {parameter.placements}); shard another dimension, as fully_shard "
                    "does, or use fewer shards"
                )
            yield parameter


def splits_blocks(parameter: Tensor, pattern: NMPattern) -> int:
    """The number of shards along the last dimension if they do not consist of whole blocks, else 0."""
    last, placements = parameter.ndim - 1, getattr(parameter, "placements", ())
    along = [i for i, placement in enumerate(placements) if getattr(placement, "dim", None) in (last, -1)]
    shards = math.prod(parameter.device_mesh.size(i) for i in along)
    return shards if shards > 1 and math.ceil(parameter.shape[last] / shards) % pattern.m else 0


def learns(group: dict) -> bool:
    """False at lr = 0, where a step must not change the weights: distributed checkpointing runs it to create the state.

    A learning rate on an accelerator counts as nonzero, because reading it would stall the device.
    """
    lr = group.get("lr")
    on_accelerator = isinstance(lr, Tensor) and lr.device.type != "cpu"
    return lr is None or on_accelerator or bool(lr != 0)


def check_not_capturing(optimizer: Optimizer) -> None:
    """Raises RuntimeError while a CUDA graph is being captured, even if all parameters are on the CPU."""
    if torch.compiler.is_compiling():
        return
    try:
        capturing = torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a torch without CUDA
        return
    if capturing:
        raise RuntimeError(
            f"{type(optimizer).__name__}: step cannot be captured in a CUDA graph, because step number, learning rate, "
            "lambda and the seed of stochastic rounding are launch arguments, which a replay does not change; capture "
            "forward and backward only"
        )


def reg_lambda_now(group: dict) -> float:
    """lambda_1 of the next step of the group, which a training loop may change. Raises ValueError if it is invalid."""
    value = float(group["reg_lambda"])
    if not 0 <= value < math.inf:
        raise ValueError(f"reg_lambda={value} of a param group: must be finite and >= 0")
    return value


def prox_step(strengths: list[tuple[dict, float]]) -> None:
    """W <- prox_{lambda_1 Reg_{N:M}}(W) for the parameters with a gradient of every (group, lambda_1).

    Increments `prox_step`. The op is called once per pattern: for small weights a launch takes longer than the
    computation.
    """
    of_pattern: dict[str, dict[Tensor, float]] = {}
    for group, reg_lambda in strengths:
        parameters = of_pattern.setdefault(group["pattern"], {})
        trained = (parameter for parameter in pruned_parameters(group) if parameter.grad is not None)
        parameters.update(dict.fromkeys(trained, reg_lambda))
    for pattern, parameters in of_pattern.items():
        prox_nm_list_([local(parameter) for parameter in parameters], list(parameters.values()), pattern)
    for group, _ in strengths:
        group["prox_step"] += 1
