"""How fast each backend applies the 2:4 prox in place, beside plain copying and the paper's formulation, EnumALM.

    python benchmarks/prox_speed.py                                            # this machine, about a minute
    python benchmarks/prox_speed.py --shapes 4096x11008 --dtypes bfloat16 --lambdas 0.25 --models
    python benchmarks/prox_speed.py --shapes --models Llama-2-7b               # its 224 layers in one call

A prox reads and writes each weight once: GB/s counts both. `copy` is the share of the speed of Tensor.copy_ on the same
memory, measured right before each run; the weights rotate, so that both find them in memory and not in a cache, as in a
training step. What a prox costs depends on lambda * |w|: its mean is printed.

On a CPU the default shape is the smallest large layer of Llama-2-7b, 4096 x 4096: weight and copy exceed the last-level
cache there, so memory binds both as it does in a real run. `EnumALM` (paper_solvers.enum_alm in eager torch: 100 sweeps
at most, one stop test for the whole tensor) takes seconds for it. So it, its compiled form (eager.py, 100 sweeps) and
the reference backend run once, and only on weights up to --slow_weights; `EnumALM` is the ratio to it at the same shape
and lambda. With --models all prunable layers of a model go through prox_nm_list_ in one call; models whose layers have
the same shapes are measured once.

Rows are appended to results/prox_speed.jsonl as soon as a lambda is measured, and results/prox_speed_<device>.png shows
the share of the copy speed. What fails gets a note instead of a time, and the exit code is 1.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import (
    FOLDER,
    WeightSet,
    append_rows,
    command_line,
    elapsed_ms,
    interleaved,
    note_of,
    once,
    provenance,
    results_file,
    rotation,
    show,
)
from eager import SWEEPS, compiled, enum_alm_fixed
from shapes import MODELS, PAPER, Shape, distinct, layer_shapes, prunable_layers

from proxsparse.errors import run_command
from proxsparse.ops import prox_nm_, prox_nm_list_, use_backend
from proxsparse.ops.registry import get_kernel, list_backends
from proxsparse.reference.paper_solvers import enum_alm
from proxsparse.runtime.device import choose_device

# Device -> flag -> value, for flags that are not given. Compiling EnumALM takes half a minute; a round on a GPU takes
# milliseconds, most of them the pause that hides the launches.
DEFAULTS = {
    "cpu": {
        "shapes": [(4096, 4096), (256, 4096)],
        "models": ["smollm2-135m"],
        "slow_weights": 2**20,
        "compile": False,
        "repetitions": 5,
        "seconds": 0.25,
    },
    "cuda": {
        "shapes": sorted(layer_shapes(PAPER), key=lambda shape: shape != (4096, 4096)),  # the first is plotted
        "models": PAPER,
        "slow_weights": 2**24,
        "compile": False,
        "repetitions": 30,
        "seconds": 0.0,
    },
}
HEADER = ["weights", "dtype", "lambda", "lambda*|w|", "kernel", "ms", "GB/s", "copy", "EnumALM", "note"]
COMPILE_LIMIT_S = 30.0


@dataclass(frozen=True)
class Case:
    """What is served in one call: one weight, or all layers of a model."""

    name: str
    shapes: list[Shape]
    dtype: torch.dtype
    device: torch.device
    slow: bool = False  # whether it is small enough for the slow providers
    compiled: bool = False  # and for torch.compile, whose compiling takes long

    @property
    def op(self) -> str:
        """The op that serves it."""
        return "prox_nm_" if len(self.shapes) == 1 else "prox_nm_list_"

    def weights(self) -> int:
        """Their number."""
        return sum(rows * columns for rows, columns in self.shapes)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        where, rows = provenance(device), []
        chosen = DEFAULTS.get(device.type, DEFAULTS["cuda"]) | {k: v for k, v in vars(args).items() if v is not None}
        for case in cases(chosen, device):
            try:
                for found in benchmark(case, argparse.Namespace(**chosen)):
                    rows += [where | row for row in found]
                    failed = failed or any(row.get("failed") for row in found)
                    if not args.no_save:
                        append_rows(results_file("prox_speed"), rows[-len(found) :])
            except Exception as error:  # such as too little memory; the other cases are still measured
                print(f"failed: {case.name} in {case.dtype}: {note_of(error)}", flush=True)
                failed = True
            torch.cuda.empty_cache()
        if rows:
            show(where, HEADER, [cells(row) for row in rows], in_short(rows))
        if rows and not args.no_save:
            print(f"appended to {results_file('prox_speed')}")
            plot(rows, FOLDER / "results" / f"prox_speed_{device.type}.png")
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = command_line(__doc__)
    parser.add_argument("--shapes", type=shape, nargs="*", metavar="ROWSxCOLUMNS", help="out_features x in_features")
    parser.add_argument(
        "--models", type=str.lower, nargs="*", choices=[*MODELS], metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.25, 1, 25], help="lambda_1")
    parser.add_argument("--repetitions", type=int, help="least number of rounds of copy and kernels")
    parser.add_argument("--seconds", type=float, help="least time of each kernel in all rounds")
    parser.add_argument("--slow_weights", type=int, help="run EnumALM and the reference on so many weights at most")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="EnumALM in torch.compile, too")
    return parser.parse_args(arguments)


def shape(text: str) -> Shape:
    """ "4096x11008" -> (4096, 11008)."""
    rows, _, columns = text.partition("x")
    if int(columns) % 4:
        raise argparse.ArgumentTypeError(f"{text}: in_features, the second number, must be a multiple of 4")
    return int(rows), int(columns)


def cases(chosen: dict, device: torch.device) -> Iterator[Case]:
    """Each weight and each model in each dtype, as far as the memory holds them."""
    for name in chosen["dtypes"]:
        dtype = getattr(torch, name)
        slow = [(rows, columns) for rows, columns in chosen["shapes"] if rows * columns <= chosen["slow_weights"]]
        for shape in chosen["shapes"]:
            compiled = chosen["compile"] and shape == max(slow, default=None)
            yield Case("{}x{}".format(*shape), [shape], dtype, device, shape in slow, compiled)
        for model in distinct(chosen["models"]):
            case = Case(model, prunable_layers(model), dtype, device)
            if fits(case):
                yield case
            else:
                print(f"skipped: {model} in {name} needs twice {case.weights() * dtype.itemsize / 2**30:.0f} GiB")


def fits(case: Case) -> bool:
    """Whether weights and their copy leave a fifth of the free memory."""
    needed = 2 * case.weights() * case.dtype.itemsize
    if case.device.type == "cuda":
        free = torch.cuda.mem_get_info(case.device)[0]
    else:
        meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(meminfo["MemAvailable"].split()[0])
    return needed <= 0.8 * free


# ---------------------------------------------------------------------------------------------- measuring


def benchmark(case: Case, args: argparse.Namespace) -> Iterator[list[dict[str, object]]]:
    """For every lambda: one row for copying and one for each provider."""
    sets = rotation(case.shapes, case.dtype, case.device, args.sigma)
    mean = sum(part.float().abs().sum().item() for part in sets[0].source.split(2**26)) / case.weights()
    slow = slow_providers(case, sets[0]) if case.slow else {}
    for reg_lambda in args.lambdas:
        times = fast_times(case, sets, reg_lambda, args)
        for name, provider in slow.items():
            sets[0].renew()
            try:
                times[name] = provider(reg_lambda)
            except Exception as error:  # such as too little memory; the other rows are still measured
                times[name] = {"note": note_of(error), "failed": True}
        identity = {"weights": case.name, "dtype": str(case.dtype).removeprefix("torch."), "lambda": reg_lambda}
        identity |= {"sigma": args.sigma, "lambda_mean": reg_lambda * mean}
        yield [identity | {"kernel": name} | row | speeds(case, row, times) for name, row in times.items()]


def fast_times(case: Case, sets: list[WeightSet], reg_lambda: float, args: argparse.Namespace) -> dict[str, dict]:
    """The times of copying and of every backend but the reference, of one set: a run goes over all of them.

    A backend that fails gets a note. If it has ended the CUDA context, copying fails after it, which raises.
    """

    def renew() -> None:
        for weights in sets:
            weights.renew()

    def run_backend(name: str) -> None:
        with use_backend(name):
            for weights in sets:
                apply_prox(weights, reg_lambda)

    runs, notes, launches = {}, {}, len(sets) * len(case.shapes)
    for name in backends(case):
        if name != "reference":
            try:
                elapsed_ms(partial(run_backend, name), case.device)
                runs[name] = partial(run_backend, name)
            except Exception as error:  # whatever a kernel does, the others are wanted
                notes[name] = {"note": note_of(error), "failed": True}
    renew()
    rounds = args.repetitions if case.op == "prox_nm_" else max(3, args.repetitions // 3)  # a model takes its time
    samples = interleaved(runs, renew, case.device, rounds, args.seconds, launches)
    for sample in samples.values():
        sample.ms = [ms / len(sets) for ms in sample.ms]
        sample.copy_ms = [ms / len(sets) for ms in sample.copy_ms]
    return {name: sample.row() for name, sample in samples.items()} | notes


def backends(case: Case) -> list[str]:
    """Those that serve this case here."""
    weight = torch.empty(1, 4, dtype=case.dtype, device=case.device)
    arguments = (1.0, 2, 4, None) if case.op == "prox_nm_" else (2, 4)
    return [name for name in list_backends(case.op) if get_kernel(case.op, name).supports(weight, *arguments) is None]


def apply_prox(weights: WeightSet, reg_lambda: float) -> None:
    """In place, in one call."""
    if len(weights.weights) == 1:
        prox_nm_(weights.weights[0], reg_lambda)
    else:
        prox_nm_list_(weights.weights, [reg_lambda] * len(weights.weights))


def slow_providers(case: Case, weights: WeightSet) -> dict[str, Callable[[float], dict]]:
    """name -> (lambda -> row): what takes too long for rounds, and runs once."""
    (weight,) = weights.weights

    def row(run: Callable[[float], object], note: str, reg_lambda: float) -> dict:
        return once(partial(run, reg_lambda), case.device, note)

    def reference(reg_lambda: float) -> None:
        with use_backend("reference"):
            apply_prox(weights, reg_lambda)

    providers = {"reference": partial(row, reference, "once")}
    providers["EnumALM"] = partial(row, partial(enum_alm, weight), "once, at most 100 sweeps")
    if case.device.type == "cuda":
        enum_alm(weight, 1.0, max_sweeps=1)  # loads its kernels
    if case.compiled:
        providers["EnumALM compiled"] = compiled_provider(case, weight, row)
    return providers


def compiled_provider(case: Case, weight: torch.Tensor, row: Callable) -> Callable[[float], dict]:
    """lambda -> row of EnumALM in torch.compile, or of the reason why there is no time."""
    try:
        transform, seconds = compiled(weight, COMPILE_LIMIT_S)
    except Exception as error:  # a compiler may fail in any way, and the other rows are still wanted
        reason = f"torch.compile failed: {type(error).__name__} {str(error).partition(chr(10))[0][:80]}"
        return lambda reg_lambda: {"note": reason}

    def run(reg_lambda: float) -> None:
        enum_alm_fixed(weight, torch.tensor(reg_lambda, dtype=case.dtype, device=case.device), transform)

    return partial(row, run, f"once, {SWEEPS} sweeps, compiled in {seconds:.0f} s")


def speeds(case: Case, row: dict, times: dict[str, dict]) -> dict[str, float]:
    """GB/s, the share of the copy's speed and the ratio to EnumALM, of the median, as far as they were measured."""
    if "p50_ms" not in row:
        return {}
    found = {"gb_per_s": 2 * case.weights() * case.dtype.itemsize / row["p50_ms"] / 1e6}
    found["share_of_copy"] = row.get("share_of_copy", times["copy"]["p50_ms"] / row["p50_ms"])
    if "EnumALM" in times:
        found["times_enum_alm"] = times["EnumALM"]["p50_ms"] / row["p50_ms"]
    return found


