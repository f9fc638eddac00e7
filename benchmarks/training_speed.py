"""Learning the masks of a 7B shape on one GPU: tokens/s, seconds a step and peak memory, beside what `--plan` says.

The weights are random and made where they learn; everything after loading is that of proxsparse.train. Peak memory is
torch's of all tensors, which the plan's CUDA context is no part of; on a CPU it is that of the whole process.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time

import common
import torch
from random_models import KINDS, random_model
from torch import Tensor, nn

from proxsparse import train
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.patterns import NMPattern
from proxsparse.plan.cost import cost
from proxsparse.plan.memory import CUDA_CONTEXT, Plan
from proxsparse.run.config import TrainConfig
from proxsparse.run.parse import parse_config
from proxsparse.runtime import sharding
from proxsparse.runtime.device import autocast, choose_precision, peak_memory_bytes
from proxsparse.training import loop
from proxsparse.training.learnable_layer import make_learnable_layers
from proxsparse.training.scaling import activation_scaling

GB = 10**9
PAPER = "--recipe llama-2-7b --eval_data none --metric_samples 8"  # bf16, 4,096 tokens, gradient checkpointing
CASES = {
    "paper": "--gradient_checkpointing false",
    "paper, checkpointing": "",
    "paper, checkpointing, step in backward": "--step_in_backward --max_grad_norm 0",
    "masked, checkpointing": "--metric activation --reg_lambda_rel 0.002",
}


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = torch.device(args.devices[0])
    where = common.provenance(device) | {"command": common.typed("training_speed", arguments)}
    rows = []
    for name in args.cases:
        flags = [*PAPER.split(), *CASES[name].split(), *args.flags.split(), "--device", str(device)]
        rows.append(where | {"model": args.model, "case": name, "flags": " ".join(flags)})
        try:
            rows[-1] |= measure(args.model, flags, device, args.steps)
        except torch.OutOfMemoryError as error:
            rows[-1]["note"] = str(error).partition(".")[0]
        gc.collect()
        torch.cuda.empty_cache()
        print({key: value for key, value in rows[-1].items() if key not in where}, flush=True)
        if not args.no_save:
            common.save("training_speed", rows[-1:])
    report(where, rows)
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; None: that of this process."""
    parser = common.command_line(__doc__)
    parser.add_argument("--model", choices=KINDS, default="llama-2-7b")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps; the first two are not timed")
    parser.add_argument("--flags", default="", help="more flags of proxsparse.train, for every case")
    return parser.parse_args(arguments)


def measure(name: str, flags: list[str], device: torch.device, steps: int) -> dict[str, object]:
    """Learns for so many steps. Raises torch.OutOfMemoryError where the device is too small."""
    dtype, _ = choose_precision(parse_config(flags).precision, device)
    model = random_model(name, None, dtype, device, sparse=False)
    dense_(model)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        config = parse_config([*flags, "--model", folder, "--max_steps", str(steps)])
        planned = plan_of(config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, losses = learn(model, config, device)
    seconds = statistics.median(times[2:])
    tokens = config.seq_len * config.per_device_train_batch_size
    return planned | {
        "peak_bytes": peak_memory_bytes(device),
        "step_seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "flops_per_s": planned["operations"] / seconds,
        "losses": losses,
    }


@torch.no_grad()
def dense_(model: nn.Module, sigma: float = 0.02) -> None:
    """Gaussian weights in the decoder blocks instead of 2:4 ones, in place."""
    for module in decoder_blocks(model).modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, sigma)


def plan_of(config: TrainConfig) -> dict[str, object]:
    """What the plan says of one device, and of the seconds of a step there, if it were an H200."""
    plan = Plan(config)
    phase, buckets = plan.on_device(1)
    found = cost(plan, 1)
    return {
        "planned_bytes": sum(buckets.values()) - CUDA_CONTEXT * plan.on_gpu,
        "phase": phase,
        "buckets": buckets,
        "planned_seconds": found.seconds,
        "operations": found.operations,
    }


def learn(model: nn.Module, config: TrainConfig, device: torch.device) -> tuple[list[float], list[float]]:
    """`train.main` from the loaded model to its masks, on random documents: seconds and loss of every step."""
    dtype, compute_dtype = choose_precision(config.precision, device)
    pattern, layers = NMPattern.parse(config.pattern), prunable_layers(model, config.pattern)
    batches = documents(model.config.vocab_size, config)
    blocks, keep = decoder_blocks(model), config.pretrained_weights
    pretrained = sharding.shard_and_move_(model, blocks, device, dtype, keep, within_node=False)
    with autocast(device, compute_dtype):
        metric = activation_scaling(model, layers, batches, config.metric_samples) if config.metric != "none" else {}
    learned = make_learnable_layers(layers, pretrained, metric, pattern, config.forward == "masked", {})
    state = loop.begin(model, learned, config, config.max_steps)
    samples = loop.own_samples(batches, config.seed, 0)
    times, losses, started = [], [], time.perf_counter()
    steps = config.max_steps
    for row in train.learn_masks(model, learned, state.optimizer, samples, 0, steps, compute_dtype, config):
        state.monitor.observe(row["step"])  # it reads the weights, so that the step has ended
        times.append(time.perf_counter() - started)
        losses.append(row["loss"])
        started = time.perf_counter()
    loop.current_masks(learned)
    return times, losses


def documents(vocabulary: int, config: TrainConfig) -> list[dict[str, Tensor]]:
    """Batches of random tokens that fill their windows, one a step."""
    generator = torch.Generator().manual_seed(config.seed)
    size = (config.max_steps, config.per_device_train_batch_size, config.seq_len)
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        for ids in torch.randint(vocabulary, size, generator=generator)
    ]


def report(where: dict[str, object], rows: list[dict]) -> None:
    """The table: memory planned and measured, seconds planned and measured, tokens and operations a second."""
    header = ["case", "planned GB", "peak GB", "plan / peak", "planned s", "s a step", "tokens/s", "TFLOP/s"]
    cells, ratios = [], []
    for row in rows:
        if "note" in row:
            cells.append([row["case"], row["note"], *["-"] * (len(header) - 2)])
            continue
        ratios.append(row["planned_bytes"] / row["peak_bytes"])
        sizes = [f"{row[name] / GB:.2f}" for name in ("planned_bytes", "peak_bytes")]
        seconds = [f"{row[name]:.3g}" for name in ("planned_seconds", "step_seconds")]
        speeds = [f"{row['tokens_per_s']:,.0f}", f"{row['flops_per_s'] / 1e12:.1f}"]
        cells.append([row["case"], *sizes, f"{ratios[-1]:.3f}", *seconds, *speeds])
    worst = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    rehearsal = "A rehearsal: the peak is that of the whole process, the planned seconds are those of an H200."
    in_short = rehearsal if rows[0]["flags"].endswith("cpu") else f"The plan is within {worst:.1%} of every peak."
    common.show(where, header, cells, in_short)


if __name__ == "__main__":
    sys.exit(main())
