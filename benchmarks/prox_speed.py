"""How fast each backend applies the 2:4 prox in place, beside plain copying and the paper's EnumALM.

    python benchmarks/prox_speed.py                      # every backend of this machine, about a minute
    python benchmarks/prox_speed.py --shape 4096 11008 --dtypes bfloat16 --lambdas 0.25

A prox reads and writes each weight once: GB/s counts both, and `copy` is the share of the speed of Tensor.copy_ on the
same weight, measured in the same run. `EnumALM` says how many times faster than reference.enum_alm (100 sweeps at most,
one stop test for the whole tensor; timed once) a backend is. Rows are appended to results/prox_speed.jsonl.
"""

import argparse
from functools import partial

import torch
from common import append_rows, measure, provenance, results_file, table

from proxsparse import reference
from proxsparse.ops import prox_nm_, use_backend
from proxsparse.ops.registry import kernels

HEADER = ["device", "dtype", "lambda", "kernel", "ms", "GB/s", "copy", "EnumALM"]


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    rows = []
    for device in map(torch.device, args.devices):
        where = provenance(device)
        for name in args.dtypes:
            source = (args.sigma * torch.randn(args.shape)).to(device, getattr(torch, name))
            for reg_lambda in args.lambdas:
                rows += [where | row for row in benchmark(source, reg_lambda, args.repetitions)]
    print(table(HEADER, [cells(row) for row in rows]))
    if not args.no_save:
        append_rows(results_file("prox_speed"), rows)
        print(f"appended to {results_file('prox_speed')}")


def parse_arguments() -> argparse.Namespace:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=2, default=[1024, 4096], help="out_features in_features")
    parser.add_argument("--sigma", type=float, default=0.02, help="standard deviation of the weights")
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.25, 1, 25], help="lambda_1")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--devices", nargs="+", default=devices)
    parser.add_argument("--repetitions", type=int, default=5, help="least number of runs of each backend")
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser.parse_args()


def benchmark(source: torch.Tensor, reg_lambda: float, repetitions: int) -> list[dict[str, object]]:
    """One row for copying, one for EnumALM and one for each backend that serves `source`."""
    weight = source.clone()

    def renew() -> None:
        weight.copy_(source)

    def run_backend(name: str) -> None:
        with use_backend(name):
            prox_nm_(weight, reg_lambda)

    times = {
        "copy": measure(renew, renew, source.device, repetitions),
        "EnumALM": measure(
            lambda: reference.enum_alm(weight, reg_lambda), renew, source.device, repetitions=1, seconds=0
        ),
    }
    for kernel in kernels("prox_nm_"):
        if kernel.supports(weight, reg_lambda, 2, 4, None) is None:
            times[kernel.backend] = measure(partial(run_backend, kernel.backend), renew, source.device, repetitions)
    case = {"shape": list(source.shape), "dtype": str(source.dtype).removeprefix("torch."), "lambda": reg_lambda}
    return [case | {"kernel": name} | time | speeds(source, time, times) for name, time in times.items()]


def speeds(source: torch.Tensor, time: dict, times: dict[str, dict]) -> dict[str, float]:
    """GB/s, its share of the copy's, and the ratio to EnumALM, all of the median."""
    moved = 2 * source.numel() * source.element_size()
    return {
        "gb_per_s": moved / time["p50_ms"] / 1e6,
        "share_of_copy": times["copy"]["p50_ms"] / time["p50_ms"],
        "times_enum_alm": times["EnumALM"]["p50_ms"] / time["p50_ms"],
    }


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    numbers = [f"{row['p50_ms']:.3f}", f"{row['gb_per_s']:.2f}", f"{row['share_of_copy']:.0%}"]
    ratio = "" if row["kernel"] == "copy" else f"{row['times_enum_alm']:.1f}x"
    return [row["device"], row["dtype"], f"{row['lambda']:g}", row["kernel"], *numbers, ratio]


if __name__ == "__main__":
    main()
