"""What Algorithm 1 takes for granted: its optimizer, step sizes, the order of the samples, how to stop."""

import math
import signal
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from proxsparse.checkpoint import load_masks
from proxsparse.config import PRETRAINED, TrainConfig
from proxsparse.data import IGNORED_LABEL
from proxsparse.device import autocast
from proxsparse.distillation import calibration_loss
from proxsparse.errors import InputError
from proxsparse.masked import learned_weight, pretrained_weight, ranking
from proxsparse.methods import Method, masks_of, method
from proxsparse.ops import nm_mask
from proxsparse.optim import ProxAdamW
from proxsparse.optim.schedules import linear_ramp
from proxsparse.patterns import NMPattern


def layer_lambda(weight: Tensor, config: TrainConfig) -> float:
    """lambda_1 of a layer: absolute, or R / mean|w| (in the activation metric mean|c * w| is 1)."""
    if config.reg_lambda is not None:
        return config.reg_lambda
    if config.metric == "activation":
        return config.reg_lambda_rel
    mean = weight.detach().float().abs().mean().item()
    return config.reg_lambda_rel / mean if mean > 0 else 0.0


def prox_adamw(
    model: nn.Module, layers: dict[str, nn.Linear], metric: dict[str, Tensor], config: TrainConfig, steps: int
) -> ProxAdamW:
    """AdamW with the prox on the layers' weights; also says which parameters learn (requires_grad).

    With --precision bf16 the moments are bfloat16 too, as torch's AdamW keeps them, and all is rounded stochastically:
    rounding to nearest would lose much of the prox, which moves a weight by 1 to 3 units in the last place.

    Args:
        metric: layer name -> c; {} is the paper's form. With a metric every weight that is not pruned steps in units
            of its own mean magnitude, so that one dimensionless learning rate fits all.
    """
    prunable = {id(learned_weight(layer)): name for name, layer in layers.items()}
    groups = []
    for parameter in model.parameters():
        name = prunable.get(id(parameter))
        parameter.requires_grad_(name is not None or config.update == "all")
        group = {"params": [parameter], "lr": config.learning_rate, "reg_lambda": 0.0, "frozen_lambda": 0.0}
        if name is not None:
            group |= {"reg_lambda": layer_lambda(parameter, config), "frozen_lambda": config.frozen_lambda}
        elif metric:
            group["lr"] *= parameter.detach().abs().mean().item()
        if parameter.requires_grad:
            groups.append(group)
    bf16 = config.precision == "bf16"
    optimizer = ProxAdamW(
        groups,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        reg_lambda=0.0,
        pattern=config.pattern,
        frozen_eps=config.frozen_eps,
        reg_schedule=REG_SCHEDULES[config.reg_schedule](steps),
        moment_dtype=torch.bfloat16 if bf16 else None,
        stochastic_rounding=bf16,
        seed=config.seed,
    )
    for name, scale in metric.items():
        optimizer.set_metric(learned_weight(layers[name]), scale)
    return optimizer


def start_of(start: str) -> Method | dict[str, Tensor] | None:
    """What --start names: a method, the masks in a .safetensors file, or None, the mask of the pretrained weights.

    Raises:
        InputError: no such method or file, a file that holds no masks.
    """
    if start == PRETRAINED:
        return None
    return load_masks(start) if start.endswith(".safetensors") else method(start, "--start")


def check_start(start: Method | dict[str, Tensor] | None, layers: dict[str, nn.Linear], pattern: NMPattern) -> None:
    """Before the passes over the calibration text: raises InputError for masks of a file that do not fit the layers."""
    for name, layer in layers.items() if isinstance(start, dict) else ():
        mask, shape = start.get(name), list(layer.weight.shape)
        if mask is None:
            held = "none"
        elif list(mask.shape) != shape:
            held = f"one of {list(mask.shape)}"
        elif (pattern.nonzeros(mask) != pattern.n).any():
            held = f"one that is not {pattern}"
        else:
            continue
        raise InputError(
            f"--start: layer {name} needs a {pattern} mask of {shape}, the file has {held}; give masks of this model"
        )


def first_masks(
    start: Method | dict[str, Tensor] | None,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: list[dict[str, Tensor]],
    pattern: NMPattern,
) -> dict[str, Tensor]:
    """The masks to start from: layer name -> bool [out_features, in_features]; {} is the ranking of the weights.

    `start` has passed `check_start`. Raises what the method raises.
    """
    if isinstance(start, Method):
        return masks_of(start, model, layers, batches, dict.fromkeys(layers, pattern), progress=True)
    return start or {}


