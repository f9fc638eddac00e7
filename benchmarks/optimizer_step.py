"""Measures time and memory of an optimizer step with the prox: separate passes and the fused step.

    python benchmarks/optimizer_step.py                                        # this machine, under a minute
    python benchmarks/optimizer_step.py --model llama-2-7b --blocks 1 --dtypes bfloat16

The weights are the prunable layers of some decoder blocks. `bytes` is what a step with this state has to move for each
weight: weight, moments and master read and written once, gradient read once. GB/s counts only those; `copy` is its
share of the speed of Tensor.copy_. `state` is what the optimizer keeps for each weight, `peak` what one step allocates
in addition. torch's AdamW keeps moments in the dtype of the weights. `AdamW + EnumALM` is the step with the paper's
formulation of the prox in eager torch (at most 100 sweeps), run once. Rows are appended to results/optimizer_step.jsonl
after each dtype. What fails gets a note instead of a time, and the exit code is 1.
"""

import argparse
import sys
from functools import partial

import torch
from lib.common import Results, command_line, error_note, with_defaults
from lib.measure import WeightSet, interleaved, once, peak_bytes, rotation
from lib.paper_solvers import enum_alm
from lib.shapes import MODELS, prunable_layers
from torch.optim import AdamW, Optimizer

from proxsparse.errors import run_command
from proxsparse.optim import ProxAdamW, ProxOptimizer
from proxsparse.runtime.device import choose_device

COLUMNS = {
    "layers": "{weights}",
    "dtype": "{dtype}",
    "optimizer": "{optimizer}",
    "ms": "{p50_ms:.3f}",
    "bytes": "{bytes_a_weight:.0f}",
    "GB/s": "{gb_per_s:.2f}",
    "copy": "{share_of_copy:.1%}",
    "state": "{state_bytes_a_weight:.0f}",
    "peak": "{peak_bytes_a_weight:.1f}",
    "note": "{note}",
}
# Even a copy of the weights exceeds the last-level cache. On a GPU a step takes 1 to 3 ms and the pause that hides its
# launches 20 ms: rounds are counted there, not seconds.
DEFAULTS = {
    "cpu": {"model": "smollm2-135m", "blocks": 8, "repetitions": 5, "seconds": 0.25},
    "cuda": {"model": "llama-2-7b", "blocks": 1, "repetitions": 10, "seconds": 0.0},
}
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.01}
SLOW = "AdamW + EnumALM"


def main(arguments: list[str] | None = None) -> int:
    """Measures every optimizer in every dtype; the exit code is 1 if one failed."""
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    failed = False
    for device in map(choose_device, args.devices):
        chosen = with_defaults(args, DEFAULTS, device)
        results = Results("optimizer_step", device, not args.no_save, arguments)
        for dtype in args.dtypes:
            case = {"weights": f"{chosen.model} x {chosen.blocks}", "dtype": dtype, "lambda": args.reg_lambda}
            shapes = prunable_layers(chosen.model, chosen.blocks)
            (layers,) = rotation(shapes, getattr(torch, dtype), device, args.sigma, sets=1)
            results.add([case | row for row in benchmark(layers, chosen)])
        results.show(COLUMNS)
        failed |= any("p50_ms" not in row for row in results.rows)
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=str.lower, choices=[*MODELS], metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--blocks", type=int, help="number of its decoder blocks")
    parser.add_argument("--reg_lambda", type=float, default=0.25, help="lambda_1; the paper's for Llama-2-7b is 0.25")
    parser.add_argument("--repetitions", type=int, help="minimum number of steps of each optimizer")
    parser.add_argument("--seconds", type=float, help="minimum total time of each optimizer")
    return parser.parse_args(arguments)


def adamw(parameters: list, reg_lambda: float) -> Optimizer:
    """torch's fused AdamW, without the prox."""
    return AdamW(parameters, **ADAMW, fused=True)


def separate(parameters: list, reg_lambda: float) -> Optimizer:
    """torch's fused AdamW, then the prox in passes of its own."""
    return ProxOptimizer(adamw(parameters, reg_lambda), reg_lambda)


