"""Finished decoder blocks on disk, so that a stopped run continues after them.

    OUTPUT_DIR/.proxsparse.json                           the run that they belong to, with its flags
    OUTPUT_DIR/finished_blocks/start.json                 the pattern of every layer; the digest of model and samples
    OUTPUT_DIR/finished_blocks/model.layers.0.safetensors one file per decoder block: its masks and updated weights

Each file has the id of its run and is written atomically. A resumed run restores the masks and weights of a finished
block exactly and runs the calibration samples through it. On the same machine its result is bit-identical to that of
a run without interruption. A completed run removes the folder.
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

Finished = dict[str, tuple[Tensor, Tensor | None]]  # layer name -> mask; updated weight, or None if unchanged

FORMAT = "proxsparse-finished-1"


def block_file(folder: Path, layers: Iterable[str]) -> Path:
    """The file of the decoder block with these layers, named by the common prefix of their names: model.layers.0."""
    common = os.path.commonpath([name.replace(".", "/") for name in layers])
    return folder / f"{common.replace('/', '.')}.safetensors"


def save_block(folder: Path, masks: dict[str, Tensor], weights: dict[str, Tensor], run_id: str = "") -> None:
    """Saves a finished decoder block.

    Args:
        masks: layer name -> bool [out_features, in_features].
        weights: layer name -> weight of the same shape, for the layers whose weights the method has changed.
        run_id: the id of the run, checked by `load_block`.
    """
    from safetensors.torch import save_file

    tensors = {f"{name}.mask": pack_mask(mask) for name, mask in masks.items()}
    tensors |= {f"{name}.weight": weight.detach().cpu().contiguous() for name, weight in weights.items()}
    with atomic_write(block_file(folder, masks)) as temporary:
        save_file(tensors, temporary, {"format": FORMAT, "run_id": run_id})


def load_block(
    folder: Path, layers: dict[str, nn.Linear], patterns: dict[str, NMPattern], run_id: str = ""
) -> Finished:
    """The saved masks and weights of these layers; {} if the file is absent or, with a warning, damaged or foreign."""
    from safetensors import SafetensorError, safe_open

    path = block_file(folder, layers)
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            owner = (file.metadata() or {}).get("run_id", "")
        if owner != run_id:
            raise ValueError(f"from another run: {owner or 'no id'}")
        finished = {
            name: (
                checked_mask(tensors.pop(f"{name}.mask"), layer, patterns[name]),
                checked_weight(tensors.pop(f"{name}.weight", None), layer),
            )
            for name, layer in layers.items()
        }
        if tensors:
            raise ValueError(f"{min(tensors)} belongs to no layer")
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        print(f"{path} is damaged ({error}): this decoder block is pruned again", file=sys.stderr)
        return {}
    return finished


def checked_mask(packed: Tensor, layer: nn.Linear, pattern: NMPattern) -> Tensor:
    """bool [out_features, in_features]. Raises ValueError if the mask does not fit the layer or the pattern."""
    rows, columns = layer.weight.shape
    if packed.dtype != torch.uint8 or packed.shape != (rows, -(-columns // 8)):
        raise ValueError(f"packed mask {list(packed.shape)} {packed.dtype} does not fit weight [{rows}, {columns}]")
    mask = unpack_mask(packed, columns)
    if not (pattern.nonzeros(mask) == pattern.n).all():
        raise ValueError(f"the mask is not {pattern}")
    return mask


def checked_weight(weight: Tensor | None, layer: nn.Linear) -> Tensor | None:
    """The weight. Raises ValueError if its shape or dtype is not that of the layer."""
    expected = layer.weight
    if weight is not None and (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"weight {list(weight.shape)} {weight.dtype}, expected {list(expected.shape)} {expected.dtype}"
        )
    return weight
