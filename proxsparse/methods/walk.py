"""Layer-by-layer calibration and pruning.

For each decoder block in order: the calibration samples run through the block to collect statistics, its layers are
pruned, and the samples run again to compute the inputs of the next block. Memory: the model on its device, the
statistics of one decoder block, and for each sample one hidden state [T, hidden_size] and the other arguments of the
blocks (rotary tables [T, head_dim], for some models [T, T] masks). Pruned decoder blocks are saved as checkpoints: a
resumed run restores their masks and updated weights exactly, and continues after them.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import Batch, single_samples
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import Checkpoints
from proxsparse.io.mask_files import pack_mask, unpack_mask
from proxsparse.methods.pruned import Pruned
from proxsparse.models.checks import check_finite, evaluating
from proxsparse.models.feature_norms import make_hook
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.snap import masked
from proxsparse.patterns import NMPattern
from proxsparse.runtime.device import full_precision
from proxsparse.runtime.progress import phase

Batches = Sequence[Batch]
REMEDY = "so blocks cannot be calibrated one by one; use --method magnitude or proxsparse train, in pack no --calibrate"


@torch.no_grad()
def prune_layers_(
    method: str,
    prune_layer: Callable,
    statistics: type | None,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    checkpoints: Checkpoints | None = None,
    **options,
) -> Pruned:
    """`Method.prune` for a function that prunes one layer; computes in full precision even under autocast."""
    masks = {}

    def visit(collected: dict) -> None:
        tensors = {}
        for name, statistic in collected.items():
            layer = layers[name]
            try:
                with full_precision(layer.weight):
                    mask, new_weight = prune_layer(layer.weight, statistic, patterns[name], **options)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            masks[name] = apply_mask_(layer, mask, new_weight)
            if new_weight is not None:
                tensors[f"weight.{name}"] = layer.weight.detach()
        if checkpoints:
            tensors |= {f"mask.{name}": pack_mask(masks[name]) for name in collected}
            checkpoints.save(block_name(collected), tensors, {})

    def restored(inside: dict[str, nn.Linear]) -> bool:
        name = block_name(inside)
        if not checkpoints or checkpoints.facts(name) is None:
            return False
        tensors = checkpoints.load(name, prefixes=("",))
        for name, layer in inside.items():
            mask = unpack_mask(tensors[f"mask.{name}"], layer.weight.shape[-1])
            masks[name] = apply_mask_(layer, mask, tensors.get(f"weight.{name}"))
        return True

    if statistics is None:
        with phase(method, len(layers), "layer") as current:
            for name in current.count(layers):
                visit({name: None})
    else:
        walk(model, layers, batches, statistics, visit, method, restored)
    return Pruned({name: masks[name] for name in layers})


def block_name(layers: Iterable[str]) -> str:
    """The common prefix of the names of a decoder block's layers: model.layers.0."""
    return os.path.commonpath([name.replace(".", "/") for name in layers]).replace("/", ".")


def apply_mask_(layer: nn.Linear, mask: Tensor, new_weight: Tensor | None = None) -> Tensor:
    """Prunes one layer in place, optionally with new weights, and returns the mask on the CPU."""
    weight = layer.weight if new_weight is None else new_weight.to(layer.weight)
    layer.weight.copy_(masked(weight, mask))
    return mask.cpu()


@dataclass(frozen=True)
class BlockOutput:
    """An argument of a decoder block that is an output of an earlier one: `outputs[block][part]`, part > 0."""

    block: int
    part: int


@dataclass
class Sample:
    """The state of one calibration sample between two decoder blocks."""

    hidden: Tensor  # [1, T, hidden_size], the input of the next decoder block
    calls: list[tuple[tuple, dict]]  # for every decoder block: other positional arguments, keyword arguments
    outputs: dict[int, tuple] = field(default_factory=dict)  # of the blocks that later ones refer to

    def run(self, block: nn.Module, index: int) -> Tensor:
        """[1, T, hidden_size], the output of decoder block `index`."""
        args, kwargs = self.calls[index]
        kwargs = {name: self.resolve(value) for name, value in kwargs.items()}
        output = block(self.hidden, *map(self.resolve, args), **kwargs)
        if index in self.outputs:
            self.outputs[index] = (None, *output[1:])
        return hidden_of(output)

    def resolve(self, value: object) -> object:
        """The value, or the present output of an earlier block that it refers to."""
        return self.outputs[value.block][value.part] if isinstance(value, BlockOutput) else value