def fused(parameters: list, reg_lambda: float, **settings) -> Optimizer:
    """ProxAdamW."""
    return ProxAdamW(parameters, **ADAMW, reg_lambda=reg_lambda, **settings)


def scaled(parameters: list, reg_lambda: float) -> Optimizer:
    """ProxAdamW with a random scaling of every weight, around 1."""
    scales = [0.5 + torch.rand(parameter.shape[-1], device=parameter.device) for parameter in parameters]
    groups = [{"params": [p], "prox_scale": scale} for p, scale in zip(parameters, scales, strict=True)]
    return fused(groups, reg_lambda)


OPTIMIZERS = {  # name -> (parameters, lambda) -> optimizer
    "AdamW": adamw,
    SLOW: adamw,
    "ProxOptimizer(AdamW)": separate,
    "ProxAdamW": fused,
    "ProxAdamW, scaling": scaled,
}
ROUNDED = {"stochastic_rounding": True}
FOR_DTYPE = {  # dtype of the weights -> further ones
    torch.bfloat16: {
        "ProxAdamW, stochastic rounding": partial(fused, **ROUNDED),
        "ProxAdamW, stochastic rounding, bf16 moments": partial(fused, **ROUNDED, moment_dtype=torch.bfloat16),
        "ProxAdamW, masters": partial(fused, master_weights=True),
    },
    torch.float32: {"ProxAdamW, bf16 moments": partial(fused, moment_dtype=torch.bfloat16)},
}


def benchmark(layers: WeightSet, args: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each optimizer. All step the same weights, which are renewed before each step."""
    parameters = [torch.nn.Parameter(weight) for weight in layers.weights]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    device, optimizers, peaks, notes = layers.flat.device, {}, {}, {}
    for name, make in (OPTIMIZERS | FOR_DTYPE.get(layers.flat.dtype, {})).items():
        try:
            optimizer = make(parameters, args.reg_lambda)
            optimizer.step()  # creates the state
            layers.renew()
            peaks[name] = peak_bytes(optimizer.step, device) if name != SLOW else None
            optimizers[name] = optimizer
        except Exception as error:  # whatever a kernel does, the others are measured
            notes[name] = {"optimizer": name, "note": error_note(error)}
    fast = {name: optimizer.step for name, optimizer in optimizers.items() if name != SLOW}
    try:
        rows = interleaved(fast, layers.renew, device, args.repetitions, args.seconds, 16 * len(parameters))
    except Exception as error:  # an earlier step has ended the CUDA context: the reason is in its note
        return [*notes.values(), *({"optimizer": name, "note": error_note(error)} for name in optimizers)]

    def slow_step() -> None:
        optimizers[SLOW].step()
        for weight in layers.weights:
            weight.copy_(enum_alm(weight, args.reg_lambda))

    if SLOW in optimizers:
        layers.renew()
        rows[SLOW] = once(slow_step, device)
    copy_gb_per_s = 2 * layers.flat.nbytes / rows["copy"]["p50_ms"] / 1e6
    weights, found = layers.flat.numel(), [*notes.values()]
    for name, optimizer in optimizers.items():
        entries = [entry for state in optimizer.state.values() for entry in state.values()]
        kept = sum(entry.nbytes for entry in entries if isinstance(entry, torch.Tensor) and entry.ndim > 0)
        moved = 2 * kept + 3 * layers.flat.nbytes  # the weights are read and written, the gradients read
        speed, peak = moved / rows[name]["p50_ms"] / 1e6, peaks[name]
        row = {"optimizer": name, "copy_gb_per_s": copy_gb_per_s} | rows[name]
        row |= {"share_of_copy": speed / copy_gb_per_s, "bytes_a_weight": moved / weights}
        row |= {"state_bytes_a_weight": kept / weights, "gb_per_s": speed, "peak_bytes": peak}
        found.append(row | {"peak_bytes_a_weight": None if peak is None else peak / weights})
    return found


if __name__ == "__main__":
    sys.exit(run_command(main))
