"""A run's folder from its opening to its last file: checks before the work, and what is saved after it."""

import argparse
import collections
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from proxsparse import output_folder
from proxsparse._version import __version__
from proxsparse.checkpoint import require_space, save_masks, staged, sync, write_file
from proxsparse.config import LAST, NOT_REPEATED, TrainConfig
from proxsparse.data import evaluation_text
from proxsparse.device import environment, peak_memory_bytes
from proxsparse.distributed import from_first, processes
from proxsparse.errors import InputError
from proxsparse.evaluation.perplexity import Perplexity, evaluation_tokens, perplexity
from proxsparse.log import check_tracker
from proxsparse.methods.allocation import UNIFORM, budget, numel
from proxsparse.models import cast_parameters_, check_length, load_model, snap_
from proxsparse.options import PROXSPARSE
from proxsparse.output_folder import NEXT, OutputFolder
from proxsparse.patterns import NMPattern
from proxsparse.report import write_report

Config = TrainConfig | argparse.Namespace  # the flags of proxsparse.train or of proxsparse.prune
# Below this share of N:M blocks the final projection, not the learning, makes most decisions.
FEW_DECIDED = 0.5
# What result.json says of a run in its first lines, where the run has it.
IDENTITY = ("method", "model", "data", "pattern", "allocation", "metric")
NO_CHOICE = {"method": PROXSPARSE.name, "allocation": UNIFORM}  # of proxsparse.train, which has no flag for them


# Flags that may name a file or a folder which the run reads.
INPUTS = ("model", "data", "eval_data", "start", "config", "resume_from_checkpoint")


@contextmanager
def opened(config: Config, command: str, may_differ: tuple[str, ...]) -> Iterator[OutputFolder]:
    """The output folder of a run, locked for this run within the block, see `output_folder.opened`.

    Of several processes the first one opens it; all get the same. `may_differ`: flags that a resumed run may change.

    Raises:
        InputError: as `output_folder.opened`; it is the folder of --model; --resume_from_checkpoint names no run.
    """
    check_tracker(vars(config).get("report_to", "none"))
    with ExitStack() as stack:

        def enter() -> OutputFolder:
            final = output_dir_of(config)
            if final.exists() and Path(config.model).exists() and final.samefile(config.model):
                raise InputError(f"--output_dir {str(final)!r} is the folder of --model: the result would replace it")
            folder = stack.enter_context(
                output_folder.opened(
                    final,
                    command,
                    vars(config),
                    overwrite=config.overwrite_output_dir,
                    resume=is_resumed_in(final, config.resume_from_checkpoint),
                    may_differ=may_differ,
                    inputs={name: value for name in INPUTS if (value := vars(config).get(name)) not in (None, LAST)},
                )
            )
            if config.resume_from_checkpoint == LAST and not folder.begun:
                print(f"no run to resume in {str(final)!r}: starting from the beginning", file=sys.stderr)
            return folder

        yield from_first(enter)


def output_dir_of(config: Config) -> Path:
    """--output_dir, else the folder of the checkpoint to resume from, else a new one. Raises InputError for `last`."""
    asked = config.resume_from_checkpoint
    if config.output_dir is not None:
        return Path(config.output_dir)
    if asked == LAST:
        raise InputError("--resume_from_checkpoint last requires --output_dir")
    if asked is not None:
        around = Path(asked).resolve().parent
        return around.parent if around.name == NEXT else around
    return Path(f"runs/{Path(config.model).name or 'model'}-{datetime.now():%Y%m%d-%H%M%S}")


def is_resumed_in(final: Path, asked: str | None) -> bool:
    """Whether --resume_from_checkpoint continues in this output directory: `last`, or a folder inside of it."""
    if asked is None or asked == LAST:
        return asked == LAST
    return Path(asked).resolve().parent in (final.resolve(), (final / NEXT).resolve())


def start_run(run_dir: Path, config: Config, resumed: Path | None = None) -> None:
    """Writes config.yaml, and metrics.jsonl as it was at the checkpoint `resumed`; without one it begins empty.

    The result.json of an interruption goes: it does not describe the run that continues.
    """
    (run_dir / output_folder.RESULT).unlink(missing_ok=True)
    settings = {name: value for name, value in vars(config).items() if value is not None}
    settings = {name: value for name, value in settings.items() if name not in NOT_REPEATED}
    write_file(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False).encode())
    if resumed is not None:
        write_file(run_dir / output_folder.METRICS, (resumed / output_folder.METRICS).read_bytes())
    else:
        (run_dir / output_folder.METRICS).unlink(missing_ok=True)


