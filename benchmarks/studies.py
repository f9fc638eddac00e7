"""The paper's studies of its own parts: each one command that leaves rows and a picture. NAME comes first.

    python benchmarks/studies.py --list
    python benchmarks/studies.py lambda1                            # on proxsparse.train's demo recipe
    python benchmarks/studies.py lambda1 --metric none --quick      # the paper's form; a rehearsal of seconds
    python benchmarks/studies.py all --recipe smollm2-135m --data c4_train_sample.jsonl.gz --eval_data wiki.valid.raw

A flag that is not listed below goes to proxsparse.train. What a study does not sweep stays as those flags say. Each run
has a folder of its own in --output_dir/cells; a run that is there with the same settings is not repeated, so that a
study goes on where it stopped, and studies share their runs.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import common
import study_plots
import torch
from compare_methods import quoted, read_rows
from contenders import digest, label, settings_of
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from proxsparse import train
from proxsparse.errors import InputError, run_command
from proxsparse.io.atomic import write_file
from proxsparse.optim.param_groups import pruned_parameters
from proxsparse.reference import nm_mask
from proxsparse.run.config import TrainConfig
from proxsparse.run.parse import parse_config
from proxsparse.run.report import read_metrics, read_result
from proxsparse.run.resume import NOT_SETTINGS
from proxsparse.runtime.device import choose_device

# lambda_1 = infinity is the projection: the prox is 2-sparse for every block whose largest |w| is above 1.21 / lambda.
PROJECTION = 1e9
QUICK_FLAGS = ["--num_samples", "16", "--seq_len", "64", "--eval_seq_len", "64", "--eval_max_windows", "2"]
PROVENANCE = "provenance.json"  # device, versions and commit of a run, written when all else is there
CURVE_POINTS = 100  # of a run's curve in its row, at most


# ---------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Sweep:
    """The runs of a study: one a value, with the settings that `settings(value, the user's config)` adds."""

    values: tuple
    quick: tuple  # what --quick leaves of them
    parse: Callable[[str], object]
    settings: Callable[[object, TrainConfig], dict[str, float]]
    flags: tuple[str, ...] = ()  # of proxsparse.train, in the place of its defaults


@dataclass(frozen=True)
class Study:
    """`curve` is what it follows over the steps (of `CURVES`); without one its figure is the final perplexity."""

    paper: str
    title: str
    sweep: Sweep
    draw: Callable
    curve: str | None = None


def reg_lambda_flag(config: TrainConfig) -> str:
    """The flag that sets lambda_1 in this run: absolute, or relative to mean|w|."""
    return "reg_lambda" if config.reg_lambda is not None else "reg_lambda_rel"


def times_reg_lambda(factor: float, config: TrainConfig) -> dict[str, float]:
    flag = reg_lambda_flag(config)
    return {flag: factor * getattr(config, flag)}


def hard_or_soft(cell: str, config: TrainConfig) -> dict[str, float]:
    """The paper's four cells: a hard constraint is the limit of its lambda at infinity."""
    sparsity, frozen = {reg_lambda_flag(config): math.inf}, {"frozen_lambda": math.inf}
    cells = {"both soft": {}, "hard frozen weights": frozen, "hard sparsity": sparsity, "both hard": sparsity | frozen}
    return cells[cell]


# What keeps the learned weights near W0 can be studied only where the loss sees them.
DENSE = ("--forward", "dense")
ONE_RUN = ("--average_runs", "1")  # a curve over several would start again with each
CELLS = ("both soft", "hard frozen weights", "hard sparsity", "both hard")
CONSTRAINTS = Sweep(CELLS, CELLS, str, hard_or_soft, DENSE)
# Factors of the lambda that the flags give; the paper's own sweeps reach from 1/1000 to 50 times its best value.
LAMBDA_1 = Sweep((0.01, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf), (0.1, 1.0, 10.0), float, times_reg_lambda, ONE_RUN)
LAMBDA_2 = Sweep(
    (0.0, 0.5, 2.0, 20.0, 100.0, 500.0, 2500.0, math.inf),  # those of the paper's table
    (0.0, 20.0, math.inf),
    float,
    lambda value, config: {"frozen_lambda": value},
    DENSE,
)
SAMPLES = Sweep((100, 200, 400), (4, 8, 16), int, lambda value, config: {"num_samples": value}, ONE_RUN)

