"""The mask that learning starts from: what --start names, whether it fits, and how it is had."""

from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.mask_files import load_masks
from proxsparse.methods import Method, compute_masks, get_method
from proxsparse.patterns import NMPattern
from proxsparse.run.config import PRETRAINED
from proxsparse.runtime.distributed import launched_world_size

Start = Method | dict[str, Tensor] | None  # a method, masks of a file by layer name, or the pretrained weights


def parse_start(start: str) -> Start:
    """What --start names: a method, the masks in a .safetensors file, or None, the mask of the pretrained weights.

    Raises:
        InputError: no such method or file, a file that holds no masks.
    """
    if start == PRETRAINED:
        return None
    if start.endswith(".safetensors"):
        return load_masks(start)
    chosen = get_method(start, "--start")
    if launched_world_size() > 1:
        raise InputError(
            f"--start {start} is not computed on {launched_world_size()} processes: run proxsparse.prune "
            f"--method {start} on one of them, then give its masks.safetensors"
        )
    return chosen


def check_start(start: Start, layers: dict[str, nn.Linear], pattern: NMPattern) -> None:
    """Before the passes over the calibration text: raises InputError for masks of a file that do not fit the layers."""
    for name, layer in layers.items() if isinstance(start, dict) else ():
        mask, shape = start.get(name), list(layer.weight.shape)
        if mask is None:
            held = "none"
        elif list(mask.shape) != shape:
            held = f"one of {list(mask.shape)}"
        elif (pattern.nonzeros(mask) != pattern.n).any():
            held = f"one that is not {pattern}"
        else:
            continue
        raise InputError(
            f"--start: layer {name} needs a {pattern} mask of {shape}, the file has {held}; give masks of this model"
        )


def first_masks(
    start: Start,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: list[dict[str, Tensor]],
    pattern: NMPattern,
) -> dict[str, Tensor]:
    """The masks to start from: layer name -> bool [out_features, in_features]; {} is the ranking of the weights.

    `start` has passed `check_start`. Raises what the method raises.
    """
    if isinstance(start, Method):
        return compute_masks(start, model, layers, batches, dict.fromkeys(layers, pattern), progress=True)
    return start or {}
