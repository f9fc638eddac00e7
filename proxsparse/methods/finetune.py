"""Recovery: the mask is held, the kept weights are trained on text and on the predictions of the dense model."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import IGNORED_LABEL, add_labels
from proxsparse.errors import InputError
from proxsparse.methods.proxsparse import run_loop
from proxsparse.methods.registry import Method
from proxsparse.methods.store import Store
from proxsparse.methods.walk import Batches
from proxsparse.models.checks import evaluating
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.loading import load_model, load_tokenizer
from proxsparse.patterns import NMPattern
from proxsparse.runtime.device import autocast
from proxsparse.runtime.distributed import all_reduce_sum, shard_items
from proxsparse.runtime.sharding import shard_and_move_
from proxsparse.training.distillation import calibration_loss, teacher_targets
from proxsparse.training.early_stopping import EarlyStopping
from proxsparse.training.held_layer import HeldLayer, hold_layers, require_held
from proxsparse.training.log import check_tracker
from proxsparse.training.loop import TrainState, step_count
from proxsparse.training.optimizer import adamw, weights_of
from proxsparse.training.options import HELD_OUT, FinetuneOptions


def check(**options) -> None:
    """Raises InputError for an option that is out of range or not available."""
    options = FinetuneOptions(**options).check()
    check_tracker(options.report_to)


def check_model(
    layers: dict[str, nn.Linear],
    patterns: dict[str, NMPattern],
    _base: dict,
    tokenizer,
    teacher: str | None = None,
    **_options,
) -> None:
    """Raises InputError if a layer is not N:M, or the teacher has other tokens, before anything is measured."""
    require_held(layers, patterns)
    if teacher:
        check_tokens(tokenizer, teacher)


def finetune(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    store: Store | None = None,
    **options,
) -> dict[str, Tensor]:
    """min over the kept weights of  (1 - a) * -log p(y)  +  a * KL(teacher || p),  a = `distill`, with AdamW.

    The mask is that of the zeros in the model; pruned weights stay +0.0. Embeddings and the output layer are not
    trained. The weights with the smallest loss on the held-out samples are kept.

    Args:
        options: the fields of `FinetuneOptions`.
    Returns:
        Layer name -> bool [out_features, in_features] on the CPU, True = kept; for a sharded model the rows of this
        process.
    Raises:
        InputError: a layer is not N:M; the teacher has another vocabulary; a loss or gradient is not finite.
    """
    options, store = FinetuneOptions(**options).check(), store or Store()
    dtype = torch.get_autocast_dtype(model.device.type) if torch.is_autocast_enabled(model.device.type) else None
    learns = {name: weight.requires_grad for name, weight in model.named_parameters()}
    held = hold_layers(layers, patterns)
    batches = [add_labels(batch) for batch in batches]
    batches, held_out = split(batches, options)
    steps = step_count(len(batches), options)
    if options.distill:
        if not options.teacher:
            raise InputError(f"teacher=None: distill={options.distill} needs the dense model; give its name or folder")
        teacher = load_teacher(options.teacher, model, store)
        targets = teacher_targets(teacher, [*batches, *held_out])
        batches, held_out = targets[: len(batches)], targets[len(batches) :]
        del teacher, targets

    measure = partial(held_out_loss, model, held_out, dtype, options.distill) if held_out else None
    state = start_state(model, layers, held, options, steps, measure)
    stopping, trained = state.monitor, weights_of(state.optimizer)
    if not store.checkpoint:  # a checkpoint has what was measured before it
        stopping.observe(0)
    run_loop(state, store, batches, dtype, "training the kept weights")
    stopping.take_best_()
    store.figures |= {
        "steps": state.step,
        "tokens": state.tokens,
        "held_out": {"losses": stopping.losses, "best_step": stopping.best_step if stopping.losses else None},
        "trained_weights": sum(weight.numel() for weight in trained.values()),
    }
    for name, weight in model.named_parameters():
        weight.requires_grad_(learns.get(name, False))
    store.trained = frozenset(trained)
    return {name: one.mask().cpu() for name, one in held.items()}


def start_state(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    held: dict[str, HeldLayer],
    options: FinetuneOptions,
    steps: int,
    measure: Callable[[], float] | None = None,
) -> TrainState:
    """The state before the first step; sets requires_grad of every parameter. `measure`: the held-out loss."""
    trained = trained_parameters(model, layers, options)
    # one group for each parameter, as --step_in_backward needs
    optimizer = adamw([{"params": [one], "lr": options.learning_rate} for one in trained.items()], options)
    stopping = EarlyStopping(measure, trained, max(1, steps // options.evals), steps, options.patience)
    return TrainState(model, held, options, steps, optimizer, stopping)


def split(batches: list[dict[str, Tensor]], options: FinetuneOptions) -> tuple[list, list]:
    """The batches to train on, and the last batches, with --held_out samples, to measure.

    Raises:
        InputError: no sample is left to train on.
    """
    samples = sum(len(batch["input_ids"]) for batch in batches)
    asked = min(HELD_OUT, samples // 8) if options.held_out is None else options.held_out
    count = -(-asked // options.per_device_train_batch_size)
    if count >= len(batches):
        raise InputError(f"--held_out {asked}: the calibration text has only {samples} samples; lower it")
    return batches[: len(batches) - count], batches[len(batches) - count :]


def check_tokens(tokenizer, teacher: str) -> None:
    """Raises InputError if a token id has different texts in the tokenizers of the model and of the teacher.

    An id that only one of the two has is accepted, such as that of an added padding token.
    """
    with named_teacher():
        other = load_tokenizer(teacher)
    own, others = ({i: text for text, i in one.get_vocab().items()} for one in (tokenizer, other))
    different = [i for i in sorted(own.keys() & others.keys()) if own[i] != others[i]]
    if different:
        i = different[0]
        raise InputError(
            f"--teacher {teacher}: its tokens are not those of {tokenizer.name_or_path}: {len(different):,} token ids "
            f"differ, such as {i}: {others[i]!r} in the teacher, {own[i]!r} in the model; give the dense model that "
            "was pruned"
        )


@contextmanager
def named_teacher() -> Iterator[None]:
    """Within the block an InputError gets the name of the flag."""
    try:
        yield
    except InputError as error:
        raise InputError(f"--teacher: {error}") from error


def read_teacher(name: str, model: nn.Module) -> nn.Module:
    """The teacher of the model, on the CPU.

    Raises:
        InputError: it cannot be loaded, or has another vocabulary.
    """
    with named_teacher():
        teacher, _ = load_model(name)
    sizes = [len(one.get_input_embeddings().weight) for one in (model, teacher)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"--teacher {name}: its vocabulary has {sizes[1]:,} tokens, that of the model {sizes[0]:,}; give the dense "
            "model that was pruned"
        )
    return teacher


def load_teacher(name: str, model: nn.Module, store: Store) -> nn.Module:
    """The teacher on the device of the model; also measures its held-out perplexity, as that of "dense".

    Raises:
        InputError: as `read_teacher`.
    """
    teacher = read_teacher(name, model)
    weight = next(model.parameters())
    shard_and_move_(teacher, decoder_blocks(teacher), weight.device, weight.dtype, "disk", within_node=False)
    store.score("dense", teacher)
    return teacher


def trained_parameters(
    model: nn.Module, layers: dict[str, nn.Linear], options: FinetuneOptions
) -> dict[str, nn.Parameter]:
    """Parameter name -> the parameters that --train trains; also sets requires_grad of all parameters."""
    chosen = {id(layer.weight) for layer in layers.values()} if options.train == "kept" else set()
    inside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in chosen or (weight.ndim == 1 and id(weight) not in inside))
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def held_out_loss(
    model: nn.Module, batches: list[dict[str, Tensor]], dtype: torch.dtype | None, distill: float
) -> float:
    """The mean loss over all predicted tokens of the batches of all processes.

    Raises:
        InputError: it is not finite.
    """
    loss, tokens = 0.0, 0
    with evaluating(model), autocast(model.device, dtype):
        for batch, counts in shard_items(batches):
            predicted = counts * int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
            loss += predicted * calibration_loss(model, batch, distill).item()
            tokens += predicted
    loss, tokens = all_reduce_sum([loss, float(tokens)])
    if not math.isfinite(loss):
        raise InputError("the held-out loss is not finite; lower --learning_rate, or use --precision fp32")
    return loss / tokens


FINETUNE = Method(
    name="finetune",
    needs_data=True,
    updates_weights=True,
    paper="fine-tuning under a fixed mask with distillation",
    prune=finetune,
    options={one.name: one.default for one in dataclasses.fields(FinetuneOptions)},
    starts_as="pruned",
    keeps="checkpoints",
    check=check,
    check_model=check_model,
)
