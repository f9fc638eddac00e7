"""The allocations, and `allocate`, which chooses the pattern of every layer."""

from torch import nn

from proxsparse.allocations.budget import Layers
from proxsparse.allocations.sensitivity import sensitivity
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import Checkpoints
from proxsparse.methods.registry import Method, check_option_names, describe_options, options_of, ranges
from proxsparse.methods.walk import Batches
from proxsparse.patterns import WINDOWED, NMPattern, PatternLike
from proxsparse.training.options import AT_LEAST_1, Valid

UNIFORM = "uniform"
SHARE_OF_FLOPS: Valid = (lambda share: 0.5 <= share < 1, "from 0.5 (2:4 everywhere) to below 1 (dense)")

ALLOCATIONS = {
    "sensitivity": Method(
        "sensitivity",
        needs_data=True,
        updates_weights=False,
        paper="none: the cost is that of LeCun et al. 1990, Optimal Brain Damage, with a Fisher matrix",
        prune=sensitivity,  # returns layer name -> pattern, see `allocate`
        options=options_of(sensitivity),
        check=ranges(target_flops=SHARE_OF_FLOPS, samples=AT_LEAST_1),
        descriptions=describe_options(sensitivity),
    ),
    # `allocate` gives all layers the pattern of the call
    UNIFORM: Method(UNIFORM, False, False, "none: one pattern for all layers", prune=dict.fromkeys, options={}),
}


def get_allocation(name: str) -> Method:
    """The allocation of that name. Raises InputError, listing the choices, if there is none."""
    if name not in ALLOCATIONS:
        raise InputError(f"allocation {name!r}: no such allocation; choose from {', '.join(ALLOCATIONS)}")
    return ALLOCATIONS[name]


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
        name: one of `ALLOCATIONS`.
        layers: the layers to prune, from `models.prunable_layers(model, pattern)`.
        batches: calibration samples as in `prune_`; ignored unless the allocation needs data.
        pattern: of all layers, for `uniform`.
        checkpoints: where the patterns of `sensitivity` are saved, and read when a run is resumed.
        options: options of the allocation; `get_allocation(name).options` has names and defaults.
    Raises:
        InputError: an unknown allocation or option, or an option out of range.
    """
    chosen = get_allocation(name)
    check_option_names(options, chosen.options, f"allocation {name!r}")
    chosen.check(**chosen.options | options)
    if name == UNIFORM:
        return dict.fromkeys(layers, NMPattern.parse(pattern))
    if isinstance(pattern, dict) or NMPattern.parse(pattern) != WINDOWED[0]:
        raise InputError(f"allocation {name!r} chooses the pattern of every layer; leave out pattern {pattern}")
    if saved := checkpoints and checkpoints.facts("patterns"):
        return {name: NMPattern.parse(pattern) for name, pattern in saved["patterns"].items()}
    try:
        patterns = chosen.prune(model, layers, batches, **options)
        if not patterns:
            raise InputError(f"all {len(layers)} layers stay dense; lower target_flops")
        if checkpoints:
            checkpoints.save("patterns", {}, {"patterns": {name: str(each) for name, each in patterns.items()}})
        return patterns
    except InputError as error:
        raise InputError(f"allocation {name!r}: {error}") from error
