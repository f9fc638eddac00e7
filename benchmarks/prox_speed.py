"""Measures how fast each backend applies the 2:4 prox in place, compared with a plain copy and with EnumALM.

    python benchmarks/prox_speed.py                                            # this machine, about a minute
    python benchmarks/prox_speed.py --shapes 4096x11008 --dtypes bfloat16 --lambdas 0.25 --models
    python benchmarks/prox_speed.py --shapes --models Llama-2-7b               # its 224 layers in one call

`copy` is the share of the speed of Tensor.copy_ on the same memory, measured directly before each run. EnumALM
(paper_solvers.enum_alm, at most 100 sweeps) and the reference backend run once, on weights up to --slow_weights.
--models passes all prunable layers of a model to prox_nm_list_ in one call; models with equal layers are measured once.
Rows are appended to results/prox_speed.jsonl as soon as a lambda is measured; results/prox_speed_<device>.png shows
them. What fails gets a note instead of a time, and the exit code is 1.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lib import plots
from lib.common import Results, command_line, dtype_name, error_note, matrix_shape, with_defaults
from lib.measure import WeightSet, elapsed_ms, interleaved, once, rotation
from lib.paper_solvers import enum_alm
from lib.shapes import MODELS, PAPER, Shape, distinct, layer_shapes, prunable_layers

from proxsparse.errors import run_command
from proxsparse.ops import prox_nm_, prox_nm_list_, use_backend
from proxsparse.ops.registry import get_kernel, list_backends
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
HEADER = ["weights", "dtype", "lambda", "lambda*|w|", "kernel", "ms", "GB/s", "copy", "EnumALM", "note"]


@dataclass(frozen=True)
class Case:
    """The weights of one call: one weight, or all layers of a model."""

    name: str
    shapes: list[Shape]
    dtype: torch.dtype
    device: torch.device
    slow: bool = False  # whether the reference and EnumALM run

    @property
    def op(self) -> str:
        """The op of the call."""
        return "prox_nm_" if len(self.shapes) == 1 else "prox_nm_list_"

    def weights(self) -> int:
        """Their number."""
        return sum(rows * columns for rows, columns in self.shapes)


def main(arguments: list[str] | None = None) -> int:
    """Measures every case; the exit code is 1 if something failed."""
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        results = Results("prox_speed", device, not args.no_save, arguments)
        chosen = with_defaults(args, DEFAULTS, device)
        for case in cases(chosen, device):
            try:
                for rows in benchmark(case, chosen):
                    failed |= any(row.get("failed") for row in results.add(rows))
            except Exception as error:  # such as too little memory; the other cases are still measured
                print(f"failed: {case.name} in {case.dtype}: {error_note(error)}", flush=True)
                failed = True
            torch.cuda.empty_cache()
        if results.rows:
            results.show(HEADER, cells, summary(results.rows))
            if results.save:
                plots.draw(results.picture(device), partial(plots.prox_speed, results.rows))
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = command_line(__doc__)
    names = ", ".join(MODELS)
    parser.add_argument("--shapes", type=matrix_shape, nargs="*", metavar="OUTxIN", help="out_features x in_features")
    parser.add_argument("--models", type=str.lower, nargs="*", choices=[*MODELS], metavar="NAME", help=names)
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.25, 1, 25], help="lambda_1")
    parser.add_argument("--repetitions", type=int, help="minimum number of rounds of copy and kernels")
    parser.add_argument("--seconds", type=float, help="minimum total time of each kernel")
    parser.add_argument("--slow_weights", type=int, help="largest weight for EnumALM and the reference")
    return parser.parse_args(arguments)


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Each weight and each model in each dtype, as far as they fit into memory."""
    for dtype in (getattr(torch, name) for name in args.dtypes):
        slow = [shape for shape in args.shapes if shape[0] * shape[1] <= args.slow_weights]
        for shape in args.shapes:
            yield Case("{}x{}".format(*shape), [shape], dtype, device, shape in slow)
        for model in distinct(args.models):
            case = Case(model, prunable_layers(model), dtype, device)
            gigabytes = 2 * case.weights() * dtype.itemsize / 1e9
            if gigabytes <= 0.8 * free_gigabytes(device):
                yield case
            else:
                print(f"skipped: {model} in {dtype_name(dtype)} needs {gigabytes:.0f} GB for weights and their copy")


