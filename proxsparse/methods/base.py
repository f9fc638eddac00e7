"""The table of pruning methods, and the one layer-by-layer walk that calibrates them.

The walk holds one decoder block's statistics at a time: the calibration samples run through the block, its layers are
pruned, the samples run again, and what the pruned block puts out is what the next one receives.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from proxsparse.errors import InputError
from proxsparse.models import decoder_blocks, prunable_layers
from proxsparse.patterns import NMPattern, PatternLike

Batches = Iterable[dict[str, Tensor]]


@dataclass(frozen=True)
class Method:
    """`prune(weight, statistics, pattern, **options)` gives the mask, and the new weight or None if it stays.

    Without needs_data its `statistics` are None, else an instance of this class: `__init__(layer)`, `add(inputs)`
    with [tokens, in_features], `tokens` (how many so far) and `sums` (what was added up).
    """

    name: str
    needs_data: bool
    updates_weights: bool
    paper: str
    statistics: type | None
    prune: Callable[..., tuple[Tensor, Tensor | None]]


_methods: dict[str, Method] = {}


def register_method(name: str, needs_data: bool, updates_weights: bool, paper: str, statistics: type | None = None):
    """Decorator: add a pruning function to the table; `statistics` is required where it needs data."""
    if needs_data != (statistics is not None):
        raise ValueError(f"method {name!r}: needs_data={needs_data}, statistics={statistics}: give both or neither")

    def add(prune: Callable) -> Callable:
        _methods[name] = Method(name, needs_data, updates_weights, paper, statistics, prune)
        return prune

    return add


def methods() -> list[str]:
    """The names of all registered methods."""
    return sorted(_methods)


def method(name: str) -> Method:
    """The method of that name. Raises InputError, listing the choices, if there is none."""
    if name not in _methods:
        raise InputError(f"method {name!r}: there is no such method; choose from {', '.join(methods())}")
    return _methods[name]


@torch.no_grad()
def prune_(
    model: nn.Module,
    name: str,
    batches: Batches = (),
    pattern: PatternLike = "2:4",
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    progress: bool = False,
    **options,
) -> dict[str, Tensor]:
    """Prunes the layers of a model in place by the method `name`; pruned weights become +0.0.

    Args:
        batches: calibration samples, dicts of input_ids and attention_mask, int64 [B, T], T may vary; padding does
            not count. Methods without needs_data ignore them.
        include, exclude: which layers, as in `models.prunable_layers`.
        options: what the method's function takes beside (weight, statistics, pattern), such as damping=0.1.
    Returns:
        Layer name -> bool [out_features, in_features] on the CPU, True = kept; in model order.
    Raises:
        InputError: an unknown method, no calibration sample, or a layer that cannot be pruned; names the layer.
    """
    chosen, pattern, masks = method(name), NMPattern.parse(pattern), {}
    layers = prunable_layers(model, pattern, include, exclude)

    def prune_layers(statistics: dict) -> None:
        for layer_name, statistic in statistics.items():
            try:
                masks[layer_name] = prune_layer_(layers[layer_name], chosen, statistic, pattern, options)
            except InputError as error:
                raise InputError(f"{layer_name}: {error}") from error

    if chosen.needs_data:
        walk(model, layers, batches, chosen.statistics, prune_layers, progress)
    else:
        prune_layers(dict.fromkeys(layers))
    return masks


def prune_layer_(layer: nn.Linear, chosen: Method, statistics, pattern: NMPattern, options: dict) -> Tensor:
    """Prunes one layer in place and returns its mask on the CPU."""
    if statistics is not None and statistics.tokens == 0:
        raise InputError("no calibration token reached this layer; take more samples, or exclude it with --exclude")
    if statistics is not None and not statistics.sums.isfinite().all():
        raise InputError("its calibration inputs overflow or hold a NaN; load the model in bfloat16 or float32")
    mask, new_weight = chosen.prune(layer.weight, statistics, pattern, **options)
    weight = layer.weight if new_weight is None else new_weight.to(layer.weight.dtype)
    layer.weight.copy_(torch.where(mask, weight, 0.0))  # where, not a product: that would leave -0.0
    return mask.cpu()


@dataclass
class Sample:
    """One calibration batch on its way through the decoder blocks."""

    hidden: Tensor  # [B, T, hidden_size], what the next decoder block receives
    real: Tensor  # bool [B * T], False on padding
    calls: list[tuple[tuple, dict]]  # every decoder block's other positional arguments, and its keyword arguments

    def run(self, block: nn.Module, index: int) -> Tensor:
        """[B, T, hidden_size], the output of decoder block `index`."""
        args, kwargs = self.calls[index]
        output = block(self.hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def walk(
    model: nn.Module, layers: dict[str, nn.Linear], batches: Batches, collect: type, visit: Callable, progress: bool
) -> None:
    """Calls `visit({layer name: statistics})` for one decoder block after the other, in evaluation mode.

    `collect(layer)` makes the statistics. The inputs of later blocks have gone through the block as `visit` left it.
    """
    blocks, training = decoder_blocks(model), [module for module in model.modules() if module.training]
    model.eval()
    try:
        samples = [capture(model, blocks, batch) for batch in batches]
        if not samples:
            raise InputError("no calibration sample: this method needs data; give at least one batch")
        for index, block in enumerate(tqdm(blocks, desc="pruning", unit="decoder block", disable=not progress)):
            inside = set(block.modules())
            statistics = {name: collect(layer) for name, layer in layers.items() if layer in inside}
            for sample in samples if statistics else ():
                with ExitStack() as hooks:
                    for name, statistic in statistics.items():
                        hooks.enter_context(layers[name].register_forward_pre_hook(feeding(statistic, sample.real)))
                    sample.run(block, index)
            visit(statistics)
            for sample in samples if index + 1 < len(blocks) else ():
                sample.hidden = sample.run(block, index)
    finally:
        for module in training:
            module.training = True


def feeding(statistics, real: Tensor) -> Callable:
    """The forward pre-hook of a layer that adds its inputs, without padding, to the statistics."""

    def hook(layer: nn.Module, args: tuple) -> None:
        rows = args[0].flatten(0, -2)
        # a layer that sees other rows than the block does (an expert: its routed tokens) is taken as it is
        statistics.add(rows[real] if len(rows) == len(real) else rows)

    return hook


class _Captured(Exception):
    """Ends a forward pass whose rest is not needed."""


def capture(model: nn.Module, blocks: nn.ModuleList, batch: dict[str, Tensor]) -> Sample:
    """What the first decoder block receives, and every block's other arguments, from the model's own forward."""
    hidden, calls = [], []
    needed = len(blocks) if blocks_differ(model, blocks) else 1

    def record(block: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden.append(args[0] if args else kwargs["hidden_states"])
        calls.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))
        if len(calls) == needed:
            raise _Captured

    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with ExitStack() as hooks, suppress(_Captured):
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(record, with_kwargs=True))
        model(**inputs, use_cache=False)
    return Sample(hidden[0], inputs["attention_mask"].flatten().bool(), calls * (len(blocks) // needed))


def blocks_differ(model: nn.Module, blocks: nn.ModuleList) -> bool:
    """Whether their arguments may differ: they are built of different modules, or the config lists a value for each."""
    kinds = {tuple(type(module) for module in block.modules()) for block in blocks}
    lists = [value for value in vars(model.config).values() if isinstance(value, list) and len(value) == len(blocks)]
    return len(kinds) > 1 or any(value != values[0] for values in lists for value in values)
