"""The initial mask of the training: parses, checks and computes --start."""

from pathlib import Path

from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.mask_files import load_masks, refuse_other_base
from proxsparse.methods.registry import Method, compute_masks, get_method, list_methods
from proxsparse.patterns import NMPattern
from proxsparse.runtime.distributed import launched_world_size
from proxsparse.training.options import PRETRAINED

Start = Method | dict[str, Tensor] | None  # a method, masks of a file by layer name, or the pretrained weights


def parse_start(start: str) -> Start:
    """The value of --start: a method, the masks in a .safetensors file, or None for the pretrained weights.

    Raises:
        InputError: no such method or file, or a file without masks.
    """
    if start == PRETRAINED:
        return None
    if start.endswith(".safetensors") or (start not in list_methods() and Path(start).is_dir()):
        return load_masks(start)
    chosen = get_method(start, "--start")
    if launched_world_size() > 1:
        raise InputError(
            f"--start {start}: not supported on {launched_world_size()} processes; run proxsparse prune --method "
            f"{start} on one process, then give its masks.safetensors"
        )
    return chosen


def check_start(
    layers: dict[str, nn.Linear],
    patterns: dict[str, NMPattern],
    base: dict[str, str],
    _tokenizer,
    start: str = PRETRAINED,
    allow_other_base: bool = False,
    **_others,
) -> None:
    """Raises InputError if the masks in the file of --start do not fit the model."""
    masks = parse_start(start)
    if not isinstance(masks, dict):
        return
    for name, layer in layers.items():
        mask, shape, pattern = masks.get(name), list(layer.weight.shape), patterns[name]
        if mask is None:
            held = "none"
        elif list(mask.shape) != shape:
            held = f"a mask of {list(mask.shape)}"
        elif (pattern.nonzeros(mask) != pattern.n).any():
            held = f"a mask that is not {pattern}"
        else:
            continue
        raise InputError(
            f"--start {start}: layer {name} needs a {pattern} mask of {shape}, found {held}; give masks of this model"
        )
    if not allow_other_base:
        refuse_other_base(start, base, "--start")


def initial_masks(
    start: Start,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: list[dict[str, Tensor]],
    patterns: dict[str, NMPattern],
) -> dict[str, Tensor]:
    """The initial masks: layer name -> bool [out_features, in_features]; {}: the largest weights are kept."""
    if isinstance(start, Method):
        return compute_masks(start, model, layers, batches, patterns)
    return start or {}