def hidden_of(output: object) -> Tensor:
    """The hidden state in the output of a decoder block, which may be a tuple or list that begins with it."""
    return output[0] if isinstance(output, tuple | list) else output


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
    """Calls `visit({layer name: statistics})` for every decoder block in order, in evaluation mode.

    The inputs of a block are the outputs of the previous blocks after `visit`, usually pruned ones.

    Args:
        collect: `collect(layer)` creates the statistics of a layer's inputs: an object with `add(inputs)`, inputs
            [tokens, in_features]; `tokens`, the number added so far; `sums`, their sum.
        visit: not called for decoder blocks without layers. The statistics are freed when it returns.
        restored: `restored({layer name: layer})` returns True if it has pruned the block, which is then not visited.
    Raises:
        InputError: a layer that no token reached, inputs that are not finite; names the layer.
    """
    blocks = decoder_blocks(model)
    with evaluating(model), phase(title, len(blocks), "decoder block") as current:
        # one sample at a time: the experts of a mixture could not distinguish padding from text
        samples = capture_samples(model, blocks, list(single_samples(batches)))
        insides, left = [], dict(layers)  # a layer in several blocks is pruned in the first of them
        for block in blocks:
            modules = set(block.modules())
            insides.append({name: left.pop(name) for name, layer in list(left.items()) if layer in modules})
        waiting = [index for index, inside in enumerate(insides) if inside and not restored(inside)]
        last = max(waiting, default=-1)
        for index in current.count(range(last + 1)):
            if index in waiting:
                visit(statistics_of(blocks[index], index, insides[index], samples, collect))
            for sample in samples if index < last else ():
                sample.hidden = sample.run(blocks[index], index)


def statistics_of(
    block: nn.Module, index: int, layers: dict[str, nn.Linear], samples: list[Sample], collect: Callable
) -> dict:
    """Layer name -> statistics of its inputs over all samples. All `layers` are in `block`."""
    statistics = {name: collect(layer) for name, layer in layers.items()}
    for sample in samples:
        with ExitStack() as hooks:
            for name, statistic in statistics.items():
                hooks.enter_context(layers[name].register_forward_pre_hook(make_hook(statistic)))
            sample.run(block, index)
    if unreached := [name for name, statistic in statistics.items() if statistic.tokens == 0]:
        raise InputError(describe_unreached(unreached, list(layers)))
    for name, statistic in statistics.items():
        check_finite(name, statistic.sums)
    return statistics


def describe_unreached(unreached: list[str], names: list[str]) -> str:
    """Why the first layer of `unreached` has no calibration inputs. `names`: all layers of the decoder block."""
    name = unreached[0]
    if re.search(r"experts\.\d+\.", name):
        return f"{name}: no calibration token reached this expert; use more samples, or --exclude experts"
    outer, parent = name, name.rpartition(".")[0]  # the outermost module of which no layer was called
    while not parent[-1:].isdigit() and all(name in unreached for name in names if name.startswith(f"{parent}.")):
        outer, parent = parent, parent.rpartition(".")[0]
    return (
        f"{name}: the decoder block does not call this layer by itself, so it has no calibration inputs; leave it "
        f"dense with --exclude {re.sub(r'([.][0-9]+)+$', '', outer).rpartition('.')[2]}"
    )


class _Captured(Exception):
    """Ends a forward pass early."""


def capture_samples(model: nn.Module, blocks: nn.ModuleList, texts: list[Tensor]) -> list[Sample]:
    """The samples at the first decoder block. `texts`: input_ids [1, T] each.

    Most models pass the same objects to all blocks; the forward pass can then stop at the first block. Models with
    blocks of several kinds (sliding windows, different rotary embeddings) do not. The longest text decides, because
    short texts may have no mask. Raises as `capture_sample` and `check_arguments`.
    """
    longest = max(texts, key=Tensor.numel)
    whole = capture_sample(model, blocks, longest, len(blocks))
    if same_arguments(whole.calls):
        return [whole if ids is longest else capture_sample(model, blocks, ids, 1) for ids in texts]
    check_arguments(model, blocks, longest, whole)
    return [whole if ids is longest else capture_sample(model, blocks, ids, len(blocks)) for ids in texts]


