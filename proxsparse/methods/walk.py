"""The layer-by-layer walk that calibrates pruning methods.

The walk holds one decoder block's statistics at a time: the calibration samples run through the block, its layers are
pruned, the samples run again, and what the pruned block puts out is what the next one receives. What is held all the
while is the model on its device and, for each sample, one hidden state [T, hidden_size] and what the model hands to its
blocks beside: rotary tables [T, head_dim], and the [T, T] masks of models that make them. A pruned decoder block can be
kept on disk at once, see `finished_blocks`; a later walk takes it from there.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import single_samples
from proxsparse.errors import InputError
from proxsparse.io.output_folder import FINISHED_BLOCKS
from proxsparse.methods.finished_blocks import load_block, save_block
from proxsparse.methods.store import Store
from proxsparse.models.checks import check_finite, evaluating
from proxsparse.models.layers import decoder_blocks
from proxsparse.patterns import NMPattern
from proxsparse.runtime.progress import phase

Batches = Iterable[dict[str, Tensor]]


@torch.no_grad()
def prune_layers_(
    method: str,
    prune_layer: Callable,
    statistics: type | None,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    store: Store | None = None,
    **options,
) -> dict[str, Tensor]:
    """`Method.prune` made of a function for one layer; its arithmetic is in full precision even under autocast."""
    masks = {}
    finished_blocks = store.directory / FINISHED_BLOCKS if store and store.directory else None

    def visit(collected: dict) -> None:
        updated = {}
        for name, statistic in collected.items():
            layer = layers[name]
            try:
                with full_precision(layer.weight):
                    mask, new_weight = prune_layer(layer.weight, statistic, patterns[name], **options)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            masks[name] = apply_mask_(layer, mask, new_weight)
            if new_weight is not None:
                updated[name] = layer.weight
        if finished_blocks:
            save_block(finished_blocks, {name: masks[name] for name in collected}, updated, store.run_id)

    def restored(inside: dict[str, nn.Linear]) -> bool:
        finished = load_block(finished_blocks, inside, patterns, store.run_id) if finished_blocks else {}
        for name, (mask, new_weight) in finished.items():
            masks[name] = apply_mask_(inside[name], mask, new_weight)
        return bool(finished)

    if statistics is None:
        with phase(method, len(layers), "layer") as current:
            for name in current.count(layers):
                visit({name: None})
    else:
        walk(model, layers, batches, statistics, visit, method, restored)
    return {name: masks[name] for name in layers}


@torch.no_grad()
def apply_mask_(layer: nn.Linear, mask: Tensor, new_weight: Tensor | None = None) -> Tensor:
    """Prunes one layer in place, with its own weights or new ones, and returns the mask on the CPU."""
    weight = layer.weight if new_weight is None else new_weight.to(layer.weight)
    layer.weight.copy_(torch.where(mask.to(weight.device), weight, 0.0))  # where, not a product: that would leave -0.0
    return mask.cpu()


def full_precision(tensor: Tensor):
    """Within the block autocast is off on the tensor's device: a Hessian in bfloat16 has few digits left."""
    return torch.autocast(tensor.device.type, enabled=False)