def require_space_for(model: nn.Module, run_dir: Path, more_bytes: int = 0) -> None:
    """Raises InputError if the disk cannot hold the pruned model, its masks, small files and `more_bytes`."""
    weights = sum(p.numel() * p.element_size() + p.numel() // 8 for p in model.parameters())
    require_space(run_dir, weights + 2**24 + more_bytes)


def pruned(model: nn.Module, masks: dict[str, Tensor], config: Config) -> nn.Module:
    """The model to save. Of a sharded one it is read anew: its weights are the pretrained ones under the masks."""
    if processes() == 1:
        return model
    model, _ = load_model(config.model)
    snap_(model, {name: parameter.detach() for name, parameter in model.named_parameters()}, masks)
    return model


def perplexity_of(
    config: Config, model: nn.Module, tokenizer, autocast_dtype: torch.dtype | None
) -> Callable[[nn.Module], Perplexity | None]:
    """A function model -> perplexity on the held-out text (None with --eval_data none); reads the text now.

    Raises:
        InputError: the text cannot be read, or the model has fewer positions than the window.
    """
    if config.eval_data == "none":
        return lambda model: None
    source = config.eval_data
    text = from_first(lambda: evaluation_text(source, text_field=config.text_field))
    check_length(model, config.eval_seq_len, "eval_seq_len")
    tokens = evaluation_tokens(text, tokenizer)
    return lambda model: perplexity(model, tokens, config.eval_seq_len, config.eval_max_windows, autocast_dtype)


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    tokenizer,
    masks: dict[str, Tensor],
    patterns: str | dict[str, NMPattern],
    base: dict[str, str],
) -> None:
    """Writes the masks, then the pruned model (dense, zeros +0.0) and its tokenizer; each of the two whole or not.

    Args:
        patterns: of all layers, or layer name -> pattern.
        base: the pretrained model, see `models.base_of`.
    """
    with staged(run_dir) as scratch:
        save_masks(scratch / output_folder.MASKS, masks, patterns, **base)
    with staged(run_dir) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        output_folder.claim(run_dir, [entry.name for entry in scratch.iterdir()])


def scores_under(
    contenders: dict[str, dict[str, Tensor]],
    model: nn.Module,
    pretrained: dict[str, Tensor],
    weight_dtype: torch.dtype,
    evaluate: Callable[[nn.Module], Perplexity | None],
    updated: bool = False,
) -> dict[str, Perplexity | None]:
    """The perplexity of the pretrained weights under each set of masks; None for those that Ctrl-C cut off.

    `updated`: of the weights as the method has changed them, as in `models.snap_`.
    """
    scores: dict[str, Perplexity | None] = dict.fromkeys(contenders)
    try:
        for name, masks in contenders.items():
            snap_(model, pretrained, masks, updated)
            cast_parameters_(model, weight_dtype)
            scores[name] = evaluate(model)
    except KeyboardInterrupt:
        print("\ninterrupted: the masks are saved, the perplexity is not measured", file=sys.stderr)
    return scores


def perplexity_table(scores: dict[str, Perplexity | None], config: Config) -> dict | None:
    """The perplexity entry of result.json: one value per name, and what they were measured on; None if not measured."""
    if any(score is None for score in scores.values()):
        return None
    first = next(iter(scores.values()))
    table = {"data": config.eval_data, "seq_len": config.eval_seq_len, "windows": first.windows, "tokens": first.tokens}
    return table | {name: score.value for name, score in scores.items()}


def what_was_pruned(layers: dict[str, nn.Linear], patterns: dict[str, NMPattern], pattern: NMPattern) -> dict:
    """What result.json says of the layers: how many, their weights, the pattern of each, the share that is kept."""
    return {
        "layers": len(layers),
        "weights": numel(layers),
        "budget": {"asked": pattern.density, "kept": budget(layers, patterns)},
        "patterns": {name: str(pattern) for name, pattern in patterns.items()},
    }


