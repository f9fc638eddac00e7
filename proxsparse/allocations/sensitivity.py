"""Patterns of layers by the loss that pruning them costs: little of it for a given share of the arithmetic."""

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from proxsparse.allocations.budget import Layers, arithmetic, numel
from proxsparse.data.calibration import single_samples
from proxsparse.errors import InputError
from proxsparse.methods.walk import Batches
from proxsparse.models.checks import check_finite, evaluating
from proxsparse.models.feature_norms import FeatureNorms, make_hook
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import WINDOWED, NMPattern
from proxsparse.runtime.progress import phase


def sensitivity(
    model: nn.Module,
    layers: Layers,
    batches: Batches,
    *,
    target_flops: float = 0.6,
    samples: int = 32,
) -> dict[str, NMPattern]:
    """Every layer gets 2:4, 4:6, 6:8, 8:10 or stays dense, so that the estimated loss is small:

        cost(layer, pattern) = mean over samples of <dL/dW, W_pruned - W>^2,   L = sum of the losses of its tokens

    the increase of the loss to second order, with the Fisher matrix instead of the Hessian. W_pruned has Wanda's mask.
    Layers that are called with the same input one after the other, such as q, k and v, get the same pattern, so that a
    runtime can join them. All layers begin with 2:4. Those whose next pattern lowers the cost most for its arithmetic
    get it, as long as the mean arithmetic of the layers is at most `target_flops` of the dense model's.

    Args:
        target_flops: arithmetic of the layers, where dense is 1, 2:4 is 0.5 and 6:8 is 0.75.
        samples: number of calibration samples that are used; each takes one backward pass.
    Returns:
        layer name -> pattern; layers that are not in it stay dense.
    """
    used_samples = list(islice(single_samples(batches), samples))
    costs_of, first_of = loss_costs(model, layers, used_samples)
    groups = defaultdict(list)  # the first layer with an input -> all layers with this input
    for name in layers:
        groups[first_of.get(name, name)].append(name)
    costs, flops = {}, {}
    for first, names in groups.items():
        costs[first] = {each: sum(costs_of[name][each] for name in names) for each in costs_of[first]}
        share = numel({name: layers[name] for name in names}) / numel(layers)
        flops[first] = [share * arithmetic(layers[first].in_features, each) for each in costs[first]]
    chosen, used = dict.fromkeys(groups, 0), sum(shares[0] for shares in flops.values())
    while True:
        steps = [
            ((cost[now] - cost[new]) / (share[new] - share[now]), name, new)
            for name, now in chosen.items()
            for cost, share in [(list(costs[name].values()), flops[name])]
            for new in range(now + 1, len(share))
            if share[new] > share[now]
            and cost[new] < cost[now]
            and used + share[new] - share[now] <= target_flops + 1e-9
        ]
        if not steps:
            break
        _, name, new = max(steps)
        used += flops[name][new] - flops[name][chosen[name]]
        chosen[name] = new
    patterns = {name: list(costs[first])[chosen[first]] for first, names in groups.items() for name in names}
    return {name: patterns[name] for name in layers if patterns[name] is not None}


def loss_costs(
    model: nn.Module, layers: Layers, samples: list[Tensor]
) -> tuple[dict[str, dict[NMPattern | None, float]], dict[str, str]]:
    """Layer name -> pattern -> cost, see `sensitivity`; None: dense, without cost. And layer name -> the first layer
    that was called with the same input."""
    norms = {name: FeatureNorms(layer) for name, layer in layers.items()}
    patterns = {name: [each for each in WINDOWED if each.fits(layer.in_features)] for name, layer in layers.items()}
    costs = dict.fromkeys(layers, 0)  # of the patterns, one tensor a layer: the host need not wait for a GPU
    first_of, latest = {}, (None, "")  # the latest input, and the first layer that was called with it

    def note_input(name: str, _: nn.Module, args: tuple[Tensor]) -> None:
        nonlocal latest
        if args[0] is not latest[0]:
            latest = args[0], name
        first_of.setdefault(name, latest[1])

    def add_costs(name: str, weight: nn.Parameter) -> None:
        loss_of_zeros, score = -weight.grad.float() * weight.float(), (weight * norms[name].norms()).abs()
        changes = [torch.where(nm_mask(score, each), 0.0, loss_of_zeros).sum() for each in patterns[name]]
        costs[name] = costs[name] + torch.stack(changes).square() / len(samples)
        weight.grad = None

    with evaluating(model), phase("sensitivity", 2 * len(samples), "sample") as current, ExitStack() as undo:
        for parameter in model.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
        model.requires_grad_(False)
        model.zero_grad()
        undo.callback(model.zero_grad)
        passes = iter(current.count(range(2 * len(samples))))
        with ExitStack() as first, torch.no_grad():
            for name, layer in layers.items():
                first.enter_context(layer.register_forward_pre_hook(make_hook(norms[name])))
                first.enter_context(layer.register_forward_pre_hook(partial(note_input, name)))
            for ids, _ in zip(samples, passes, strict=False):
                model(ids.to(model.device))
        latest = None, ""  # frees the input
        for name, layer in layers.items():
            check_finite(name, norms[name].sums)
            layer.weight.requires_grad_(True)
            undo.enter_context(layer.weight.register_post_accumulate_grad_hook(partial(add_costs, name)))
        for ids, _ in zip(samples, passes, strict=True):
            with torch.enable_grad():
                loss = model(ids.to(model.device), labels=ids.to(model.device), use_cache=False).loss
                (loss * (ids.numel() - 1)).backward()
    found = {}
    for name in layers:
        if not isinstance(costs[name], Tensor) or not costs[name].isfinite().all():
            reason = "has a gradient that is NaN or infinite" if isinstance(costs[name], Tensor) else "has no gradient"
            raise InputError(f"{name}: its weight {reason}; use --precision fp32, or leave it dense with --exclude")
        found[name] = dict(zip(patterns[name], costs[name].tolist(), strict=True)) | {None: 0.0}
    return found, first_of