# ---------------------------------------------------------------------------------------------- showing


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    numbers = ["", "", "", ""]
    if "p50_ms" in row:
        numbers = [f"{row['p50_ms']:.3f}", f"{row['gb_per_s']:.2f}", f"{row['share_of_copy']:.1%}"]
        numbers += [f"{row['times_enum_alm']:.1f}x" if "times_enum_alm" in row and row["kernel"] != "copy" else ""]
    case = [row["weights"], row["dtype"], f"{row['lambda']:g}", f"{row['lambda_mean']:.4f}", row["kernel"]]
    return [*case, *numbers, row.get("note", "")]


def in_short(rows: list[dict]) -> str:
    """The least share of the copy's speed that the fastest backend reaches, for each lambda."""
    best: dict[tuple, float] = {}
    for row in rows:
        if "p20_ms" in row and "note" not in row and row["kernel"] != "copy":
            case = row["lambda"], row["weights"], row["dtype"]
            best[case] = max(best.get(case, 0.0), row["share_of_copy"])
    lambdas = dict.fromkeys(row["lambda"] for row in rows)
    least = {x: min((share for case, share in best.items() if case[0] == x), default=0.0) for x in lambdas}
    return "least share of copying: " + ", ".join(f"{share:.1%} at lambda {x:g}" for x, share in least.items())


