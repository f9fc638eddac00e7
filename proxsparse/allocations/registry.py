"""The allocations, and `allocate`, which chooses the pattern of every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from proxsparse.allocations.alphapruning import alphapruning_targets, check_alphapruning
from proxsparse.allocations.budget import Layers, by_decoder_block, nearest_counts, numel
from proxsparse.allocations.owl import check_owl, owl_targets
from proxsparse.errors import InputError
from proxsparse.methods.registry import check_option_names, describe_options, options_of
from proxsparse.methods.walk import Batches
from proxsparse.patterns import NMPattern, PatternLike

UNIFORM = "uniform"


@dataclass(frozen=True)
class Allocation:
    """An allocation.

    `targets(model, blocks, batches, pattern, **options)` returns one target for each decoder block: how many of every
    m weights to keep, a real number. `blocks`: the layers of each decoder block, name -> nn.Linear. `batches` are
    calibration samples if `needs_data`. Its keyword-only parameters are the options.
    """

    name: str
    needs_data: bool
    paper: str
    targets: Callable[..., list[float]]
    check: Callable[..., None] = lambda **options: None  # raises InputError for options out of range

    @cached_property
    def options(self) -> dict[str, bool | int | float | str]:
        """Name -> default."""
        return options_of(self.targets)

    @cached_property
    def descriptions(self) -> dict[str, str]:
        """Name of an option -> its description, for --help."""
        return describe_options(self.targets)


def uniform_targets(model: nn.Module, blocks: list[Layers], batches: Batches, pattern: NMPattern) -> list[float]:
    """target_b = n."""
    return [float(pattern.n)] * len(blocks)


ALLOCATIONS = (
    Allocation(
        "alphapruning",
        False,
        "Lu et al. 2024, AlphaPruning: Using Heavy-Tailed Self Regularization Theory for Improved Layer-wise Pruning",
        alphapruning_targets,
        check_alphapruning,
    ),
    Allocation(
        "owl",
        True,
        "Yin et al. 2024, Outlier Weighed Layerwise Sparsity (OWL): A Missing Secret Sauce for Pruning LLMs",
        owl_targets,
        check_owl,
    ),
    Allocation(UNIFORM, False, "none: one pattern for all layers", uniform_targets),
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
    **options,
) -> dict[str, NMPattern]:
    """Layer name -> its pattern n_b:m, where b is the layer's decoder block; the model is not changed.

    Args:
        name: one of `list_allocations()`.
        layers: the layers to prune, from `models.prunable_layers(model, pattern)`.
        batches: calibration samples as in `prune_`; ignored unless the allocation needs data.
        pattern: the budget: as many weights are kept as with this pattern in all layers, see `nearest_counts`.
        options: options of the allocation; `get_allocation(name).options` has names and defaults.
    Raises:
        InputError: an unknown allocation or option, an option out of range, or all layers would get `pattern`.
    """
    chosen, pattern = get_allocation(name), NMPattern.parse(pattern)
    check_option_names(options, chosen.options, f"allocation {name!r}")
    chosen.check(**chosen.options | options)
    blocks = by_decoder_block(model, layers)
    try:
        if name != UNIFORM and not 1 < pattern.n < pattern.m - 1:
            raise InputError(
                f"pattern {pattern}: every decoder block would keep {pattern.n}, because each keeps 1 to m - 1 of "
                "every m; choose a pattern with 1 < n < m - 1, such as 2:4, or uniform"
            )
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
