"""Measures mask learning: tokens/s, seconds per step and peak memory, compared with `--plan` and with fine-tuning.

    python benchmarks/training_speed.py                            # a 7B shape on one GPU
    python benchmarks/training_speed.py --model tiny --steps 3     # a rehearsal; --flags: of `proxsparse train`

The weights of a shape are random and created on the device; the tokens are random; the rest is the method that
`proxsparse train` runs. The peak is that of all tensors, without the CUDA context of the plan; on a CPU it is that of
the whole process. The case "AdamW" fine-tunes all weights of the model with torch.optim.AdamW.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from lib.common import Results, command_line
from lib.random_models import KINDS, random_model
from torch import nn

from proxsparse.io.checkpoints import Checkpoints
from proxsparse.methods import get_method
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.patterns import NMPattern
from proxsparse.run.args import RunArgs
from proxsparse.run.memory import Plan
from proxsparse.run.parse import parse_train
from proxsparse.run.report import read_metrics
from proxsparse.runtime.device import autocast, choose_precision, peak_memory_bytes
from proxsparse.runtime.sharding import shard_and_move_
from proxsparse.training.compiled import compiled_blocks

PAPER = "--recipe llama-2-7b --eval_data none --scaling_samples 8"  # bf16, 4,096 tokens, gradient checkpointing
CASES = {
    "paper": "--gradient_checkpointing false",
    "paper, checkpointing": "",
    "masked, checkpointing": "--objective masked --reg_lambda_rel 0.002",
    "masked": "--objective masked --reg_lambda_rel 0.002 --gradient_checkpointing false",
    "masked, distill": "--objective masked --reg_lambda_rel 0.002 --gradient_checkpointing false --distill 0.5",
    "AdamW": "--gradient_checkpointing false",
}
COLUMNS = {
    "case": "{case}",
    "planned bytes": "{planned_bytes:,}",
    "peak bytes": "{peak_bytes:,}",
    "s per step": "{step_seconds:.3g}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "note": "{note}",
}
OTHERS = ("process", "CUDA context (assumed)")  # planned, but not in the peak of the tensors


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = torch.device(args.devices[0])
    results = Results("training_speed", device, not args.no_save, arguments)
    for name in args.cases:
        flags = [*PAPER.split(), *CASES[name].split(), *args.flags.split(), "--device", str(device)]
        try:
            row = measure(args.model, flags, device, args.steps, masks=name != "AdamW")
        except torch.OutOfMemoryError as error:
            row = {"note": str(error).partition(".")[0]}
        gc.collect()
        torch.cuda.empty_cache()
        results.add([{"model": args.model, "case": name, "flags": " ".join(flags)} | row])
    results.show(COLUMNS, "A rehearsal: the peak is that of the whole process." * (device.type == "cpu"))
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    shapes = f"a shape with random weights ({', '.join(KINDS)}), or a model"
    parser.add_argument("--model", default="llama-2-7b", metavar="NAME", help=shapes)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps; the first two are not timed")
    parser.add_argument("--flags", default="", help="more flags of `proxsparse train`, for every case")
    return parser.parse_args(arguments)


def measure(name: str, flags: list[str], device: torch.device, steps: int, masks: bool) -> dict[str, object]:
    """Learns masks, or all weights, for so many steps. Raises torch.OutOfMemoryError where the device is too small."""
    dtype, compute_dtype = choose_precision(parse_train(flags).hardware.precision, device)
    if name in KINDS:
        model = random_model(name, None, dtype, device, sparse=False)
        for module in decoder_blocks(model).modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 0.02)  # the random model is 2:4
    else:
        model = load_model(name, dtype)[0].to(device)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        run = parse_train([*flags, "--model", folder, "--max_steps", str(steps)])
        planned = Plan(run).memory()
        items = {k: size for k, size in planned.get("device", planned["host"]).items() if k not in OTHERS}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        layers, method = prunable_layers(model, run.model.pattern), get_method(run.method)
        pretrained = shard_and_move_(
            model, decoder_blocks(model), device, dtype, run.hardware.pretrained_weights, False
        )
        patterns, batches = dict.fromkeys(layers, NMPattern.parse(run.model.pattern)), documents(model, run)
        checkpoints = Checkpoints(Path(folder), {})
        with autocast(device, compute_dtype):
            if masks:
                options = run.options_of(method)
                method.prune(model, layers, batches, patterns, checkpoints, pretrained, **options).stop.restore()
                metrics = read_metrics(Path(folder))
            else:
                metrics = fine_tune(model, batches, compile=run.options.compile)
    seconds = statistics.median(after["seconds"] - before["seconds"] for before, after in pairwise(metrics[1:]))
    tokens = run.data.seq_len * run.options.per_device_train_batch_size
    figures = {"planned_bytes": sum(items.values()), "items": items, "peak_bytes": peak_memory_bytes(device)}
    figures |= {"step_seconds": seconds, "tokens_per_s": tokens / seconds}
    return figures | {"losses": [row["loss"] for row in metrics]}


def fine_tune(model: nn.Module, batches: list[dict[str, torch.Tensor]], compile: bool) -> list[dict[str, float]]:
    """A step for each batch, for all weights of the model; the rows have what metrics.jsonl has."""
    optimizer = torch.optim.AdamW(model.train().requires_grad_(True).parameters())
    rows, start = [], time.monotonic()
    with compiled_blocks(model) if compile else nullcontext():
        for batch in batches:
            batch = {key: value.to(model.device) for key, value in batch.items()}
            loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rows.append({"loss": loss.item(), "seconds": time.monotonic() - start})
    return rows


def documents(model: nn.Module, run: RunArgs) -> list[dict[str, torch.Tensor]]:
    """Batches of random tokens that fill their windows, one for each step."""
    generator = torch.Generator().manual_seed(run.hardware.seed)
    size = (run.options.max_steps, run.options.per_device_train_batch_size, run.data.seq_len)
    tokens = torch.randint(model.config.vocab_size, size, generator=generator)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]


if __name__ == "__main__":
    sys.exit(main())
