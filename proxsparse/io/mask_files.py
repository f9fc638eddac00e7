"""masks.safetensors: the masks as bits, with the name and digest of the pretrained model."""

import hashlib
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from proxsparse.errors import InputError, require_path
from proxsparse.io.atomic import atomic_write
from proxsparse.patterns import MIXED, NMPattern, PatternLike, pattern_name, pattern_of_mask

MASK_FORMAT = "proxsparse-masks-1"
BASE = ("base_model", "base_revision", "base_weights_sha256")  # what a file says of its base model


def pack_mask(mask: Tensor) -> Tensor:
    """bool [rows, columns] -> uint8 [rows, ceil(columns / 8)], column j in bit j % 8 of byte j // 8."""
    return torch.from_numpy(np.packbits(mask.cpu().contiguous().numpy(), axis=-1, bitorder="little"))


def unpack_mask(packed: Tensor, columns: int) -> Tensor:
    """The inverse of `pack_mask`. Raises ValueError unless `packed` is uint8 [rows, ceil(columns / 8)].

    They may be untrusted, so this is checked first: `columns` decides how much memory is allocated.
    """
    whole = type(columns) is int and columns > 0
    if not whole or packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] != -(-columns // 8):
        raise ValueError(f"{packed.dtype} {list(packed.shape)} is not a uint8 mask of in_features {columns!r:.40}")
    bits = np.unpackbits(packed.cpu().numpy(), axis=-1, bitorder="little", count=columns)
    return torch.from_numpy(bits.astype(bool))


def save_masks(
    path: Path | str,
    masks: Mapping[str, Tensor],
    pattern: PatternLike | Mapping[str, PatternLike] | None = None,
    base_model: str = "",
    base_revision: str = "",
    base_weights_sha256: str = "",
    updated: bool = False,
) -> None:
    """Writes masks.safetensors.

    Per layer `<module name>`: uint8 [out_features, ceil(in_features / 8)], numpy.packbits(mask, axis=-1,
    bitorder="little"). Metadata: format, pattern, bitorder, what is known of the pretrained model, updated, and
    in_features of every layer as JSON. If the patterns differ: pattern "mixed", and `patterns` of every layer as JSON.

    Args:
        masks: layer name -> bool [out_features, in_features], True = kept.
        pattern: one for all layers, or layer name -> pattern; None: that which each mask keeps exactly.
        base_model, base_revision, base_weights_sha256: name, commit on the Hub and digest of the pretrained model, see
            `models.loading.base_identity`; "" if unknown.
        updated: whether the pruned model has other weights than the pretrained ones under the masks, as after
            fine-tuning.
    Raises:
        InputError: there is no mask, or one is not a bool matrix, has no pattern or does not keep exactly n of every m
            weights; there is no such directory.
    """
    from safetensors.torch import save_file

    require_path("path", path)
    if not Path(path).parent.is_dir():
        raise InputError(f"{path}: there is no directory {Path(path).parent}; create it first")
    if Path(path).is_dir():
        raise InputError(f"{path}: a directory; give the name of a file in it")
    check_masks(masks)
    given, patterns = pattern if isinstance(pattern, Mapping) else dict.fromkeys(masks, pattern), {}
    for name, mask in masks.items():
        found = pattern_of_mask(mask) if pattern is None else given.get(name)
        if found is None and pattern is None:
            raise InputError(f"masks: layer {name} does not keep n:m in all blocks, for any n:m; leave it out")
        if found is None:
            raise InputError(f"pattern: none of layer {name}; add it, or give pattern=None to find those of all layers")
        found = NMPattern.parse(found)
        if not found.is_mask(mask):
            raise InputError(f"masks: layer {name} does not keep {found} in all blocks; give its pattern")
        patterns[name] = str(found)
    metadata = {
        "format": MASK_FORMAT,
        "pattern": pattern_name(patterns),
        "bitorder": "little",
        "in_features": json.dumps({name: mask.shape[-1] for name, mask in masks.items()}),
    }
    base = zip(BASE, (base_model, base_revision, base_weights_sha256), strict=True)
    metadata |= {name: str(value or "") for name, value in base} | {"updated": str(updated).lower()}
    if metadata["pattern"] == MIXED:
        metadata["patterns"] = json.dumps(patterns)
    with atomic_write(Path(path)) as temporary:
        save_file({name: pack_mask(mask) for name, mask in masks.items()}, temporary, metadata)


def check_masks(masks: Mapping[str, Tensor]) -> None:
    """Raises InputError unless they are bool matrices, at least one."""
    if not isinstance(masks, Mapping) or not masks:
        what = "no layer" if isinstance(masks, Mapping) else "not a dict, layer name -> mask"
        raise InputError(f"masks={reprlib.repr(masks)}: {what}; give the masks of prune_ or load_masks")
    for name, mask in masks.items():
        is_tensor = isinstance(mask, Tensor)
        is_dense = is_tensor and mask.layout == torch.strided and not mask.is_meta
        if not is_dense or mask.dtype != torch.bool or mask.ndim != 2:
            kind = f"{mask.dtype} {list(mask.shape)}" if is_tensor else type(mask).__name__
            if is_tensor and not is_dense:
                kind += f" {mask.layout} on {mask.device}"
            raise InputError(f"masks: layer {name} has {kind}; give torch.bool [out_features, in_features]")


def masks_sha256(masks: dict[str, Tensor]) -> str:
    """Digest of the sorted names and their packed bits. The bytes of masks.safetensors differ from run to run."""
    digest = hashlib.sha256()
    for name in sorted(masks):
        digest.update(name.encode() + pack_mask(masks[name]).numpy().tobytes())
    return digest.hexdigest()


def load_masks(path: Path | str) -> dict[str, Tensor]:
    """Reads masks.safetensors and checks every block: layer name -> bool [out_features, in_features], True = kept.

    Raises InputError as `read_masks`.
    """
    return read_masks(path)[0]


def read_masks(path: Path | str) -> tuple[dict[str, Tensor], dict[str, NMPattern], dict[str, str]]:
    """The masks as in `load_masks`, layer name -> pattern, and the metadata of the file.

    Raises InputError if the file is missing or malformed, or a mask does not keep exactly n of every m weights.
    """
    from safetensors import SafetensorError, safe_open

    require_path("path", path)
    if not Path(path).is_file():
        what = (
            "a directory; give the masks.safetensors in it" if Path(path).is_dir() else "no such file; check the path"
        )
        raise InputError(f"mask file {str(path)!r}: {what}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            packed = {name: file.get_tensor(name) for name in list(file.keys())}
        if metadata.get("format") != MASK_FORMAT or metadata.get("bitorder") != "little":
            kind = f"not a mask file of proxsparse (format {metadata.get('format')!r:.40})"
            raise InputError(f"mask file {str(path)!r}: {kind}; give a masks.safetensors file")
        columns = json.loads(metadata["in_features"])
        mixed = metadata["pattern"] == MIXED
        named = json.loads(metadata["patterns"]) if mixed else dict.fromkeys(packed, metadata["pattern"])
        patterns = {name: NMPattern.parse(named[name]) for name in packed}
        masks = {name: unpack_mask(tensor, columns[name]) for name, tensor in packed.items()}
        for name, mask in masks.items():
            if not patterns[name].is_mask(mask):
                raise ValueError(f"layer {name} {list(mask.shape)} does not keep {patterns[name]} in all blocks")
    except InputError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"mask file {str(path)!r} is malformed ({error}); give an undamaged mask file") from error
    return masks, patterns, metadata


def read_rows(path: Path | str, rows: Mapping[str, slice]) -> dict[str, Tensor]:
    """Some rows of some masks in a file that `read_masks` has checked: layer name -> bool [rows, in_features]."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        columns = json.loads(file.metadata()["in_features"])
        return {name: unpack_mask(file.get_slice(name)[chosen], columns[name]) for name, chosen in rows.items()}


def mark_updated(path: Path) -> None:
    """Records in masks.safetensors that the weights under the masks are not those of the base model."""
    masks, patterns, recorded = read_masks(path)
    save_masks(path, masks, patterns, **{key: recorded.get(key, "") for key in BASE}, updated=True)


def notes_on(recorded: Mapping[str, str]) -> list[str]:
    """What the user of masks must be told, by the metadata of their file."""
    note = "the pruned model of these masks has other weights than the base model under them"
    return [note] * (recorded.get("updated") == "true")


def is_mask_file(path: Path) -> bool:
    """Whether the metadata of the file says that `save_masks` wrote it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format") == MASK_FORMAT
    except (OSError, SafetensorError):
        return False


def refuse_other_base(recorded: dict[str, str], base: dict[str, str], masks: str) -> None:
    """Raises InputError, which begins with `masks`, if masks belong to another model than `base` (`base_identity`).

    Compares the digests of all weights; masks without a digest are compared by name. `recorded`: their metadata.
    """
    key = "base_weights_sha256" if recorded.get("base_weights_sha256") else "base_model"
    if not recorded.get(key):
        raise InputError(f"{masks}: the file does not say to which model it belongs; add --allow_other_base")
    if recorded[key] != base[key]:
        revision = f" at revision {recorded['base_revision']}" if recorded.get("base_revision") else ""
        owner = f"{recorded.get('base_model')!r}{revision}, whose weights differ from those of {base['base_model']!r}"
        remedy = "give the masks of this model, or add --allow_other_base"
        raise InputError(f"{masks}: these masks belong to {owner}; {remedy}")
