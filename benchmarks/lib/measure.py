"""Random weights that exceed the caches, and the timing of functions on them."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lib.shapes import Shape
from torch import Tensor

from proxsparse.ops import unpack_nm

# One pass over this many bytes of weights, and as many that they are renewed from, leaves nothing of the first weight
# in a cache: the L2 of an H200 has 60 MB, the part of an EPYC's L3 that two cores see has 32 MB.
ROTATION_BYTES, ROTATION_SETS = 2**28, 64
MAX_SETS = 256  # copies of a packed weight
COPY_BYTES = {"cpu": 2**26, "cuda": 2**28}  # with its copy several times the L3 of a CPU, the L2 of a GPU
RUN_MS = {"cpu": 5.0, "cuda": 0.5}  # least time of one run, far above that of reading a clock
LAUNCH_CYCLES = 300_000  # GPU clocks for each launch: 0.15 ms, several times what the host needs


@dataclass(frozen=True)
class WeightSet:
    """Weights in one buffer `flat`, and the values from which they are restored."""

    weights: list[Tensor]
    flat: Tensor
    source: Tensor

    def renew(self) -> None:
        """Restores all weights: one plain copy, whose speed every kernel is compared with."""
        self.flat.copy_(self.source)


def views(shapes: Sequence[Shape], source: Tensor) -> WeightSet:
    """Weights of these shapes with the values of `source`, one after the other."""
    flat = source.clone()
    parts = flat.split([rows * columns for rows, columns in shapes])
    return WeightSet([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], flat, source)


def rotation(
    shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, sigma: float, sets: int | None = None
) -> list[WeightSet]:
    """Equal sets of Gaussian weights of standard deviation `sigma`, one of each shape.

    sets: their number; default: enough that a kernel that runs over all of them reads each from memory, as in training.
    """
    size = sum(rows * columns for rows, columns in shapes)
    source = torch.empty(size, dtype=dtype, device=device).normal_(0, sigma)
    count = sets or min(max(1, ROTATION_BYTES // source.nbytes), ROTATION_SETS)
    return [views(shapes, source)] + [views(shapes, source.clone()) for _ in range(count - 1)]


def packed_weight(shape: Shape, dtype: torch.dtype, device: torch.device, sigma: float) -> tuple[Tensor, Tensor]:
    """A random 2:4 weight in packed format, (values, indices): Gaussian values, every pair of places equally likely."""
    out_features, in_features = shape
    values = torch.empty(out_features, in_features // 2, dtype=dtype, device=device).normal_(0, sigma)
    pairs = torch.tensor([4, 8, 12, 9, 13, 14], dtype=torch.uint8, device=device)  # i0 | i1 << 2, i0 < i1
    blocks = pairs[torch.randint(6, (out_features, in_features // 4), dtype=torch.int32, device=device)]
    low, high = blocks[:, ::2], blocks[:, 1::2]
    indices = low.clone()
    indices[:, : high.shape[1]] |= high << 4
    return values, indices


@dataclass
class LinearWeights:
    """Equal copies of one random 2:4 weight in every form, enough that they exceed the cache, and exact products."""

    shape: Shape
    dense: list[Tensor]
    packed: list[tuple[Tensor, Tensor]]
    x: Tensor  # [most rows, in_features]
    places: list[int]  # rows of x that are checked
    expected: Tensor  # float64, [places, out_features]
    prepared: dict[str, list[Tensor | None]] = field(default_factory=dict)  # backend -> its own forms

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device, sigma: float, rows: Sequence[int]):
        """For calls with these numbers of rows of x."""
        values, indices = packed_weight(shape, dtype, device, sigma)
        sets = min(math.ceil(COPY_BYTES[device.type] / (values.nbytes + indices.nbytes)), MAX_SETS)
        weight = unpack_nm(values, indices)
        x = torch.randn(max(rows), shape[1], device=device).to(dtype)
        places = sorted({place for count in rows for place in (0, count // 2, count - 1)})
        packed = [(values.clone(), indices.clone()) for _ in range(sets)]
        expected = x[places].double() @ weight.double().T
        return cls(shape, [weight.clone() for _ in range(sets)], packed, x, places, expected)

    def tolerance(self, dense_error: float) -> float:
        """The largest error that is accepted: twice that of dense, plus one rounding of the largest number."""
        return 2 * dense_error + torch.finfo(self.x.dtype).eps * self.expected.abs().max().item()

    def error_of(self, call: Callable[[int], Tensor], rows: int, weight: Tensor | None = None) -> float:
        """The largest error of call(0), x W^T for `rows` rows, compared with float64 in the rows that are checked.

        weight: W in float64, if it is not that of the others.
        """
        known = [number for number, place in enumerate(self.places) if place < rows]
        places = [self.places[number] for number in known]
        expected = self.expected[known] if weight is None else self.x[places].double() @ weight.T
        return (call(0)[places].double() - expected).abs().max().item()

    def visits(self, call: Callable[[int], Tensor]) -> int:
        """The number of copies that a run visits: all, or as many as give a time worth measuring."""
        one = elapsed_ms(lambda: call(0), self.x.device)
        return max(1, min(len(self.dense), math.ceil(RUN_MS[self.x.device.type] / max(one, 1e-4))))


def interleaved(
    runs: dict[str, Callable[[], object]],
    renew: Callable[[], object],
    device: torch.device,
    repetitions: int,
    seconds: float = 0.25,
    launches: int = 1,
    calls: dict[str, int] | None = None,
) -> dict[str, dict[str, float]]:
    """Times copy, run, copy, the next run, copy ... in rounds, so that a drift of the machine affects all equally.

    Args:
        runs: name -> what is timed.
        renew: the copy, which restores the weights after a run.
        repetitions, seconds: the least number of rounds, and the least total time of each run. One more round before
            them warms up.
        launches: the largest number of kernel launches in a run.
        calls: name -> the calls in a run, by which its time is divided; default: 1.
    Returns:
        Of every run, and of "copy" itself: the percentiles of the time, and the median of its share of the speed of the
        copy measured directly before it.
    """
    runs = runs or {"copy": renew}  # without runs, only the copy is measured
    ms: dict[str, list[float]] = {name: [] for name in ("copy", *runs)}
    shares: dict[str, list[float]] = {name: [] for name in runs} | {"copy": [1.0]}
    rounds = 0
    while rounds <= repetitions or any(sum(ms[name]) < 1000 * seconds for name in runs):
        for name, run in runs.items():
            copy_ms, run_ms = elapsed_ms(renew, device, launches), elapsed_ms(run, device, launches)
            if rounds > 0:
                ms["copy"].append(copy_ms)
                ms[name].append(run_ms)
                shares[name].append(copy_ms / run_ms)
        rounds += 1
    calls = calls or {}
    return {
        name: percentiles([time_ms / calls.get(name, 1) for time_ms in times])
        | {"share_of_copy": statistics.median(shares[name])}
        for name, times in ms.items()
    }


def once(run: Callable[[], object], device: torch.device, note: str = "once") -> dict[str, object]:
    """The row of a function that is too slow for rounds: the time of a single run, and a note."""
    return percentiles([elapsed_ms(run, device)]) | {"note": note}


def percentiles(times: list[float]) -> dict[str, float]:
    """p20_ms, p50_ms and p80_ms of the times in milliseconds, and the number of runs."""
    cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    return {"p20_ms": cuts[1], "p50_ms": cuts[4], "p80_ms": cuts[7], "runs": len(times)}


def elapsed_ms(run: Callable[[], object], device: torch.device, launches: int = 1) -> float:
    """Milliseconds of one run with at most `launches` kernel launches.

    On a GPU it is the time between two events. A pause before them keeps the GPU busy while the host launches, so that
    launches are not counted.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)
    with torch.cuda.device(device):  # events are recorded on its stream
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(LAUNCH_CYCLES * (launches + 4))
        start.record()
        run()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def held_bytes(device: torch.device) -> int:
    """Memory of this process: on the GPU, or resident."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes("VmRSS")


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a run minus the memory before it, in bytes; None if the system does not report it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = held_bytes(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = held_bytes(device)
    except OSError:
        run()
        return None
    run()
    return max(0, resident_bytes("VmHWM") - before)


def resident_bytes(field: str) -> int:
    """VmRSS, the resident memory of this process, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
