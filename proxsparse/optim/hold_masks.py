"""hold_masks_: any optimizer trains the kept weights of an N:M model, and the pruned weights stay zero."""

from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from proxsparse.ops import nm_mask
from proxsparse.optim.param_groups import pruned_parameters, splits_blocks
from proxsparse.patterns import (
    PROBES,
    WINDOWED,
    NMPattern,
    PatternLike,
    clear_pattern,
    live_rows,
    not_quite,
    pattern_of_counts,
)
from proxsparse.reference.quantize import INTEGERS
from proxsparse.runtime.sharding import local

REMEDY = "flat parameters, as in DeepSpeed ZeRO, are not supported; shard with FSDP2's fully_shard"


def hold_masks_(optimizer: Optimizer, pattern: PatternLike | None = None) -> "HeldMasks":
    """From now on, the pruned weights of an N:M model stay +0.0 while `optimizer` trains the other weights.

        g <- where(mask, g, 0)    after every backward pass, so that gradient clipping computes the right norm
        w <- where(mask, w, 0)    after every step

    NaN gradients become 0 too. The moments of pruned weights are 0, also after `load_state_dict` and if the optimizer
    has already made steps. Nothing is added to `state_dict`. Each held weight needs one byte of memory.

    A parameter is held if it has two or more dimensions and its zeros have a pattern n:m along the last one, see
    `patterns.pattern_of_counts`. Each parameter has its own. The mask keeps the n largest weights of each block of
    m; in a block with fewer nonzeros, the first zeros are kept and can be trained. Parameters that are dense, or zero
    everywhere (LoRA's B), are not held. Parameters that the optimizer gets later are held from their first step on.

    Args:
        optimizer: any torch.optim.Optimizer, or accelerate's wrapper of one. With several processes, call this in all
            of them, after `accelerator.prepare` or `fully_shard`.
        pattern: "N:M", the densest pattern of the parameters; None: found from the zeros of each.
    Returns:
        a handle, whose `remove()` removes the hooks.
    Raises:
        TypeError: optimizer is not a torch optimizer.
        ValueError: no parameter is pruned; a parameter is not quite N:M, because fewer blocks have more than N nonzeros
            than have 1 to N (without `pattern`: not quite 2:4, 4:6, 6:8 or 8:10, in a tenth of its blocks at most); a
            parameter is n:M with N < n < M; FSDP1, or shards that split blocks.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # accelerate's wrapper has no hooks
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer ({REMEDY})")
    return HeldMasks(optimizer, None if pattern is None else NMPattern.parse(pattern))


class HeldMasks:
    """The handle of `hold_masks_`. `masks`: parameter -> its mask, True = kept, or None if it is not held."""

    def __init__(self, optimizer: Optimizer, pattern: NMPattern | None):
        self.pattern, self.hooks = pattern, ExitStack()
        self.masks: dict[Tensor, Tensor | None] = {}
        self.find_masks(optimizer)
        if not self.held():
            raise ValueError(
                f"no parameter of this {type(optimizer).__name__} is {pattern or 'pruned'}: the model is dense; prune "
                f"it first, or pass its pattern ({REMEDY})"
            )
        self.hooks.enter_context(optimizer.register_step_pre_hook(self.before_step))
        self.hooks.enter_context(optimizer.register_step_post_hook(self.after_step))
        self.hooks.enter_context(optimizer.register_load_state_dict_post_hook(self.clear_moments))

    def __repr__(self) -> str:
        return f"HeldMasks({len(self.held())} of {len(self.masks)} parameters are held)"

    def held(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, mask) for every parameter that is held."""
        return [(parameter, kept) for parameter, kept in self.masks.items() if kept is not None]

    def remove(self) -> None:
        """Removes the hooks; all weights can be trained again."""
        self.hooks.close()

    @torch.no_grad()
    def find_masks(self, optimizer: Optimizer) -> None:
        """Adds the masks of new parameters, and forgets parameters that the optimizer no longer has."""
        known, self.masks = self.masks, {}
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or [f"{i} of group {number}" for i in range(len(group["params"]))]
            for name, p in zip(names, group["params"], strict=True):
                self.masks[p] = known[p] if p in known else find_mask(p, self.pattern, name)
        for parameter, kept in self.held():
            if parameter not in known:
                trained, hook = parameter.requires_grad, partial(clear_gradient_, kept=kept)
                parameter.requires_grad_(True)  # a frozen parameter accepts no hook, but may be trained later
                self.hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))
                parameter.requires_grad_(trained)
                hook(parameter)
                clear_(parameter, kept)  # -0.0 becomes +0.0
        self.clear_moments(optimizer)

    def before_step(self, optimizer: Optimizer, *_) -> None:
        """Gradients <- 0 for pruned weights, because not all gradients come from a backward pass."""
        if any(p not in self.masks for group in optimizer.param_groups for p in group["params"]):
            self.find_masks(optimizer)  # after add_param_group, or accelerate has replaced the parameters by shards
        for parameter, kept in self.held():
            clear_gradient_(parameter, kept)

    def after_step(self, *_) -> None:
        """Pruned weights <- +0.0: Muon, for example, changes weights whose gradient is 0."""
        for parameter, kept in self.held():
            clear_(parameter, kept)

    def clear_moments(self, optimizer: Optimizer) -> None:
        """Moments of pruned weights <- 0: every tensor in the state of a parameter that has its shape."""
        for parameter, kept in self.held():
            for value in optimizer.state.get(parameter, {}).values():
                plain = isinstance(value, Tensor) and type(local(value)) is Tensor  # not quantized by a library
                if plain and not value.is_sparse and value.is_floating_point() and local(value).shape == kept.shape:
                    clear_(value, kept)


