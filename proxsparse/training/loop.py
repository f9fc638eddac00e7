"""One training step, and what both training loops need around their steps."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import IGNORED_LABEL, Batch, add_labels, endless_order
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import Checkpoints
from proxsparse.models.checks import evaluating
from proxsparse.runtime import distributed, sharding
from proxsparse.runtime.device import autocast
from proxsparse.runtime.distributed import world_size
from proxsparse.training.compiled import compiled_blocks
from proxsparse.training.log import run_log
from proxsparse.training.optimizer import lr_factor, weights_of, whole
from proxsparse.training.options import LoopOptions
from proxsparse.training.state import TrainState


@contextmanager
def training(
    state: TrainState, checkpoints: Checkpoints | None, title: str, teacher: nn.Module | None = None
) -> Iterator[Callable[[dict], None]]:
    """The surroundings of a training loop: modes, log, checkpoints, signals.

    SIGINT and SIGTERM are deferred, also after the block, unless it fails.

    Args:
        checkpoints: where the state and metrics.jsonl are saved; None: nowhere.
        teacher: another model that computes in the loop, compiled with --compile.
    Yields:
        `end_step(row)`, which logs a step, observes it and saves a checkpoint if it is due.
    """
    if checkpoints:
        distributed.on_rank_zero(lambda: state.require_space(checkpoints))
    with (
        torch.autocast(state.model.device.type, enabled=False),
        torch.enable_grad(),
        evaluating(state.model),  # restores the train/eval modes at the end
        compiled_blocks(*filter(None, (state.model, teacher))) if state.options.compile else nullcontext(),
        run_log(checkpoints and checkpoints.run_dir, state.step, state.steps, title) as log_step,
    ):
        last_save = time.monotonic()

        def end_step(row: dict[str, float | Tensor]) -> None:
            nonlocal last_save
            if "loss" in row:
                row |= state.observer.observe(state.step)
            log_step({"step": state.step, "tokens": state.tokens, "seconds": state.seconds} | row)
            steps = state.options.save_steps
            due = steps is not None and state.step % steps == 0
            due |= time.monotonic() - last_save >= state.options.seconds_between_checkpoints
            due = state.stop.agree(due) or state.stop.number
            if checkpoints and due and state.step < state.steps:
                read_norm(state, row["grad_norm"])
                state.save(checkpoints)
                last_save = time.monotonic()

        recomputes = any(getattr(module, "gradient_checkpointing", False) for module in state.model.modules())
        state.model.train()
        if state.options.gradient_checkpointing:
            switch_checkpointing(state.model, "enable", {"use_reentrant": False})
        state.stop.defer()
        try:
            yield end_step
            if checkpoints:
                checkpoints.wait()
        except BaseException as error:
            state.stop.restore()
            try:
                if checkpoints:
                    checkpoints.wait()
            except OSError as other:
                error.add_note(str(other))
            raise
        finally:
            if state.options.gradient_checkpointing and not recomputes:
                switch_checkpointing(state.model, "disable")


def train_step(
    state: TrainState,
    samples: Iterator[Batch],
    loss_of_batch: Callable[[Batch], Tensor],
    compute_dtype: torch.dtype | None,
) -> dict[str, float | Tensor]:
    """One optimizer step: forward and backward passes, the base step, the prox. Returns its figures for the log.

    If the step is not logged, there is no loss, and the norm of the gradient stays on the device. `samples` are those
    of `own_samples`; `compute_dtype` is that of autocast, None without.
    """
    micro_batches = list(itertools.islice(samples, state.options.gradient_accumulation_steps))
    factor = lr_factor(state.step, state.steps, state.options)
    for group in state.optimizer.param_groups:
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
    logged = state.logged
    loss = backward(state.model, micro_batches, compute_dtype, loss_of_batch, logged)
    norm = update_all(state, logged)
    state.count_(micro_batches)
    rate = max(group["lr"] for group in state.optimizer.param_groups)
    return ({"loss": loss} if logged else {}) | {"learning_rate": rate, "grad_norm": norm}


def step_count(batches: int, options: LoopOptions) -> int:
    """Optimizer steps of a run, at least 1. Raises InputError if a step needs more batches than there are."""
    a_step = options.gradient_accumulation_steps * world_size()
    if a_step > batches:
        raise InputError(
            f"--gradient_accumulation_steps {options.gradient_accumulation_steps}: a step on {world_size()} processes "
            f"needs {a_step} batches, there are {batches} to train on; lower it, or give more samples (more text, a "
            "larger --num_samples)"
        )
    if options.max_steps > 0:
        return options.max_steps
    return max(1, whole(batches * options.num_train_epochs) // a_step)


def own_samples(batches: Sequence[Batch], state: TrainState) -> Iterator[Batch]:
    """The batches of this process: every world_size-th one of the stream, after those of the finished steps."""
    order = endless_order(len(batches), state.options.seed)
    own = itertools.islice(order, state.batches + distributed.rank(), None, world_size())
    return (add_labels(batches[index]) for index in own)


def switch_checkpointing(model: nn.Module, action: str, *settings: dict) -> None:
    """Enables or disables gradient checkpointing; transformers 5.2x has renamed it and deprecated the old name."""
    new = hasattr(model, f"activation_checkpointing_{action}")
    getattr(model, f"{'activation' if new else 'gradient'}_checkpointing_{action}")(*settings)


def backward(
    model: nn.Module,
    batches: list[Batch],
    compute_dtype: torch.dtype | None,
    loss_of_batch: Callable[[Batch], Tensor],
    read: bool = True,
) -> float:
    """Adds the gradient of the loss to `.grad`. Returns the loss, the mean over all predicted tokens of all processes.

    Batches are weighted by their number of tokens, because the gradient of a short document is noisy. Raises InputError
    if the loss is not finite. `read=False`: it is not read from the device nor checked, and 0 is returned.
    """
    predicted = [int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches]
    (all_predicted,) = distributed.all_reduce_sum([sum(predicted)])
    loss = 0.0
    for batch, count in zip(batches, predicted, strict=True):
        with autocast(model.device, compute_dtype):
            batch_loss = loss_of_batch(batch) * (count / all_predicted)
        (part,) = distributed.all_reduce_sum([batch_loss.item()]) if read else (0.0,)
        if not math.isfinite(part):
            raise InputError(
                f"the loss is {part}; lower --learning_rate, or use --precision fp32; if this is the first step, "
                "check the model for damaged weights"
            )
        batch_loss.backward()
        loss += part
    return loss


def update_all(state: TrainState, read: bool) -> float | Tensor:
    """The base step, then the prox, of every weight. Returns the norm of all gradients before clipping.

    If `read`, raises InputError for a norm that is not finite, before a weight is updated.
    """
    for layer in state.layers.values():
        layer.take_gradient_()
    norm = clip_gradients_(list(weights_of(state.optimizer).values()), state.options.max_grad_norm or math.inf)
    if read:
        norm = read_norm(state, norm)
    else:
        state.norms_not_read = state.norms_not_read + norm
    state.optimizer.step()
    state.optimizer.zero_grad()
    for layer in state.layers.values():
        if layer.weight not in state.optimizer.masked:  # otherwise the optimizer has updated it
            layer.remask_()
    return norm


@torch.no_grad()
def clip_gradients_(weights: list[Tensor], max_norm: float) -> Tensor:
    """As `nn.utils.clip_grad_norm_`, with the norm in fp32 for bf16 and fp16 too; the norm over all processes."""
    gradients = [sharding.local(weight.grad) for weight in weights if weight.grad is not None]
    norms = torch.stack(torch._foreach_norm(gradients, 2, torch.promote_types(weights[0].dtype, torch.float32)))
    norm = sharding.sum_of_shards(norms.square().sum(), weights[0]).sqrt()
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_max(1.0))
    return norm


def read_norm(state: TrainState, norm: float | Tensor) -> float:
    """The norm of the gradient as a number. Raises InputError if it, or one that was not read, is not finite."""
    norm = float(norm)
    for each in (norm, float(state.norms_not_read)):
        if not math.isfinite(each):
            raise InputError(f"the gradient norm is {each}; lower --learning_rate, or use --precision fp32")
    state.norms_not_read = 0.0
    return norm
