"""What benchmarks share: flags, weights out of the cache, timing, where a result was measured, result files, tables."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from predictions import predictions_for
from shapes import Shape
from torch import Tensor

from proxsparse.patterns import FLOAT_DTYPES
from proxsparse.runtime.device import environment, version

FOLDER = Path(__file__).resolve().parent
# A pass over so many bytes of weights, and as many they are renewed from, leaves nothing of the first weight in a
# cache: the L2 of an H200 has 60 MB, the share of the L3 that two cores of an EPYC see has 32 MB.
ROTATION_BYTES, ROTATION_SETS = 2**28, 64
LAUNCH_CYCLES = 300_000  # of the GPU's clock a launch: 0.15 ms, several times what the host needs for it

# ---------------------------------------------------------------------------------------------- flags


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark on random weights."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES]
    parser.add_argument("--dtypes", nargs="+", choices=names, default=["bfloat16", "float32"], metavar="DTYPE")
    parser.add_argument("--sigma", type=float, default=0.02, help="standard deviation of the weights")
    parser.add_argument("--devices", nargs="+", default=devices())
    parser.add_argument("--no-save", action="store_true", help="print only")
    return parser


# ---------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class WeightSet:
    """Weights that belong together, one after the other in `flat`, and the values they are renewed from."""

    weights: list[Tensor]
    flat: Tensor
    source: Tensor

    def renew(self) -> None:
        """All weights back to their first values: one plain copy, whose speed every kernel is compared with."""
        self.flat.copy_(self.source)


def weight_set(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, sigma: float) -> WeightSet:
    """Gaussian weights of standard deviation `sigma`, one of each shape."""
    size = sum(rows * columns for rows, columns in shapes)
    return views(shapes, torch.empty(size, dtype=dtype, device=device).normal_(0, sigma))


def views(shapes: Sequence[Shape], source: Tensor) -> WeightSet:
    """Weights of these shapes with the values of `source`, one after the other."""
    flat = source.clone()
    parts = flat.split([rows * columns for rows, columns in shapes])
    return WeightSet([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], flat, source)


def rotation(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, sigma: float) -> list[WeightSet]:
    """So many equal sets that a kernel which runs over all of them finds each in memory, as in a training step."""
    first = weight_set(shapes, dtype, device, sigma)
    count = min(max(1, ROTATION_BYTES // first.flat.nbytes), ROTATION_SETS)
    return [first] + [views(shapes, first.source.clone()) for _ in range(count - 1)]


def packed_weight(shape: Shape, dtype: torch.dtype, device: torch.device, sigma: float) -> tuple[Tensor, Tensor]:
    """A random 2:4 weight in the packed form, (values, indices): Gaussian values, every pair of places as likely."""
    out_features, in_features = shape
    values = torch.empty(out_features, in_features // 2, dtype=dtype, device=device).normal_(0, sigma)
    pairs = torch.tensor([4, 8, 12, 9, 13, 14], dtype=torch.uint8, device=device)  # i0 | i1 << 2, i0 < i1
    blocks = pairs[torch.randint(6, (out_features, in_features // 4), dtype=torch.int32, device=device)]
    low, high = blocks[:, ::2], blocks[:, 1::2]
    indices = low.clone()
    indices[:, : high.shape[1]] |= high << 4
    return values, indices


# ---------------------------------------------------------------------------------------------- timing


@dataclass
class Samples:
    """Times of one thing in milliseconds, and of the copy measured right before each of them."""

    ms: list[float]
    copy_ms: list[float]

    def row(self) -> dict[str, float]:
        """The percentiles of the time, and the median of the share of the copy's speed."""
        shares = [copy / ms for copy, ms in zip(self.copy_ms, self.ms, strict=True)]
        return percentiles(self.ms) | {"share_of_copy": statistics.median(shares)}


def interleaved(
    runs: dict[str, Callable[[], object]],
    renew: Callable[[], object],
    device: torch.device,
    repetitions: int,
    seconds: float = 0.25,
    launches: int = 1,
) -> dict[str, Samples]:
    """Times copy, run, copy, the next run, copy ... in rounds, so that a drift of the machine hits all alike.

    Args:
        runs: what is timed, by name.
        renew: the copy, which undoes what a run did to the weights.
        repetitions, seconds: rounds go on until there are so many, and until each run took so long in all. One more
            round before them warms up.
        launches: of kernels in a run, at most.
    Returns:
        The samples of every run, and of "copy" itself.
    """
    runs = runs or {"copy": renew}  # without runs, copying alone is measured
    samples = {name: Samples([], []) for name in ("copy", *runs)}
    rounds = 0
    while rounds <= repetitions or any(sum(samples[name].ms) < 1000 * seconds for name in runs):
        for name, run in runs.items():
            copy_ms = elapsed_ms(renew, device, launches)
            ms = elapsed_ms(run, device, launches)
            if rounds > 0:
                samples[name].ms.append(ms)
                samples[name].copy_ms.append(copy_ms)
                samples["copy"].ms.append(copy_ms)
                samples["copy"].copy_ms.append(copy_ms)
        rounds += 1
    return samples


