"""The calibration loss: cross-entropy of the next token and, with distillation, divergence from the dense model.

Source of the distillation: Hinton et al. 2015, arXiv 1503.02531.
"""

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import IGNORED_LABEL
from proxsparse.models.checks import evaluating
from proxsparse.runtime.distributed import gather_in_order, shard_items, world_size
from proxsparse.runtime.progress import phase

# Most likely tokens that are stored of the teacher's distribution; all others count as one more token. The full
# distribution would need vocabulary / 64 times the memory.
KEPT_TOKENS = 64

Batch = dict[str, Tensor]


@torch.no_grad()
def teacher_targets(model: nn.Module, batches: list[Batch]) -> list[Batch]:
    """Adds the current predictions of the model to every batch, for the R positions that have a label.

    teacher_tokens: int32 [R, K], the K = 64 most likely next tokens; teacher_probs: bfloat16 [R, K].
    """
    own = []
    samples = sum(len(batch["input_ids"]) for batch in batches)
    with evaluating(model), phase("outputs of the dense model", samples, "sample") as current:
        for batch, counts in shard_items(batches):
            found = most_likely(logits_at_labels(model, batch)[0])
            own += [{name: tensor.cpu() for name, tensor in found.items()}] * counts
            current.step(len(batch["input_ids"]) * world_size())
        targets = gather_in_order(own, len(batches))
    return [batch | target for batch, target in zip(batches, targets, strict=True)]


def most_likely(logits: Tensor) -> Batch:
    """The targets of logits [R, vocabulary]."""
    probs, tokens = logits.float().softmax(-1).topk(min(KEPT_TOKENS, logits.shape[-1]))
    return {"teacher_tokens": tokens.int(), "teacher_probs": probs.bfloat16()}


def logits_at_labels(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits [R, vocabulary] of the positions whose next token has a label, and those tokens, int64 [R]."""
    return logits_and_states(model, batch, with_states=False)[:2]


def logits_and_states(model: nn.Module, batch: Batch, with_states: bool = True) -> tuple[Tensor, Tensor, tuple]:
    """As `logits_at_labels`, and the hidden states after every decoder block but the last."""
    # before the forward pass and on the CPU: copies to the GPU and nonzero() on it would wait for queued kernels
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    labels = batch["labels"][:, 1:].flatten()
    real = (labels != IGNORED_LABEL).nonzero().flatten()
    chosen = real.to(model.device) if len(real) < len(labels) else None  # avoids a copy of the large logits
    labels = labels[real].to(model.device)
    output = model(**inputs, use_cache=False, output_hidden_states=with_states)
    logits, states = output.logits[:, :-1].flatten(0, 1), output.hidden_states[1:-1] if with_states else ()
    return logits if chosen is None else logits[chosen], labels, states


def calibration_loss(model: nn.Module, batch: Batch, distill: float) -> Tensor:
    """Mean over positions of  (1 - a) * -log p(y)  +  a * KL(q || p),  a = `distill`; a scalar.

        KL(q || p) = sum_k q_k log(q_k / p_k)  +  r log(r / s),   r = 1 - sum_k q_k,  s = 1 - sum_k p_k

    p: the model's distribution; y: the next token; q: the teacher's K most likely tokens, from `teacher_targets`.
    """
    teacher = {name: batch[name].to(model.device) for name in ("teacher_tokens", "teacher_probs") if distill}
    return loss_of_logits(*logits_at_labels(model, batch), teacher, distill)


def loss_of_logits(logits: Tensor, labels: Tensor, teacher: Batch, distill: float) -> Tensor:
    """`calibration_loss` of the logits [R, vocabulary] and the next tokens, int64 [R]."""
    log_p = logits.float().log_softmax(-1)
    text = -log_p.gather(-1, labels[:, None]).mean()
    if not distill:
        return text
    q, top = teacher["teacher_probs"].to(log_p), log_p.gather(-1, teacher["teacher_tokens"].to(labels))
    tiny = torch.finfo(torch.float32).eps
    r = (1 - q.sum(-1)).clamp_min(tiny)
    s = (1 - top.exp().sum(-1)).clamp_min(tiny)
    divergence = (q * (q.clamp_min(tiny).log() - top)).sum(-1) + r * (r / s).log()
    return (1 - distill) * text + distill * divergence.mean()
