"""ProxSparse: learns the mask by proximal gradient descent on the calibration loss (Algorithm 1 of the paper)."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import add_labels
from proxsparse.methods.registry import register_method
from proxsparse.methods.store import Store
from proxsparse.methods.walk import Batches
from proxsparse.models.checks import evaluating
from proxsparse.models.snap import snap_
from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.runtime import distributed
from proxsparse.runtime.signals import StopSignal
from proxsparse.training import checkpoint
from proxsparse.training.distillation import teacher_targets
from proxsparse.training.hidden_states import require_blocks
from proxsparse.training.learnable_layer import make_learnable_layers
from proxsparse.training.log import RunLog, check_tracker
from proxsparse.training.loop import TrainState, backward, loss_of, own_samples, start_training, step_count, stepping
from proxsparse.training.mask_monitor import agreement, feasible_share
from proxsparse.training.optimizer import lr_factor, reg_lambda_range, set_rates_
from proxsparse.training.options import LearningOptions
from proxsparse.training.scaling import activation_scaling


def check(**options) -> None:
    """Raises InputError for an option that is out of range or not available."""
    options = LearningOptions(**options).check()
    check_tracker(options.report_to)


@register_method(
    "proxsparse",
    needs_data=True,
    updates_weights=False,
    paper="Liu et al. 2025, ProxSparse: Regularized Learning of Semi-Structured Sparsity Masks for Pretrained LLMs",
    check=check,
    options={one.name: one.default for one in dataclasses.fields(LearningOptions)},
    keeps="checkpoints",
)
def learn_masks(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    store: Store | None = None,
    **options,
) -> dict[str, Tensor]:
    """min over W of  loss(W) + lambda_1 sum_blocks Reg_N:M(w) + lambda_2 Reg_W0(W);  the mask of W.

    Every step is a step of AdamW, followed by the proximal operator of lambda_1 Reg_N:M on every block (`ops.prox_nm`).
    With the default objective the loss is that of W0 under the mask of W, and the blocks are scaled by the norms of
    their inputs; see `training.learnable_layer` and `training.scaling`. Source: Liu et al. 2025, equations 3 to 6 and
    Algorithm 1.

    Args:
        options: the fields of `LearningOptions`.
    Returns:
        Layer name -> bool [out_features, in_features] on the CPU, True = kept; for a sharded model the rows of this
        process.
    Raises:
        InputError: a loss, gradient or weight is not finite; a step needs more batches than there are.
    """
    options, store = LearningOptions(**options).check(), store or Store()
    dtype = torch.get_autocast_dtype(model.device.type) if torch.is_autocast_enabled(model.device.type) else None
    pretrained = store.pretrained or {name: weight.detach().clone() for name, weight in model.named_parameters()}
    learns = {name: weight.requires_grad for name, weight in model.named_parameters()}
    batches = [add_labels(batch) for batch in batches]
    steps = step_count(len(batches), options)
    if options.match_hidden:  # evaluates the teacher in every step
        require_blocks(model)
    elif options.distill:
        batches = teacher_targets(model, batches)
    if store.checkpoint:
        scales = checkpoint.read_scales(store.checkpoint, layers, options)
    else:
        scaled = options.scaling == "activation"
        scales = activation_scaling(model, layers, batches, options.scaling_samples) if scaled else {}
    learned = make_learnable_layers(layers, pretrained, scales, patterns, options.forward == "masked")
    state = TrainState.begin(model, learned, options, steps)
    run_loop(state, store, batches, dtype, "learning the masks")
    masks = state.masks()
    magnitude = {name: nm_mask(one.pretrained.abs(), one.pattern).cpu() for name, one in learned.items()}
    store.figures |= {
        "steps": state.step,
        "tokens": state.tokens,
        "reg_lambda": reg_lambda_range(state.optimizer),
        "feasible_share": feasible_share(learned.values()),
        "magnitude_agreement": agreement(masks, magnitude, learned),
        "mask_similarity": state.monitor.similarity(),
    }
    store.baselines["magnitude"] = magnitude
    for name, weight in model.named_parameters():
        weight.requires_grad_(learns[name])
    if not store.pretrained:
        snap_(model, pretrained, masks)
    return masks


def run_loop(
    state: TrainState, store: Store, batches: list[dict[str, Tensor]], dtype: torch.dtype | None, title: str
) -> None:
    """Restores the checkpoint to resume from, if there is one, then trains; sets `store.complete`.

    Args:
        dtype: autocast dtype of the forward pass; None: no autocast.
        title: title of the progress bar.
    """
    store.stop.defer()
    if store.checkpoint:
        checkpoint.restore_(store.checkpoint, store.state, state)
    if store.directory:
        distributed.on_rank_zero(lambda: checkpoint.require_space_for(state, store.directory))
    samples = own_samples(batches, state.options.seed, state.batches)
    with (
        torch.autocast(state.model.device.type, enabled=False),
        torch.enable_grad(),
        evaluating(state.model),  # restores the train/eval modes at the end
        RunLog(store.directory, state.step, state.steps, title, state.options.report_to) as log,
    ):
        if not state.monitor.finished:
            learn(state, samples, dtype, log, store.stop, lambda: save(store, state))
    store.complete = state.step == state.steps or state.monitor.finished


def learn(
    state: TrainState,
    samples: Iterator[dict[str, Tensor]],
    dtype: torch.dtype | None,
    log: RunLog,
    stop: StopSignal,
    save: Callable[[], None],
) -> None:
    """Algorithm 1 from the current step to the last one, or to the end of the step in which a signal arrives.

    It also ends when the monitor says that it is finished.

    Args:
        dtype: autocast dtype of the forward pass; None: no autocast.
        save: writes a checkpoint of the state.
    """
    options = state.options
    start_training(state.model, options.gradient_checkpointing)
    with stepping(state) as step_:
        for step in range(state.step, state.steps):
            micro_batches = list(islice(samples, options.gradient_accumulation_steps))
            factor = lr_factor(step, state.steps, options)
            set_rates_(state.optimizer, factor)
            loss = backward(state.model, micro_batches, dtype, loss_of(state))
            norm = step_()  # the base step, then the prox
            state.count_(micro_batches)
            figures = {"loss": loss, "learning_rate": options.learning_rate * factor, "grad_norm": norm}
            counts = {"step": state.step, "tokens": state.tokens, "seconds": state.seconds}
            log.step(counts | figures | state.monitor.observe(state.step))
            stop.agree()
            if checkpoint.is_due(state, stop.number):
                save()
            if stop.number or state.monitor.finished:
                return


def save(store: Store, state: TrainState) -> None:
    """Writes a checkpoint into the run's directory, if there is one."""
    if store.directory:
        scores = {name: score and dataclasses.asdict(score) for name, score in store.scores.items()}
        checkpoint.save(store.directory, state, store.identity | {"scores": scores})
