"""ProxSparse: learns the mask by proximal gradient descent on the calibration loss (Algorithm 1 of the paper)."""

import dataclasses
from functools import partial

from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.checkpoints import Checkpoints
from proxsparse.methods.pruned import Pruned
from proxsparse.methods.registry import register_method
from proxsparse.methods.walk import Batches
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.snap import snap_
from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.runtime.device import autocast_dtype
from proxsparse.runtime.sharding import local
from proxsparse.training.learnable_layer import dense, make_learnable_layers
from proxsparse.training.loop import own_samples, step_count, train_step, training
from proxsparse.training.loss import training_loss
from proxsparse.training.mask_monitor import MaskMonitor, agreement, feasible_share
from proxsparse.training.optimizer import prox_adamw
from proxsparse.training.options import LearningOptions
from proxsparse.training.scaling import activation_scaling
from proxsparse.training.state import TrainState


@register_method(
    "proxsparse",
    needs_data=True,
    updates_weights=False,
    paper="Liu et al. 2025, ProxSparse: Regularized Learning of Semi-Structured Sparsity Masks for Pretrained LLMs",
    check=lambda **options: LearningOptions(**options).check(),
    options={field.name: field.default for field in dataclasses.fields(LearningOptions)},
)
def learn_masks(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    checkpoints: Checkpoints | None = None,
    pretrained: dict[str, Tensor] | None = None,
    **options,
) -> Pruned:
    """min over W of  loss(W) + lambda_1 sum_blocks Reg_N:M(w) + lambda_2 Reg_W0(W);  the mask of W.

    Every step is a step of AdamW, followed by the proximal operator of lambda_1 Reg_N:M on every block (`ops.prox_nm`).
    With the default objective the loss is that of W0 under the mask of W, and the blocks are scaled by the norms of
    their inputs; see `training.learnable_layer` and `training.scaling`. Source: Liu et al. 2025, equations 3 to 6 and
    Algorithm 1.

    Args:
        checkpoints: where the state is saved; a call with the same arguments resumes from it.
        pretrained: parameter name -> W0, the rows of this process; None: a copy of the model's weights. If given, the
            caller snaps the model to the masks.
        options: the fields of `LearningOptions`.
    Returns:
        The masks; for a sharded model the rows of this process.
    Raises:
        InputError: a loss, gradient or weight is not finite; a step needs more batches than there are.
    """
    options, compute_dtype = LearningOptions(**options).check(), autocast_dtype(model.device)
    weights = pretrained or {name: weight.detach().clone() for name, weight in model.named_parameters()}
    steps = step_count(len(batches), options)
    if options.match_hidden and len(decoder_blocks(model)) < 2:
        reason = "the model has one decoder block, but the last one is not matched"
        raise InputError(f"--match_hidden: {reason}; leave it out")
    newest = checkpoints and checkpoints.newest_step()
    scales = {}
    if options.masked and newest:
        scales = {name: local(layer.weight).new_empty(layer.in_features).float() for name, layer in layers.items()}
        checkpoints.load(newest[0], {f"scale.{name}": scale for name, scale in scales.items()})
    elif options.masked:
        scales = activation_scaling(model, layers, batches, options.scaling_samples)
    short_dtype = compute_dtype if options.gradient_accumulation_steps == 1 else None
    learned = make_learnable_layers(layers, weights, scales, patterns, options.masked, short_dtype)
    monitor = MaskMonitor(learned.values(), steps)
    state = TrainState(model, learned, options, steps, prox_adamw(model, learned, options), monitor)
    if newest:
        state.restore_(checkpoints, *newest)
    seconds_before = state.seconds

    loss_options = {name: getattr(options, name) for name in ("distill", "match_hidden", "compile")}
    loss = partial(training_loss, model, teacher=partial(dense, model, learned.values()), **loss_options)
    samples = own_samples(batches, state)
    with training(state, checkpoints, "learning the masks") as end_step:
        while not state.complete and not state.stop.number:
            end_step(train_step(state, samples, loss, compute_dtype))
        masks = state.masks()  # within the block, which restores the signals if this fails

    magnitude = {name: nm_mask(layer.pretrained.abs(), layer.pattern).cpu() for name, layer in learned.items()}
    lambdas = [group["reg_lambda"] for group in state.optimizer.param_groups if group["reg_lambda"]] or [0.0]
    figures = {
        "steps": state.step,
        "tokens": state.tokens,
        "reg_lambda": {"min": min(lambdas), "max": max(lambdas)},
        "feasible_share": feasible_share(learned.values()),
        "magnitude_agreement": agreement(masks, magnitude, learned),
        "mask_similarity": monitor.similarity(),
    }
    if not pretrained:
        snap_(model, weights, masks)
    more = {"baselines": {"magnitude": magnitude}, "seconds_before": seconds_before}
    return Pruned(masks, figures, **more, complete=state.complete, stop=state.stop)
