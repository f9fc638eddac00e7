"""The options of the training loops: flags of `proxsparse train` and `finetune` in addition to those of every run."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

from proxsparse.errors import InputError, require

# Defaults by --objective. masked: dimensionless, because the weights are scaled; measured on SmolLM2-135M
# (docs/results.md). paper: the values of the paper.
OBJECTIVES = {
    "masked": {"learning_rate": 5e-3, "reg_lambda_rel": 2e-3},
    "paper": {"learning_rate": 1e-4, "reg_lambda_rel": 3e-3},
}
SAVE_MINUTES = 10  # between checkpoints
# Learning rate and lambda_1 of layers that keep more than half, relative to those of 2:4, under masks. The weights that
# 6:8 prunes are small and close to each other: with the steps of 2:4 its mask became no better than Wanda's
# (docs/results.md, "Between 2:4 and dense").
MILDER_STEP = 0.3


Valid = tuple[Callable[[float], bool], str]  # a condition, and the same in words
AT_LEAST_0: Valid = (lambda value: value >= 0, "at least 0")
AT_LEAST_1: Valid = (lambda value: value >= 1, "at least 1")
STEPS: Valid = (lambda value: value >= 1, "at least 1; --save_minutes 0 saves only when the run is stopped")
NOT_NEGATIVE: Valid = (lambda value: value >= 0, "a finite number >= 0")
POSITIVE: Valid = (lambda value: value > 0, "a finite number > 0")
SHARE: Valid = (lambda value: 0 <= value <= 1, "between 0 and 1")


def flag(default, help: str, group: str | None = None, choices: tuple[str, ...] = (), valid: Valid | None = None):
    """A flag with default, help text, group in --help (None: that of its class), allowed values (empty: any), range."""
    return field(default=default, metadata={"help": help, "group": group, "choices": choices, "valid": valid})


def check_fields(options) -> None:
    """Raises InputError if the value of a field is not one of its choices, or out of its range."""
    for each in dataclasses.fields(options):
        value, allowed, valid = getattr(options, each.name), each.metadata["choices"], each.metadata["valid"]
        if value is None:
            continue
        if allowed and value not in allowed:
            raise InputError(f"--{each.name} {value}: must be one of {', '.join(allowed)}")
        if valid:
            require(each.name, value, isinstance(value, int | float) and valid[0](value), valid[1])


@dataclass
class LoopOptions:
    """Options of every training loop: steps, AdamW, memory and checkpoints."""

    group: ClassVar[str] = "learning"  # in --help
    distill: float = flag(
        0.0, "weight of the distillation from the dense model, 0 to 1; needs --objective masked", valid=SHARE
    )
    num_train_epochs: float = flag(
        1.0, "passes over the samples", valid=(lambda value: 0 < value <= 1e6, "a number > 0, at most 1,000,000")
    )
    max_steps: int = flag(
        -1,
        "optimizer steps; -1: determined by --num_train_epochs",
        valid=(lambda value: value == -1 or value >= 1, "at least 1, or -1 for --num_train_epochs"),
    )
    per_device_train_batch_size: int = flag(1, "samples per forward pass", valid=AT_LEAST_1)
    gradient_accumulation_steps: int = flag(1, "forward passes per optimizer step", valid=AT_LEAST_1)
    learning_rate: float | None = flag(
        None,
        "learning rate after the warm-up; default: 5e-3 (dimensionless), with --objective paper 1e-4. With --objective "
        f"masked, layers that keep more than half of the weights, such as 6:8, use {MILDER_STEP} of it and of lambda_1",
        valid=POSITIVE,
    )
    lr_scheduler_type: str = flag(
        "linear", "decay of the learning rate after the warm-up", choices=("linear", "cosine", "constant")
    )
    warmup_ratio: float = flag(0.1, "share of the steps in which the learning rate rises from 0", valid=SHARE)
    weight_decay: float = flag(0.0, "decoupled weight decay of AdamW", valid=NOT_NEGATIVE)
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm; 0: no clipping", valid=NOT_NEGATIVE)

    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory", "hardware")
    moment_dtype: str | None = flag(
        None, "dtype of AdamW's moments; default: bf16 with --precision bf16, else fp32", "hardware", ("fp32", "bf16")
    )
    master_weights: bool = flag(
        False, "with --precision bf16: fp32 copies of the weights instead of stochastic rounding", "hardware"
    )
    compile: bool = flag(
        False, "torch.compile of the decoder blocks and the loss; needs a C++ compiler, on a GPU triton", "hardware"
    )
    save_minutes: float | None = flag(
        None,
        f"minutes between checkpoints, default {SAVE_MINUTES}; 0: only when the run is stopped; a complete run removes "
        "them",
        "output",
        valid=NOT_NEGATIVE,
    )
    save_steps: int | None = flag(None, "steps between checkpoints, instead of minutes", "output", valid=STEPS)
    save_total_limit: int = flag(1, "number of checkpoints to keep", "output", valid=AT_LEAST_1)
    seed: int = flag(
        42,
        "seed of the document order and of all random numbers",
        "hardware",
        valid=(lambda value: 0 <= value < 2**63, "between 0 and 2^63 - 1"),
    )

    @property
    def seconds_between_checkpoints(self) -> float:
        """Infinite if the run saves by steps, or only when it is stopped."""
        minutes = SAVE_MINUTES if self.save_minutes is None else self.save_minutes
        return 60 * minutes if minutes and self.save_steps is None else math.inf

    def check(self) -> Self:
        """Returns itself. Raises InputError if an option is out of range or incompatible with another one."""
        check_fields(self)
        if self.save_steps is not None and self.save_minutes is not None:
            raise InputError(
                f"--save_steps {self.save_steps} and --save_minutes {self.save_minutes:g} exclude each other; give one"
            )
        return self


@dataclass
class LearningOptions(LoopOptions):
    """Options of the method "proxsparse". None: a default that depends on other options, see `check`."""

    objective: str = flag(
        "masked",
        "masked: the loss is computed with the pretrained weights under the current mask, and weights are scaled by "
        "their input activations; paper: with the learned weights, without scaling, and all weights are trained",
        choices=tuple(OBJECTIVES),
    )
    scaling_samples: int = flag(128, "samples on which the input activations are measured", valid=AT_LEAST_1)
    reg_lambda: float | None = flag(None, "lambda_1, absolute; not multiplied by the learning rate", valid=NOT_NEGATIVE)
    reg_lambda_rel: float | None = flag(
        None,
        "lambda_1 * mean|w|, the same in every layer (scaled weights have mean 1); default: 0.002, with --objective "
        "paper 0.003",
        valid=NOT_NEGATIVE,
    )
    frozen_lambda: float = flag(0.0, "lambda_2 of the frozen-weight term; needs --objective paper", valid=NOT_NEGATIVE)
    frozen_eps: float = flag(0.1, "epsilon of the frozen-weight term", valid=POSITIVE)
    match_hidden: float = flag(
        0.0,
        "weight in the loss of the squared relative error of the hidden states after each decoder block, compared with "
        "the dense model; needs --objective masked",
        valid=NOT_NEGATIVE,
    )

    @property
    def masked(self) -> bool:
        """Whether the loss is that of W0 under the mask, with scaled weights; else the objective of the paper."""
        return self.objective == "masked"

    def check(self) -> Self:
        """As in `LoopOptions`; also fills in the defaults."""
        super().check()
        defaults = OBJECTIVES[self.objective]
        self.learning_rate = defaults["learning_rate"] if self.learning_rate is None else self.learning_rate
        if self.reg_lambda is None and self.reg_lambda_rel is None:
            self.reg_lambda_rel = defaults["reg_lambda_rel"]
        if self.reg_lambda is not None and self.reg_lambda_rel is not None:
            raise InputError("--reg_lambda and --reg_lambda_rel are mutually exclusive; give one of them")
        for name in ("reg_lambda", "reg_lambda_rel"):
            if self.masked and (value := getattr(self, name) or 0) > 0.1:
                raise InputError(
                    f"--{name} {value}: too large for scaled weights, which have mean 1; use about 0.002, or "
                    "--objective paper for the values of the paper"
                )
        frozen = "with --objective masked the weights are frozen already"
        needs = {"frozen_lambda": ("paper", frozen)}
        needs |= dict.fromkeys(("distill", "match_hidden"), ("masked", "it compares the model with and without masks"))
        for name, (objective, reason) in needs.items():
            if self.objective != objective and (value := getattr(self, name)):
                remedy = f"add --objective {objective}, or leave out --{name}"
                raise InputError(f"--{name} {value:g}: needs --objective {objective}: {reason}; {remedy}")
        return self


@dataclass
class FinetuneOptions(LoopOptions):
    """Options of `proxsparse finetune` in addition to those of every run."""

    held_out: int = flag(
        0, "samples that are held out to choose the best weights; 0: none, the last weights are kept", valid=AT_LEAST_0
    )
    evals: int = flag(10, "number of measurements of the held-out loss after that at the start", valid=AT_LEAST_1)
    distill: float = flag(0.5, "weight of the distillation from the teacher in the loss, 0 to 1", valid=SHARE)
    learning_rate: float | None = flag(
        None,
        "learning rate after the warm-up; default: 3e-4, or 1.5e-4 if every layer keeps at least 2/3 of its weights",
        valid=POSITIVE,
    )
