"""Packed checkpoints on disk: their config.json, their tensors, checks and writing.

A packed checkpoint is a Hugging Face folder in which each layer of `quantization_config["layers"]` has `<layer>.values`
and `<layer>.indices` in the format of `proxsparse.reference.pack`, and a `<layer>.weight` without elements. A layer of
`quantization_config["bits"]` has 8 or 4 bits: its values are codes, and it has `<layer>.scales`, in the format of
`proxsparse.reference.quantize`.

A program that does not know the format must fail, not run with random weights. In transformers without proxsparse, the
WEIGHTS_NAME in config.json is an error that says what to install. `save_pretrained` drops it; then the empty weights,
which have the wrong shape, are the error.
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from proxsparse.io.model_files import (
    FROM_CLONE,
    ONE_FILE,
    QUANT_METHOD,
    SAFETENSORS_FLOATS,
    Header,
    read_object,
    shard_names,
    write_index,
)
from proxsparse.patterns import MIXED, NMPattern, pattern_name
from proxsparse.reference.quantize import CODES, packed_shapes
from proxsparse.reference.windows import expanded_features

FORMAT_VERSION = 4
READABLE = (2, 3, FORMAT_VERSION)  # 2 and 3: all layers are 2:4; 2: with 16 bits
PARTS = ("values", "indices", "scales")
NOTE = """
<!-- proxsparse.pack -->
The pruned layers of this checkpoint are packed: `AutoModelForCausalLM.from_pretrained` loads it where proxsparse is
installed ({}). `proxsparse pack THIS_FOLDER --unpack --output_dir DENSE` makes a dense checkpoint.
<!-- /proxsparse.pack -->
"""
ROUNDED = """
<!-- proxsparse.rounded -->
The kept weights of the layers that were packed were rounded to {} bits. A perplexity above is that of the model before.
<!-- /proxsparse.rounded -->
"""
DTYPES = {16: SAFETENSORS_FLOATS, 8: ("I8",), 4: ("U8",)}  # of the values, by bits
UNCHANGED = re.compile(rb"(The kept weights\s+are)\s+the pretrained ones, unchanged")  # as in `run.model_card`
ANY_NOTE = re.compile(rb"\n<!-- proxsparse\.pack -->.*?<!-- /proxsparse\.pack -->\n", re.DOTALL)


class Form(NamedTuple):
    """How a layer is packed."""

    bits: int
    pattern: NMPattern


def description(layers: dict[str, Form]) -> dict:
    """The quantization_config of config.json for these packed layers."""
    patterns = {name: str(form.pattern) for name, form in layers.items()}
    entries = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION, "pattern": pattern_name(patterns)}
    if entries["pattern"] == MIXED:
        entries["patterns"] = patterns
    bits = {name: form.bits for name, form in layers.items() if form.bits != 16}
    return entries | {"layers": list(layers)} | ({"bits": bits} if bits else {})


def forms(config: dict) -> dict[str, Form]:
    """The inverse of `description`. Raises ValueError for a pattern that cannot be packed."""
    bits, pattern = config.get("bits", {}), config["pattern"]
    patterns = config.get("patterns", {}) if pattern == MIXED else dict.fromkeys(config["layers"], pattern)
    return {name: Form(bits.get(name, 16), NMPattern.parse_windowed(patterns.get(name))) for name in config["layers"]}


def check_description(config: dict) -> None:
    """Raises ValueError for a quantization_config that does not describe a packed checkpoint of this format version."""
    if not isinstance(config, dict) or config.get("quant_method") != QUANT_METHOD:
        reason = "not a packed checkpoint of proxsparse"
        raise ValueError(f"quantization_config is {config!r:.60}: {reason}; give the --output_dir of proxsparse pack")
    version, layers, bits = config.get("format_version"), config.get("layers"), config.get("bits", {})
    if version not in READABLE:
        raise ValueError(
            f"packed checkpoint has format version {version!r}, but this proxsparse reads "
            f"{', '.join(map(str, READABLE))}; update proxsparse, or pack the dense checkpoint again"
        )
    wrong = "`layers` must be a list of names"
    try:
        if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
            raise ValueError(f"{layers!r:.60}")
        wrong = "`bits` must have 8 or 4 for some of `layers`"
        if not isinstance(bits, dict) or not bits.keys() <= set(layers) or not set(bits.values()) <= CODES.keys():
            raise ValueError(f"{bits!r:.60}")
        wrong = "`pattern`, or `patterns` for mixed ones, must be those of `layers`"
        forms(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"packed checkpoint: quantization_config of config.json: {wrong} ({error}); pack the dense checkpoint again"
        ) from error


def read_packed_config(path: Path, packed: bool) -> dict:
    """Reads the config.json of a packed or a dense checkpoint. Raises ValueError if it is missing or of another one."""
    folder, commands = str(path.parent), "proxsparse pack" if packed else "train, prune or finetune"
    wanted = f"the --output_dir of {commands}"
    if not path.is_file():
        missing = f"{path.name} is missing" if path.parent.is_dir() else "no such folder"
        raise ValueError(f"{folder!r}: {missing}; give {wanted}")
    config = read_object(path)
    entry = config.get("quantization_config")
    if packed and entry is None:
        raise ValueError(f"{folder!r} is not packed; give {wanted}, which packs the --output_dir of proxsparse prune")
    if packed:
        check_description(entry)
    elif entry is not None:
        method = entry.get("quant_method") if isinstance(entry, dict) else entry
        raise ValueError(f"{folder!r} is not dense (quant_method {method}); give the dense pruned checkpoint")
    return config


def annotate(card: Path, bits: Collection[int], packed: bool) -> None:
    """Adds to the model card how the layers are packed, or removes it; what was rounded remains in the card.

    Works on bytes, because the encoding is unknown. `bits` are those of the layers that are, or were, packed.
    """
    rounded = " or ".join(str(number) for number in sorted({*bits} - {16}))
    text = ANY_NOTE.sub(b"", card.read_bytes() if card.is_file() else b"")
    if rounded and (note := ROUNDED.format(rounded).encode()) not in text:
        text = UNCHANGED.sub(rb"\1 the pretrained ones, rounded", text) + note
    if packed:
        text += NOTE.format(FROM_CLONE.format(".")).encode()
    card.unlink(missing_ok=True)
    if text:
        card.write_bytes(text)


def check_tensors(headers: dict[str, Header], packed: dict[str, tuple[nn.Linear, Form]]) -> None:
    """Compares the files with the packed layers that config.json lists: name in the files -> layer in the model, form.

    Raises ValueError if a layer is packed but not listed, or dense but listed, so that transformers would load random
    weights, or if a tensor of a packed layer is missing or has another shape or dtype.
    """
    for tensor, header in headers.items():
        layer, _, part = tensor.rpartition(".")
        dense = part == "weight" and header.shape != (0,)
        if (part in PARTS and layer not in packed) or (dense and layer in packed):
            says = "lists this layer as packed" if layer in packed else "does not list this layer as packed"
            raise ValueError(
                f"{header.file} contains {tensor}, but the quantization_config in config.json {says}; "
                "download the checkpoint again, or pack it again"
            )
    for name, (linear, form) in packed.items():
        for tensor, (shape, dtypes) in tensors_of(name, linear, form).items():
            header = headers.get(tensor)
            if header is None:
                raise ValueError(f"packed layer {name}: no file has {tensor}; download the checkpoint again")
            if header.shape != shape or header.dtype not in dtypes:
                raise ValueError(
                    f"{header.file}: {tensor} is {header.dtype} {list(header.shape)}, but the model needs "
                    f"{' or '.join(dtypes)} {list(shape)}; pack the pruned folder again"
                )


def tensors_of(name: str, linear: nn.Linear, form: Form) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name in the files -> shape and possible dtypes, for the tensors of a packed layer."""
    form.pattern.check_blocks(linear.weight.shape, f"packed layer {name}: weight")
    columns = expanded_features(linear.in_features, form.pattern.m)
    shapes = packed_shapes(linear.out_features, columns, form.bits)
    if linear.bias is not None:
        shapes["bias"] = (linear.out_features,)
    dtypes = {"values": DTYPES[form.bits], "indices": ("U8",)}
    return {f"{name}.{part}": (shape, dtypes.get(part, SAFETENSORS_FLOATS)) for part, shape in shapes.items()}


