"""The content of result.json, and the summary on the terminal."""

import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse._version import __version__
from proxsparse.allocations.budget import kept_share, numel, packed_cost
from proxsparse.data.calibration import evaluation_tokens
from proxsparse.data.sources import evaluation_text
from proxsparse.errors import INTERRUPTED, TERMINATED, Terminated, describe_error
from proxsparse.evaluation.perplexity import Perplexity, perplexity, window_bos
from proxsparse.models.checks import fit_window
from proxsparse.models.layers import body_linears, dense_share
from proxsparse.models.snap import cast_parameters_, snap_
from proxsparse.models.unfold_linears import unfolded_layers
from proxsparse.patterns import NMPattern, pattern_name
from proxsparse.run.args import PROXSPARSE, EvaluateArgs, RunArgs
from proxsparse.run.sections import cost_text, counted, each_value, named_scores, shareable, windows_text
from proxsparse.runtime.command import command_line
from proxsparse.runtime.device import environment, peak_memory_bytes, precision_name
from proxsparse.runtime.distributed import on_rank_zero, world_size

# If fewer blocks than this are N:M, the final projection determines most of the mask.
FEW_DECIDED = 0.5
# A smaller share of dense weights in the decoder blocks is not printed.
NOTABLE = 0.005
# If a measurement of the perplexity at the end of a run does not end.
COMPLETE = "the model is complete; proxsparse evaluate measures its perplexity"
# The first entries of result.json, if the run has these flags.
IDENTITY = ("method", "model", "data", "pattern", "allocation", "objective")


def perplexity_of(
    args: EvaluateArgs, text_field: str, model: nn.Module, tokenizer, autocast_dtype: torch.dtype | None
) -> Callable[[nn.Module, str], Perplexity]:
    """Reads the held-out text. Returns a function (model, name) -> its perplexity.

    Raises InputError if the text cannot be read, or --eval_seq_len exceeds the text or the model's positions.
    """
    source = args.eval_data
    tokens = evaluation_tokens(on_rank_zero(lambda: evaluation_text(source, text_field=text_field)), tokenizer)
    window_bos(model, tokenizer, args.eval_bos, "eval_bos")  # refuses --eval_bos before the run
    asked = model, args.eval_seq_len, args.window, "eval_seq_len"
    window = on_rank_zero(lambda: fit_window(*asked, len(tokens), source))

    def measure(model: nn.Module, name: str) -> Perplexity:
        title = f"perplexity of the {'fine-tuned' if name == 'finetune' else name} model"
        return perplexity(model, tokenizer, tokens, window, args.eval_max_windows, args.eval_bos, autocast_dtype, title)

    return measure


def scores_under(
    contenders: dict[str, dict[str, Tensor]],
    model: nn.Module,
    pretrained: dict[str, Tensor],
    weight_dtype: torch.dtype,
    evaluate: Callable[[nn.Module, str], Perplexity | None],
    trained: Collection[str] = (),
) -> tuple[dict[str, Perplexity], int]:
    """The perplexity of the pretrained weights under each set of masks, as far as it was measured; the exit code.

    An error or a signal ends the measurement with a message, and not the run: the masks are complete. `trained`: names
    of parameters that keep their current values, as in `models.snap_`.
    """
    scores, code = {}, 0
    try:
        for name, masks in contenders.items():
            snap_(model, pretrained, masks, trained)
            cast_parameters_(model, weight_dtype)
            scores[name] = evaluate(model, name)
    except KeyboardInterrupt as stop:
        code = TERMINATED if isinstance(stop, Terminated) else INTERRUPTED
        print(f"\ninterrupted; {COMPLETE}", file=sys.stderr)
    except Exception as error:  # of any type: that of a library, or out of memory
        if world_size() > 1:  # the other processes would wait for this one
            raise
        print(f"measuring the perplexity failed: {describe_error(error)}; {COMPLETE}", file=sys.stderr)
    return scores, code


def perplexity_table(scores: dict[str, Perplexity | None], eval_data: str) -> dict | None:
    """The perplexity entry of result.json: the text, the window and one value per name; None if none was measured."""
    scores = {name: score for name, score in scores.items() if score is not None}
    if not scores:
        return None
    scores = dict(sorted(scores.items(), key=lambda score: score[0] != "dense"))  # the dense model first
    measured_on = next(iter(scores.values())).measured_on
    return {"data": eval_data} | measured_on | {name: score.value for name, score in scores.items()}


