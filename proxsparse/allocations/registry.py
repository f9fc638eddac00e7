"""The allocations, and `allocate`, which chooses the pattern of every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from proxsparse.allocations.budget import Layers
from proxsparse.allocations.sensitivity import check_sensitivity, sensitivity
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import Checkpoints
from proxsparse.methods.registry import check_option_names, describe_options, options_of
from proxsparse.methods.walk import Batches
from proxsparse.patterns import WINDOWED, NMPattern, PatternLike

UNIFORM = "uniform"


@dataclass(frozen=True)
class Allocation:
    """An allocation.

    `patterns(model, layers, batches, pattern, **options)` returns layer name -> pattern, see `allocate`. Its
    keyword-only parameters are the options.
    """

    name: str
    needs_data: bool
    paper: str
    patterns: Callable[..., dict[str, NMPattern]]
    check: Callable[..., None] = lambda **options: None  # raises InputError for options out of range

    @cached_property
    def options(self) -> dict[str, bool | int | float | str]:
        """Name -> default."""
        return options_of(self.patterns)

    @cached_property
    def descriptions(self) -> dict[str, str]:
        """Name of an option -> its description, for --help."""
        return describe_options(self.patterns)


def uniform(model: nn.Module, layers: Layers, batches: Batches, pattern: NMPattern) -> dict[str, NMPattern]:
    """One pattern for all layers."""
    return dict.fromkeys(layers, pattern)


ALLOCATIONS = (
    Allocation(
        "sensitivity",
        True,
        "none: the cost is that of LeCun et al. 1990, Optimal Brain Damage, with a Fisher matrix",
        sensitivity,
        check_sensitivity,
    ),
    Allocation(UNIFORM, False, "none: one pattern for all layers", uniform),
)


def list_allocations() -> list[str]:
    """The names of all allocations."""
    return [row.name for row in ALLOCATIONS]


def get_allocation(name: str) -> Allocation:
    """The allocation of that name. Raises InputError, listing the choices, if there is none."""
    for row in ALLOCATIONS:
        if row.name == name:
            return row
    raise InputError(f"allocation {name!r}: no such allocation; choose from {', '.join(list_allocations())}")


def allocate(
    name: str,
    model: nn.Module,
    layers: Layers,
    batches: Batches,
    pattern: PatternLike,
    checkpoints: Checkpoints | None = None,
    **options,
) -> dict[str, NMPattern]:
    """Layer name -> its pattern; layers that are not in it stay dense. The model is not changed.

    Args:
        name: one of `list_allocations()`.
        layers: the layers to prune, from `models.prunable_layers(model, pattern)`.
        batches: calibration samples as in `prune_`; ignored unless the allocation needs data.
        pattern: of all layers, for `uniform`.
        checkpoints: where the patterns are saved if they took time, and read when a run is resumed.
        options: options of the allocation; `get_allocation(name).options` has names and defaults.
    Raises:
        InputError: an unknown allocation or option, or an option out of range.
    """
    chosen = get_allocation(name)
    check_option_names(options, chosen.options, f"allocation {name!r}")
    chosen.check(**chosen.options | options)
    if name != UNIFORM and (isinstance(pattern, dict) or NMPattern.parse(pattern) != WINDOWED[0]):
        raise InputError(f"allocation {name!r} chooses the pattern of every layer; leave out pattern {pattern}")
    if saved := checkpoints and checkpoints.facts("patterns"):
        return {name: NMPattern.parse(pattern) for name, pattern in saved["patterns"].items()}
    try:
        patterns = chosen.patterns(model, layers, batches, NMPattern.parse(pattern), **options)
        if not patterns:
            raise InputError(f"all {len(layers)} layers stay dense; lower target_flops")
        if checkpoints and chosen.needs_data:
            checkpoints.save("patterns", {}, {"patterns": {name: str(each) for name, each in patterns.items()}})
        return patterns
    except InputError as error:
        raise InputError(f"allocation {name!r}: {error}") from error
