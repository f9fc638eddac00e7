"""The registry of allocations, and `allocate`, which chooses the pattern of every layer."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from proxsparse.allocations.budget import Layers, by_decoder_block, nearest_counts, numel
from proxsparse.errors import InputError
from proxsparse.methods.registry import check_option_names, describe_options, options_of
from proxsparse.methods.walk import Batches
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.runtime.progress import shown


@dataclass(frozen=True)
class Allocation:
    """A registered allocation.

    `targets(model, blocks, batches, pattern, **options)` returns one target for each decoder block: how many of every
    m weights to keep, a real number. `blocks`: the layers of each decoder block, name -> nn.Linear. `batches` are
    calibration samples if `needs_data`.
    """

    name: str
    needs_data: bool
    paper: str
    targets: Callable[..., list[float]]
    options: dict[str, bool | int | float | str]  # name -> default
    check: Callable[..., None] = lambda **options: None  # raises InputError for options out of range
    descriptions: dict[str, str] = field(default_factory=dict)  # of the options, for --help


_allocations: dict[str, Allocation] = {}


def register_allocation(name: str, needs_data: bool, paper: str, check: Callable[..., None] = Allocation.check):
    """Decorator: registers a function `targets`, see `Allocation`; its keyword-only parameters are its options."""

    def add(targets: Callable) -> Callable:
        options, descriptions = options_of(targets), describe_options(targets)
        _allocations[name] = Allocation(name, needs_data, paper, targets, options, check, descriptions)
        return targets

    return add


def list_allocations() -> list[str]:
    """The names of all registered allocations."""
    return sorted(_allocations)


def get_allocation(name: str) -> Allocation:
    """The allocation of that name. Raises InputError, listing the choices, if there is none."""
    if name not in _allocations:
        raise InputError(f"allocation {name!r}: no such allocation; choose from {', '.join(list_allocations())}")
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
    """Layer name -> its pattern n_b:m, where b is the layer's decoder block; the model is not changed.

    Args:
        name: one of `list_allocations()`.
        layers: the layers to prune, from `models.prunable_layers(model, pattern)`.
        batches: calibration samples as in `prune_`; ignored unless the allocation needs data.
        pattern: the budget: as many weights are kept as with this pattern in all layers, see `nearest_counts`.
        progress: show progress bars on stderr.
        options: options of the allocation; `get_allocation(name).options` has names and defaults.
    Raises:
        InputError: an unknown allocation or option, an option out of range, or all layers would get `pattern`.
    """
    chosen, pattern = get_allocation(name), NMPattern.parse(pattern)
    check_option_names(options, chosen.options, f"allocation {name!r}")
    chosen.check(**chosen.options | options)
    blocks = by_decoder_block(model, layers)
    try:
        with shown(progress):
            targets = chosen.targets(model, blocks, batches, pattern, **options)
    except InputError as error:
        raise InputError(f"allocation {name!r}: {error}") from error
    counts = nearest_counts(targets, [numel(block) for block in blocks], pattern)
    if len(set(targets)) > 1 and len(set(counts)) == 1:
        raise InputError(
            f"allocation {name!r}: all decoder blocks get the same pattern within the budget of {pattern}; change "
            f"{' or '.join(chosen.options)}, or choose uniform"
        )
    count_of = {name: n for n, block in zip(counts, blocks, strict=True) for name in block}
    return {name: NMPattern(count_of[name], pattern.m) for name in layers}
