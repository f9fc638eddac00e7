"""The parts of Algorithm 1: training state, gradients, steps."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import IGNORED_LABEL, sample_stream
from proxsparse.errors import InputError
from proxsparse.models.checks import first_not_finite
from proxsparse.optim import ProxAdamW
from proxsparse.runtime import distributed, sharding
from proxsparse.runtime.device import autocast
from proxsparse.runtime.distributed import world_size
from proxsparse.training.distillation import calibration_loss
from proxsparse.training.hidden_states import matching_loss
from proxsparse.training.learnable_layer import LearnableLayer, count_not_finite
from proxsparse.training.mask_monitor import MaskMonitor
from proxsparse.training.optimizer import prox_adamw, weights_of
from proxsparse.training.options import LearningOptions


@dataclass
class TrainState:
    """The state of the training, which a checkpoint saves: learned weights, optimizer and counters."""

    model: nn.Module
    learned: dict[str, LearnableLayer]
    options: LearningOptions
    steps: int
    optimizer: ProxAdamW
    monitor: MaskMonitor
    step: int = 0  # finished steps
    batches: int = 0  # batches used by all processes
    tokens: int = 0
    seconds: float = 0.0
    clock: float = field(default_factory=time.monotonic)  # time of the last update of `seconds`

    @classmethod
    def begin(
        cls, model: nn.Module, learned: dict[str, LearnableLayer], options: LearningOptions, steps: int
    ) -> "TrainState":
        """The state before the first step; sets requires_grad of every parameter."""
        optimizer = prox_adamw(model, learned, options)
        return cls(model, learned, options, steps, optimizer, MaskMonitor(learned.values(), steps))

    def remask_(self) -> None:
        """Applies the current masks to the weights of masked layers."""
        for one in self.learned.values():
            one.remask_()

    def count_(self, micro_batches: list[dict[str, Tensor]]) -> None:
        """Updates the counters after a step."""
        (tokens,) = distributed.all_reduce_sum([sum(int(batch["attention_mask"].sum()) for batch in micro_batches)])
        now = time.monotonic()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        self.step, self.tokens = self.step + 1, self.tokens + int(tokens)
        self.batches += self.options.gradient_accumulation_steps * world_size()

    def masks(self) -> dict[str, Tensor]:
        """The masks of the learned weights: layer name -> bool [local rows, in_features] on the CPU, True = kept.

        Raises:
            InputError: a weight is not finite: the run has diverged.
        """
        if count_not_finite(self.learned.values()):
            raise InputError("the weights became NaN or infinite during training; lower --learning_rate")
        return {name: one.mask().cpu() for name, one in self.learned.items()}


def step_count(batches: int, options: LearningOptions) -> int:
    """Optimizer steps of a run: --max_steps, or --num_train_epochs converted to steps; at least 1.

    Raises:
        InputError: a step needs more batches than there are.
    """
    a_step = options.gradient_accumulation_steps * world_size()
    if a_step > batches:
        raise InputError(
            f"--gradient_accumulation_steps {options.gradient_accumulation_steps}: a step on {world_size()} processes "
            f"needs {a_step} batches, the calibration text has {batches}; lower it, or raise --num_samples"
        )
    if options.max_steps > 0:
        return options.max_steps
    return max(1, int(batches * options.num_train_epochs) // a_step)


def own_samples(batches: list[dict[str, Tensor]], seed: int, taken: int) -> Iterator[dict[str, Tensor]]:
    """The batches of this process: every world_size-th one of the stream, after the first `taken` batches."""
    return itertools.islice(sample_stream(batches, seed), taken + distributed.rank(), None, world_size())


def start_training(model: nn.Module, gradient_checkpointing: bool) -> None:
    """Sets training mode and enables gradient checkpointing."""
    model.train()
    if gradient_checkpointing:
        # transformers 5.2x has renamed it and deprecated the old name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def loss_of(state: TrainState) -> Callable[[dict[str, Tensor]], Tensor]:
    """A function: batch -> its loss, a scalar."""
    options = state.options
    if options.match_hidden:
        masked = state.learned.values()
        return partial(matching_loss, state.model, masked, distill=options.distill, weight=options.match_hidden)
    return partial(calibration_loss, state.model, distill=options.distill)


def backward(
    model: nn.Module,
    batches: list[dict[str, Tensor]],
    compute_dtype: torch.dtype | None,
    loss_of_batch: Callable[[dict[str, Tensor]], Tensor],
) -> float:
    """Adds the gradient of the loss to `.grad`. Returns the loss, the mean over all predicted tokens of all processes.

    Batches are weighted by their number of tokens, because the gradient of a short document is noisy.

    Raises:
        InputError: the loss is not finite.
    """
    predicted = [int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches]
    (all_predicted,) = distributed.all_reduce_sum([sum(predicted)])
    loss = 0.0
    for batch, count in zip(batches, predicted, strict=True):
        with autocast(model.device, compute_dtype):
            batch_loss = loss_of_batch(batch) * (count / all_predicted)
        (part,) = distributed.all_reduce_sum([batch_loss.item()])
        if not math.isfinite(part):  # checked before the backward pass, which may update the weights
            with autocast(model.device, compute_dtype):
                where = first_not_finite(model, batch["input_ids"])
            raise InputError(
                f"the loss is {part}{where}; lower --learning_rate, or use --precision fp32; if this is "
                "the first step, check the model for damaged weights"
            )
        if not batch_loss.requires_grad:
            raise InputError(
                f"the loss of {type(model).__name__} has no gradient, so its mask cannot be learned; use "
                "proxsparse prune --method magnitude"
            )
        batch_loss.backward()
        loss += part
    return loss


@contextmanager
def stepping(state: TrainState) -> Iterator[Callable[[], float]]:
    """Yields a function that ends a step: the base step, then the prox, of every weight.

    The function returns the norm of all gradients before clipping, and raises InputError if it is not finite. With
    step_in_backward the backward pass updates each weight and frees its gradient as soon as the gradient is computed.
    Then the function only returns the norm, and its error comes after the update.
    """
    if not state.options.step_in_backward:
        yield partial(step_, state)
        return
    learned = {id(one.layer.weight): one for one in state.learned.values()}
    parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
    squares: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        one = learned.get(id(parameter))
        if one:
            one.take_gradient_()
        weight = one.weight if one else parameter
        squares.append(sharding.local(weight.grad).float().square().sum())
        state.optimizer.step_parameter(weight)
        weight.grad = None
        if one:
            one.remask_()

    def norm() -> float:
        square = sharding.sum_of_shards(torch.stack(squares).sum(), parameters[0])
        squares.clear()
        return checked_norm(square.sqrt().item())

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in parameters]
    try:
        yield norm
    finally:
        for handle in handles:
            handle.remove()


def step_(state: TrainState) -> float:
    """The base step, then the prox, of every weight. Returns the norm of all gradients before clipping.

    Raises:
        InputError: the norm is not finite; no weight has been updated.
    """
    for one in state.learned.values():
        one.take_gradient_()
    norm = nn.utils.clip_grad_norm_(weights_of(state.optimizer).values(), state.options.max_grad_norm or math.inf)
    norm = checked_norm((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.remask_()
    return norm


def checked_norm(norm: float) -> float:
    """The norm of the gradient. Raises InputError if it is not finite."""
    if not math.isfinite(norm):
        raise InputError(f"the gradient norm is {norm}; lower --learning_rate, or use --precision fp32")
    return norm
