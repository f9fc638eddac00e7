"""A run's folder from its opening to its last file: names, checks before the work, and what is saved after it."""

import dataclasses
import json
import math
import resource
import shlex
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

import proxsparse
from proxsparse.checkpoint import prepare_output_dir, require_space, save_masks, staged, write_text
from proxsparse.config import TrainConfig
from proxsparse.data import load_texts
from proxsparse.env import environment
from proxsparse.evaluation.perplexity import Perplexity, evaluation_tokens, perplexity
from proxsparse.log import check_tracker

# Documents read at most of a source, which may be endless; the samples are drawn from them.
TEXT_POOL = 10_000
# A run whose blocks are mostly undecided leaves the choice to the final projection.
FEW_DECIDED = 0.5


def open_run_dir(config: TrainConfig) -> Path:
    """Creates the output folder and writes config.yaml; fails at once where a run could not be saved."""
    check_tracker(config.report_to)
    name = Path(config.model).name or "model"
    run_dir = Path(config.output_dir or f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}")
    prepare_output_dir(run_dir, config.overwrite_output_dir)
    for name in ("result.json", "report.md", "README.md"):  # of an earlier run: they would call this one finished
        (run_dir / name).unlink(missing_ok=True)
    settings = {
        key: value for key, value in dataclasses.asdict(config).items() if value is not None and key != "config"
    }
    write_text(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False))
    return run_dir


def require_space_for(model: nn.Module, run_dir: Path) -> None:
    """Raises InputError if the disk cannot hold the checkpoint, the masks and the small files."""
    require_space(run_dir, sum(p.numel() * p.element_size() for p in model.parameters()) + 2**24)


def perplexity_of(
    config: TrainConfig, tokenizer, autocast_dtype: torch.dtype | None
) -> Callable[[nn.Module], Perplexity | None]:
    """A function model -> perplexity on the held-out text (None with --eval_data none); reads the text now."""
    if config.eval_data == "none":
        return lambda model: None
    tokens = evaluation_tokens(load_texts(config.eval_data, "validation", config.text_field, TEXT_POOL), tokenizer)
    return lambda model: perplexity(model, tokens, config.eval_seq_len, config.eval_max_windows, autocast_dtype)


def save_checkpoint(run_dir: Path, model: nn.Module, tokenizer, masks: dict[str, Tensor], config: TrainConfig) -> None:
    """Writes the pruned model (dense, zeros +0.0), tokenizer and masks, all or nothing."""
    with staged(run_dir) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        save_masks(scratch / "masks.safetensors", masks, config.pattern, config.model)


def perplexity_table(scores: dict[str, Perplexity | None], config: TrainConfig) -> dict | None:
    """The perplexity entry of result.json: one value per name, and what they were measured on."""
    if any(score is None for score in scores.values()):
        return None
    first = next(iter(scores.values()))
    measured_on = {
        "data": config.eval_data,
        "seq_len": config.eval_seq_len,
        "windows": first.windows,
        "tokens": first.tokens,
    }
    return measured_on | {name: score.value for name, score in scores.items()}


def warnings_for(table: dict | None, feasible_share: float, config: TrainConfig) -> list[str]:
    """What the user should know before using the mask, each with what to change."""
    found = []
    if table and not table["proxsparse"] < table["magnitude"]:
        found.append(
            f"the learned mask is no better than the magnitude mask (perplexity {table['proxsparse']:.2f} against "
            f"{table['magnitude']:.2f}): raise --num_samples or --seq_len, change --learning_rate (now "
            f"{config.learning_rate:g}), or use --metric activation (now {config.metric})"
        )
    if feasible_share < FEW_DECIDED:
        found.append(
            f"only {feasible_share:.1%} of the blocks were {config.pattern} before the final projection: the rest was "
            "decided by size alone; raise --reg_lambda_rel (or --reg_lambda), or take more steps"
        )
    return found


def save_result(run_dir: Path, config: TrainConfig, figures: dict) -> dict:
    """Writes result.json, the file that makes a folder a finished run, and returns what it holds."""
    result = {
        "version": proxsparse.__version__,
        "model": config.model,
        "data": config.data,
        "pattern": config.pattern,
        "metric": config.metric,
        "command": shlex.join(["python", "-m", "proxsparse.train", *sys.argv[1:]]),
        "config": dataclasses.asdict(config),
        "environment": environment(),
        "peak_memory_bytes": peak_memory_bytes(),
        **figures,
    }
    write_text(run_dir / "result.json", json.dumps(finite(result), indent=2) + "\n")
    return result


def finite(value):
    """The same value with every NaN and infinity as None: JSON has no words for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_memory_bytes() -> int:
    """The most this process held: on the GPU if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def summary(result: dict, run_dir: Path) -> str:
    """The table that ends a run on the terminal."""
    lines = []
    table = result["perplexity"]
    if table:
        lines += [f"perplexity on {table['data']}, {table['windows']} windows of {table['seq_len']} tokens"]
        lines += [
            f"  {name:<12}{table[key]:>10.2f}"
            for name, key in (("dense", "dense"), ("magnitude", "magnitude"), ("ProxSparse", "proxsparse"))
        ]
    lines += [f"WARNING: {warning}" for warning in result["warnings"]]
    lines += [f"saved to {run_dir}: the {result['pattern']} model, masks.safetensors, report.md"]
    return "\n".join(lines)
