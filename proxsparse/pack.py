"""`proxsparse pack`: packs the 2:4 layers of a pruned checkpoint, with 16, 8 or 4 bits, or unpacks them.

The result is a Hugging Face checkpoint: `from_pretrained` loads it wherever proxsparse is installed.
"""

import argparse
import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from proxsparse.data.batches import read_batches
from proxsparse.data.sources import check_source
from proxsparse.errors import InputError, require, run_command
from proxsparse.inference import convert
from proxsparse.inference import packed_checkpoint as disk
from proxsparse.inference.linear import BITS
from proxsparse.inference.packable import names_of_modules
from proxsparse.io import output_folder
from proxsparse.io.atomic import atomic_directory, copy_files, require_space
from proxsparse.io.mask_files import mark_updated
from proxsparse.io.model_files import INSTALL, WEIGHTS_NAME, check_folder, headers, read_tensor, weight_files
from proxsparse.methods.gptq import quantize_layers_
from proxsparse.models.loading import load_model, skeleton
from proxsparse.models.matching import check_saved, match, refuse_codes, refuse_incomplete
from proxsparse.runtime.command import Parser
from proxsparse.runtime.progress import phase

DESCRIPTION = """\
Pack every 2:4 nn.Linear layer of a pruned checkpoint to 9/16 of its bytes in bf16, without any change of the weights;
or to 5/16 or 1/5 with --bits 8 or 4, which rounds the weights. Layers of 4:6, 6:8 and 8:10 take 4/3, 3/2 and 8/5 of
that. Other tensors stay as they are.
AutoModelForCausalLM.from_pretrained loads the result without making dense weights, where proxsparse is installed."""
OF_CALIBRATION = ("num_samples", "seq_len", "text_field")  # flags that only --calibrate uses
NUM_SAMPLES, SEQ_LEN = 128, 512  # of --calibrate; the latter as in `proxsparse train`
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
CONFIG, CARD, MASKS = "config.json", "README.md", "masks.safetensors"
# Not copied: weights in any format, and the files that describe the run.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
FOREIGN_WEIGHTS = ("*.h5", "*.msgpack", "*.pth", "*.pt", "*.ot", "*.onnx")
OF_THE_RUN = ("result.json", "config.yaml", "metrics.jsonl", "report.md", "*.png")


