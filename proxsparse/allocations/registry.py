"""The table of allocations, and `allocate`, which gives every layer its pattern."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from proxsparse.allocations.budget import Layers, by_decoder_block, nearest_counts, numel
from proxsparse.errors import InputError
from proxsparse.methods.registry import check_option_names, options_of
from proxsparse.methods.walk import Batches
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.runtime.progress import shown


@dataclass(frozen=True)
class Allocation:
    """One row of the table.

    `wish(model, blocks, batches, pattern, **options)` gives one wish per item of `blocks`: the layers by name
    of each decoder block that has any. Without needs_data it does not look at the batches.
    """

    name: str
    needs_data: bool
    paper: str
    wish: Callable[..., list[float]]
    options: dict[str, bool | int | float | str]  # name -> default
    check: Callable[..., None] = lambda **options: None  # raises InputError for values of its options out of range


_allocations: dict[str, Allocation] = {}


def register_allocation(name: str, needs_data: bool, paper: str, check: Callable[..., None] = Allocation.check):
    """Decorator: add a function that wishes, see `Allocation`; keyword-only parameters are its options."""

    def add(wish: Callable) -> Callable:
        _allocations[name] = Allocation(name, needs_data, paper, wish, options_of(wish), check)
        return wish

    return add


def list_allocations() -> list[str]:
    """The names of all registered allocations."""
    return sorted(_allocations)


def get_allocation(name: str) -> Allocation:
    """The allocation of that name. Raises InputError, listing the choices, if there is none."""
    if name not in _allocations:
        raise InputError(
            f"allocation {name!r}: there is no such allocation; choose from {', '.join(list_allocations())}"
        )
    return _allocations[name]


def allocate(
    name: str,
    model: nn.Module,
    layers: Layers,
    batches: Batches,
    pattern: PatternLike,
    progress: bool = False,
    **options,
) -> dict[str, NMPattern]:
    """Layer name -> its pattern n_b:m, b the layer's decoder block; the model stays as it is.

    Args:
        name: one of `allocations()`.
        layers: the layers to prune, from `models.prunable_layers(model, pattern)`.
        batches: calibration samples as in `prune_`; ignored unless the allocation needs data.
        pattern: the budget: as many weights are kept as if all layers had this one, see `nearest_counts`.
        progress: show progress bars on stderr.
        options: of the allocation; `allocation(name).options` has their names and defaults.
    Raises:
        InputError: an unknown allocation or option, an option out of range, or nothing to share out; by name.
    """
    chosen, pattern = get_allocation(name), NMPattern.parse(pattern)
    check_option_names(options, chosen.options, f"allocation {name!r}")
    chosen.check(**chosen.options | options)
    blocks = by_decoder_block(model, layers)
    try:
        with shown(progress):
            wishes = chosen.wish(model, blocks, batches, pattern, **options)
    except InputError as error:
        raise InputError(f"allocation {name!r}: {error}") from error
    counts = nearest_counts(wishes, [numel(block) for block in blocks], pattern)
    if len(set(wishes)) > 1 and len(set(counts)) == 1:
        raise InputError(
            f"allocation {name!r}: within the budget of {pattern} no decoder block gets another pattern; change "
            f"{' or '.join(chosen.options)}, or choose uniform"
        )
    count_of = {name: n for n, block in zip(counts, blocks, strict=True) for name in block}
    return {name: NMPattern(count_of[name], pattern.m) for name in layers}
