"""`python -m proxsparse.pack`: a pruned checkpoint with its 2:4 layers packed, 9/16 of them in bf16; or dense again.

The folder that comes out is a Hugging Face checkpoint: after `import proxsparse`, `from_pretrained` loads it.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

from proxsparse.checkpoint import prepare_output_dir, require_space, staged
from proxsparse.errors import InputError, run_command
from proxsparse.inference.packed_checkpoint import check_description, description, headers, weight_files, write_shards
from proxsparse.inference.packing import pack_tensors, unpack_tensors
from proxsparse.models import linear_layers, refuse_pickles
from proxsparse.run import WRITTEN

DESCRIPTION = """\
Packs every 2:4 nn.Linear layer of a pruned checkpoint: in bf16 9/16 of its bytes. Other tensors stay as they are.
After `import proxsparse`, AutoModelForCausalLM.from_pretrained loads the folder, without ever holding dense weights."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
CONFIG, CARD, MASKS = "config.json", "README.md", "masks.safetensors"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
# What a run of proxsparse.train or .prune says of itself: the folder that comes out is no run.
OF_THE_RUN = ("result.json", "config.yaml", "metrics.jsonl", "report.md", "*.png")
NOTE = """
<!-- proxsparse.pack -->
The 2:4 layers of this checkpoint are packed: `import proxsparse`, then `AutoModelForCausalLM.from_pretrained` loads it.
`python -m proxsparse.pack THIS_FOLDER --unpack --output_dir DENSE` gives the dense checkpoint back, bit for bit.
<!-- /proxsparse.pack -->
"""


def main(arguments: list[str] | None = None) -> int:
    """Checks, packs or unpacks tensor by tensor, copies the rest, says what it did. Returns the exit code."""
    options = parse(arguments)
    source, target, shard_bytes = Path(options.model), Path(options.output_dir), parse_size(options.max_shard_size)
    config = read_config(source, options.unpack)
    refuse_pickles(source)
    paths = weight_files(source)
    found, linears = headers(paths), linear_layers(source)
    if target.exists() and target.samefile(source):
        raise InputError(f"--output_dir {options.output_dir!r} is the folder of the model: the result would replace it")
    prepare_output_dir(target, options.overwrite_output_dir)
    before = sum(path.stat().st_size for path in paths)
    require_space(target, 2 * before if options.unpack else before)

    if options.unpack:
        layers = config.pop("quantization_config")["layers"]
        stream = unpack_tensors(found, linears, layers)
    else:
        stream = pack_tensors(found, linears, options.include, options.exclude)
    with staged(target) as scratch:
        sizes = write_shards(scratch, stream, shard_bytes)
        if not options.unpack:
            layers = [name for name in linears if f"{name}.values" in sizes]
            if not layers:
                raise InputError(
                    f"nothing to pack in {options.model!r}: none of its {len(linears)} nn.Linear layers is 2:4 and "
                    "selected (Conv1D layers, fused experts: not packed); prune it first: python -m proxsparse.prune"
                )
            config["quantization_config"] = description(layers)
        (scratch / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        copy_rest(source, scratch, options.unpack)
        after = sum(path.stat().st_size for path in weight_files(scratch))
        for stale in (path for pattern in WRITTEN for path in target.glob(pattern)):
            stale.unlink()
    what = "unpacked" if options.unpack else "packed"
    print(f"{what} {len(layers)} of {len(linears)} nn.Linear layers; the other tensors are as they were")
    if not options.unpack:
        print(change("these layers", *layer_bytes(layers, sizes)))
    print(change("files", before, after))
    print(f"saved to {options.output_dir}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proxsparse.pack",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL_DIR", help="folder of a safetensors checkpoint, as proxsparse.train or .prune leave it")
    add("--output_dir", required=True, metavar="DIR", help="the folder to write, whole or not at all")
    add("--unpack", action="store_true", help="the inverse: the dense checkpoint of a packed one")
    add("--include", nargs="+", metavar="REGEX", help="pack only layers whose name has one of these; they must be 2:4")
    add("--exclude", nargs="+", metavar="REGEX", help="leave layers dense whose name has one of these")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="of an output file, and of the memory; default 5GB")
    add("--overwrite_output_dir", action="store_true", help="replace what an earlier run left in --output_dir")
    options = parser.parse_args(arguments)
    if options.unpack and (options.include or options.exclude):
        raise InputError("--unpack takes neither --include nor --exclude: it unpacks every packed layer")
    return options


def parse_size(text: str) -> int:
    """Bytes: "5GB" is 5 * 10**9; also MB, KB, or a number alone."""
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise InputError(f"--max_shard_size {text}: must be a size such as 5GB, 500MB or a number of bytes")
    return int(match[1]) * UNITS[match[2].upper()]


def read_config(folder: Path, unpack: bool) -> dict:
    """config.json. Raises InputError if there is none, or if it is packed already (with --unpack: if it is not)."""
    if not (folder / CONFIG).is_file():
        raise InputError(f"{str(folder)!r} has no {CONFIG}: give the folder of a pruned checkpoint (proxsparse.prune)")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        entry = config.get("quantization_config")
    except (AttributeError, ValueError) as error:
        raise InputError(f"{folder / CONFIG} is malformed: {error}; get the checkpoint again") from error
    if unpack and entry is None:
        raise InputError(f"{str(folder)!r} is not packed: there is nothing to unpack")
    if unpack:
        check_description(entry)
    elif entry is not None:
        method = entry.get("quant_method") if isinstance(entry, dict) else entry
        raise InputError(f"{str(folder)!r} is not dense (quant_method {method}): give the dense pruned checkpoint")
    return config


def copy_rest(source: Path, target: Path, unpack: bool) -> None:
    """Tokenizer, generation config, masks and whatever else belongs to the model; the card with a note, or without."""
    for path in sorted(source.iterdir()):
        skipped = any(path.match(pattern) for pattern in (CONFIG, CARD, *WEIGHTS, *OF_THE_RUN))
        if path.is_file() and not path.name.startswith(".") and (path.name == MASKS or not skipped):
            shutil.copyfile(path, target / path.name)
    card = (source / CARD).read_text(encoding="utf-8") if (source / CARD).is_file() else ""
    card = card.replace(NOTE, "") if unpack else card + NOTE
    if card:
        (target / CARD).write_text(card, encoding="utf-8")


def layer_bytes(layers: list[str], sizes: dict[str, int]) -> tuple[int, int]:
    """Of the packed layers' weights: dense, packed."""
    values = sum(sizes[f"{name}.values"] for name in layers)
    return 2 * values, values + sum(sizes[f"{name}.indices"] for name in layers)


def change(what: str, before: int, after: int) -> str:
    """One line of the summary."""
    return f"{what}: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB, {after / before:.3f} of it"


if __name__ == "__main__":
    sys.exit(run_command(main))