def main(arguments: list[str] | None = None) -> int:
    """Packs or unpacks tensor by tensor, copies the other files, and prints the sizes. Returns the exit code."""
    options = parse(arguments)
    source, target, shard_bytes = Path(options.model), Path(options.output_dir), parse_size(options.max_shard_size)
    config = disk.read_packed_config(source / CONFIG, packed=options.unpack)
    check_folder(source)
    source_headers, model = headers(weight_files(source)), skeleton(source)
    bits = config["quantization_config"].get("bits", {}).values() if options.unpack else [options.bits]
    work, verb = (unpacking, "unpack") if options.unpack else (packing, "pack")
    # float32 weights with 16, 8 or 4 bits become at most so many times larger
    growth = {16: 2, 8: 7, 4: 10}[min(bits, default=16)] if options.unpack else 1
    before = file_bytes(source)
    with output_folder.opened(target, "pack", vars(options)):
        require_space(target, growth * before)
        layers, stream, count = work(options, config, source_headers, model)
        with atomic_directory(target) as scratch:
            with phase(f"{verb}ing", count, "tensor") as current:
                disk.write_shards(scratch, current.count(stream), shard_bytes)
            (scratch / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            copy_files(source, scratch, keep=(MASKS,), exclude=(CONFIG, *WEIGHTS, *FOREIGN_WEIGHTS, *OF_THE_RUN))
            if options.bits != 16 and (scratch / MASKS).is_file():
                mark_updated(scratch / MASKS)
            after, written = file_bytes(scratch), headers(weight_files(scratch))
            refuse_differences(scratch, source_headers, written, config)
            disk.annotate(scratch / CARD, bits, packed=not options.unpack)
    linears = names_of_modules(model, nn.Linear)
    print(f"{verb}ed {len(layers)} of {len(linears)} nn.Linear layers; the other tensors are unchanged")
    if options.bits != 16:
        print(f"their kept weights are rounded to {options.bits} bits")
    entry = config.get("quantization_config", {})
    if options.bits == 4 and entry.get("pattern", "2:4") != "2:4":
        print("note: a weight of 4:6, 6:8 or 8:10 takes 4.3 to 5.2 bits then, more than dense weights of 4 bits (4.25)")
    print(change("these layers", disk.layer_bytes(layers, source_headers), disk.layer_bytes(layers, written)))
    print(change("files", before, after))
    print(f"saved to {options.output_dir}")
    return 0


Work = tuple[list[str], convert.Stream, int]  # the packed layers; the tensors of the result, and their number


def packing(options, config: dict, source_headers: dict, model: nn.Module) -> Work:
    """Packs a dense checkpoint; `config` becomes that of the result."""
    names = match(source_headers, skeleton(Path(options.model)))
    refuse_codes(source_headers, model)
    refuse_incomplete(options.model, names, type(model).__name__)
    merged = [] if options.include else convert.merged_tensors(source_headers, model, names, options.exclude)
    if merged:
        why = "transformers splits or joins them to make layers; proxsparse.sparsify_ in Python packs these layers"
        print(f"note: {len(merged)} N:M tensors stay dense, the first is {merged[0]}: {why}")
    layers = convert.layers_to_pack(source_headers, model, names, options.include, options.exclude, options.bits)
    buffers = {name for name, _ in model.named_buffers()}
    forms = {layer: disk.Form(options.bits, pattern) for layer, (_, pattern) in layers.items()}
    config |= {"quantization_config": disk.description(forms), WEIGHTS_NAME: INSTALL}
    more = 2 if options.bits == 16 else 3  # tensors for a weight, besides the empty one
    rounded = {} if options.calibrate is None else calibrated(options, source_headers, layers)
    stored = dict(layers.values())
    fixed = {*names.extra, *(name for name, inside in names.names.items() if inside in buffers)}
    stream = convert.pack_tensors(source_headers, stored, options.bits, rounded, fixed)
    return list(stored), stream, len(source_headers) + more * len(layers)


def refuse_differences(folder: Path, source_headers: dict, written: dict, config: dict) -> None:
    """Raises ValueError unless the written files have the tensors of a checkpoint that `from_pretrained` loads."""
    model, dense = skeleton(folder), dict(written)
    if entry := config.get("quantization_config"):
        for layer, (place, _) in convert.packed_layers(written, model, entry).items():
            parts = [dense.pop(f"{layer}.{part}", None) for part in disk.PARTS]
            dense[f"{layer}.weight"] = replace(parts[0], shape=tuple(model.get_submodule(place).weight.shape))
    check_saved(dense, model, extra=source_headers)


def calibrated(options, source_headers: dict, stored: dict[str, tuple]) -> dict:
    """Layer -> codes, scales and indices, by GPTQ under the mask on the text of --calibrate.

    `stored`: name in the model -> name in the files, which is that of the result, and pattern. The weights have the
    dtype of the files, where they may need no rounding; config.json may have another one.
    """
    check_source(options.calibrate)
    dtypes = {name: read_tensor(source_headers, f"{file}.weight").dtype for name, (file, _) in stored.items()}
    model, tokenizer = load_model(options.model, functools.reduce(torch.promote_types, dtypes.values()))
    size = {"num_samples": options.num_samples or NUM_SAMPLES, "seq_len": options.seq_len, "window": SEQ_LEN}
    size |= {"text_field": options.text_field or "text"}
    batches, _ = read_batches(options.calibrate, model, tokenizer, **size)
    layers = {name: model.get_submodule(name) for name in stored}
    patterns = {name: pattern for name, (_, pattern) in stored.items()}
    rounded = quantize_layers_(model, layers, batches, options.bits, dtypes, patterns)
    if others := [name for name in stored if name not in rounded]:
        print(f"not in a decoder block, so rounded to nearest: {', '.join(others)}")
    return {stored[name][0]: parts for name, parts in rounded.items()}


def unpacking(_options, config: dict, source_headers: dict, model: nn.Module) -> Work:
    """The same for --unpack."""
    config.pop(WEIGHTS_NAME, None)
    packed = convert.packed_layers(source_headers, model, config.pop("quantization_config"))
    layers = {name: (form.pattern, model.get_submodule(place).in_features) for name, (place, form) in packed.items()}
    parts = sum(f"{layer}.{part}" in source_headers for layer in layers for part in (*disk.PARTS, "weight"))
    return list(layers), convert.unpack_tensors(source_headers, layers), len(source_headers) + len(layers) - parts


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("pack", description=DESCRIPTION)
    add = parser.add_argument
    add("model", metavar="MODEL_DIR", help="pruned checkpoint, such as the --output_dir of train, prune or finetune")
    add("--output_dir", required=True, metavar="DIR", help="the folder to write")
    add("--unpack", action="store_true", help="make a dense checkpoint from a packed one")
    add("--include", nargs="+", metavar="REGEX", help="pack only layers whose name matches one; they must be pruned")
    add("--exclude", nargs="+", metavar="REGEX", help="do not pack layers whose name matches one")
    bits_help = "16 keeps the kept weights (default); 8 or 4 rounds them, with a scale per row or per 64 columns"
    add("--bits", type=int, choices=BITS, default=16, help=bits_help)
    calibrate_help = "text for rounding by GPTQ, which needs minutes: c4, a file or a Hub data set; without: to nearest"
    add("--calibrate", metavar="SOURCE", help=calibrate_help)
    add("--num_samples", type=int, metavar="N", help=f"documents of --calibrate; default: {NUM_SAMPLES}")
    seq_len_help = f"largest number of tokens of a document; default: {SEQ_LEN}, at most the context of the model"
    add("--seq_len", type=int, metavar="N", help=seq_len_help)
    add("--text_field", metavar="NAME", help="the field of a row that holds the text; default: text")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="largest file, also limits memory; default: 5GB")
    options = parser.parse_args(arguments)
    of_packing = ("include", "exclude", "bits", "calibrate", *OF_CALIBRATION)
    given = [f"--{name}" for name in of_packing if getattr(options, name) != parser.get_default(name)]
    if options.unpack and given:
        raise InputError(f"--unpack: unpacks every packed layer; leave out {', '.join(given)}")
    if options.calibrate is not None and options.bits == 16:
        raise InputError(f"--calibrate {options.calibrate}: only rounding uses text; add --bits 8 or --bits 4")
    if options.calibrate is None and (lost := [flag for flag in given if flag[2:] in OF_CALIBRATION]):
        raise InputError(f"{', '.join(lost)}: only for --calibrate; add --calibrate, or leave out {', '.join(lost)}")
    if options.num_samples is not None:
        require("num_samples", options.num_samples, options.num_samples >= 1, "at least 1")
    if options.seq_len is not None:
        require("seq_len", options.seq_len, options.seq_len >= 2, "at least 2")
    return options


def parse_size(text: str) -> int:
    """Text to bytes: "5GB" is 5 * 10**9; also MB, KB, or a number without a unit."""
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise InputError(f"--max_shard_size {text}: must be a size such as 5GB, 500MB or a number of bytes")
    return int(match[1]) * UNITS[match[2].upper()]


def file_bytes(folder: Path) -> int:
    """Bytes of the weight files."""
    return sum(path.stat().st_size for path in weight_files(folder))


def change(what: str, before: int, after: int) -> str:
    """One line of the summary."""
    return f"{what}: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB ({after / before:.3f}x)"


if __name__ == "__main__":
    sys.exit(run_command(main))
