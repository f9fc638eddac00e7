"""The paper's studies: each is one command that writes rows and a plot. NAME comes first.

    python benchmarks/studies.py lambda1                            # with the demo recipe of `proxsparse train`
    python benchmarks/studies.py all --recipe smollm2-135m --data c4_train_sample.jsonl.gz --eval_data wiki.valid.raw

Flags that are not listed below are those of `proxsparse train`. Each run has its own folder in --output_dir/cells. A
complete run with the same settings is not repeated: a study continues where it stopped, and studies share their runs.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from lib import common, plots
from lib.runs import NOT_SETTINGS, digest, label, run_once
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from proxsparse.errors import InputError, run_command
from proxsparse.optim.param_groups import pruned_parameters
from proxsparse.reference import nm_mask
from proxsparse.run.args import RunArgs
from proxsparse.run.parse import train_args, train_parser
from proxsparse.run.report import read_metrics

# lambda_1 = infinity is the projection: the prox is 2-sparse for every block whose largest |w| is above 1.21 / lambda.
PROJECTION = 1e9
COLUMNS = {
    "": "{cell}",
    "perplexity": "{perplexity[proxsparse]:.5g}",
    "N:M before projection": "{feasible_share:.1%}",
    "norm gap": "{norm_gap:.4g}",
    "seconds": "{seconds:.0f}",
}
CURVE_POINTS = 100  # about the largest number of points of a curve in a row


@dataclass(frozen=True)
class Study:
    """One table or figure: a run for each value, with the settings that `settings(value, run of the flags)` adds.

    `fixed`: settings of all runs, unless a flag says otherwise. `curve`: what it shows over the steps (a key of
    `CURVES`); None: it shows the final perplexity.
    """

    title: str
    values: tuple
    settings: Callable[[object, RunArgs], dict[str, float]]
    parse: Callable[[str], object] = float
    fixed: dict[str, object] = field(default_factory=dict)
    curve: str | None = None


def reg_lambda_name(run: RunArgs) -> str:
    """The setting of lambda_1 in this run: absolute, or relative to mean|w|."""
    return "reg_lambda" if run.options.reg_lambda is not None else "reg_lambda_rel"


def times_reg_lambda(factor: float, run: RunArgs) -> dict[str, float]:
    """lambda_1 times a factor."""
    name = reg_lambda_name(run)
    return {name: factor * getattr(run.options, name)}


def hard_or_soft(cell: str, run: RunArgs) -> dict[str, float]:
    """The paper's four cells: a hard constraint is the limit of its lambda at infinity."""
    sparsity, frozen = {reg_lambda_name(run): math.inf}, {"frozen_lambda": math.inf}
    return dict(zip(CELLS, ({}, frozen, sparsity, sparsity | frozen), strict=True))[cell]


def one_of_the_cells(text: str) -> str:
    """Raises ValueError for another text."""
    return CELLS[CELLS.index(text)]


# The constraints on the learned weights can be studied only where the loss sees these weights.
PAPER = {"fixed": {"objective": "paper"}}
CELLS = ("both soft", "hard frozen weights", "hard sparsity", "both hard")
# Factors of the lambda of the flags; the paper's sweeps reach from 1/1000 to 50 times its best value.
LAMBDA_1 = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf), times_reg_lambda
LAMBDA_2 = (0.0, 0.5, 2.0, 20.0, 100.0, 500.0, 2500.0, math.inf), lambda value, run: {"frozen_lambda": value}
COUNT = (lambda value, run: {"num_samples": value}), int
STUDIES = {
    "constraints": Study("Hard and soft constraints (Table 3)", CELLS, hard_or_soft, one_of_the_cells, **PAPER),
    "lambda1": Study("Strength of the sparsity regularizer (Table 4)", *LAMBDA_1),
    "lambda2": Study("Strength of the frozen-weight regularizer (Table 5)", *LAMBDA_2, **PAPER),
    "samples": Study("Calibration samples (Table 6, its ProxSparse rows)", (100, 200, 400), *COUNT),
    "convergence": Study("Share of N:M blocks (Figures 1 and 4, (a) to (c))", *LAMBDA_1, curve="feasible_share"),
    "early_mask": Study("Mask bits equal to the final mask (Figures 1 and 4, (d))", *LAMBDA_1, curve="similarity"),
    "norm_gap": Study("Distance of kept weights from pretrained (Figure 2)", *LAMBDA_2, **PAPER, curve="norm_gap"),
}
CURVES = {  # curve -> the [step, value] pairs of a run's folder and result.json
    "feasible_share": lambda folder, result: [[row["step"], row["feasible_share"]] for row in read_metrics(folder)],
    "norm_gap": lambda folder, result: [[row["step"], row["norm_gap"]] for row in read_metrics(folder)],
    "similarity": lambda folder, result: [[point["step"], point["to_final"]] for point in result["mask_similarity"]],
}


