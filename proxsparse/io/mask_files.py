"""masks.safetensors: packed bits of the masks and what they belong to."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from proxsparse.errors import InputError
from proxsparse.patterns import NMPattern, PatternLike

MASK_FORMAT = "proxsparse-masks-1"
MIXED = "mixed"  # in the place of a pattern: the layers have different ones


def pack_mask(mask: Tensor) -> Tensor:
    """bool [rows, columns] -> uint8 [rows, ceil(columns / 8)], column j in bit j % 8 of byte j // 8."""
    return torch.from_numpy(np.packbits(mask.cpu().contiguous().numpy(), axis=-1, bitorder="little"))


def unpack_mask(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_mask`."""
    bits = np.unpackbits(packed.cpu().numpy(), axis=-1, bitorder="little", count=columns)
    return torch.from_numpy(bits.astype(bool))


def save_masks(
    path: Path,
    masks: dict[str, Tensor],
    pattern: PatternLike | dict[str, PatternLike],
    base_model: str,
    base_revision: str = "",
    base_sha256: str = "",
) -> None:
    """Writes masks.safetensors.

    Per layer `<module name>`: uint8 [out_features, ceil(in_features / 8)], numpy.packbits(mask, axis=-1,
    bitorder="little"). Metadata: format, pattern, bitorder, base_model, base_revision, base_sha256, and in_features of
    every layer as JSON.

    Args:
        base_model, base_revision, base_sha256: name, commit on the Hub and digest of the pretrained model, see
            `models.base_of`; "" if unknown.
        pattern: one for all layers, or layer name -> pattern. Where they differ, the metadata's pattern is "mixed", and
            its `patterns` has that of every layer as JSON.
    """
    from safetensors.torch import save_file

    one_each = pattern if isinstance(pattern, dict) else dict.fromkeys(masks, pattern)
    patterns = {name: str(NMPattern.parse(one_each[name])) for name in masks}
    metadata = {
        "format": MASK_FORMAT,
        "pattern": pattern_name(patterns),
        "bitorder": "little",
        "base_model": base_model,
        "base_revision": base_revision,
        "base_sha256": base_sha256,
        "in_features": json.dumps({name: mask.shape[-1] for name, mask in masks.items()}),
    }
    if metadata["pattern"] == MIXED:
        metadata["patterns"] = json.dumps(patterns)
    save_file({name: pack_mask(mask) for name, mask in masks.items()}, path, metadata)


def pattern_name(patterns: dict[str, PatternLike]) -> str:
    """The one pattern of all layers, such as "2:4", or "mixed"."""
    names = {str(NMPattern.parse(pattern)) for pattern in patterns.values()}
    return names.pop() if len(names) == 1 else MIXED


def masks_sha256(masks: dict[str, Tensor]) -> str:
    """Digest of the names and packed bits in the order of the names; the file's own bytes differ from run to run."""
    digest = hashlib.sha256()
    for name in sorted(masks):
        digest.update(name.encode() + pack_mask(masks[name]).numpy().tobytes())
    return digest.hexdigest()


def load_masks(path: Path | str) -> dict[str, Tensor]:
    """masks.safetensors -> layer name -> bool [out_features, in_features], True = kept; every block is checked.

    Raises:
        InputError: the file is absent, malformed, or a mask does not keep exactly n of every m weights, by the pattern
            that the file names for its layer.
    """
    from safetensors import SafetensorError, safe_open

    if Path(path).is_dir():
        raise InputError(f"mask file {str(path)!r}: it is a directory; give the masks.safetensors in it")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            packed = {name: file.get_tensor(name) for name in list(file.keys())}
    except FileNotFoundError as error:
        raise InputError(f"mask file {str(path)!r}: there is no such file") from error
    except SafetensorError as error:
        raise InputError(f"mask file {str(path)!r} is malformed: {error}") from error
    if metadata.get("format") != MASK_FORMAT or metadata.get("bitorder") != "little":
        raise InputError(f"{path}: not a mask file of proxsparse (format {metadata.get('format')!r})")
    try:
        columns = json.loads(metadata["in_features"])
        mixed = metadata["pattern"] == MIXED
        named = json.loads(metadata["patterns"]) if mixed else dict.fromkeys(packed, metadata["pattern"])
        patterns = {name: NMPattern.parse(named[name]) for name in packed}
        masks = {name: unpack_checked(tensor, columns[name]) for name, tensor in packed.items()}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"mask file {str(path)!r} is malformed: {error}") from error
    for name, mask in masks.items():
        pattern = patterns[name]
        if not (pattern.nonzeros(mask) == pattern.n).all():
            raise InputError(f"mask file {str(path)!r}: layer {name} does not keep {pattern} in every block")
    return masks


def is_mask_file(path: Path) -> bool:
    """Whether `save_masks` has written the file, by its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == MASK_FORMAT
    except (OSError, SafetensorError):
        return False


def refuse_other_base(path: Path | str, base: dict[str, str], flag: str) -> None:
    """Raises InputError if the masks in a file belong to another model than `base` (see `models.base_of`).

    Compares the digests of the weights, or the names if the file has no digest.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        recorded = file.metadata() or {}
    key = "base_sha256" if recorded.get("base_sha256") and base["base_sha256"] else "base_model"
    if recorded.get(key) != base[key]:
        revision = f" at revision {recorded['base_revision']}" if recorded.get("base_revision") else ""
        raise InputError(
            f"{flag} {path}: these masks belong to {recorded.get('base_model')!r}{revision}, whose weights are not "
            f"those of {base['base_model']!r}; give the masks of this model, or add --allow_other_base"
        )


def unpack_checked(packed: Tensor, columns: object) -> Tensor:
    """`unpack_mask` of a tensor of unknown origin: what it would allocate is decided by `columns`.

    Raises:
        ValueError: it is no uint8 [out_features, ceil(columns / 8)].
    """
    whole = isinstance(columns, int) and not isinstance(columns, bool) and columns > 0
    if not whole or packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] != -(-columns // 8):
        raise ValueError(f"{packed.dtype} {list(packed.shape)} is no uint8 mask of in_features {columns!r:.40}")
    return unpack_mask(packed, columns)
