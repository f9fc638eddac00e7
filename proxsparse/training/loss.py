"""The training loss: cross-entropy of the next token, divergence from the dense model, error of the hidden states.

Sources: distillation, Hinton et al. 2015, arXiv 1503.02531. Matching of hidden states, Romero et al. 2015, arXiv
1412.6550; normalized by layer for sparse language models, Kurtic et al. 2023, arXiv 2310.06927. Here every token is
normalized.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, nll_loss
from torch.utils.checkpoint import checkpoint

from proxsparse.data.calibration import IGNORED_LABEL, Batch
from proxsparse.models.checks import evaluating
from proxsparse.runtime.device import send
from proxsparse.training.compiled import compiled

ROWS = 256  # of the logits that are in fp32 at a time: 256 x 152k tokens take 156 MB
# On a GPU a part has as many rows as fit in these bytes, because the host needs time for each part.
GPU_BYTES = 512 << 20
LOWEST = -1e30  # replaces the -inf of tokens that a model forbids: 0 * (inf - inf) in the divergence would be NaN

Teacher = Callable[[], AbstractContextManager[nn.Module]]  # the dense model within a block


def training_loss(
    model: nn.Module,
    batch: Batch,
    teacher: Teacher | None = None,
    distill: float = 0.0,
    match_hidden: float = 0.0,
    compile: bool = False,
) -> Tensor:
    """Mean over positions of  (1 - a) * -log p(y) + a * KL(q || p),  a = `distill`; + `match_hidden` * `hidden_error`.

    p: the model's distribution over the vocabulary; q: the teacher's, evaluated here without gradient; y: the next
    token. A scalar. With a = 0 and match_hidden = 0 no teacher is needed.

    `compile`: the sum over `rows_at_a_time` positions is compiled.

    If the teacher is the model itself with other weights (`learnable_layer.dense`), call `backward` on the result
    before the next call.
    """
    batch = batch | {name: send(batch[name], model.device) for name in ("input_ids", "attention_mask")}  # once for both
    target, wanted = None, ()
    if distill or match_hidden:
        with torch.no_grad(), teacher() as dense, evaluating(dense):
            target, _, wanted = logits_and_states(dense, batch, bool(match_hidden))
    logits, labels, states = logits_and_states(model, batch, bool(match_hidden))
    loss = loss_of_logits(logits, labels, target if distill else None, distill, compile)
    if match_hidden:
        loss = loss + match_hidden * hidden_error(states, wanted, batch["attention_mask"].bool())
    return loss


def logits_and_states(model: nn.Module, batch: Batch, with_states: bool) -> tuple[Tensor, Tensor, tuple]:
    """The predictions of the R positions whose next token has a label.

    Returns:
        Their logits [R, vocabulary]; those tokens, int64 [R]; the hidden states after every decoder block but the last.
    """
    inputs = {name: send(batch[name], model.device) for name in ("input_ids", "attention_mask")}
    labels = batch["labels"][:, 1:].flatten()
    real = (labels != IGNORED_LABEL).nonzero().flatten()  # on the CPU: nonzero() on a GPU would wait for it
    chosen = send(real, model.device) if len(real) < len(labels) else None  # no copy if all have one
    labels = send(labels[real], model.device)
    output = model(**inputs, use_cache=False, output_hidden_states=with_states)
    logits, states = output.logits[:, :-1].flatten(0, 1), output.hidden_states[1:-1] if with_states else ()
    return logits if chosen is None else logits[chosen], labels, states


def loss_of_logits(
    logits: Tensor, labels: Tensor, target: Tensor | None, distill: float, compile: bool = False
) -> Tensor:
    """The loss of the logits [R, vocabulary], the next tokens int64 [R] and the teacher's logits [R, vocabulary].

    Computed in fp32, `rows_at_a_time` rows at a time; the backward pass computes them again instead of storing them.
    """
    rows = rows_at_a_time(logits.is_cuda, logits.shape[-1])
    parts = logits.split(rows)
    targets = [None] * len(parts) if target is None else target.split(rows)
    sums = [
        checkpoint(
            compiled(sum_of) if compile else sum_of, *part, distill, use_reentrant=False, preserve_rng_state=False
        )
        for part in zip(parts, labels.split(rows), targets, strict=True)
    ]
    return torch.stack(sums).sum() / len(logits)


def rows_at_a_time(on_gpu: bool, vocabulary: int) -> int:
    """The number of rows of the logits that are in fp32 at a time."""
    return max(ROWS, GPU_BYTES // (torch.float32.itemsize * vocabulary)) if on_gpu else ROWS


def sum_of(logits: Tensor, labels: Tensor, target: Tensor | None, distill: float) -> Tensor:
    """The sum over positions of `loss_of_logits`."""
    log_p = logits.float().clamp_min(LOWEST).log_softmax(-1)
    text = nll_loss(log_p, labels, reduction="sum")
    if target is None:
        return text
    log_q = target.to(log_p).clamp_min(LOWEST).log_softmax(-1)
    return (1 - distill) * text + distill * kl_div(log_p, log_q, reduction="sum", log_target=True)


def hidden_error(states: tuple[Tensor, ...], wanted: tuple[Tensor, ...], real: Tensor) -> Tensor:
    """Mean over blocks and tokens of log(1 + ||h - t||^2 / ||t||^2), in fp32; a scalar without unit.

    The gradient of a block's error does not pass through the blocks after it. The logarithm limits the effect of
    single tokens. Without it, the norm of the gradient rose from 5 to more than 1,000 in some steps of SmolLM2-135M.

    Args:
        states, wanted: h and t after every block but the last, each [documents, tokens, hidden size].
        real: bool [documents, tokens], False = padding.
    """
    errors = []
    for state, target in zip(states, wanted, strict=True):
        target = target.to(state.device).float()
        size = target.square().sum(-1).where(real, 1)  # padding may be 0; an index of real tokens would wait for a GPU
        error = ((state.float() - target).square().sum(-1) / size).log1p()
        errors.append(error.where(real, 0).sum() / real.sum())
    return torch.stack(errors).mean()