def main(arguments: list[str] | None = None) -> None:
    args, flags = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    for name in STUDIES if args.study == "all" else [args.study]:
        run_study(name, args, flags)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this command, and all others, which are those of `proxsparse train`."""
    parser, names = common.new_parser(__doc__, allow_abbrev=False), [*STUDIES, "all"]
    parser.add_argument("study", choices=names, metavar="NAME", help=", ".join(names))
    values_help = "values of the sweep; lambda1: factors of the lambda of the flags"
    parser.add_argument("--values", nargs="+", metavar="V", help=values_help)
    parser.add_argument("--again", action="store_true", help="repeat runs that already exist")
    folder = Path("runs/studies")
    parser.add_argument("--output_dir", type=Path, default=folder, help="folder of pictures, and of runs in cells/")
    parser.add_argument("--results", type=Path, default=common.results_file("studies"), help="the file of rows")
    return parser.parse_known_args(arguments)


def run_study(name: str, args: argparse.Namespace, flags: list[str]) -> None:
    """The runs of a study that are missing, a row for each of its runs, and the picture of all."""
    study, known = STUDIES[name], common.read_rows(args.results)
    given = study.fixed | vars(train_parser().parse_args(flags))
    run = train_args(**given)
    if study.curve is None and run.evaluate.eval_data == "none":
        raise InputError(f"{name}: measures the perplexity; give --eval_data")
    try:
        values = study.values if args.values is None else list(map(study.parse, args.values))
    except ValueError as error:
        raise InputError(f"--values {' '.join(args.values)}: {name} takes values such as {study.values}") from error
    cells = {value: study.settings(value, run) for value in values}
    runs = [train_args(**given | finite(settings)) for settings in cells.values()]  # bad flags before the first run
    rows = []
    for (value, settings), run in zip(cells.items(), runs, strict=True):
        print(f"\n{name}, {cell_name(value)}: {settings or 'the flags as given'}", file=sys.stderr)
        command = common.command("studies", [name, "--values", cell_name(value), *flags])
        rows.append(row_of(name, run, settings, args) | {"cell": cell_name(value), "command": command})
        if rows[-1] not in known:
            common.append_rows(args.results, rows[-1:])
    print(f"\n{study.title}; {plots.measured_on(rows[0])}\n\n{common.table(COLUMNS, rows)}\n")
    if len(rows) > 1:  # a single run repeats a part of a picture
        picture = args.output_dir / f"{name}-{label(run.model.model)}-{run.options.objective}.png"
        plots.draw(picture, partial(plots.curves if study.curve else plots.perplexities, rows, study.title))


def cell_name(value: object) -> str:
    """A value as text."""
    return value if isinstance(value, str) else f"{value:g}"


def finite(settings: dict[str, float]) -> dict[str, float]:
    """The settings without infinity: lambda_1 is the projection, lambda_2 is left out, see `hard_frozen_weights`."""
    kept = {name: value for name, value in settings.items() if (name, value) != ("frozen_lambda", math.inf)}
    return {name: min(value, PROJECTION) for name, value in kept.items()}


@contextlib.contextmanager
def hard_frozen_weights() -> Iterator[None]:
    """lambda_2 = infinity: every step ends by resetting the n largest |c w| of a block to W0; c = 1 without a scaling.

    The paper's "hard frozen weights" (section 4.3.1): "reset the two largest-magnitude weights to their original
    values". A large finite lambda_2 differs from it, as AdamW's step does not grow with the gradient. It applies to all
    optimizers that step within the context, after the prox.
    """
    pretrained: dict[torch.Tensor, torch.Tensor] = {}

    def remember(optimizer, *_arguments) -> None:
        for group in optimizer.param_groups if not pretrained else ():
            pretrained.update((weight, weight.detach().clone()) for weight in pruned_parameters(group))

    @torch.no_grad()
    def reset(optimizer, *_arguments) -> None:
        for group in optimizer.param_groups:
            scale = group["prox_scale"]
            for weight in pruned_parameters(group):
                score = (weight if scale is None else weight * scale).abs()
                kept = nm_mask(score, group["pattern"]) & (weight != 0)
                weight.copy_(torch.where(kept, pretrained[weight], weight))

    hooks = [register_optimizer_step_pre_hook(remember), register_optimizer_step_post_hook(reset)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def row_of(name: str, run: RunArgs, settings: dict[str, float], args: argparse.Namespace) -> dict:
    """The row of a run, which is done now if it is missing; it names no local folders."""
    study, frozen = STUDIES[name], settings.get("frozen_lambda") == math.inf
    identity = {field: value for field, value in run.flags().items() if field not in NOT_SETTINGS}
    folder = (
        args.output_dir / "cells" / f"{label(run.model.model)}-{digest(identity | {'hard_frozen_weights': frozen})}"
    )
    with hard_frozen_weights() if frozen else contextlib.nullcontext():
        provenance, result = run_once(run, folder, args.again, resumes=not frozen)
    scores, curve = result["perplexity"], CURVES[study.curve](folder, result) if study.curve else []
    return provenance | {
        "study": name,
        "settings": {key: cell_name(number) for key, number in settings.items()},
        "model": label(result["model"]),
        "data": label(result["data"]),
        **{key: result["config"][key] for key in ("objective", "num_samples")},
        "perplexity": scores and scores | {"data": label(scores["data"])},
        "feasible_share": result["feasible_share"],
        "norm_gap": read_metrics(folder)[-1]["norm_gap"],
        **{key: result[key] for key in ("steps", "tokens", "seconds", "masks_sha256", "warnings")},
        **({"curve": curve[: -1 : -(-len(curve) // CURVE_POINTS)] + curve[-1:]} if study.curve else {}),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
