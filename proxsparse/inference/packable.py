"""Which layers of a model can be packed, with which pattern, and why others cannot."""

import collections
import inspect
from collections.abc import Callable

from torch import Tensor, nn

from proxsparse.models.layers import is_selected, stored_weight
from proxsparse.models.unfold_linears import unfolded_layers
from proxsparse.patterns import (
    DENSE_SHARE,
    FLOAT_DTYPES,
    WINDOWED,
    NMPattern,
    block_counts,
    live_rows,
    pattern_of_counts,
)
from proxsparse.reference.quantize import CODES, check_values
from proxsparse.runtime.progress import phase

PATTERNS = " or ".join(map(str, WINDOWED))  # for messages
PLAIN_SUBCLASSES = ("FalconLinear",)  # of nn.Linear, with its forward: x W^T + b


def packable_layers(
    model: nn.Module,
    weight_of: Callable[[str], Tensor | None],
    include: list[str] | None,
    exclude: list[str] | None,
    bits: int,
) -> list[tuple[list[str], NMPattern]]:
    """The layers to pack, each as its names and its pattern; `weight_of` returns a weight. Raises as `sparsify_`."""
    tied, unfolded, chosen = tied_weights(model), unfolded_layers(model), []
    linears = [names for names in names_of_modules(model, nn.Linear) if model.get_submodule(names[0]) not in unfolded]
    with phase("looking for pruned layers", unit="layer") as current:
        for names in current.count(linears):
            name, is_tied = names[0], id(model.get_submodule(names[0]).weight) in tied
            selected = is_selected(name, include, exclude)
            if selected and (pattern := pattern_of(name, weight_of(name), bool(include), is_tied, bits)):
                refuse_altered(model, name)
                chosen.append((names, pattern))
        current.result = f"{len(chosen)} found"
    if not chosen:
        selected = f" and selected by {include=}, {exclude=}" if include or exclude else ""
        reason = f"none of {len(linears)} dense nn.Linear layers is {PATTERNS}{selected}"
        others = "packed layers, Conv1D and fused experts do not count"
        raise ValueError(f"nothing to pack: {reason} ({others}); first run proxsparse prune, or select other layers")
    return chosen


def pattern_of(
    name: str, weight: Tensor | None, named: bool = False, tied: bool = False, bits: int = 16
) -> NMPattern | None:
    """The pattern to pack the layer `name` with; None to leave it dense.

    Raises ValueError if the weight is sparse but has no pattern that can be packed, if `include` names the layer and it
    cannot be packed, or if a weight has no code of 8 or 4 bits.
    """
    remedy = f"to leave it dense, exclude {name!r}"
    obstacle = f"its weight is not {PATTERNS}"
    if tied:
        obstacle = "its weight is tied to that of another module, which needs it dense"
    elif weight is None:
        obstacle = "the files store its weight joined with others or split, which only proxsparse.sparsify_ packs"
    elif weight.is_meta:
        raise ValueError(f"{name}: its weight is on the meta device; load the model first")
    elif weight.dtype not in FLOAT_DTYPES or not WINDOWED[0].fits(weight.shape[-1]):
        obstacle = f"its weight is {weight.dtype} {list(weight.shape)}, which has no blocks of {PATTERNS}"
    else:
        try:
            if pattern := windowed_pattern(weight):
                if bits in CODES:
                    check_values(weight, bits)
                return pattern
        except ValueError as error:
            raise ValueError(f"{name}: {error}; {remedy}") from error
    if named:
        raise ValueError(f"{name}: {obstacle}; {remedy}")
    return None


def windowed_pattern(weight: Tensor) -> NMPattern | None:
    """The first of 2:4, 4:6, 6:8 and 8:10 that a weight fits; None for a dense weight.

    Raises ValueError for a weight of another pattern, one with as many zeros as in 2:4 without a clear pattern, and one
    in which at least half of the blocks, but not all, fit one of them; rows of zeros do not count.
    """
    kept = int(weight.count_nonzero()) / max(1, weight.numel())
    if kept > DENSE_SHARE:
        return None
    windowed = first_fitting(weight)
    if windowed == WINDOWED[0] or (windowed and kept > 0.9 * windowed.density):  # no more zeros than it explains
        return windowed
    if not weight.isfinite().all():
        raise ValueError("its weight contains NaN or infinity; load it again")
    try:
        pattern = pattern_of_counts("its weight:", block_counts(weight), weight.shape[-1])
    except ValueError as error:  # its remedy is not one for packing
        raise ValueError(f"{str(error).partition(';')[0]}; prune it again") from error
    if pattern is None:
        rows = live_rows(weight)
        for each in (each for each in WINDOWED if each.fits(rows.shape[-1])):
            wrong, blocks = int((~each.feasible_blocks(rows)).sum()), each.count(rows.shape)
            if 0 < 2 * wrong <= blocks:
                raise ValueError(f"{wrong} of {blocks} blocks are not {each}; prune it again")
    if pattern is None or pattern.density > WINDOWED[-1].density:
        return None
    if not windowed:
        raise ValueError(f"its pattern is {pattern}; prune it to one of {PATTERNS}")
    return windowed


def first_fitting(weight: Tensor) -> NMPattern | None:
    """The first of 2:4, 4:6, 6:8 and 8:10 that the zeros of a weight fit; None: none."""
    return next((each for each in WINDOWED if each.fits(weight.shape[-1]) and each.is_feasible(weight)), None)


def refuse_altered(model: nn.Module, name: str) -> None:
    """Raises ValueError for a layer whose replacement would lose hooks or overrides."""
    layer = model.get_submodule(name)
    stored_weight(name, layer)
    kind = type(layer).__name__
    hooks = [value for key, value in vars(layer).items() if key.endswith("_hooks")]
    reasons = {
        "it is the whole model (use SparseLinear.from_linear)": not name,
        f"it is a {kind}, a subclass of nn.Linear": type(layer) is not nn.Linear and kind not in PLAIN_SUBCLASSES,
        "it has hooks or its own forward": "forward" in vars(layer) or any(hooks),
        "the module around it reads its weight, which a packed layer does not have": is_read(model, name),
    }
    for reason, applies in reasons.items():
        if applies:
            exclude = name.rpartition(".")[2]
            raise ValueError(f"{name}: {reason}; replace it with a plain nn.Linear, or exclude {exclude!r}")


def is_read(model: nn.Module, layer: str) -> bool:
    """Whether the module around a layer multiplies by its weight, or reads it and never calls it: dt_proj of Mamba."""
    parent, _, name = layer.rpartition(".")
    try:
        classes = type(model.get_submodule(parent)).__mro__
        if nn.TransformerEncoderLayer in classes:  # passes its weights to one kernel if there is no gradient
            return True
        source = "".join(inspect.getsource(kind) for kind in classes[: classes.index(nn.Module)])
    except (OSError, TypeError):  # no source
        return False
    weight = f"self.{name}.weight"
    return f"{weight} @" in source or (weight in source and f"self.{name}(" not in source)


def names_of_modules(model: nn.Module, kind: type) -> list[list[str]]:
    """The names of each module of this type; a module that the model holds twice has two names."""
    names = collections.defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            names[id(module)].append(name)
    return list(names.values())


def tied_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters that several modules share."""
    owners = collections.Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {parameter for parameter, count in owners.items() if count > 1}