def few_samples(samples: int, config: Config) -> list[str]:
    """A warning if the calibration text was too short for what was asked."""
    if samples >= config.num_samples:
        return []
    return [
        f"the calibration text made only {samples} of --num_samples {config.num_samples} samples: give more "
        "documents, or --packing with a shorter --seq_len"
    ]


def warnings_for(table: dict | None, feasible_share: float, samples: int, config: TrainConfig) -> list[str]:
    """What the user should know before using the mask, each with what to change."""
    found = few_samples(samples, config)
    if table and not table["proxsparse"] < table["magnitude"]:
        metric = "" if config.metric == "activation" else ", or use --metric activation"
        found.append(
            f"the learned mask is no better than the magnitude mask (perplexity {table['proxsparse']:.2f} against "
            f"{table['magnitude']:.2f}): raise --num_samples or --seq_len, change --learning_rate (now "
            f"{config.learning_rate:g}){metric}"
        )
    if config.forward == "dense" and feasible_share < FEW_DECIDED:  # under the mask there is no projection to come
        found.append(
            f"only {feasible_share:.1%} of the blocks were {config.pattern} before the final projection, which decided "
            "the rest by size alone; raise --reg_lambda_rel (or --reg_lambda), or take more steps"
        )
    return found


def as_result(config: Config, device: torch.device, figures: dict) -> dict:
    """What result.json holds: who made this, of what, where, and the figures."""
    settings, identity = vars(config), NO_CHOICE | vars(config)
    command = "prune" if Path(sys.argv[0]).stem == "prune" else "train"
    return {
        "version": __version__,
        **{key: identity[key] for key in IDENTITY if key in identity},
        "command": shlex.join(["python", "-m", f"proxsparse.{command}", *sys.argv[1:]]),
        "config": settings,
        "environment": environment(device),
        "peak_memory_bytes": peak_memory_bytes(device),
        **figures,
    }


def save_result(run_dir: Path, result: dict) -> None:
    """Writes result.json, the file that makes a folder a finished run; metrics.jsonl is on the disk before."""
    if (run_dir / output_folder.METRICS).exists():
        sync(run_dir / output_folder.METRICS)
    write_file(run_dir / output_folder.RESULT, (json.dumps(finite(result), indent=2) + "\n").encode())


def nothing_left(folder: OutputFolder) -> bool:
    """Whether the resumed run is complete. If so, finishes what a kill after its last file may have left undone."""
    if not folder.complete:
        return False
    if (folder.path / output_folder.METRICS).exists():
        write_report(folder.path)
    finish(folder)
    print(f"{folder.final}: this run is complete, nothing is left to do")
    return True


def finish(folder: OutputFolder) -> None:
    """Removes checkpoints and finished blocks; with --overwrite_output_dir, replaces the older result."""
    output_folder.remove_in_progress(folder.path)
    output_folder.publish(folder)


def finite(value):
    """The same value with every NaN and infinity as None: JSON has no words for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(result: dict, run_dir: Path) -> str:
    """The table that ends a run on the terminal."""
    lines = []
    if table := result["perplexity"]:
        lines += [f"perplexity on {table['data']}, {table['windows']} windows of {table['seq_len']} tokens"]
        names = {"dense": "dense", result["method"]: result["method"]}
        names |= {"magnitude": "magnitude", PROXSPARSE.name: "ProxSparse"}
        lines += [f"  {name:<12}{table[key]:>10.2f}" for key, name in names.items() if key in table]
    counts = collections.Counter(result["patterns"].values())
    spread = ", ".join(f"{count} of {pattern}" for pattern, count in sorted(counts.items()))
    kept, asked = result["budget"]["kept"], result["budget"]["asked"]
    lines += [f"{result['allocation']}: {spread} layers; {kept:.2%} of their weights kept, asked for {asked:.2%}"]
    lines += [f"WARNING: {warning}" for warning in result["warnings"]]
    if result["status"] == "interrupted":
        lines += [f"interrupted after step {result['steps']}: these are the masks learned so far, no perplexity"]
    report = "report.md" if (run_dir / "report.md").exists() else "result.json"
    lines += [f"saved to {run_dir}: the {result['pattern']} model, masks.safetensors, {report}"]
    return "\n".join(lines)