def clear_gradient_(parameter: Tensor, kept: Tensor) -> None:
    """Gradient <- 0 for pruned weights."""
    if parameter.grad is not None and parameter.grad.is_sparse:  # rows, as of nn.Embedding(sparse=True)
        parameter.grad = parameter.grad.coalesce()
        clear_(parameter.grad.values(), kept[parameter.grad.indices()[0].to(kept.device)])
    elif parameter.grad is not None:
        clear_(parameter.grad, kept)


@torch.no_grad()
def clear_(tensor: Tensor, kept: Tensor) -> None:
    """Tensor <- +0.0 for pruned weights."""
    tensor = local(tensor)
    if kept.device != tensor.device:  # the model was moved
        kept.data = kept.to(tensor.device)
    tensor.view(INTEGERS[tensor.element_size()]).mul_(kept)  # exact, also for NaN; four times as fast as masked_fill_


def find_mask(parameter: Tensor, largest: NMPattern | None, name: str) -> Tensor | None:
    """The mask of the rows of this process; None if the parameter is not held. Raises as `hold_masks_`."""
    limit = largest or WINDOWED[0]
    group = {"params": [parameter], "reg_lambda": 1.0, "pattern": limit}
    no_blocks = parameter.ndim >= 2 and not limit.fits(parameter.shape[-1])
    if no_blocks or not parameter.is_floating_point() or not list(pruned_parameters(group)):  # refuses flat parameters
        return None
    what, in_features = f"parameter {name}, of shape {list(parameter.shape)}, is", parameter.shape[-1]
    probes = [probe for probe in PROBES if probe.fits(in_features) and not splits_blocks(parameter, probe)]
    rows = live_rows(local(parameter))
    counts = {probe: counts_of(parameter, rows, probe) for probe in probes}
    if largest is None:
        pattern = pattern_of_counts(what, counts, in_features)
    else:
        pattern = clear_pattern(counts, in_features)
        if pattern is None or pattern.density > largest.density:
            pattern = pattern_within(largest, what, counts.get(largest) or counts_of(parameter, rows, largest))
    return pattern and nm_mask(local(parameter).abs(), pattern)


def pattern_within(largest: NMPattern, what: str, blocks: list[int]) -> NMPattern | None:
    """n:M, n the largest number of nonzeros in a block of M; None: dense, or 0 everywhere. Raises as `hold_masks_`.

    `blocks`: `NMPattern.counts` for `largest`, N:M.
    """
    n = max(k for k, count in enumerate(blocks) if count or k == 0)
    if 0 < sum(blocks[largest.n + 1 :]) < sum(blocks[1 : largest.n + 1]):
        raise ValueError(f"{what} {not_quite(largest, blocks)}")
    if largest.n < n < largest.m:
        pattern = f"{n}:{largest.m}"
        raise ValueError(f'{what} {pattern}, not {largest}; pass pattern="{pattern}", or prune it to {largest} first')
    return NMPattern(n, largest.m) if 0 < n < largest.m else None


def counts_of(parameter: Tensor, rows: Tensor, pattern: NMPattern) -> list[int]:
    """`NMPattern.counts` of the rows of the whole parameter; `rows`: those of this process."""
    counts = pattern.counts(rows)
    for dimension, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            counts = counts.to(parameter.device_mesh.device_type)  # nccl does not accept CPU tensors
            dist.all_reduce(counts, group=parameter.device_mesh.get_group(dimension))
    return counts.tolist()