def free_gigabytes(device: torch.device) -> float:
    """Free memory of the GPU, or available memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 1e9
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(meminfo["MemAvailable"].split()[0]) / 1e9


def benchmark(case: Case, args: argparse.Namespace) -> Iterator[list[dict[str, object]]]:
    """For every lambda: one row for the copy and one for each provider."""
    sets = rotation(case.shapes, case.dtype, case.device, args.sigma)
    mean = sum(part.float().abs().sum().item() for part in sets[0].source.split(2**26)) / case.weights()
    for reg_lambda in args.lambdas:
        times = fast_times(case, sets, reg_lambda, args)
        times |= slow_times(case, sets[0], reg_lambda) if case.slow else {}
        identity = {"weights": case.name, "dtype": dtype_name(case.dtype), "lambda": reg_lambda}
        identity |= {"sigma": args.sigma, "lambda_mean": reg_lambda * mean}
        yield [identity | {"kernel": name} | row | speeds(case, row, times) for name, row in times.items()]


def fast_times(case: Case, sets: list[WeightSet], reg_lambda: float, args: argparse.Namespace) -> dict[str, dict]:
    """The times of the copy and of every backend except the reference, for one set; a run visits all sets.

    A backend that fails gets a note. If it has ended the CUDA context, the copy after it raises.
    """

    def renew() -> None:
        for weights in sets:
            weights.renew()

    def run_backend(name: str) -> None:
        with use_backend(name):
            for weights in sets:
                apply_prox_(weights, reg_lambda)

    runs, notes, launches = {}, {}, len(sets) * len(case.shapes)
    for name in backends(case):
        try:
            elapsed_ms(partial(run_backend, name), case.device)
            runs[name] = partial(run_backend, name)
        except Exception as error:  # whatever a kernel does, the others are measured
            notes[name] = {"note": error_note(error), "failed": True}
    renew()
    rounds = args.repetitions if case.op == "prox_nm_" else max(3, args.repetitions // 3)  # a model takes longer
    samples = interleaved(runs, renew, case.device, rounds, args.seconds, launches)
    for sample in samples.values():
        sample.ms = [ms / len(sets) for ms in sample.ms]
        sample.copy_ms = [ms / len(sets) for ms in sample.copy_ms]
    return {name: sample.row() for name, sample in samples.items()} | notes


def backends(case: Case) -> list[str]:
    """The backends that support this case on this machine, except the reference."""
    weight = torch.empty(1, 4, dtype=case.dtype, device=case.device)
    arguments = (1.0, 2, 4, None) if case.op == "prox_nm_" else (2, 4)
    names = [name for name in list_backends(case.op) if get_kernel(case.op, name).supports(weight, *arguments) is None]
    return [name for name in names if name != "reference"]


def apply_prox_(weights: WeightSet, reg_lambda: float) -> None:
    """In place, in one call."""
    if len(weights.weights) == 1:
        prox_nm_(weights.weights[0], reg_lambda)
    else:
        prox_nm_list_(weights.weights, [reg_lambda] * len(weights.weights))


def slow_times(case: Case, weights: WeightSet, reg_lambda: float) -> dict[str, dict]:
    """The rows of the reference and of EnumALM, which are too slow for rounds: one run of each."""
    (weight,) = weights.weights

    def reference() -> None:
        with use_backend("reference"):
            prox_nm_(weight, reg_lambda)

    if case.device.type == "cuda":
        enum_alm(weight, 1.0, max_sweeps=1)  # loads its kernels
    runs, found = {"reference": reference, "EnumALM": partial(enum_alm, weight, reg_lambda)}, {}
    for name, run in runs.items():
        weights.renew()
        try:
            found[name] = once(run, case.device, "once" if name == "reference" else "once, at most 100 sweeps")
        except Exception as error:  # such as too little memory; the other rows are still measured
            found[name] = {"note": error_note(error), "failed": True}
    return found


def speeds(case: Case, row: dict, times: dict[str, dict]) -> dict[str, float]:
    """GB/s, the share of the copy's speed and the ratio to EnumALM, of the median, as far as they were measured."""
    if "p50_ms" not in row:
        return {}
    found = {"gb_per_s": 2 * case.weights() * case.dtype.itemsize / row["p50_ms"] / 1e6}
    found["share_of_copy"] = row.get("share_of_copy", times["copy"]["p50_ms"] / row["p50_ms"])
    if "p50_ms" in times.get("EnumALM", {}):
        found["times_enum_alm"] = times["EnumALM"]["p50_ms"] / row["p50_ms"]
    return found


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    numbers = ["", "", "", ""]
    if "p50_ms" in row:
        numbers = [f"{row['p50_ms']:.3f}", f"{row['gb_per_s']:.2f}", f"{row['share_of_copy']:.1%}"]
        numbers += [f"{row['times_enum_alm']:.1f}x" if "times_enum_alm" in row and row["kernel"] != "copy" else ""]
    case = [row["weights"], row["dtype"], f"{row['lambda']:g}", f"{row['lambda_mean']:.4f}", row["kernel"]]
    return [*case, *numbers, row.get("note", "")]


def summary(rows: list[dict]) -> str:
    """For each lambda, the share of the copy's speed that the fastest backend reaches in the worst case."""
    best: dict[tuple, float] = {}
    for row in rows:
        if "p20_ms" in row and "note" not in row and row["kernel"] != "copy":
            case = row["lambda"], row["weights"], row["dtype"]
            best[case] = max(best.get(case, 0.0), row["share_of_copy"])
    least = {x: min((share for case, share in best.items() if case[0] == x), default=0.0) for x in {c[0] for c in best}}
    return "lowest share of the copy's speed: " + ", ".join(f"{least[x]:.1%} at lambda {x:g}" for x in sorted(least))


if __name__ == "__main__":
    sys.exit(run_command(main))