class RunAverage:
    """W = 1/R sum_r W_r: the mean of what R runs from the same start have learned, a model soup (Wortsman et al. 2022,
    arXiv 2203.05482), which depends less than one run on the order of its samples.

    With several runs it holds two more copies of what learns: the start, and the sum in float32.
    """

    def __init__(self, model: nn.Module, runs: int):
        self.parameters = [parameter for parameter in model.parameters() if runs > 1 and parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.sum = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self.parameters]
        self.ended = 0

    @torch.no_grad()
    def restart_(self) -> None:
        """Puts the parameters back to the start."""
        for parameter, start in zip(self.parameters, self.start, strict=True):
            parameter.copy_(start)

    @torch.no_grad()
    def end_run_(self) -> None:
        """Counts the parameters in, and leaves the mean in their place."""
        self.ended += 1
        for parameter, total in zip(self.parameters, self.sum, strict=True):
            total += parameter
        self.mean_()

    @torch.no_grad()
    def mean_(self) -> None:
        """The parameters become the mean of the runs that have ended; if none has, they stay."""
        for parameter, total in zip(self.parameters, self.sum, strict=True) if self.ended else ():
            parameter.copy_(total / self.ended)


def averaged_runs(
    model: nn.Module, runs: int, steps: int, one_run: Callable[[], Iterator[dict]], stop: "StopSignal"
) -> Iterator[dict[str, float]]:
    """So many runs of so many steps from the same weights, one after the other; the weights end as their mean.

    Yields the figures of every step that `one_run()` yields, its tokens, step and seconds counted through all runs; the
    last step of a run sees the mean so far. A signal ends it after a step, with the mean of the runs that were
    complete; the weights of that step if none was.
    """
    average, tokens, started = None, 0, time.monotonic()
    for run_index in range(runs):
        if average:
            average.restart_()
        rows = one_run()  # makes the optimizer, which says what learns
        average = average or RunAverage(model, runs)
        for row in rows:
            tokens += row["tokens"]
            if row["step"] == steps:
                average.end_run_()
            elapsed = {"tokens": tokens, "seconds": time.monotonic() - started}
            yield row | elapsed | {"step": run_index * steps + row["step"]}
            if stop.number:
                average.mean_()
                return


REG_SCHEDULES = {"constant": lambda steps: None, "linear": linear_ramp}
DECAYS = {  # share of the steps after the warm-up that is done -> factor of the learning rate
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}


def lr_factor(step: int, steps: int, config: TrainConfig) -> float:
    """Factor of the learning rate at `step`, from 0: linear warm-up, then the decay; never 0 before the last step."""
    warmup = int(config.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    return DECAYS[config.lr_scheduler_type]((step - warmup) / max(1, steps - warmup))


def step_count(batches: int, config: TrainConfig) -> int:
    """Optimizer steps of the run: --max_steps, or what the epochs give; at least 1."""
    if config.max_steps > 0:
        return config.max_steps
    return max(1, int(batches * config.num_train_epochs) // config.gradient_accumulation_steps)


@torch.no_grad()
def current_masks(layers: dict[str, nn.Linear], metric: dict[str, Tensor], config: TrainConfig) -> dict[str, Tensor]:
    """The masks of the learned weights: layer name -> bool [out_features, in_features] on the CPU, True = kept.

    Raises:
        InputError: a weight is not finite, so the run has diverged.
    """
    masks = {}
    for name, layer in layers.items():
        weight = learned_weight(layer)
        if not weight.isfinite().all():
            raise InputError("the weights have become NaN or infinite while learning; lower --learning_rate")
        signs = pretrained_weight(layer) if config.forward == "masked" else None
        masks[name] = nm_mask(ranking(weight, metric.get(name), signs), config.pattern).cpu()
    return masks


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
    """Adds the gradient of the loss, the mean over all tokens that the batches predict, to `.grad`; returns the loss.

    A batch counts by its tokens: a short document is as noisy as it is short.
    """
    predicted = [int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches]
    loss = 0.0
    with parametrize.cached():  # one mask for all forward passes of a step
        for batch, count in zip(batches, predicted, strict=True):
            with autocast(model.device, compute_dtype):
                batch_loss = calibration_loss(model, batch, distill) * (count / sum(predicted))
            batch_loss.backward()
            loss += batch_loss.item()
    return loss


class StopSignal:
    """Within the block, SIGINT and SIGTERM only set `.number`: a step, and then a save, are never cut in two."""

    def __init__(self):
        self.number: int | None = None

    def __enter__(self) -> "StopSignal":
        self.previous = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _stop(self, number, _frame) -> None:
        self.number = number