def plot(rows: list[dict], file: Path) -> None:
    """Share of the copy's speed for the first weight: a group of bars a backend, a bar each for dtype and lambda."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file.name}: matplotlib is missing; remedy: pip install matplotlib")
        return
    rows = [row for row in rows if row["weights"] == rows[0]["weights"] and "p20_ms" in row and "note" not in row]
    names = list(dict.fromkeys(row["kernel"] for row in rows if row["kernel"] != "copy"))
    bars = list(dict.fromkeys((row["dtype"], row["lambda"]) for row in rows))
    share = {(row["kernel"], row["dtype"], row["lambda"]): row["share_of_copy"] for row in rows}
    figure = Figure(figsize=(3 + 2 * max(2, len(names)), 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(bars)
    shades = {dtype: shade for shade, dtype in enumerate(dict.fromkeys(dtype for dtype, _ in bars))}
    for place, (dtype, reg_lambda) in enumerate(bars):
        x = [group - 0.4 + (place + 0.5) * width for group in range(len(names))]
        height = [share.get((name, dtype, reg_lambda), 0.0) for name in names]
        same = [value for name, value in bars if name == dtype]
        color = ["Blues", "Oranges", "Greens", "Purples"][shades[dtype] % 4]
        drawn = axes.bar(x, height, width, label=f"{dtype}, λ = {reg_lambda:g}")
        for bar in drawn:
            bar.set_facecolor(colour(color, (same.index(reg_lambda) + 1) / (len(same) + 0.5)))
        axes.bar_label(drawn, fmt=lambda value: f"{value:.0%}", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set(xticks=range(len(names)), xticklabels=names, ylabel="share of the speed of copying")
    axes.set_title(f"2:4 prox in place, {rows[0]['weights']}, {rows[0]['device']}", fontsize=10)
    figure.legend(fontsize=8, loc="outside right upper")  # no bar reaches it there
    figure.savefig(file, dpi=120)
    print(f"drawn {file}")


def colour(name: str, shade: float):
    """A colour of matplotlib's map, light at 0 and dark at 1."""
    from matplotlib import colormaps

    return colormaps[name](0.2 + 0.7 * shade)


if __name__ == "__main__":
    sys.exit(run_command(main))
