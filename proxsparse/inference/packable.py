"""Which layers of a model can be packed, with which pattern, and why others cannot."""

import collections
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxsparse.inference.linear import SparseLinear
from proxsparse.inference.packed_checkpoint import PARTS
from proxsparse.models.layers import is_selected, stored_weight
from proxsparse.models.unfold_linears import unfolded_layers
from proxsparse.patterns import FLOAT_DTYPES, WINDOWED, NMPattern, block_counts, clear_pattern
from proxsparse.reference.quantize import CODES, check_values
from proxsparse.runtime.progress import phase

PATTERNS = " or ".join(map(str, WINDOWED))  # for messages


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
        kinds = {type(module).__name__ for module in model.modules()}
        packed = SparseLinear.__name__ in kinds
        remedy = "the other layers are already packed" if packed else "first run proxsparse prune"
        remedy += " (if they are pruned, select others)" * bool(include or exclude)
        if kinds & {"Conv1D", "TransposedLinear"}:
            remedy = f"the weights of {type(model).__name__} are in Conv1D modules, which cannot be packed"
        selected = f" and selected by {include=}, {exclude=}" if include or exclude else ""
        reason = f"none of {len(linears)} dense nn.Linear layers is {PATTERNS}{selected}"
        raise ValueError(f"nothing to pack: {reason} (Conv1D and fused experts stay dense); {remedy}")
    return chosen


def pattern_of(
    name: str, weight: Tensor | None, named: bool = False, tied: bool = False, bits: int = 16
) -> NMPattern | None:
    """The pattern to pack the layer `name` with; None to leave it dense.

    Raises ValueError if at least half of its blocks, but not all, have a pattern, if `include` names it and it cannot
    be packed, or if a weight is NaN, or has no code of 8 or 4 bits.
    """
    found, alarming = pattern_or_obstacle(weight, tied, bits)
    if isinstance(found, NMPattern):
        return found
    if alarming or named:
        raise ValueError(f"{name}: {found}; to leave it dense, exclude {name!r}")
    return None


def pattern_or_obstacle(weight: Tensor | None, tied: bool, bits: int) -> tuple[NMPattern | str, bool]:
    """The first pattern of a weight; or why it cannot be packed, and whether this is an error without `include`."""
    if tied:
        return "its weight is tied to that of another module, which needs it dense", False
    if weight is None:
        return "the files store its weight joined with others or split, which only proxsparse.sparsify_ packs", False
    if weight.is_meta:
        return "its weight is on the meta device; load the model first", True
    if weight.dtype not in FLOAT_DTYPES or not WINDOWED[0].fits(weight.shape[-1]):
        return f"its weight is {weight.dtype} {list(weight.shape)}, which has no blocks of {PATTERNS}", False
    tried = []  # (pattern, blocks that do not fit it, blocks, blocks that are not zero)
    for pattern in (each for each in WINDOWED if each.fits(weight.shape[-1])):
        nonzeros = pattern.nonzeros(weight)
        wrong = int((nonzeros > pattern.n).sum())
        if not wrong:
            break
        tried.append((pattern, wrong, nonzeros.numel(), int((nonzeros > 0).sum())))
    else:
        if not weight.isfinite().all():
            return "its weight contains NaN or infinity; load it again", True
        if pattern := clear_pattern(block_counts(weight), weight.shape[-1]):
            return f"its pattern is {pattern}; prune it to one of {PATTERNS}", pattern.density <= WINDOWED[-1].density
        almost = [row for row in tried if 2 * row[1] <= row[2]]
        pattern, wrong, blocks, _ = (almost or tried)[0]
        return not_pruned(pattern, wrong, blocks), bool(almost)
    # a damaged 2:4 layer may fit 6:8, which takes more memory; 4:8 also does, and few of its blocks are not 4:6
    damaged = [row for row in tried if 10 * row[1] <= row[3]]
    if damaged and not clear_pattern(block_counts(weight), weight.shape[-1]):
        return not_pruned(*damaged[0][:3]), True
    if bits in CODES:
        try:
            check_values(weight, bits)
        except ValueError as error:
            return str(error), True
    return pattern, False


