"""Measures how fast each backend applies the prox in place, compared with a plain copy and, for 2:4, with EnumALM.

    python benchmarks/prox_speed.py                                            # this machine, about a minute
    python benchmarks/prox_speed.py --shapes 4096x11008 --dtypes bfloat16 --lambdas 0.25 --models
    python benchmarks/prox_speed.py --shapes --models Llama-2-7b               # its 224 layers in one call
    python benchmarks/prox_speed.py --shapes 4096x4096 --patterns 2:4 4:6 6:8 8:10

`copy` is the share of the speed of Tensor.copy_ on the same memory, measured directly before each run. EnumALM
(paper_solvers.enum_alm, at most 100 sweeps) and the reference backend run once, on weights up to --slow_weights.
--models passes all prunable layers of a model to prox_nm_list_ in one call; models with equal layers are measured once.
Rows are appended to results/prox_speed.jsonl as soon as a lambda is measured; results/prox_speed_<device>.png shows
them. What fails gets a note instead of a time, and the exit code is 1.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from functools import partial

import torch
from lib import plots
from lib.common import Results, command_line, dtype_name, error_note, matrix_shape, with_defaults
from lib.measure import WeightSet, elapsed_ms, interleaved, once, rotation
from lib.paper_solvers import enum_alm
from lib.shapes import MODELS, PAPER, Shape, distinct, layer_shapes, prunable_layers

from proxsparse.errors import run_command
from proxsparse.ops import prox_nm_, prox_nm_list_, use_backend
from proxsparse.ops.registry import get_kernel, list_backends
from proxsparse.patterns import WINDOWED, NMPattern
from proxsparse.runtime.device import choose_device

# The defaults of the flags. On a CPU the shape is the smallest large layer of Llama-2-7b: weight and copy exceed the
# last-level cache there, so memory is the limit of both, as in a real run.
DEFAULTS = {
    "cpu": {
        "shapes": [(4096, 4096), (256, 4096)],
        "models": ["smollm2-135m"],
        "slow_weights": 2**20,
        "repetitions": 5,
        "seconds": 0.25,
    },
    "cuda": {
        "shapes": sorted(layer_shapes(PAPER), key=lambda shape: shape != (4096, 4096)),  # the first is plotted
        "models": PAPER,
        "slow_weights": 2**24,
        "repetitions": 30,
        "seconds": 0.0,  # most of a round is the pause that hides the launches
    },
}
COLUMNS = {
    "weights": "{weights}",
    "pattern": "{pattern}",
    "dtype": "{dtype}",
    "lambda": "{lambda:g}",
    "lambda*|w|": "{lambda_mean:.4f}",
    "kernel": "{kernel}",
    "ms": "{p50_ms:.3f}",
    "GB/s": "{gb_per_s:.2f}",
    "copy": "{share_of_copy:.1%}",
    "EnumALM": "{times_enum_alm:.1f}x",
    "note": "{note}",
}


def main(arguments: list[str] | None = None) -> int:
    """Measures every case; the exit code is 1 if something failed."""
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        results = Results("prox_speed", device, not args.no_save, arguments)
        chosen = with_defaults(args, DEFAULTS, device)
        cases = {"{}x{}".format(*shape): [shape] for shape in chosen.shapes}
        cases |= {model: prunable_layers(model) for model in distinct(chosen.models)}
        for dtype, (name, shapes), pattern in itertools.product(args.dtypes, cases.items(), args.patterns):
            case = {"weights": name, "pattern": pattern}
            try:
                for rows in benchmark(shapes, getattr(torch, dtype), NMPattern.parse(pattern), device, chosen):
                    failed |= any(row.get("failed") for row in results.add([case | row for row in rows]))
            except torch.OutOfMemoryError as error:
                print(f"skipped: {name}, {pattern}, in {dtype}: {error_note(error)}", flush=True)
            except Exception as error:  # the other cases are still measured
                print(f"failed: {name}, {pattern}, in {dtype}: {error_note(error)}", flush=True)
                failed = True
            torch.cuda.empty_cache()
        if results.rows:
            results.show(COLUMNS)
            if results.save:
                plots.draw(results.picture(device), partial(plots.prox_speed, results.rows))
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    names = ", ".join(MODELS)
    parser.add_argument("--shapes", type=matrix_shape, nargs="*", metavar="OUTxIN", help="out_features x in_features")
    parser.add_argument("--models", type=str.lower, nargs="*", choices=[*MODELS], metavar="NAME", help=names)
    parser.add_argument("--patterns", nargs="+", choices=[*map(str, WINDOWED)], default=["2:4"], help="default: 2:4")
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.25, 1, 25], help="lambda_1")
    parser.add_argument("--repetitions", type=int, help="minimum number of rounds of copy and kernels")
    parser.add_argument("--seconds", type=float, help="minimum total time of each kernel")
    parser.add_argument("--slow_weights", type=int, help="largest weight for EnumALM and the reference")
    return parser.parse_args(arguments)


def benchmark(
    shapes: list[Shape], dtype: torch.dtype, pattern: NMPattern, device: torch.device, args: argparse.Namespace
) -> Iterator[list[dict[str, object]]]:
    """For every lambda one row for the copy and one for each provider, of one weight or of all layers of a model."""
    sets = rotation(shapes, dtype, device, args.sigma)
    source = sets[0].source
    mean = sum(part.float().abs().sum().item() for part in source.split(2**26)) / source.numel()
    for reg_lambda in args.lambdas:
        times = fast_times(sets, reg_lambda, pattern, args)
        if pattern == NMPattern(2, 4) and len(shapes) == 1 and source.numel() <= args.slow_weights:
            times |= slow_times(sets[0], reg_lambda)
        case = {"dtype": dtype_name(dtype), "lambda": reg_lambda, "sigma": args.sigma, "lambda_mean": reg_lambda * mean}
        for name, row in times.items():
            if ms := row.get("p50_ms"):
                row["gb_per_s"] = 2 * source.nbytes / ms / 1e6
                row.setdefault("share_of_copy", times["copy"]["p50_ms"] / ms)
                if "p50_ms" in times.get("EnumALM", {}) and name != "copy":
                    row["times_enum_alm"] = times["EnumALM"]["p50_ms"] / ms
        yield [case | {"kernel": name} | row for name, row in times.items()]


def fast_times(
    sets: list[WeightSet], reg_lambda: float, pattern: NMPattern, args: argparse.Namespace
) -> dict[str, dict]:
    """The times of the copy and of every backend except the reference, for one set; a run visits all sets.

    A backend that fails gets a note. If it has ended the CUDA context, the copy after it raises.
    """
    device, number = sets[0].flat.device, len(sets[0].weights)

    def renew() -> None:
        for weights in sets:
            weights.renew()

    def run_backend(name: str) -> None:
        with use_backend(name):
            for weights in sets:
                if number == 1:
                    prox_nm_(weights.weights[0], reg_lambda, pattern)
                else:
                    prox_nm_list_(weights.weights, [reg_lambda] * number, pattern)

    arguments = 1.0, pattern.n, pattern.m
    weight = torch.empty(1, pattern.m, dtype=sets[0].flat.dtype, device=device)
    kernels = {name: get_kernel("prox_nm_", name) for name in list_backends("prox_nm_")}
    names = [name for name, kernel in kernels.items() if kernel.supports(weight, *arguments) is None]
    runs, notes = {}, {}
    for name in names:
        try:
            if name != "reference":
                elapsed_ms(partial(run_backend, name), device)
                runs[name] = partial(run_backend, name)
        except Exception as error:  # whatever a kernel does, the others are measured
            notes[name] = {"note": error_note(error), "failed": True}
    renew()
    rounds = args.repetitions if number == 1 else max(3, args.repetitions // 3)  # a model takes longer
    calls = dict.fromkeys(("copy", *runs), len(sets))
    return interleaved(runs, renew, device, rounds, args.seconds, len(sets) * number, calls) | notes


def slow_times(weights: WeightSet, reg_lambda: float) -> dict[str, dict]:
    """The rows of the reference and of EnumALM, which are too slow for rounds: one run of each."""
    (weight,) = weights.weights

    def reference() -> None:
        with use_backend("reference"):
            prox_nm_(weight, reg_lambda)

    if weight.is_cuda:
        enum_alm(weight, 1.0, max_sweeps=1)  # loads its kernels
    runs, found = {"reference": reference, "EnumALM": partial(enum_alm, weight, reg_lambda)}, {}
    for name, run in runs.items():
        weights.renew()
        try:
            found[name] = once(run, weight.device, "once" if name == "reference" else "once, at most 100 sweeps")
        except Exception as error:  # such as too little memory; the other rows are still measured
            found[name] = {"note": error_note(error), "failed": True}
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))