def layer_bytes(layers: list[str], headers: dict[str, Header]) -> int:
    """Bytes of the weights of these layers, dense or packed."""
    tensors = (f"{layer}.{part}" for layer in layers for part in ("weight", *PARTS))
    return sum(headers[tensor].size for tensor in tensors if tensor in headers)


def write_shards(folder: Path, stream: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Writes the tensors as model.safetensors, or as shards with an index if they exceed `max_bytes`.

    One shard at a time is in memory. A tensor larger than `max_bytes` gets its own shard.
    """
    sizes: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if shard and sum(sizes[other] for other in shard) + size > max_bytes:
            shards.append(write_shard(folder, shard, len(shards)))
        shard[name], sizes[name] = tensor, size
    if shard:
        shards.append(write_shard(folder, shard, len(shards)))
    names = [ONE_FILE]
    if len(shards) > 1:
        names = shard_names(len(shards))
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        write_index(folder, weight_map, sum(sizes.values()))
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)


def write_shard(folder: Path, shard: dict[str, Tensor], number: int) -> list[str]:
    """Writes a shard to a temporary name, empties it, and returns the names of its tensors."""
    from safetensors.torch import save_file

    names, tensors = sorted(shard), {name: tensor.contiguous() for name, tensor in shard.items()}
    save_file(tensors, folder / f"{number}.part", {"format": "pt"})
    shard.clear()
    return names