def layer_figures(model: nn.Module, patterns: dict[str, NMPattern]) -> dict:
    """The entries of result.json about the pruned layers; dense_share: the share of the blocks' weights in others.

    arithmetic (dense is 1) and bytes a weight in bf16 are means over all linear layers of the decoder blocks, packed.
    """
    linears, unfolded = body_linears(model), unfolded_layers(model)
    layers = {name: linears[name] for name in patterns}
    packed = {name: pattern for name, pattern in patterns.items() if linears[name] not in unfolded}
    arithmetic, size = packed_cost(linears, packed)
    return {
        "dense_share": dense_share(model, layers),
        "layers": len(layers),
        "weights": numel(layers),
        "kept": kept_share(layers, patterns),
        "arithmetic": arithmetic,
        "bytes_a_weight": size,
        "pattern": pattern_name(patterns),
        "patterns": {name: str(pattern) for name, pattern in patterns.items()},
    }


def warnings_for(table: dict | None, figures: dict, samples: int | None, args: RunArgs) -> list[str]:
    """Warnings about the quality of the masks, each with a remedy.

    `table`: from `perplexity_table`; `figures`: of `Pruned`; `samples`: their number, None: the method needs none.
    """
    found, table = [], table or {}
    if samples is not None and samples < args.data.num_samples:
        found.append(
            f"the calibration text has only {samples} of --num_samples {args.data.num_samples} samples: give more "
            f"documents, or use {'' if args.data.packing else '--packing with '}a shorter --seq_len"
        )
    if names := ", ".join(name for name, score in named_scores(table).items() if math.isnan(score)):
        found.append(f"the perplexity is NaN ({names}): use --precision fp32, or check the model for damaged weights")
    before = table.get("pruned" if args.command == "finetune" else args.method)
    if "finetune" in table and not table["finetune"] < before:
        found.append(
            f"fine-tuning has not improved the model (perplexity {table['finetune']:.2f}, before {before:.2f}): give "
            f"more text (--num_samples), or change --learning_rate (now {figures['learning_rate']:g})"
        )
    if args.method != PROXSPARSE:
        return found
    options, decided = args.options, figures["feasible_share"]
    if "magnitude" in table and not table[PROXSPARSE] < table["magnitude"]:
        found.append(
            f"the learned mask is no better than the magnitude mask (perplexity {table[PROXSPARSE]:.2f} against "
            f"{table['magnitude']:.2f}): raise --num_samples or --seq_len, change --learning_rate (now "
            f"{options.learning_rate:g})" + ", or use --objective masked" * (not options.masked)
        )
    if not options.masked and decided < FEW_DECIDED:  # masked has no final projection
        found.append(
            f"only {decided:.1%} of the blocks were {args.model.pattern} before the final projection, which prunes the "
            "others by magnitude; raise --reg_lambda_rel (or --reg_lambda), or use more steps"
        )
    return found


def as_result(args: RunArgs, device: torch.device, figures: dict) -> dict:
    """The content of result.json: version, flags, environment and figures; of absolute paths only the file names."""
    flags = {"method": args.method, "allocation": args.allocation} | args.flags()
    result = {
        "version": __version__,
        **{key: flags[key] for key in IDENTITY if key in flags},
        "precision": precision_name(args.hardware.precision, device),
        "command": command_line(),
        "config": args.flags(),
        "environment": environment(device),
        "peak_memory_bytes": peak_memory_bytes(device),
        **figures,
    }
    return shareable(result)


def finite(value):
    """The same value with None for every NaN and infinity, which JSON does not support."""
    return each_value(value, lambda item: None if isinstance(item, float) and not math.isfinite(item) else item)


def summary(result: dict, run_dir: Path) -> str:
    """The summary that is printed at the end of a run."""
    lines = []
    if table := result["perplexity"]:
        lines += [f"perplexity on {table['data']}, {windows_text(table)}"]
        lines += [f"  {name:<20}{score:>10.2f}" for name, score in named_scores(table).items()]
    kept = f"{counted(result['patterns'])}; {result['kept']:.2%} of their weights kept"
    lines += [f"layers ({result['allocation']}): {kept}", cost_text(result)]
    if (dense := result["dense_share"]) >= NOTABLE:
        lines += [f"{dense:.1%} of the weights of the decoder blocks are in other layers and stay dense"]
    lines += [f"WARNING: {warning}" for warning in result["warnings"]]
    if result["status"] == "interrupted":
        lines += [f"interrupted after step {result['steps']}: the model is the one learned so far"]
    report = "report.md" if (run_dir / "report.md").exists() else "result.json"
    lines += [f"saved to {run_dir}: the {result['pattern']} model, masks.safetensors, {report}"]
    return "\n".join(lines)
