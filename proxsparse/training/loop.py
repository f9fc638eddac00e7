"""The parts of Algorithm 1: the state of a run, gradients, steps, averaged runs, signals."""

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
from proxsparse.training.learnable_layer import LearnableLayer, count_not_finite
from proxsparse.training.mask_monitor import MaskMonitor
from proxsparse.training.optimizer import prox_adamw, weights_of
from proxsparse.training.options import LearningOptions


class RunAverage:
    """W = 1/R sum_r W_r: the mean of what R runs from the same start have learned, a model soup (Wortsman et al. 2022,
    arXiv 2203.05482), which depends less than one run on the order of its samples.

    With several runs it holds two more copies of what learns: the start, and the sum in float32.
    """

    def __init__(self, weights: dict[str, Tensor], runs: int):
        self.weights = weights if runs > 1 else {}
        self.start = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.sum = {name: torch.zeros_like(start, dtype=torch.float32) for name, start in self.start.items()}
        self.ended = 0

    @torch.no_grad()
    def restart_(self) -> None:
        """Puts the weights back to the start."""
        for name, weight in self.weights.items():
            weight.copy_(self.start[name])

    @torch.no_grad()
    def end_run_(self) -> None:
        """Counts the weights in, and leaves the mean in their place."""
        self.ended += 1
        for name, weight in self.weights.items():
            self.sum[name] += weight
        self.mean_()

    @torch.no_grad()
    def mean_(self) -> None:
        """The weights become the mean of the runs that have ended; if none has, they stay."""
        for name, weight in self.weights.items() if self.ended else ():
            weight.copy_(self.sum[name] / self.ended)


@dataclass
class TrainState:
    """All runs of mask learning, one after the other: what learns, and how far it has come. A checkpoint holds it."""

    model: nn.Module
    learned: dict[str, LearnableLayer]
    options: LearningOptions
    steps: int  # of one run
    optimizer: ProxAdamW
    average: RunAverage
    monitor: MaskMonitor
    step: int = 0  # steps done, in all runs together
    batches: int = 0  # batches that all processes have taken
    tokens: int = 0
    seconds: float = 0.0
    clock: float = field(default_factory=time.monotonic)  # up to which `seconds` counts

    @classmethod
    def begin(
        cls, model: nn.Module, learned: dict[str, LearnableLayer], options: LearningOptions, steps: int
    ) -> "TrainState":
        """The state before the first step; sets requires_grad of every parameter."""
        optimizer = prox_adamw(model, learned, options)
        average = RunAverage(weights_of(optimizer), options.average_runs)
        monitor = MaskMonitor(learned.values(), options.average_runs * steps)
        return cls(model, learned, options, steps, optimizer, average, monitor)

    @property
    def all_steps(self) -> int:
        """The steps of all runs."""
        return self.options.average_runs * self.steps

    def restart_(self) -> None:
        """Begins another run: the initial weights, and an optimizer without state."""
        self.average.restart_()
        self.remask_()
        self.optimizer = prox_adamw(self.model, self.learned, self.options)

    def remask_(self) -> None:
        """Under the mask: the model computes with the mask of the learned weights as they are now."""
        for one in self.learned.values():
            one.remask_()

    def count_(self, micro_batches: list[dict[str, Tensor]]) -> None:
        """Counts a step of these micro-batches; the last step of a run ends it."""
        (tokens,) = distributed.all_reduce_sum([sum(int(batch["attention_mask"].sum()) for batch in micro_batches)])
        now = time.monotonic()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        self.step, self.tokens = self.step + 1, self.tokens + int(tokens)
        self.batches += self.options.gradient_accumulation_steps * world_size()
        if self.step % self.steps == 0:
            self.average.end_run_()

    def masks(self) -> dict[str, Tensor]:
        """The masks of the learned weights: layer name -> bool [rows here, in_features] on the CPU, True = kept.

        Raises:
            InputError: a weight is not finite, so the run has diverged.
        """
        if count_not_finite(self.learned.values()):
            raise InputError("the weights have become NaN or infinite while learning; lower --learning_rate")
        return {name: one.mask().cpu() for name, one in self.learned.items()}


def step_count(batches: int, options: LearningOptions) -> int:
    """Optimizer steps of a run: --max_steps, or what the epochs give; at least 1.

    Raises:
        InputError: a step takes more batches than there are.
    """
    a_step = options.gradient_accumulation_steps * world_size()
    if a_step > batches:
        raise InputError(
            f"--gradient_accumulation_steps {options.gradient_accumulation_steps} on {world_size()} processes takes "
            f"{a_step} batches a step, and the calibration text makes {batches}; lower it, or raise --num_samples"
        )
    if options.max_steps > 0:
        return options.max_steps
    return max(1, int(batches * options.num_train_epochs) // a_step)


def own_samples(batches: list[dict[str, Tensor]], seed: int, taken: int) -> Iterator[dict[str, Tensor]]:
    """Every N-th batch of the stream for this one of N processes, after so many that all of them have taken."""
    return itertools.islice(sample_stream(batches, seed), taken + distributed.rank(), None, world_size())


def start_training(model: nn.Module, gradient_checkpointing: bool) -> None:
    """Training mode, with or without recomputing activations."""
    model.train()
    if gradient_checkpointing:
        # renamed in transformers 5.2x; the old name is deprecated there
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def backward(
    model: nn.Module, batches: list[dict[str, Tensor]], compute_dtype: torch.dtype | None, distill: float
) -> float:
    """Adds the gradient of the loss to `.grad`; returns the loss, the mean over all tokens that all processes predict.

    A batch counts by its tokens: a short document is as noisy as it is short.

    Raises:
        InputError: the loss is not finite.
    """
    predicted = [int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches]
    (all_predicted,) = distributed.all_reduce_sum([sum(predicted)])
    loss = 0.0
    for batch, count in zip(batches, predicted, strict=True):
        with autocast(model.device, compute_dtype):
            batch_loss = calibration_loss(model, batch, distill) * (count / all_predicted)
        (part,) = distributed.all_reduce_sum([batch_loss.item()])
        if not math.isfinite(part):  # looked for now, as a backward pass may step the weights
            with autocast(model.device, compute_dtype):
                where = first_not_finite(model, batch["input_ids"])
            raise InputError(
                f"the loss is {part}{where}; lower --learning_rate, or raise --precision if it is not fp32; at the "
                "first step look for damaged weights"
            )
        batch_loss.backward()
        loss += part
    return loss


@contextmanager
def stepping(state: TrainState) -> Iterator[Callable[[], float]]:
    """Yields a function that ends a step: the base step, then the prox, of every weight.

    It returns the norm of all gradients together, before clipping. With step_in_backward the backward pass has stepped
    every weight once its gradient was computed, and freed the gradient; then only the norm is left to compute.

    The function raises InputError if the norm is not finite; with step_in_backward that is too late for the weights.
    """
    if not state.options.step_in_backward:
        yield partial(step_, state)
        return
    masked = {id(one.layer.weight): one for one in state.learned.values() if one.masked}
    parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
    squares: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        one = masked.get(id(parameter))
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
    """The base step, then the prox, of every weight; returns the norm of all gradients together, before clipping.

    Raises:
        InputError: the norm is not finite; no weight has moved.
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
        raise InputError(
            f"the gradient's norm is {norm}; lower --learning_rate, or raise --precision if it is not fp32"
        )
    return norm