STUDIES = {
    "constraints": Study("Table 3", "Hard against soft constraints", CONSTRAINTS, study_plots.bars),
    "lambda1": Study("Table 4", "Strength of the sparsity regularizer", LAMBDA_1, study_plots.line),
    "lambda2": Study("Table 5", "Strength of the frozen-weight regularizer", LAMBDA_2, study_plots.line),
    "samples": Study("Table 6, its ProxSparse rows", "Calibration samples", SAMPLES, study_plots.line),
    "convergence": Study(
        "Figures 1 and 4, (a) to (c)", "Share of N:M blocks by λ₁", LAMBDA_1, study_plots.curves, "feasible_share"
    ),
    "early_mask": Study(
        "Figures 1 and 4, (d)", "Mask bits equal to the final mask, by λ₁", LAMBDA_1, study_plots.curves, "similarity"
    ),
    "norm_gap": Study(
        "Figure 2", "Distance of the kept weights from pretrained, by λ₂", LAMBDA_2, study_plots.curves, "norm_gap"
    ),
}
CURVES = {  # what a study follows -> [step, value] of a run's folder
    "feasible_share": lambda folder: [[row["step"], row["feasible_share"]] for row in read_metrics(folder)],
    "norm_gap": lambda folder: [[row["step"], row["norm_gap"]] for row in read_metrics(folder)],
    "similarity": lambda folder: [[p["step"], p["to_final"]] for p in read_result(folder)["mask_similarity"]],
}


# ---------------------------------------------------------------------------------------------- the walk


def main(arguments: list[str] | None = None) -> None:
    """Each named study: its runs, its rows, its picture."""
    args, flags = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    if args.list or args.study is None:
        print(common.table(["study", "paper", "what"], [[name, s.paper, s.title] for name, s in STUDIES.items()]))
        return
    for name in STUDIES if args.study == "all" else [args.study]:
        run_study(name, args, [*STUDIES[name].sweep.flags, *(QUICK_FLAGS if args.quick else []), *flags])


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this command, and all others: those of proxsparse.train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "study", nargs="?", choices=[*STUDIES, "all"], metavar="NAME", help=f"{', '.join(STUDIES)}, all"
    )
    parser.add_argument("--list", action="store_true", help="print the studies and the paper's tables and figures")
    parser.add_argument("--values", nargs="+", metavar="V", help="of the sweep; lambda1: factors of the flags' lambda")
    parser.add_argument("--quick", action="store_true", help="few values, and few short samples: a rehearsal")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/studies"), help="pictures; in cells/ the runs")
    parser.add_argument("--results", type=Path, default=common.results_file("studies"), help="the file of rows")
    return parser.parse_known_args(arguments)


def run_study(name: str, args: argparse.Namespace, flags: list[str]) -> None:
    """The study's runs that are missing, a row for each of its runs, and the picture of all."""
    study, config, known = STUDIES[name], parse_config(flags), read_rows(args.results)
    if study.curve is None and config.eval_data == "none":
        raise InputError(f"{name}: its figure is the perplexity; give an --eval_data")
    cells, rows = {value: study.sweep.settings(value, config) for value in chosen_values(name, args)}, []
    for settings in cells.values():
        parse_config([*flags, *flags_for(settings)])  # what is refused is refused before the first run
    for value, settings in cells.items():
        print(f"\n{name}, {cell_name(value)}: {settings or 'as the flags say'}", file=sys.stderr)
        folder = run_cell([*flags, *flags_for(settings)], math.inf == settings.get("frozen_lambda"), args)
        row = row_of(name, value, settings, flags, folder)
        rows.append(row)
        if row not in known:
            common.append_rows(args.results, [row])
    header = ["", "perplexity", "N:M before projection", "norm gap", "minutes"]
    print(
        f"\n{study.title} ({study.paper}); {study_plots.measured_on(rows[0])}\n\n{common.table(header, cells_of(rows))}"
    )
    if len(rows) > 1:  # one run alone is a repetition of what a picture shows already
        picture = args.output_dir / f"{name}-{label(config.model)}-{config.metric}-{config.forward}.png"
        write_file(picture, study_plots.png(study.draw(rows, study.title)))
        print(f"\n{picture}")


def chosen_values(name: str, args: argparse.Namespace) -> list:
    """The values of the sweep that this call runs. Raises InputError for --values that it cannot have."""
    sweep = STUDIES[name].sweep
    if not args.values:
        return list(sweep.quick if args.quick else sweep.values)
    try:
        values = [sweep.parse(text) for text in args.values]
    except ValueError as error:
        raise InputError(f"--values {' '.join(args.values)}: {name} takes values such as {sweep.values}") from error
    if sweep is CONSTRAINTS and not set(values) <= set(CELLS):
        raise InputError(f"--values {shlex.join(values)}: {name} takes {shlex.join(CELLS)}")
    return values


def cell_name(value: object) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def flags_for(settings: dict[str, float]) -> list[str]:
    """The flags of proxsparse.train that set these; lambda_2 = infinity has none, see `hard_frozen_weights`."""
    finite = {name: PROJECTION if math.isinf(value) else value for name, value in settings.items()}
    if math.isinf(settings.get("frozen_lambda", 0)):
        del finite["frozen_lambda"]
    return [word for name, value in finite.items() for word in (f"--{name}", f"{value:g}")]


