"""The upper limits of this machine: copying and reading of memory in GB/s, a large matrix product in TFLOP/s.

    python benchmarks/ceilings.py

Kernels are judged by these numbers: memory-bound ones by the copy (which counts bytes read and written; a kernel that
only reads can be faster, see `read`), the others by the matrix product. On a GPU the rows hold its clocks, temperature
and power too, before and after. Nothing is set. Rows are appended to results/ceilings.jsonl.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch
from common import command_line, measure, provenance, save, show

from proxsparse.errors import run_command
from proxsparse.runtime.device import choose_device

DEFAULTS = {"cpu": {"megabytes": 512, "size": 1024}, "cuda": {"megabytes": 4096, "size": 8192}}
SENSORS = ["clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "power.limit", "clocks_event_reasons.active"]
HEADER = ["ceiling", "size", "ms", "speed", "state of the GPU"]


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    for device in map(choose_device, args.devices):
        where = provenance(device)
        default = DEFAULTS.get(device.type, DEFAULTS["cuda"])
        nbytes, size = 10**6 * (args.megabytes or default["megabytes"]), args.size or default["size"]
        rows = []
        for make in (copy, read, matmul):
            state = sensors(device)
            name, run, work, unit = make(size if make is matmul else nbytes, device)
            row = {"ceiling": name} | measure(run, lambda: None, device, args.repetitions, args.seconds)
            row |= {unit: work / row["p50_ms"], "before": state, "after": sensors(device)}
            rows.append(where | row)
            if not args.no_save:
                save("ceilings", rows[-1:])
        show(where, HEADER, [cells(row) for row in rows], "The upper limits for kernels on this machine.")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = command_line(__doc__)
    parser.add_argument("--megabytes", type=int, help="that are copied and read; default: 4096 on a GPU, 512 on a CPU")
    parser.add_argument("--size", type=int, help="of the square matrices; default: 8192 on a GPU, 1024 on a CPU")
    parser.add_argument("--repetitions", type=int, default=20, help="least number of runs")
    parser.add_argument("--seconds", type=float, default=0.3, help="least time of all runs")
    return parser.parse_args(arguments)


Ceiling = tuple[str, Callable[[], object], float, str]  # name, what runs, its work in units of the rate a ms, that rate


def copy(nbytes: int, device: torch.device) -> Ceiling:
    """From memory to memory; bytes read and written count."""
    source = random_numbers(nbytes, device)
    target = torch.empty_like(source)
    return f"copy {nbytes / 1e6:.0f} MB", lambda: target.copy_(source), 2 * source.nbytes / 1e6, "gb_per_s"


def read(nbytes: int, device: torch.device) -> Ceiling:
    """The largest number of a tensor: the tensor is read once, and one number is written."""
    source = random_numbers(nbytes, device)
    return f"read {nbytes / 1e6:.0f} MB", lambda: source.amax(), source.nbytes / 1e6, "gb_per_s"


def matmul(size: int, device: torch.device) -> Ceiling:
    """A product of square bf16 matrices of random numbers: on zeros it would be faster."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return f"matmul {size}^3 bf16", lambda: a @ b, 2 * size**3 / 1e9, "tflop_per_s"


def random_numbers(nbytes: int, device: torch.device) -> torch.Tensor:
    """float32 numbers, nbytes bytes of them."""
    return torch.empty(nbytes // 4, device=device).normal_()


def sensors(device: torch.device) -> dict[str, str]:
    """Clocks, temperature and power of the first GPU, as nvidia-smi reads them; {} on a CPU."""
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(SENSORS)}", "--format=csv,noheader"]
    values = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0].split(", ")
    return dict(zip(SENSORS, values, strict=False))


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    speed = f"{row['gb_per_s']:.0f} GB/s" if "gb_per_s" in row else f"{row['tflop_per_s']:.3g} TFLOP/s"
    state = ", ".join(f"{name} {value}" for name, value in row["after"].items())
    name, _, size = row["ceiling"].partition(" ")
    return [name, size, f"{row['p50_ms']:.3f}", speed, state]


if __name__ == "__main__":
    sys.exit(run_command(main))
