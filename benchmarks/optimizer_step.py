"""Time and memory of an optimizer step with the prox: separate passes against the fused step.

    python benchmarks/optimizer_step.py                                        # this machine, under a minute
    python benchmarks/optimizer_step.py --model llama-2-7b --blocks 1 --dtypes bfloat16

The weights are the prunable layers of some decoder blocks. `bytes` is what a step with this state has to move for each
weight: weight, moments and master read and written once, gradient read once. GB/s counts those alone, so passes that
are made twice show as a lower speed; `copy` is its share of the speed of Tensor.copy_, measured right before each step.
`state` is what the optimizer keeps for each weight, `peak` what one step allocates on top and frees again, for each
weight: of the GPU's memory, or of the resident memory on Linux.

torch's AdamW keeps moments in the dtype of the weights. `AdamW + EnumALM` is the step with the paper's formulation of
the prox in eager torch (100 sweeps at most), run once. Rows are appended to results/optimizer_step.jsonl after each
dtype. What fails gets a note instead of a time, and the exit code is 1.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from common import WeightSet, command_line, filled, interleaved, note_of, once, provenance, save, show, weight_set
from shapes import MODELS, prunable_layers
from torch.optim import AdamW, Optimizer

from proxsparse.errors import run_command
from proxsparse.optim import ProxAdamW, ProxOptimizer
from proxsparse.reference.paper_solvers import enum_alm
from proxsparse.runtime.device import choose_device

HEADER = ["layers", "dtype", "optimizer", "ms", "bytes", "GB/s", "copy", "state", "peak", "note"]
# Device -> flag -> value, for flags that are not given. Even a copy of the weights exceeds the last-level cache. On a
# GPU a step takes 1 to 3 ms and the pause that hides its launches 20 ms: rounds are counted there, not seconds.
DEFAULTS = {
    "cpu": {"model": "smollm2-135m", "blocks": 8, "repetitions": 5, "seconds": 0.25},
    "cuda": {"model": "llama-2-7b", "blocks": 1, "repetitions": 10, "seconds": 0.0},
}
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 0.01
SLOW = "AdamW + EnumALM"


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        where, rows = provenance(device), []
        chosen = filled(args, DEFAULTS.get(device.type, DEFAULTS["cuda"]))
        for dtype in args.dtypes:
            case = {"weights": f"{chosen.model} x {chosen.blocks}", "dtype": dtype, "lambda": args.reg_lambda}
            shapes = prunable_layers(chosen.model, chosen.blocks)
            layers = weight_set(shapes, getattr(torch, dtype), device, args.sigma)
            found = [where | case | row for row in benchmark(layers, chosen)]
            rows += found
            if not args.no_save:
                save("optimizer_step", found)
        show(where, HEADER, [cells(row) for row in rows], in_short(rows))
        failed = failed or any("p50_ms" not in row for row in rows)
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=str.lower, choices=[*MODELS], metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--blocks", type=int, help="how many of its decoder blocks")
    parser.add_argument("--reg_lambda", type=float, default=0.25, help="lambda_1; the paper's for Llama-2-7b is 0.25")
    parser.add_argument("--repetitions", type=int, help="least number of steps of each optimizer")
    parser.add_argument("--seconds", type=float, help="least time of each optimizer in all")
    parser.add_argument("--slow", action=argparse.BooleanOptionalAction, default=True, help=f"{SLOW}, too")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------------------------------------- optimizers


def adamw(parameters: list) -> Optimizer:
    """torch's fused AdamW."""
    return AdamW(parameters, LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def with_metric(optimizer: Optimizer, parameters: list) -> Optimizer:
    """A random metric for every weight, around 1."""
    for parameter in parameters:
        optimizer.set_scale(parameter, 0.5 + torch.rand(parameter.shape[-1], device=parameter.device))
    return optimizer


def fused(parameters: list, reg_lambda: float, **settings) -> Optimizer:
    """ProxAdamW with everything else as `adamw`."""
    return ProxAdamW(parameters, LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, reg_lambda=reg_lambda, **settings)


# name -> (parameters, lambda) -> optimizer
OPTIMIZERS: dict[str, Callable[[list, float], Optimizer]] = {
    "AdamW": lambda parameters, reg_lambda: adamw(parameters),
    SLOW: lambda parameters, reg_lambda: adamw(parameters),
    "ProxOptimizer(AdamW)": lambda parameters, reg_lambda: ProxOptimizer(adamw(parameters), reg_lambda),
    "ProxOptimizer(AdamW), metric": lambda parameters, reg_lambda: with_metric(
        ProxOptimizer(adamw(parameters), reg_lambda), parameters
    ),
    "ProxAdamW": fused,
    "ProxAdamW, metric": lambda parameters, reg_lambda: with_metric(fused(parameters, reg_lambda), parameters),
}
FOR_DTYPE = {  # dtype of the weights -> more of them
    torch.bfloat16: {
        "ProxAdamW, stochastic rounding": lambda parameters, reg_lambda: fused(
            parameters, reg_lambda, stochastic_rounding=True
        ),
        "ProxAdamW, the same, bf16 moments": lambda parameters, reg_lambda: fused(
            parameters, reg_lambda, stochastic_rounding=True, moment_dtype=torch.bfloat16
        ),
        "ProxAdamW, masters": lambda parameters, reg_lambda: fused(parameters, reg_lambda, master_weights=True),
    },
    torch.float32: {
        "ProxAdamW, bf16 moments": lambda parameters, reg_lambda: fused(
            parameters, reg_lambda, moment_dtype=torch.bfloat16
        ),
    },
}


# ---------------------------------------------------------------------------------------------- measuring


def benchmark(layers: WeightSet, args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each optimizer. All step the same weights, which are renewed before each step."""
    parameters = [torch.nn.Parameter(weight) for weight in layers.weights]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    makers = OPTIMIZERS | FOR_DTYPE.get(layers.flat.dtype, {})
    device, optimizers, peaks, notes = layers.flat.device, {}, {}, {}
    for name in makers:
        if args.slow or name != SLOW:
            try:
                optimizer = makers[name](parameters, args.reg_lambda)
                optimizer.step()  # makes the state
                layers.renew()
                peaks[name] = allocated_by(optimizer.step, device) if name != SLOW else None
                optimizers[name] = optimizer
            except Exception as error:  # whatever a kernel does, the others are wanted
                notes[name] = {"optimizer": name, "note": note_of(error)}
    fast = {name: optimizer.step for name, optimizer in optimizers.items() if name != SLOW}
    try:
        samples = interleaved(fast, layers.renew, device, args.repetitions, args.seconds, 16 * len(parameters))
    except Exception as error:  # an earlier step has ended the CUDA context: the reason is in its note
        return [*notes.values(), *({"optimizer": name, "note": note_of(error)} for name in optimizers)]
    rows = {name: sample.row() for name, sample in samples.items() if name != "copy"}
    if SLOW in optimizers:
        layers.renew()
        rows[SLOW] = once(lambda: slow_step(parameters, optimizers[SLOW].step, args.reg_lambda), device)
    copy_gb_per_s = 2 * layers.flat.nbytes / samples["copy"].row()["p50_ms"] / 1e6
    return [*notes.values()] + [
        {"optimizer": name, "copy_gb_per_s": copy_gb_per_s}
        | rows[name]
        | memory(optimizer, parameters, rows[name], copy_gb_per_s)
        | {"peak_bytes": peaks[name], "peak_bytes_a_weight": peaks[name] and peaks[name] / layers.flat.numel()}
        for name, optimizer in optimizers.items()
    ]


@torch.no_grad()
def slow_step(parameters: list[torch.nn.Parameter], step: Callable, reg_lambda: float) -> None:
    """The base step, then the paper's formulation of the prox."""
    step()
    for parameter in parameters:
        parameter.copy_(enum_alm(parameter, reg_lambda))


def memory(optimizer: Optimizer, parameters: list[torch.nn.Parameter], row: dict, copy_gb_per_s: float) -> dict:
    """What the optimizer keeps and what its step has to move, a weight, and the speed that follows from it."""
    weights = sum(parameter.numel() for parameter in parameters)
    kept = sum(
        entry.nbytes
        for state in optimizer.state.values()
        for entry in state.values()
        if isinstance(entry, torch.Tensor) and entry.ndim > 0
    )
    moved = 2 * kept + sum(2 * parameter.nbytes + parameter.grad.nbytes for parameter in parameters)
    speed = moved / row["p50_ms"] / 1e6
    return {
        "bytes_a_weight": moved / weights,
        "state_bytes_a_weight": kept / weights,
        "gb_per_s": speed,
        "share_of_copy": speed / copy_gb_per_s,
    }


def allocated_by(step: Callable, device: torch.device) -> int | None:
    """The most bytes that a step allocates on top of what was held before; None where that cannot be told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = resident_bytes("VmRSS")
        step()
        return max(0, resident_bytes("VmHWM") - before)
    except OSError:
        step()
        return None


def resident_bytes(field: str) -> int:
    """VmRSS, the memory this process has now, or VmHWM, the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_short(rows: list[dict]) -> str:
    """The share of the copy's speed that the fused step reaches."""
    measured = [row for row in rows if row["optimizer"] == "ProxAdamW" and "p50_ms" in row]
    shares = [f"{row['share_of_copy']:.1%} in {row['dtype']}" for row in measured]
    return f"share of copying: ProxAdamW {', '.join(shares)}"


def cells(row: dict) -> list[str]:
    """A row of the printed table."""
    if "p50_ms" not in row:
        return [row["weights"], row["dtype"], row["optimizer"], "", "", "", "", "", "", row["note"]]
    peak = row["peak_bytes_a_weight"]
    numbers = [f"{row['p50_ms']:.3f}", f"{row['bytes_a_weight']:.0f}", f"{row['gb_per_s']:.2f}"]
    numbers += [
        f"{row['share_of_copy']:.1%}",
        f"{row['state_bytes_a_weight']:.0f}",
        "" if peak is None else f"{peak:.1f}",
    ]
    return [row["weights"], row["dtype"], row["optimizer"], *numbers, row.get("note", "")]


if __name__ == "__main__":
    sys.exit(run_command(main))