def measure(
    run: Callable[[], object],
    prepare: Callable[[], object],
    device: torch.device,
    repetitions: int,
    seconds: float = 0.5,
) -> dict[str, float]:
    """Times `run` after each untimed `prepare`, until there are `repetitions` runs that took `seconds` together.

    One more run before them warms up.

    Returns:
        p20_ms, p50_ms and p80_ms, the percentiles of one run in milliseconds, and the number of runs.
    """
    prepare()
    run()
    times: list[float] = []
    while len(times) < repetitions or sum(times) < 1000 * seconds:
        prepare()
        times.append(elapsed_ms(run, device))
    return percentiles(times)


def once(run: Callable[[], object], device: torch.device, note: str = "once") -> dict[str, object]:
    """The row of what takes too long for rounds: the time of a single run, and a note that says so."""
    return percentiles([elapsed_ms(run, device)]) | {"note": note}


def note_of(error: Exception) -> str:
    """The note in the row of a failed measurement: the error's type and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def percentiles(times: list[float]) -> dict[str, float]:
    """p20_ms, p50_ms and p80_ms of the times in milliseconds, and the number of runs."""
    cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    return {"p20_ms": cuts[1], "p50_ms": cuts[4], "p80_ms": cuts[7], "runs": len(times)}


def elapsed_ms(run: Callable[[], object], device: torch.device, launches: int = 1) -> float:
    """Milliseconds of one run of at most so many launches on the device."""
    return cuda_milliseconds(run, launches) if device.type == "cuda" else cpu_milliseconds(run)


def cpu_milliseconds(run: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def cuda_milliseconds(run: Callable[[], object], launches: int = 1) -> float:
    """Time between two events on the GPU; it is kept busy meanwhile, so that the host's launches are not counted."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LAUNCH_CYCLES * (launches + 4))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


# ---------------------------------------------------------------------------------------------- provenance


def devices() -> list[str]:
    """What a benchmark runs on by default: the GPU if there is one, else the CPU."""
    return ["cuda"] if torch.cuda.is_available() else ["cpu"]


def filled(args: argparse.Namespace, defaults: dict[str, object]) -> argparse.Namespace:
    """The flags, those that were not given from the defaults of a device."""
    return argparse.Namespace(**vars(args) | {name: v for name, v in defaults.items() if getattr(args, name) is None})


def typed(benchmark: str, arguments: list[str] | None) -> str:
    """What to type for the same measurement; None: this process's own arguments."""
    return " ".join([f"python3 benchmarks/{benchmark}.py", *(sys.argv[1:] if arguments is None else arguments)])


def provenance(device: torch.device) -> dict[str, object]:
    """Where and of what a result was measured: device, threads, versions, commit; on a GPU its driver too."""
    gpu = {"driver": driver(), "triton": version("triton")} if device.type == "cuda" else {}
    return environment(device) | gpu | {"commit": commit()}


def driver() -> str:
    """The version of NVIDIA's driver, or "unknown"."""
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].strip() or "unknown"


def commit() -> str:
    """The commit of the code, "-dirty" behind it if files other than results differ.

    Outside a checkout it is what PROXSPARSE_COMMIT says, or "unknown".
    """
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--", ".", ":!benchmarks/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("PROXSPARSE_COMMIT", "unknown")


def git(*arguments: str) -> str:
    """What git says about this checkout."""
    command = ["git", "-C", str(FOLDER.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# ---------------------------------------------------------------------------------------------- results


def results_file(benchmark: str) -> Path:
    """Where the rows of a benchmark are kept."""
    return FOLDER / "results" / f"{benchmark}.jsonl"


def append_rows(file: Path, rows: Iterable[dict[str, object]]) -> None:
    """Each row as a line of JSON at the end of the file, with what was predicted for it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row | predictions_for(file.stem, row)) + "\n" for row in rows)


def save(benchmark: str, rows: Iterable[dict[str, object]]) -> None:
    """Appends the rows to the file of the benchmark, and says so."""
    append_rows(results_file(benchmark), rows)
    print(f"appended to {results_file(benchmark)}")


def show(where: dict[str, object], header: list[str], rows: list[list[str]], in_short: str) -> None:
    """Prints where the rows were measured, their table, and what they say in short."""
    print(f"\n{where['device']}, torch {where['torch']}, {where['threads']} threads, commit {where['commit']}\n")
    print(f"{table(header, rows)}\n\n{in_short}")


def write_table(file: Path, where: dict[str, object], header: list[str], rows: list[list[str]], in_short: str) -> None:
    """What `show` prints and the command that measured it, as a page in Markdown."""
    measured = f"{where['device']}, torch {where['torch']}, commit {where['commit']}: `{where['command']}`"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{measured}\n\n{table(header, rows)}\n\n{in_short}\n", encoding="utf-8")
    print(f"written {file}")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown, with columns wide enough to be read in a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    ruled = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in ruled
    )