def run_cell(flags: list[str], frozen: bool, args: argparse.Namespace) -> Path:
    """The folder of a finished run with these flags, run now unless it is there."""
    config = parse_config(flags)
    settings = settings_of(config) | {"hard_frozen_weights": frozen}
    folder = args.output_dir / "cells" / f"{label(config.model)}-{digest(settings)}"
    if not args.again and (folder / PROVENANCE).exists() and is_finished(folder, config):
        print(f"{folder}: is there already; --again runs it anew", file=sys.stderr)
        return folder
    arguments = [*flags, "--output_dir", str(folder), "--overwrite_output_dir", "true"]
    constraint = hard_frozen_weights() if frozen else contextlib.nullcontext()
    # the run's report quotes the command line of its process: let it be the one that repeats the run
    with constraint, patch.object(sys, "argv", ["proxsparse.train", *flags]):
        if train.main(arguments) != 0 or not is_finished(folder, config):
            raise KeyboardInterrupt
    for weights in folder.glob("model*.safetensors*"):  # a study has dozens of runs; the masks stay
        weights.unlink()
    where = common.provenance(choose_device(config.device))
    write_file(folder / PROVENANCE, json.dumps(where).encode())
    return folder


def is_finished(folder: Path, config: TrainConfig) -> bool:
    """Whether a complete run with this config is there; a flag that is newer than the run does not count."""
    result, wanted = read_result(folder), dataclasses.asdict(config)
    if result is None or result["status"] != "complete":
        return False
    if result["perplexity"] is None and config.eval_data != "none":  # Ctrl-C after the masks were saved
        return False
    known = result["config"].keys() & wanted.keys() - set(NOT_SETTINGS)
    return all(result["config"][name] == wanted[name] for name in known)


# ---------------------------------------------------------------------------------------------- hard frozen weights


@contextlib.contextmanager
def hard_frozen_weights() -> Iterator[None]:
    """lambda_2 = infinity: after every step the n largest |c w| of a block are W0 again, c = 1 without a metric.

    The paper's "hard frozen weights" (section 4.3.1): "reset the two largest-magnitude weights to their original
    values". Large finite lambda_2 is something else: AdamW's step does not grow with the gradient. Acts on every
    optimizer that steps within the block, after its prox.
    """
    pretrained: dict[torch.Tensor, torch.Tensor] = {}

    def remember(optimizer, *_arguments) -> None:
        for group in optimizer.param_groups if not pretrained else ():
            pretrained.update((weight, weight.detach().clone()) for weight, _ in pruned_parameters(group))

    @torch.no_grad()
    def reset(optimizer, *_arguments) -> None:
        for group in optimizer.param_groups:
            for weight, scale in pruned_parameters(group):
                score = (weight if scale is None else weight * scale).abs()
                kept = nm_mask(score, group["pattern"]) & (weight != 0)
                weight.copy_(torch.where(kept, pretrained[weight], weight))

    hooks = [register_optimizer_step_pre_hook(remember), register_optimizer_step_post_hook(reset)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------------------------------------- rows


def row_of(name: str, value: object, settings: dict, flags: list[str], folder: Path) -> dict:
    """What the run's folder says of this cell, without the names of local folders."""
    study, result = STUDIES[name], read_result(folder)
    command, rest = "python -m proxsparse.train", [*flags, *flags_for(settings)]
    if math.isinf(settings.get("frozen_lambda", 0)):
        command, rest = f"python benchmarks/studies.py {name}", ["--values", cell_name(value), *flags]
    scores = result["perplexity"]
    return json.loads((folder / PROVENANCE).read_text(encoding="utf-8")) | {
        "study": name,
        "cell": cell_name(value),
        "settings": {key: cell_name(number) for key, number in settings.items()},
        "model": label(result["model"]),
        "data": label(result["data"]),
        "metric": result["metric"],
        **{key: result["config"][key] for key in ("forward", "num_samples")},
        "perplexity": scores and scores | {"data": label(scores["data"])},
        "feasible_share": result["feasible_share"],
        "norm_gap": read_metrics(folder)[-1]["norm_gap"],
        **{key: result[key] for key in ("steps", "tokens", "seconds", "masks_sha256", "warnings")},
        "command": f"{command} {quoted(rest)}",
        **({"curve": thinned(CURVES[study.curve](folder))} if study.curve else {}),
    }


def thinned(points: list) -> list:
    """At most about CURVE_POINTS of them, the first and the last included."""
    every = -(-len(points) // CURVE_POINTS)
    return points[:-1:every] + points[-1:]


def cells_of(rows: list[dict]) -> list[list[str]]:
    """The cells of the printed table."""
    return [
        [
            row["cell"],
            study_plots.number(study_plots.learned(row)),
            f"{row['feasible_share']:.1%}",
            study_plots.number(row["norm_gap"]),
            f"{row['seconds'] / 60:.1f}",
        ]
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(run_command(main))