def not_pruned(pattern: NMPattern, wrong: int, blocks: int) -> str:
    """The reason why a weight with so many wrong blocks is not packed."""
    return f"{wrong} of {blocks} blocks are not {pattern}; prune it to {pattern} first"


def refuse_altered(model: nn.Module, name: str) -> None:
    """Raises ValueError for a layer whose replacement would lose hooks or overrides."""
    layer, parts = model.get_submodule(name), name.split(".")
    stored_weight(name, layer)
    around = [".".join(parts[:count]) for count in range(len(parts))]
    rewriting = [type(model.get_submodule(parent)).__name__ for parent in around if rewrites(model, parent, name)]
    reasons = {
        "it is the whole model (use SparseLinear.from_linear)": not name,
        f"it is a {type(layer).__name__}, a subclass of nn.Linear that computes something else": not is_plain(layer),
        "it has hooks or its own forward": "forward" in vars(layer) or any(hooks_of(layer)),
        f"state_dict hooks of {' and '.join(rewriting)} change its tensors": bool(rewriting),
        "the module around it reads its weight, which a packed layer does not have": is_read(model, name),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{name}: {reason}; replace it with a plain nn.Linear, or exclude {parts[-1]!r}")


def is_read(model: nn.Module, layer: str) -> bool:
    """Whether the module around a layer multiplies by its weight, or reads it and never calls it: dt_proj of Mamba.

    nn.TransformerEncoderLayer does both: it passes its weights to one kernel if there is no gradient.
    """
    parent, _, name = layer.rpartition(".")
    classes = type(model.get_submodule(parent)).__mro__
    if nn.TransformerEncoderLayer in classes:
        return True
    try:
        source = "".join(inspect.getsource(kind) for kind in classes[: classes.index(nn.Module)])
    except (OSError, TypeError):  # no source
        return False
    weight = f"self.{name}.weight"
    return f"{weight} @" in source or (weight in source and f"self.{name}(" not in source)


@torch.no_grad()
def is_plain(layer: nn.Linear) -> bool:
    """Whether the forward of a subclass of nn.Linear is x W^T + b, found by a call with a small random weight."""
    if type(layer) is nn.Linear:
        return True
    if layer._parameters.keys() != {"weight", "bias"} or layer._buffers or layer._modules:
        return False
    bias = None if layer.bias is None else nn.Parameter(torch.linspace(-1, 1, 3))
    small = type(layer).__new__(type(layer))
    small.__dict__ |= vars(layer) | {"in_features": 4, "out_features": 3}
    small.__dict__["_parameters"] = {"weight": nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4)), "bias": bias}
    x = torch.linspace(-3, 2, 8).reshape(2, 4)
    try:
        return torch.allclose(small(x), nn.functional.linear(x, small.weight, bias))
    except Exception:  # of any type: the class expects something else
        return False


def rewrites(model: nn.Module, parent: str, layer: str) -> bool:
    """Whether state_dict hooks of the module `parent` could rename or change the tensors of the layer below it."""
    module = model.get_submodule(parent)
    loading = module._load_state_dict_pre_hooks
    if sum(map(len, hooks_of(module, "state_dict"))) > len(loading):
        return True
    tensors = {f"{layer}.{part}": torch.empty(0, device="meta") for part in (*PARTS, "weight", "bias")}
    state = dict(tensors)
    try:
        for hook in loading.values():
            hook(state, f"{parent}." if parent else "", {}, True, [], [], [])
    except Exception:  # of any type: the hook expects other tensors
        return True
    return state.keys() != tensors.keys() or any(state[key] is not tensor for key, tensor in tensors.items())


def hooks_of(module: nn.Module, kind: str = "") -> list[dict]:
    """The dicts of hooks in the attributes of a module."""
    return [hooks for key, hooks in vars(module).items() if kind in key and key.endswith("_hooks")]


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
