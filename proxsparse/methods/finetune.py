"""Recovery: the mask is held, the kept weights are trained on text and on the predictions of the dense model."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from proxsparse.data.calibration import IGNORED_LABEL, Batch, add_labels
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import Checkpoints
from proxsparse.methods.pruned import Pruned
from proxsparse.methods.walk import Batches
from proxsparse.models.checks import evaluating
from proxsparse.patterns import NMPattern
from proxsparse.runtime.device import autocast, autocast_dtype
from proxsparse.runtime.distributed import all_reduce_sum, shard_items
from proxsparse.training.best_weights import BestWeights
from proxsparse.training.held_layer import hold_layers
from proxsparse.training.loop import own_samples, step_count, train_step, training
from proxsparse.training.loss import training_loss
from proxsparse.training.optimizer import adamw, weights_of
from proxsparse.training.options import FinetuneOptions
from proxsparse.training.state import TrainState


def train_kept_weights(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    checkpoints: Checkpoints | None = None,
    teacher: nn.Module | None = None,
    masks: dict[str, Tensor] | None = None,
    **options,
) -> Pruned:
    """min over the kept weights of  (1 - a) * -log p(y)  +  a * KL(teacher || p),  a = `distill`, with AdamW.

    Pruned weights stay +0.0. Embeddings and the output layer are not trained. With held-out samples, the weights with
    the smallest loss on them are kept.

    Args:
        checkpoints: where the state is saved; a call with the same arguments resumes from it.
        teacher: the dense model, needed with a > 0; another module than `model`.
        masks: the rows of this process, as in `Pruned`; None: those of the zeros in the model.
        options: the fields of `FinetuneOptions`.
    Returns:
        The masks; for a sharded model the rows of this process.
    Raises:
        InputError: a layer is not N:M, or a weight outside its mask is not 0; a loss or gradient is not finite.
    """
    options, compute_dtype = FinetuneOptions(**options).check(), autocast_dtype(model.device)
    held = hold_layers(layers, patterns, masks)
    batches, held_out = split(batches, options)
    steps = step_count(len(batches), options)
    trained = trained_parameters(model, layers)
    rate = options.learning_rate or default_learning_rate(patterns[name] for name in layers)
    optimizer = adamw([{"params": list(trained.items()), "lr": rate}], options)
    loss_options = {name: getattr(options, name) for name in ("distill", "compile")}
    loss = partial(training_loss, model, teacher=lambda: nullcontext(teacher), **loss_options)
    measure = partial(held_out_loss, model, held_out, compute_dtype, loss) if held_out else None
    best = BestWeights(measure, trained, options.evals, steps)
    state = TrainState(model, held, options, steps, optimizer, best)
    if newest := checkpoints and checkpoints.newest_step():
        state.restore_(checkpoints, *newest)
    else:
        best.observe(0)
    seconds_before = state.seconds

    samples = own_samples(batches, state)
    with training(state, checkpoints, "training the kept weights", teacher) as end_step:
        while not state.complete and not state.stop.number:
            end_step(train_step(state, samples, loss, compute_dtype))

    best.take_best_()
    figures = {
        "steps": state.step,
        "tokens": state.tokens,
        "learning_rate": rate,
        "held_out": {"losses": best.losses, "best_step": best.smallest()[0]},
        "trained_weights": sum(weight.numel() for weight in weights_of(optimizer).values()),
    }
    masks = {name: layer.mask().cpu() for name, layer in held.items()}
    more = {"trained": frozenset(trained), "seconds_before": seconds_before}
    return Pruned(masks, figures, **more, complete=state.complete, stop=state.stop)


def default_learning_rate(patterns: Iterable[NMPattern]) -> float:
    """3e-4; half of it if all layers keep at least two thirds of their weights, as with 4:6.

    3e-4 changes a model that has lost little too much: docs/results.md, "Between 2:4 and dense".
    """
    return 1.5e-4 if min(pattern.density for pattern in patterns) >= 2 / 3 else 3e-4


def split(batches: Sequence[Batch], options: FinetuneOptions) -> tuple[Sequence[Batch], list[Batch]]:
    """The batches to train on (InputError if none is left), and those of the last --held_out samples."""
    held_out, end, left, more = [], len(batches), options.held_out, []
    while left and end:
        end -= 1
        batch = add_labels(batches[end])
        first = max(0, len(batch["input_ids"]) - left)  # held-out sample of the batch
        left -= len(batch["input_ids"]) - first
        held_out.insert(0, {name: tensor[first:] for name, tensor in batch.items()})
        more = [{name: tensor[:first] for name, tensor in batch.items()}] if first else []
    if not (end or more):
        samples = options.held_out - left
        raise InputError(f"--held_out {options.held_out}: the calibration text has only {samples} samples; lower it")
    return ConcatDataset([Subset(batches, range(end)), more]), held_out


def trained_parameters(model: nn.Module, layers: dict[str, nn.Linear]) -> dict[str, nn.Parameter]:
    """Parameter name -> the weights of the layers, norms and biases; also sets requires_grad of all parameters."""
    chosen = {id(layer.weight) for layer in layers.values()}
    inside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    inside |= {id(weight) for weight in model.get_output_embeddings().parameters()}  # its bias too
    for weight in model.parameters():
        weight.requires_grad_(id(weight) in chosen or (weight.ndim == 1 and id(weight) not in inside))
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    batches: list[Batch],
    compute_dtype: torch.dtype | None,
    loss_of_batch: Callable[[Batch], Tensor],
) -> float:
    """The mean loss over all predicted tokens of the batches of all processes. InputError if it is not finite."""
    loss, tokens = 0.0, 0
    with evaluating(model), autocast(model.device, compute_dtype):
        for batch, counts in shard_items(batches):
            predicted = counts * int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
            loss += predicted * loss_of_batch(batch).item()
            tokens += predicted
    loss, tokens = all_reduce_sum([loss, float(tokens)])
    if not math.isfinite(loss):
        raise InputError("the held-out loss is not finite; lower --learning_rate, or use --precision fp32")
    return loss / tokens
