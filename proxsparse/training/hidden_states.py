"""Matching of hidden states: after every decoder block the masked model should have the state of the dense model.

The gradient of a block's error does not pass through the blocks after it. Source of the idea: Romero et al. 2015, arXiv
1412.6550; normalized by layer for sparse language models: Kurtic et al. 2023, arXiv 2310.06927. Here every token is
normalized.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.models.checks import evaluating
from proxsparse.models.layers import decoder_blocks
from proxsparse.runtime.sharding import local
from proxsparse.training.distillation import Batch, logits_and_states, loss_of_logits, most_likely
from proxsparse.training.learnable_layer import LearnableLayer


def require_blocks(model: nn.Module) -> None:
    """Raises InputError if there is no block whose state could be matched."""
    if len(decoder_blocks(model)) < 2:
        raise InputError(
            "--match_hidden: the model has one decoder block, but the last one is not matched; leave it out"
        )


def matching_loss(
    model: nn.Module, learned: Iterable[LearnableLayer], batch: Batch, distill: float, weight: float
) -> Tensor:
    """The calibration loss + weight * `hidden_error`; the teacher is the model with W0 instead of W0 under the masks.

    The teacher is evaluated here, so the batch needs no `teacher_targets`. This changes the weights in place and back:
    call `backward` on the result before the next call.

    Args:
        learned: the masked layers.
        distill: share of the divergence from the teacher, see `calibration_loss`.
    """
    batch = batch | {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}  # once for both
    teacher, wanted = targets_of_dense(model, learned, batch, distill)
    logits, labels, states = logits_and_states(model, batch)
    error = hidden_error(states, wanted, batch["attention_mask"].bool())
    return loss_of_logits(logits, labels, teacher, distill) + weight * error


@torch.no_grad()
def targets_of_dense(
    model: nn.Module, learned: Iterable[LearnableLayer], batch: Batch, distill: float
) -> tuple[Batch, tuple[Tensor, ...]]:
    """The likeliest tokens of the dense model ({} without distillation), and its hidden states."""
    with evaluating(model), dense(learned):
        logits, _, states = logits_and_states(model, batch)
    return most_likely(logits) if distill else {}, states


@contextmanager
def dense(learned: Iterable[LearnableLayer]) -> Iterator[None]:
    """Within the block, the masked layers have their pretrained weights."""
    learned = list(learned)
    for layer in learned:
        local(layer.layer.weight.detach()).copy_(layer.pretrained)
    try:
        yield
    finally:
        for layer in learned:
            layer.remask_()


def hidden_error(states: tuple[Tensor, ...], wanted: tuple[Tensor, ...], real: Tensor) -> Tensor:
    """Mean over blocks and tokens of log(1 + ||h - t||^2 / ||t||^2), in fp32; a scalar without unit.

    The logarithm limits the effect of single tokens. Without it, the norm of the gradient rose from 5 to more than
    1,000 in some steps of SmolLM2-135M.

    Args:
        states, wanted: h and t after every block but the last, each [documents, tokens, hidden size].
        real: bool [documents, tokens], False = padding.
    """
    errors = []
    for state, target in zip(states, wanted, strict=True):
        target = target.float()
        size = target.square().sum(-1).where(real, 1)  # padding may be 0; an index of real tokens would wait for a GPU
        error = ((state.float() - target).square().sum(-1) / size).log1p()
        errors.append(error.where(real, 0).sum() / real.sum())
    return torch.stack(errors).mean()
