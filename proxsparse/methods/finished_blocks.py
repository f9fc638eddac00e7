"""Finished decoder blocks on disk, so that a stopped run continues after them.

    OUTPUT_DIR/.proxsparse.json                           the run they belong to, with its flags
    OUTPUT_DIR/finished_blocks/start.json                 the pattern of every layer; the digest of model and samples
    OUTPUT_DIR/finished_blocks/model.layers.0.safetensors one for every decoder block: its masks and updated weights

Each file has the id of its run. It is written under another name, synced and renamed, so it is whole, whatever has
stopped the run. The masks and weights of a finished block are put back bit for bit, and the calibration samples run
through it to the next: on the same machine a resumed run ends with the bits of an undisturbed one. A completed run
removes the folder.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.io.atomic import atomic_write
from proxsparse.io.mask_files import pack_mask, unpack_mask
from proxsparse.patterns import NMPattern

Finished = dict[str, tuple[Tensor, Tensor | None]]  # layer name -> mask; updated weight, or None if it stays

FORMAT = "proxsparse-finished-1"


def block_file(folder: Path, layers: Iterable[str]) -> Path:
    """The file of the decoder block with these layers, by what their names have in common: model.layers.0."""
    common = os.path.commonpath([name.replace(".", "/") for name in layers])
    return folder / f"{common.replace('/', '.')}.safetensors"


def save_block(folder: Path, masks: dict[str, Tensor], weights: dict[str, Tensor], run_id: str = "") -> None:
    """Keeps a finished decoder block.

    Args:
        masks: layer name -> bool [out_features, in_features].
        weights: the same shape, of the layers whose weights the method has changed.
        run_id: of the run that has finished it.
    """
    from safetensors.torch import save_file

    tensors = {f"{name}.mask": pack_mask(mask) for name, mask in masks.items()}
    tensors |= {f"{name}.weight": weight.detach().cpu().contiguous() for name, weight in weights.items()}
    with atomic_write(block_file(folder, masks)) as beside:
        save_file(tensors, beside, {"format": FORMAT, "run_id": run_id})


def load_block(
    folder: Path, layers: dict[str, nn.Linear], patterns: dict[str, NMPattern], run_id: str = ""
) -> Finished:
    """A decoder block that was kept, by its layers; {} if there is none.

    A file that is damaged, or that another run has written, counts as none; a line on stderr says so.
    """
    from safetensors import SafetensorError, safe_open

    path = block_file(folder, layers)
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            owner = (file.metadata() or {}).get("run_id", "")
        if owner != run_id:
            raise ValueError(f"of another run: {owner or 'without an id'}")
        finished = {
            name: (
                checked_mask(tensors.pop(f"{name}.mask"), layer, patterns[name]),
                checked_weight(tensors.pop(f"{name}.weight", None), layer),
            )
            for name, layer in layers.items()
        }
        if tensors:
            raise ValueError(f"{min(tensors)} is of no layer")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        print(f"{path} is damaged ({error}): this decoder block is pruned again", file=sys.stderr)
        return {}
    return finished


def checked_mask(packed: Tensor, layer: nn.Linear, pattern: NMPattern) -> Tensor:
    """bool [out_features, in_features]. Raises ValueError if it is no mask of that layer and pattern."""
    rows, columns = layer.weight.shape
    if packed.dtype != torch.uint8 or packed.shape != (rows, -(-columns // 8)):
        raise ValueError(f"a mask of {list(packed.shape)} {packed.dtype} is not one of [{rows}, {columns}]")
    mask = unpack_mask(packed, columns)
    if not (pattern.nonzeros(mask) == pattern.n).all():
        raise ValueError(f"a mask that does not keep {pattern}")
    return mask


def checked_weight(weight: Tensor | None, layer: nn.Linear) -> Tensor | None:
    """The weight. Raises ValueError if the layer's has another shape or dtype."""
    if weight is not None and (weight.shape, weight.dtype) != (layer.weight.shape, layer.weight.dtype):
        raise ValueError(f"a weight of {list(weight.shape)} {weight.dtype}, the layer's is {layer.weight.dtype}")
    return weight
