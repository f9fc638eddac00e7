"""What the benchmarks share: timing, where a result was measured, result files and tables."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from proxsparse.device import environment

FOLDER = Path(__file__).resolve().parent


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
    elapsed = cuda_milliseconds if device.type == "cuda" else cpu_milliseconds
    times: list[float] = []
    while len(times) < repetitions or sum(times) < 1000 * seconds:
        prepare()
        times.append(elapsed(run))
    cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    return {"p20_ms": cuts[1], "p50_ms": cuts[4], "p80_ms": cuts[7], "runs": len(times)}


def cpu_milliseconds(run: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def cuda_milliseconds(run: Callable[[], object]) -> float:
    """Time between two events on the GPU; it is kept busy meanwhile, so that the host's launch is not counted."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)  # clock cycles: half a millisecond, ten times what a launch takes
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def provenance(device: torch.device) -> dict[str, object]:
    """Where and of what a result was measured: device, threads, versions, commit."""
    return environment(device) | {"commit": commit()}


def commit() -> str:
    """The commit of the code, "-dirty" behind it if files other than results differ; "unknown" outside a checkout."""
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--", ".", ":!benchmarks/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*arguments: str) -> str:
    """What git says about this checkout."""
    command = ["git", "-C", str(FOLDER.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def results_file(benchmark: str) -> Path:
    """Where the rows of a benchmark are kept."""
    return FOLDER / "results" / f"{benchmark}.jsonl"


def append_rows(file: Path, rows: Iterable[dict[str, object]]) -> None:
    """Each row as a line of JSON at the end of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown, with columns wide enough to be read in a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    ruled = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in ruled
    )
