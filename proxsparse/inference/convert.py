"""`sparsify_`: every 2:4 nn.Linear of a model becomes a SparseLinear; `unsparsify_` is the inverse."""

import collections
import re

import torch
from torch import Tensor, nn

from proxsparse.inference.linear import AUTO, PATTERN, SparseLinear
from proxsparse.inference.packed_checkpoint import QUANT_METHOD, description
from proxsparse.patterns import FLOAT_DTYPES


@torch.no_grad()
def sparsify_(
    model: nn.Module, backend: str = AUTO, include: list[str] | None = None, exclude: list[str] | None = None
) -> nn.Module:
    """Packs every nn.Linear of the model whose weight is 2:4, in place, and returns the model.

    One layer after the other, each dense weight freed before the next is packed: the peak is the model plus one layer.
    Dense layers (lm_head) stay as they are; weights that are tied stay tied and dense. Nothing is replaced if any layer
    is refused. A model of transformers can be saved afterwards: `from_pretrained` loads the folder packed.

    Args:
        backend: of the packed layers, see `SparseLinear`.
        include, exclude: regular expressions searched in the names of the layers, such as ["mlp"]; what `include`
            names must be 2:4.
    Raises:
        ValueError: no layer is 2:4; a layer is almost 2:4, or `include` names one that is not; a layer is a subclass of
            nn.Linear, or has hooks, and would not be the same afterwards. The message names the layer and the remedy.
    """
    for names in selected(model, include, exclude):
        packed = SparseLinear.from_linear(model.get_submodule(names[0]), backend)
        for name in names:
            model.set_submodule(name, packed)
    declare_(model)
    return model


@torch.no_grad()
def unsparsify_(model: nn.Module) -> nn.Module:
    """The inverse of `sparsify_`: every SparseLinear becomes a nn.Linear again, bit for bit, in place."""
    for names in names_of_modules(model, SparseLinear):
        packed = model.get_submodule(names[0])
        linear = nn.Linear(packed.in_features, packed.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(packed.dense_weight())
        linear.bias = None if packed.bias is None else nn.Parameter(packed.bias.detach())
        for name in names:
            model.set_submodule(name, linear.train(packed.training))
    declare_(model)
    return model


def selected(model: nn.Module, include: list[str] | None, exclude: list[str] | None) -> list[list[str]]:
    """The layers to pack, each by all its names. Raises as `sparsify_` does."""
    if (method := quant_method(model)) not in (None, QUANT_METHOD):
        raise ValueError(f"the model is quantised by {method}: it cannot be packed too; load the dense model")
    linears, tied, chosen = names_of_modules(model, nn.Linear), tied_weights(model), []
    for names in linears:
        weight = model.get_submodule(names[0]).weight
        if is_packable(names[0], weight, include, exclude, tied=id(weight) in tied):
            refuse_altered(model, names[0])
            chosen.append(names)
    if not chosen:
        raise ValueError(
            f"nothing to pack: none of {len(linears)} nn.Linear layers is {PATTERN} and selected (include={include}, "
            f"exclude={exclude}); prune the model first: python -m proxsparse.prune"
        )
    return chosen


def is_packable(
    name: str,
    weight: Tensor,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    tied: bool = False,
) -> bool:
    """Whether the layer `name` is to be packed: selected and 2:4. False for a dense one, which few blocks of 2:4 tell.

    Raises:
        ValueError: the weight is almost 2:4, at least half of its blocks, or `include` names it and it is not.
    """
    if not is_selected(name, include, exclude):
        return False
    if weight.is_meta:
        raise ValueError(f"{name}: its weight is on the meta device, there is nothing to pack; load the model first")
    blocks = wrong = 1
    reason = f"its weight is {weight.dtype} {list(weight.shape)}, which has no blocks of {PATTERN.m}"
    if weight.dtype in FLOAT_DTYPES and weight.shape[-1] % PATTERN.m == 0:
        feasible = PATTERN.feasible_blocks(weight)
        blocks, wrong = feasible.numel(), feasible.numel() - int(feasible.sum())
        reason = f"{wrong} of {blocks} blocks are not {PATTERN}"
    if wrong == 0 and not tied:
        return True
    if wrong == 0:
        reason = "its weight is tied to another module's, which needs it dense"
    if include or 0 < 2 * wrong <= blocks:
        raise ValueError(f"{name}: {reason}; prune it to {PATTERN} first, or leave it dense: exclude {name!r}")
    return False


def is_selected(name: str, include: list[str] | None, exclude: list[str] | None) -> bool:
    """Whether some `include` (None: everything) and no `exclude` expression is found in `name`."""
    try:
        included = not include or any(re.search(expression, name) for expression in include)
        return included and not any(re.search(expression, name) for expression in exclude or [])
    except re.error as error:
        raise ValueError(f"include/exclude {error.pattern!r} is not a regular expression: {error}") from error


def refuse_altered(model: nn.Module, name: str) -> None:
    """Raises ValueError for a layer that is more than a nn.Linear: replaced, it would lose what it has besides."""
    layer, parts = model.get_submodule(name), name.split(".")
    around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts))]
    rewriting = [type(module).__name__ for module in around if any(hooks_of(module, "state_dict"))]
    reasons = {
        "it is the whole model (use SparseLinear.from_linear)": not name,
        f"it is a {type(layer).__name__}, not nn.Linear itself": type(layer) is not nn.Linear,
        "it has hooks or a forward of its own": "forward" in vars(layer) or any(hooks_of(layer)),
        f"{' and '.join(rewriting)} around it rewrites its state_dict": bool(rewriting),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{name}: {reason}; restore the plain nn.Linear, or leave it dense: exclude {name!r}")


def hooks_of(module: nn.Module, kind: str = "") -> list[dict]:
    """The tables of hooks that torch keeps in a module's attributes."""
    return [hooks for key, hooks in vars(module).items() if kind in key and key.endswith("_hooks")]


def names_of_modules(model: nn.Module, kind: type) -> list[list[str]]:
    """The names of each module of the kind; more than one where the model holds it more than once."""
    names = collections.defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            names[id(module)].append(name)
    return list(names.values())


def tied_weights(model: nn.Module) -> set[int]:
    """The ids of the parameters that several modules hold."""
    owners = collections.Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {parameter for parameter, count in owners.items() if count > 1}


def declare_(model: nn.Module) -> None:
    """Has the config of a model of transformers say which layers are packed: what `save_pretrained` writes."""
    if not hasattr(model, "save_pretrained"):
        return
    layers = [name for names in names_of_modules(model, SparseLinear) for name in names]
    if layers:
        model.config.quantization_config = description(layers)
    elif quant_method(model) == QUANT_METHOD:
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False


def quant_method(model: nn.Module) -> str | None:
    """What the config of a model of transformers says of its weights; None for dense ones, and for other models."""
    entry = getattr(getattr(model, "config", None), "quantization_config", None)
    return entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)