def same_arguments(calls: list[tuple[tuple, dict]]) -> bool:
    """Whether all calls have the same objects as arguments."""
    objects = [{name: id(value) for name, value in named_arguments(call).items()} for call in calls]
    return all(others == objects[0] for others in objects)


def capture_sample(
    model: nn.Module, blocks: nn.ModuleList, ids: Tensor, needed: int, change: Callable[[Tensor], Tensor] | None = None
) -> Sample:
    """Records the input of the first decoder block and the other arguments of the first `needed` blocks.

    Args:
        ids: input_ids [1, T].
        needed: 1, if all blocks have the same arguments, or the number of blocks.
        change: applied to the hidden state that each block returns.
    Raises:
        InputError: the model does not call every block once and in order, each with the output of the previous one.
    """
    first, calls, kept, earlier, needed_later = [], [], [], {}, {}

    def refer(value: object) -> object:
        output = earlier.get(id(value)) if isinstance(value, Tensor) else None
        if output is None:
            return value
        needed_later[output.block] = ()
        return output

    def record(block: nn.Module, args: tuple, kwargs: dict) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states", None)
        previous = hidden_of(kept[-1]) if kept else hidden
        in_order = len(calls) == len(kept) < len(blocks) and block is blocks[len(calls)]
        if not in_order or not isinstance(hidden, Tensor) or not is_same(hidden, previous):
            raise InputError(
                f"{type(model).__name__} does not call its decoder blocks once and in order, each with the output of "
                f"the previous one, {REMEDY}"
            )
        first.append(hidden)
        named = {name: refer(value) for name, value in kwargs.items()}
        calls.append((tuple(refer(value) for value in args[1:]), named))
        if len(calls) == needed < len(blocks):
            raise _Captured

    def note(block: nn.Module, _args: tuple, output: object) -> object:
        if not isinstance(output, Tensor) and type(output) not in (tuple, list):
            found = type(output).__name__
            raise InputError(f"{type(block).__name__} returns a {found} instead of hidden states, {REMEDY}")
        if change is not None:
            changed = change(hidden_of(output))
            output = type(output)((changed, *output[1:])) if isinstance(output, tuple | list) else changed
        if isinstance(output, tuple | list):
            earlier.update({id(value): BlockOutput(len(kept), part) for part, value in enumerate(output) if part})
        kept.append(output)  # also keeps its tensors alive, so that no other tensor gets their id
        return output

    ids = ids.to(model.device)
    with ExitStack() as hooks, suppress(_Captured):
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(record, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(note))
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    if len(calls) < needed:
        raise InputError(
            f"{type(model).__name__} has called only {len(calls)} of its {len(blocks)} decoder blocks, {REMEDY}"
        )
    return Sample(first[0], calls * (len(blocks) // needed), needed_later)


def is_same(value: object, other: object) -> bool:
    """Whether both are the same object or equal tensors."""
    tensors = isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape
    return value is other or (tensors and value.dtype == other.dtype and torch.equal(value, other))


def check_arguments(model: nn.Module, blocks: nn.ModuleList, ids: Tensor, whole: Sample) -> None:
    """Raises InputError if an argument depends on earlier blocks in another way than as one of their outputs.

    The forward pass is repeated with other outputs of all blocks, and the arguments are compared. An object that is
    passed to all blocks is not: the blocks themselves update it.
    """
    changed = capture_sample(model, blocks, ids, len(blocks), lambda hidden: hidden.flip(-1))
    for index, (call, other) in enumerate(zip(whole.calls, changed.calls, strict=True)):
        for name, value in named_arguments(call).items():
            everywhere = all(named_arguments(each).get(name) is value for each in whole.calls)
            if not everywhere and not is_equal(value, named_arguments(other).get(name)):
                raise InputError(
                    f"decoder block {index}: {type(blocks[index]).__name__} has an argument ({name}) that "
                    f"{type(model).__name__} computes from earlier blocks, {REMEDY}"
                )


def named_arguments(call: tuple[tuple, dict]) -> dict[str, object]:
    """Name, or position as text, -> argument."""
    args, kwargs = call
    return {str(position): value for position, value in enumerate(args, 1)} | kwargs


def is_equal(value: object, other: object) -> bool:
    """Whether nested containers have equal tensors; objects of other types are not compared."""
    if isinstance(value, Tensor):
        return is_same(value, other)
    if isinstance(value, dict):
        return isinstance(other, dict) and all(is_equal(item, other.get(key)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(is_equal, value, other))
    return True
