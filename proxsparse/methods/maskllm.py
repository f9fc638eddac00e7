"""MaskLLM: learns, for every block, a distribution over its possible masks from the model's loss."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from proxsparse.data.calibration import add_labels, endless_order
from proxsparse.errors import InputError
from proxsparse.methods.block_masks import block_masks
from proxsparse.methods.pruned import Pruned
from proxsparse.methods.registry import get_method, ranges, register_method
from proxsparse.methods.walk import Batches, apply_mask_
from proxsparse.models.checks import evaluating
from proxsparse.patterns import NMPattern
from proxsparse.runtime.device import full_precision
from proxsparse.runtime.progress import phase
from proxsparse.training.options import AT_LEAST_1, NOT_NEGATIVE, POSITIVE

INITIAL_STD = 0.01
NO_PRIOR = "none"


RANGES = {"epochs": AT_LEAST_1} | dict.fromkeys(("tau", "final_tau", "scale", "final_scale"), POSITIVE)
RANGES |= dict.fromkeys(("learning_rate", "final_learning_rate", "weight_decay", "max_grad_norm"), NOT_NEGATIVE)
RANGES |= dict.fromkeys(("prior_strength", "weight_reg"), NOT_NEGATIVE)


def check(prior: str, **options) -> None:
    """Raises InputError for an unknown prior or a number out of range."""
    if prior != NO_PRIOR:
        get_method(prior, what="--prior")
    ranges(**RANGES)(**options)


@register_method(
    "maskllm",
    needs_data=True,
    updates_weights=False,
    paper="Fang et al. 2024, MaskLLM: Learnable Semi-Structured Sparsity for Large Language Models",
    check=check,
)
@torch.no_grad()
def prune_maskllm(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    patterns: dict[str, NMPattern],
    *,
    epochs: int = 1,
    learning_rate: float = 5e-4,
    final_learning_rate: float = 5e-5,
    tau: float = 4.0,
    final_tau: float = 0.05,
    scale: float = 100.0,
    final_scale: float = 500.0,
    prior: str = "sparsegpt",
    prior_strength: float = 3.0,
    weight_reg: float = 1e-5,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
    seed: int = 0,
) -> Pruned:
    """min over logits of  E_g loss(W * mask) - weight_reg * (1 - t / T) * ||W * mask||_F^2  with, for every block,

        mask = sum over its C(m, n) masks k of y_k mask_k;   y = softmax((scale * logits + g) / tau),   g ~ Gumbel(0, 1)

    Each of the T = epochs * len(batches) steps t = 0, 1, ... draws a new g. The result is the mask with the largest
    logit of every block. The initial logits are N(0, 0.01^2), biased to the mask of the prior, see `add_prior_`. tau
    and scale change linearly, the learning rate by a half cosine, from the first value to the final one at t = T. The
    optimizer is AdamW with betas 0.9 and 0.95 and eps 1e-5. W does not change.

    The constants are those of the paper's code (NVlabs/MaskLLM: learnable_sparsity/differentiable_mask.py,
    pretrain_maskllm.py and the scripts), which multiplies a learning rate of 5e-5 to 5e-6 by 10 for masks. The number
    of steps differs: that code takes 2,000 steps of 256 windows of 4,096 tokens.

    Memory in addition to the model: logits, gradient and two moments have C(m, n) / m float32 numbers per weight each.
    That is 24 bytes per weight for 2:4 and 140 for 4:8, plus about 20 until the backward pass.

    Args:
        epochs: passes over the calibration samples.
        learning_rate: learning rate of AdamW on the logits at the first step.
        final_learning_rate: the learning rate at the last step.
        tau: temperature of the softmax at the first step.
        final_tau: the temperature at the last step.
        scale: factor of the logits at the first step.
        final_scale: the factor at the last step.
        prior: the method whose masks bias the logits, with its defaults and without weight update; or "none".
        prior_strength: bias of the logits towards the prior, in standard deviations of the logits.
        weight_reg: strength of the term that rewards large kept weights.
        weight_decay: weight decay of AdamW on the logits.
        max_grad_norm: bound of the gradient norm of all logits together.
        seed: seed of the initial logits, the noise, and the order of the batches after the first pass.
    Returns:
        The masks.
    Raises:
        InputError: a block with too many masks, a loss or a gradient that is not finite.
    """
    steps = epochs * len(batches)
    choices = {name: block_masks(patterns[name], layer.weight.device) for name, layer in layers.items()}
    preferred = {} if prior == NO_PRIOR else prior_masks(prior, model, layers, batches, patterns)
    generator = torch.Generator(model.device).manual_seed(seed)
    logits = {name: initial_logits(layer.weight, choices[name], generator) for name, layer in layers.items()}
    for name, mask in preferred.items():
        add_prior_(logits[name], mask, choices[name], prior_strength)

    learned = list(logits.values())
    optimizer = torch.optim.AdamW(learned, lr=learning_rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=weight_decay)
    order = endless_order(len(batches), seed)
    with evaluating(model), torch.enable_grad(), phase("maskllm", steps) as current:
        for step in current.count(range(steps)):
            time = step / steps
            sharpness = scale + (final_scale - scale) * time, tau + (final_tau - tau) * time
            weights = {
                f"{name}.weight": soft_weight(layer.weight, logits[name], choices[name], *sharpness, generator)
                for name, layer in layers.items()
            }
            batch = batches[next(order)]
            loss = language_loss(model, weights, batch)
            bonus = weight_reg * (1 - time) * squared_norm(weights.values(), loss.device)
            optimizer.zero_grad()
            (loss - bonus).backward(inputs=learned)
            gradient_norm = nn.utils.clip_grad_norm_(learned, max_grad_norm)
            if not math.isfinite(loss.item() + gradient_norm.item()):
                raise InputError(
                    f"maskllm, step {step + 1} of {steps}: loss {loss.item()}, gradient norm {gradient_norm.item()}"
                    "; use --precision fp32, or lower learning_rate"
                )
            rate = final_learning_rate + (learning_rate - final_learning_rate) * (1 + math.cos(math.pi * time)) / 2
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            current.note = f"loss {loss.item():.3f}"
    masks = {}
    for name, layer in layers.items():
        blocks = choices[name][logits[name].argmax(-1)]  # the mask with the largest logit of every block
        masks[name] = apply_mask_(layer, with_dense_remainder(blocks.flatten(-2), layer.weight))
    return Pruned(masks)


def prior_masks(
    prior: str, model: nn.Module, layers: dict[str, nn.Linear], batches: Batches, patterns: dict[str, NMPattern]
) -> dict[str, Tensor]:
    """The masks of a method with its defaults, if possible without weight update; restores the weights."""
    method, weights = get_method(prior), {name: layer.weight.detach().clone() for name, layer in layers.items()}
    try:
        options = {name: False for name in method.options if name == "update_weights"}
        return method.prune(model, layers, batches, patterns, **options).masks
    finally:
        for name, layer in layers.items():
            layer.weight.copy_(weights[name])


def initial_logits(weight: Tensor, choices: Tensor, generator: torch.Generator) -> Tensor:
    """N(0, 0.01^2), [out_features, in_features / m, C(m, n)], float32 (float64 for float64 weights)."""
    count, m = choices.shape
    shape = (weight.shape[0], weight.shape[1] // m, count)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    logits = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype) * INITIAL_STD
    return logits.to(weight.device).requires_grad_()


def add_prior_(logits: Tensor, mask: Tensor, choices: Tensor, strength: float) -> None:
    """logit_k += (overlap_k - n^2 / m) * strength * std(logits), in place.

    overlap_k: number of weights that both mask_k and the prior keep. Its mean over all k is n^2 / m.
    """
    choices = choices.to(logits.dtype)
    count, m = logits.shape[1], choices.shape[1]
    shared = mask[:, : count * m].to(logits).unflatten(-1, (count, m)) @ choices.T
    logits += (shared - shared.mean(-1, keepdim=True)) * strength * logits.std()


def soft_weight(
    weight: Tensor, logits: Tensor, choices: Tensor, scale: float, tau: float, generator: torch.Generator
) -> Tensor:
    """W * mask with a mask sampled from the logits, differentiable in the logits; shape and dtype of `weight`."""
    noise = torch.empty(logits.shape, dtype=logits.dtype, device=generator.device).exponential_(generator=generator)
    gumbel = -noise.log().to(logits.device)
    with full_precision(logits):
        y = ((logits * scale + gumbel) / tau).softmax(-1)
        mask = with_dense_remainder((y @ choices.to(y.dtype)).flatten(-2), weight)
    return (weight.detach() * mask).to(weight.dtype)


def with_dense_remainder(mask: Tensor, weight: Tensor) -> Tensor:
    """The mask of the blocks, continued with ones for the remainder of the rows of `weight`, which stays dense."""
    return functional.pad(mask, (0, weight.shape[1] - mask.shape[1]), value=1)


def language_loss(model: nn.Module, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The model's loss on a batch, computed with these weights."""
    inputs = {name: tensor.to(model.device) for name, tensor in add_labels(batch).items()}
    return functional_call(model, weights, kwargs=inputs | {"use_cache": False}).loss


def squared_norm(weights: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all weights, a float32 scalar."""
    return sum(weight.float().square().sum().to(device) for weight in weights)
