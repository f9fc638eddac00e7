"""One step of each form of training on the same model and the same tokens, and the seconds of its parts."""

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import add_labels
from proxsparse.methods import get_method, prune_
from proxsparse.methods.finetune import start_state
from proxsparse.models.layers import prunable_layers
from proxsparse.patterns import NMPattern
from proxsparse.run.config import TrainConfig
from proxsparse.run.job import method_options
from proxsparse.runtime.device import autocast
from proxsparse.training.distillation import teacher_targets
from proxsparse.training.held_layer import hold_layers
from proxsparse.training.learnable_layer import make_learnable_layers
from proxsparse.training.loop import TrainState, backward, loss_of, start_training, step_
from proxsparse.training.options import FinetuneOptions, LearningOptions
from proxsparse.training.scaling import activation_scaling

Batch = dict[str, Tensor]
WARM_UP = 2  # steps that are not timed


class Parts(dict):
    """Name of a part of a step -> seconds."""

    def timed(self, part: str, run: Callable) -> Callable:
        """`run`, whose seconds are added to the part. A part that runs within another one is not counted twice."""

        def wrapped(*arguments):
            began, inner = time.perf_counter(), sum(self.values())
            result = run(*arguments)
            for device in range(torch.cuda.device_count()):
                torch.cuda.synchronize(device)
            inner = sum(self.values()) - inner
            self[part] = self.get(part, 0.0) + time.perf_counter() - began - inner
            return result

        return wrapped


def fine_tuning(
    model: nn.Module, batches: list[Batch], config: TrainConfig, dtype: torch.dtype | None, **adamw
) -> tuple[Parts, Callable[[Batch], None]]:
    """All weights with torch.optim.AdamW and clipped gradients, and the loss of transformers."""
    model.requires_grad_().train()
    optimizer, parts = torch.optim.AdamW(model.parameters(), lr=1e-5, **adamw), Parts()

    def learn(batch: Batch) -> None:
        with autocast(model.device, dtype):
            loss = model(**batch, use_cache=False).loss
        loss.backward()

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def step(batch: Batch) -> None:
        parts.timed("forward and backward", learn)({name: batch[name] for name in ("input_ids", "labels")})
        parts.timed("optimizer", update)()

    return parts, step


def fused_fine_tuning(*arguments) -> tuple[Parts, Callable[[Batch], None]]:
    """The same with the fused AdamW of torch, which is not its default."""
    return fine_tuning(*arguments, fused=True)


def mask_learning(
    model: nn.Module, batches: list[Batch], config: TrainConfig, dtype: torch.dtype | None
) -> tuple[Parts, Callable[[Batch], None]]:
    """Algorithm 1 as `proxsparse train` runs it, with its statistics of the masks, without log and checkpoints."""
    options, parts = LearningOptions(**method_options(config, get_method("proxsparse"))).check(), Parts()
    layers = prunable_layers(model, config.pattern)
    pretrained = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    scales = activation_scaling(model, layers, batches, 1) if options.scaling == "activation" else {}
    patterns = dict.fromkeys(layers, NMPattern.parse(config.pattern))
    learned = make_learnable_layers(layers, pretrained, scales, patterns, options.forward == "masked")
    state = TrainState.begin(model, learned, options, len(batches))
    state.remask_ = parts.timed("masked weights", state.remask_)
    start_training(model, options.gradient_checkpointing)

    def observe(batch: Batch) -> None:
        state.count_([batch])
        state.monitor.observe(state.step)

    def step(batch: Batch) -> None:
        parts.timed("forward and backward", backward)(model, [batch], dtype, loss_of(state))
        parts.timed("optimizer", step_)(state)
        parts.timed("statistics", observe)(batch)

    return parts, step


def recovery(
    model: nn.Module, batches: list[Batch], config: TrainConfig, dtype: torch.dtype | None
) -> tuple[Parts, Callable[[Batch], None]]:
    """The training of `proxsparse finetune` under the magnitude mask, without held-out samples, log and checkpoints."""
    options, parts = FinetuneOptions(distill=config.distill, max_grad_norm=config.max_grad_norm).check(), Parts()
    layers = prunable_layers(model, config.pattern)
    prune_(model, "magnitude", pattern=config.pattern)
    held = hold_layers(layers, dict.fromkeys(layers, NMPattern.parse(config.pattern)))
    state = start_state(model, layers, held, options, len(batches))
    start_training(model, options.gradient_checkpointing)

    def step(batch: Batch) -> None:
        parts.timed("forward and backward", backward)(model, [batch], dtype, loss_of(state))
        parts.timed("optimizer", step_)(state)

    return parts, step


BASE = "fine-tuning"
CONTENDERS = {
    BASE: fine_tuning,
    "fine-tuning, fused AdamW": fused_fine_tuning,
    "mask learning": mask_learning,
    "recovery": recovery,
}


def step_seconds(
    model: nn.Module, batches: list[Batch], config: TrainConfig, dtype: torch.dtype | None, contenders: list[str]
) -> list[dict[str, object]]:
    """A row for each contender: the median seconds of a step, those of its parts, and the median of its ratio to BASE.

    Every contender has a copy of the model. They take turns, one step each, so that all of them see the same load.
    """
    batches = [add_labels(batch) for batch in batches]
    if config.distill:
        batches = teacher_targets(model, batches)
    prepared = {name: CONTENDERS[name](copy.deepcopy(model), batches, config, dtype) for name in contenders}
    turns = []
    for batch in batches:
        turns.append({})
        for name, (parts, step) in prepared.items():
            parts.clear()
            step(batch)
            turns[-1][name] = dict(parts)
    rows = []
    for name in contenders:
        own = [turn[name] for turn in turns[WARM_UP:]]
        seconds = [sum(parts.values()) for parts in own]
        against = [sum(turn[BASE].values()) for turn in turns[WARM_UP:]]
        rows.append(
            {
                "case": name,
                "step_seconds": statistics.median(seconds),
                "parts": {part: statistics.median(parts[part] for parts in own) for part in own[0]},
                "ratio": statistics.median(mine / base for mine, base in zip(seconds, against, strict=True)),
                "turns": len(own),
            }
        )
    return rows
