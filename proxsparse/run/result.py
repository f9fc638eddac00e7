"""What result.json holds, and the summary on the terminal."""

import collections
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse._version import __version__
from proxsparse.allocations.budget import budget, numel
from proxsparse.data.sources import evaluation_text
from proxsparse.evaluation.perplexity import Perplexity, evaluation_tokens, perplexity
from proxsparse.models.checks import fit_window
from proxsparse.models.snap import cast_parameters_, snap_
from proxsparse.patterns import NMPattern
from proxsparse.run.config import WINDOWS, RunConfig
from proxsparse.runtime.command import command_line
from proxsparse.runtime.device import environment, peak_memory_bytes
from proxsparse.runtime.distributed import on_rank_zero

# Below this share of N:M blocks the final projection, not the learning, makes most decisions.
FEW_DECIDED = 0.5
# What result.json says of a run in its first lines, where the run has it.
IDENTITY = ("method", "model", "data", "pattern", "allocation", "objective")


def perplexity_of(
    config: RunConfig, model: nn.Module, tokenizer, autocast_dtype: torch.dtype | None
) -> Callable[[nn.Module, str], Perplexity | None]:
    """A function (model, its name) -> perplexity on the held-out text (None with --eval_data none); reads it now.

    Raises:
        InputError: the text cannot be read, or the model has fewer positions than the window.
    """
    if config.eval_data == "none":
        return lambda model, name: None
    source = config.eval_data
    text = on_rank_zero(lambda: evaluation_text(source, text_field=config.text_field))
    tokens = evaluation_tokens(text, tokenizer)
    window = fit_window(model, config.eval_seq_len, WINDOWS["eval_seq_len"], "eval_seq_len", len(tokens))
    how = window, config.eval_max_windows, autocast_dtype
    return lambda model, name: perplexity(model, tokens, *how, f"perplexity of the {name} model")


def scores_under(
    contenders: dict[str, dict[str, Tensor]],
    model: nn.Module,
    pretrained: dict[str, Tensor],
    weight_dtype: torch.dtype,
    evaluate: Callable[[nn.Module, str], Perplexity | None],
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
            scores[name] = evaluate(model, name)
    except KeyboardInterrupt:
        print("\ninterrupted: the masks are saved, the perplexity is not measured", file=sys.stderr)
    return scores


def perplexity_table(scores: dict[str, Perplexity | None], config: RunConfig) -> dict | None:
    """The perplexity entry of result.json: one value per name, and what they were measured on; None if not measured."""
    if any(score is None for score in scores.values()):
        return None
    first = next(iter(scores.values()))
    seq_len = first.tokens // first.windows
    table = {"data": config.eval_data, "seq_len": seq_len, "windows": first.windows, "tokens": first.tokens}
    return table | {name: score.value for name, score in scores.items()}


def what_was_pruned(layers: dict[str, nn.Linear], patterns: dict[str, NMPattern], pattern: NMPattern) -> dict:
    """What result.json says of the layers: how many, their weights, the pattern of each, the share that is kept."""
    return {
        "layers": len(layers),
        "weights": numel(layers),
        "budget": {"asked": pattern.density, "kept": budget(layers, patterns)},
        "patterns": {name: str(pattern) for name, pattern in patterns.items()},
    }


def few_samples(samples: int, config: RunConfig) -> list[str]:
    """A warning if the calibration text was too short for what was asked."""
    if samples >= config.num_samples:
        return []
    return [
        f"the calibration text made only {samples} of --num_samples {config.num_samples} samples: give more "
        "documents, or --packing with a shorter --seq_len"
    ]


def warnings_for(table: dict | None, figures: dict, samples: int | None, config: RunConfig) -> list[str]:
    """What the user should know before using the masks, each with what to change.

    Args:
        table: of `perplexity_table`.
        figures: what the method reports.
        samples: of the calibration text; None: the method needs none.
    """
    found = [] if samples is None else few_samples(samples, config)
    if table and figures and not table[config.method] < table["magnitude"]:
        found.append(
            f"the learned mask is no better than the magnitude mask (perplexity {table[config.method]:.2f} against "
            f"{table['magnitude']:.2f}): raise --num_samples or --seq_len, change --learning_rate (now "
            f"{config.learning_rate:g})" + (", or use --objective masked" if config.objective == "paper" else "")
        )
    decided = figures.get("feasible_share")
    if decided is not None and config.forward == "dense" and decided < FEW_DECIDED:  # masked: no projection follows
        found.append(
            f"only {decided:.1%} of the blocks were {config.pattern} before the final projection, which decided "
            "the rest by size alone; raise --reg_lambda_rel (or --reg_lambda), or take more steps"
        )
    return found


def as_result(config: RunConfig, device: torch.device, figures: dict) -> dict:
    """What result.json holds: who made this, of what, where, and the figures."""
    return {
        "version": __version__,
        **{key: getattr(config, key) for key in IDENTITY if hasattr(config, key)},
        "command": command_line(),
        "config": vars(config),
        "environment": environment(device),
        "peak_memory_bytes": peak_memory_bytes(device),
        **figures,
    }


def finite(value):
    """The same value with every NaN and infinity as None, which JSON cannot hold."""
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
        names |= {"magnitude": "magnitude", "proxsparse": "ProxSparse"}
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
