"""What Algorithm 1 takes for granted: averaged runs, gradients, steps, signals."""

import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import IGNORED_LABEL, sample_stream
from proxsparse.errors import InputError
from proxsparse.io.mask_files import pack_mask, unpack_mask
from proxsparse.models.checks import first_not_finite
from proxsparse.optim import ProxAdamW
from proxsparse.run.config import TrainConfig
from proxsparse.runtime import distributed, sharding
from proxsparse.runtime.device import autocast
from proxsparse.runtime.distributed import world_size
from proxsparse.training.distillation import calibration_loss
from proxsparse.training.learnable_layer import LearnableLayer, count_not_finite
from proxsparse.training.mask_monitor import MaskMonitor
from proxsparse.training.optimizer import prox_adamw, weights_of


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
    """All runs of a learning, one after the other: what moves, and how far it has come. A checkpoint holds it."""

    model: nn.Module
    learned: dict[str, LearnableLayer]
    config: TrainConfig
    steps: int  # of one run
    optimizer: ProxAdamW
    average: RunAverage
    monitor: MaskMonitor
    step: int = 0  # those that are done, through all runs
    batches: int = 0  # of the stream, taken by all processes
    tokens: int = 0
    seconds: float = 0.0

    @property
    def all_steps(self) -> int:
        """The steps of all runs."""
        return self.config.average_runs * self.steps

    def restart_(self) -> None:
        """Another run: the weights of the start, and an optimizer that knows nothing."""
        self.average.restart_()
        self.remask_()
        self.optimizer = prox_adamw(self.model, self.learned, self.config, self.steps)

    def remask_(self) -> None:
        """Under the mask: the model computes with that of the learned weights as they are now."""
        for one in self.learned.values():
            one.remask_()


def begin(model: nn.Module, learned: dict[str, LearnableLayer], config: TrainConfig, steps: int) -> TrainState:
    """A learning that has done nothing yet; says which parameters learn (requires_grad)."""
    optimizer = prox_adamw(model, learned, config, steps)
    average = RunAverage(weights_of(optimizer), config.average_runs)
    monitor = MaskMonitor(learned.values(), config.average_runs * steps)
    return TrainState(model, learned, config, steps, optimizer, average, monitor)


def averaged_runs(
    state: TrainState, learn: Callable[[ProxAdamW, int], Iterator[dict]], stop: "StopSignal"
) -> Iterator[dict[str, float]]:
    """The runs of a learning from where it stands to their end; the weights end as the mean of all runs.

    Yields the figures of every step that `learn(optimizer, steps of this run that are done)` yields, its tokens, step
    and seconds counted through all runs; the last step of a run sees the mean so far. A signal ends it after a step,
    with the mean of the runs that were complete; the weights of that step if none was.
    """
    earlier, started = state.seconds, time.monotonic()
    while state.step < state.all_steps:
        done = state.step % state.steps
        if state.step and not done:
            state.restart_()
        for row in learn(state.optimizer, done):
            state.step += 1
            state.batches += state.config.gradient_accumulation_steps * world_size()
            state.tokens += row["tokens"]
            state.seconds = earlier + time.monotonic() - started
            if state.step % state.steps == 0:
                state.average.end_run_()
            yield row | {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
            if stop.number:
                state.average.mean_()
                return


def step_count(batches: int, config: TrainConfig) -> int:
    """Optimizer steps of a run: --max_steps, or what the epochs give; at least 1.

    Raises:
        InputError: a step takes more batches than there are.
    """
    a_step = config.gradient_accumulation_steps * world_size()
    if a_step > batches:
        raise InputError(
            f"--gradient_accumulation_steps {config.gradient_accumulation_steps} on {world_size()} processes takes "
            f"{a_step} batches a step, and the calibration text makes {batches}; lower it, or raise --num_samples"
        )
    if config.max_steps > 0:
        return config.max_steps
    return max(1, int(batches * config.num_train_epochs) // a_step)


def own_samples(batches: list[dict[str, Tensor]], seed: int, taken: int) -> Iterator[dict[str, Tensor]]:
    """Every N-th batch of the stream for this one of N processes, after so many that all of them have taken."""
    return itertools.islice(sample_stream(batches, seed), taken + distributed.rank(), None, world_size())


def current_masks(learned: dict[str, LearnableLayer]) -> dict[str, Tensor]:
    """The masks of the learned weights: layer name -> bool [rows here, in_features] on the CPU, True = kept.

    Raises:
        InputError: a weight is not finite, so the run has diverged.
    """
    if count_not_finite(learned.values()):
        raise InputError("the weights have become NaN or infinite while learning; lower --learning_rate")
    return {name: one.mask().cpu() for name, one in learned.items()}


def whole_masks(masks: dict[str, Tensor], learned: dict[str, LearnableLayer]) -> dict[str, Tensor]:
    """All rows of the masks in the first process: bool [out_features, in_features] on the CPU; {} in the others."""
    found = {}
    for name, mask in masks.items():
        if world_size() > 1:  # as bits
            weight = learned[name].weight
            packed = sharding.gather_rows(pack_mask(mask), weight)
            mask = unpack_mask(packed, weight.shape[-1]) if distributed.is_rank_zero() else None
        found[name] = mask
    return found if distributed.is_rank_zero() else {}


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


def step_(learned: dict[str, LearnableLayer], optimizer: ProxAdamW, max_grad_norm: float) -> float:
    """The base step, then the prox, of every weight; returns the norm of all gradients together, before it was clipped.

    Raises:
        InputError: that is not finite; no weight has moved.
    """
    for one in learned.values():
        one.take_gradient_()
    norm = nn.utils.clip_grad_norm_(weights_of(optimizer).values(), max_grad_norm or math.inf)
    norm = checked_norm((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    optimizer.step()
    optimizer.zero_grad()
    for one in learned.values():
        one.remask_()
    return norm


def checked_norm(norm: float) -> float:
    """The norm of the gradient. Raises InputError if it is not finite."""
    if not math.isfinite(norm):
        raise InputError(
            f"the gradient's norm is {norm}; lower --learning_rate, or raise --precision if it is not fp32"
        )
    return norm


@contextmanager
def stepping_in_backward(model: nn.Module, learned: dict[str, LearnableLayer], optimizer: ProxAdamW):
    """Within the block a backward pass steps every weight once its gradient is there, and frees that.

    Yields a function: the norm of all gradients since it was last called. It raises InputError if that is not finite:
    too late for the weights, which have been stepped.
    """
    masked = {id(one.layer.weight): one for one in learned.values() if one.masked}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    squares: list[Tensor] = []

    def step(parameter: Tensor) -> None:
        one = masked.get(id(parameter))
        if one:
            one.take_gradient_()
        weight = one.weight if one else parameter
        squares.append(sharding.local(weight.grad).float().square().sum())
        optimizer.step_parameter(weight)
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


class StopSignal:
    """Within the block, SIGINT and SIGTERM cut no step and no save in two: they count at the next `agree`."""

    def __init__(self):
        self.number: int | None = None  # the signal that all processes have agreed on
        self.seen: int | None = None

    def __enter__(self) -> "StopSignal":
        self.previous = {number: signal.signal(number, self._see) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _see(self, number, _frame) -> None:
        self.seen = number

    def agree(self) -> None:
        """A signal that one process has seen by now ends them all."""
        seen = distributed.all_reduce_sum([self.seen == signal.SIGINT, self.seen == signal.SIGTERM])
        if any(seen):
            self.number = signal.SIGTERM if seen[1] else signal.SIGINT