@dataclass
class Sample:
    """One calibration sample on its way through the decoder blocks."""

    hidden: Tensor  # [1, T, hidden_size], what the next decoder block receives
    calls: list[tuple[tuple, dict]]  # every decoder block's other positional arguments, and its keyword arguments

    def run(self, block: nn.Module, index: int) -> Tensor:
        """[1, T, hidden_size], the output of decoder block `index`."""
        args, kwargs = self.calls[index]
        output = block(self.hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def walk(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    collect: Callable,
    visit: Callable,
    title: str = "decoder blocks",
    restored: Callable[[dict[str, nn.Linear]], bool] = lambda inside: False,
) -> None:
    """Calls `visit({layer name: statistics})` for one decoder block after the other, in evaluation mode.

    Decoder blocks without layers, and those of which `restored({layer name: layer})` says that it has pruned them, are
    not visited. `title` is that of the progress bar.

    `collect(layer)` makes the statistics of a layer's inputs, an object with `add(inputs)`, [tokens, in_features];
    `tokens`, how many so far; `sums`, what was added up. They are let go when `visit` returns. The inputs of later
    blocks have gone through the block as `visit` left it.

    Raises:
        InputError: no sample, a layer that no token reached, inputs that are not finite; names the layer.
    """
    blocks = decoder_blocks(model)
    with evaluating(model), phase(title, len(blocks), "decoder block") as current:
        # one sample at a time: padding would reach a mixture's experts, where nothing tells it from text
        samples = capture_samples(model, blocks, list(single_samples(batches)))
        insides = [layers_inside(block, layers) for block in blocks]
        waiting = [index for index, inside in enumerate(insides) if inside and not restored(inside)]
        last = max(waiting, default=-1)
        for index in current.count(range(last + 1)):
            if index in waiting:
                visit(statistics_of(blocks[index], index, insides[index], samples, collect))
            for sample in samples if index < last else ():
                sample.hidden = sample.run(blocks[index], index)


def layers_inside(block: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    """Those of the layers that are in the decoder block."""
    inside = set(block.modules())
    return {name: layer for name, layer in layers.items() if layer in inside}


def statistics_of(
    block: nn.Module, index: int, layers: dict[str, nn.Linear], samples: list[Sample], collect: Callable
) -> dict:
    """Layer name -> statistics of its inputs over all samples, for the layers, all of them in that decoder block."""
    statistics = {name: collect(layer) for name, layer in layers.items()}
    for sample in samples:
        with ExitStack() as hooks:
            for name, statistic in statistics.items():
                hooks.enter_context(layers[name].register_forward_pre_hook(make_hook(statistic)))
            sample.run(block, index)
    for name, statistic in statistics.items():
        check_inputs(name, statistic)
    return statistics


def check_inputs(name: str, statistics) -> None:
    """Raises InputError unless the layer of that name has seen tokens, all of them finite."""
    if statistics.tokens == 0:
        raise InputError(f"{name}: no calibration token reached this layer; take more samples, or --exclude it")
    check_finite(name, statistics.sums)


def make_hook(statistics) -> Callable:
    """The forward pre-hook of a layer that adds its inputs to the statistics."""

    def hook(layer: nn.Module, args: tuple) -> None:
        with full_precision(args[0]):
            statistics.add(args[0].flatten(0, -2))

    return hook


class _Captured(Exception):
    """Ends a forward pass whose rest is not needed."""


def capture_samples(model: nn.Module, blocks: nn.ModuleList, texts: list[Tensor]) -> list[Sample]:
    """The samples as they come to the first decoder block. `texts`: input_ids [1, T] each. Raises InputError if empty.

    Most models hand the same objects to all their blocks, and then a forward pass need not go beyond the first block.
    Those with blocks of several kinds (sliding windows, other rotary embeddings) do not. The longest text tells: masks
    that differ in long ones may be absent from short ones.
    """
    if not texts:
        raise InputError("no calibration sample: this method needs data; give at least one batch")
    longest = max(texts, key=Tensor.numel)
    whole = capture_sample(model, blocks, longest, len(blocks))
    needed = 1 if same_arguments(whole.calls) else len(blocks)
    return [whole if ids is longest else capture_sample(model, blocks, ids, needed) for ids in texts]


def same_arguments(calls: list[tuple[tuple, dict]]) -> bool:
    """Whether all calls have the same objects as arguments."""
    objects = [
        ([id(value) for value in args], {name: id(value) for name, value in kwargs.items()}) for args, kwargs in calls
    ]
    return all(others == objects[0] for others in objects)


def capture_sample(model: nn.Module, blocks: nn.ModuleList, ids: Tensor, needed: int) -> Sample:
    """What the first decoder block receives, and every block's other arguments, from the model's own forward on
    input_ids [1, T]; it ends at the `needed`-th block: the first, whose arguments are those of all, or the last."""
    first, calls = [], []

    def record(block: nn.Module, args: tuple, kwargs: dict) -> None:
        if not calls:
            first.append(args[0] if args else kwargs["hidden_states"])
        calls.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))
        if len(calls) == needed:
            raise _Captured

    ids = ids.to(model.device)
    with ExitStack() as hooks, suppress(_Captured):
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(record, with_kwargs=True))
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return Sample(first[0], calls * (len(blocks) // needed))
