"""The layers of the given model that are pruned before the run. Those that the run does not prune keep their masks."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.mask_files import BASE, read_masks
from proxsparse.io.output_folder import MASKS
from proxsparse.models.layers import body_linears
from proxsparse.models.loading import base_identity
from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern, pattern_of_zeros
from proxsparse.runtime.distributed import on_rank_zero


@dataclass(frozen=True)
class GivenMasks:
    """The masks of the given model, those of its masks.safetensors, else of its zeros."""

    masks: dict[str, Tensor]  # layer name -> bool [out_features, in_features], True = kept; {} on other ranks than zero
    patterns: dict[str, NMPattern]  # of these layers
    recorded: dict[str, str]  # the metadata of masks.safetensors; {}: there is no file
    base: dict[str, str]  # `base_identity` of the dense model that the file names, else of the given model

    def differ_from_base(self, masks: dict[str, Tensor]) -> bool:
        """Whether the given weights under these masks are other weights than those of the base under them."""
        if not self.recorded.get("base_model"):
            return False
        updated, again = self.recorded.get("updated") == "true", self.masks.keys() & masks.keys()
        return updated or any(bool((masks[name] & ~self.masks[name]).any()) for name in again)


def given_masks(name: str, model: nn.Module) -> GivenMasks:
    """The masks of a model that was loaded by this name. Raises InputError if it is not pruned by its masks file."""
    path, linears = Path(name) / MASKS, body_linears(model)
    masks: dict[str, Tensor] = {}  # stay on rank zero

    def read() -> tuple:
        if not path.is_file():
            patterns = patterns_of(linears)
            masks.update({layer: nm_mask(linears[layer].weight.detach().abs(), patterns[layer]) for layer in patterns})
            return patterns, {}, base_identity(name, model)
        recorded_masks, patterns, recorded = read_masks(path)
        for layer, mask in recorded_masks.items():
            if what := mismatch(linears.get(layer), mask):
                remedy = "make the model with proxsparse apply, or delete the file; then its zeros are the mask"
                raise InputError(f"{path}: the mask of layer {layer} does not fit: {what}; {remedy}")
        masks.update(recorded_masks)
        named = recorded.get("base_model")
        return patterns, recorded, {key: recorded.get(key, "") for key in BASE} if named else base_identity(name, model)

    return GivenMasks(masks, *on_rank_zero(read))


def mismatch(layer: nn.Linear | None, mask: Tensor) -> str:
    """Why a mask does not fit a layer; "" if it does."""
    if layer is None or layer.weight.shape != mask.shape:
        has = f"shape {list(layer.weight.shape)}" if layer else "no such layer"
        return f"it has shape {list(mask.shape)}, the model has {has}"
    outside = int((layer.weight.detach().bool() & ~mask).sum())
    return f"{outside:,} weights that it prunes are not 0" if outside else ""


def patterns_of(layers: dict[str, nn.Linear]) -> dict[str, NMPattern]:
    """Layer name -> pattern, for every layer whose zeros have a clear one."""
    found = {}
    for name, layer in layers.items():
        with suppress(ValueError):
            if pattern := pattern_of_zeros(name, layer.weight.detach()):
                found[name] = pattern
    return found
