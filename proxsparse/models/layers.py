"""The decoder blocks of a language model and the linear layers in them that can be pruned."""

import re

import torch
from torch import nn
from torch.nn.utils import parametrize

from proxsparse.errors import InputError
from proxsparse.models.unfold_linears import SplitExperts
from proxsparse.patterns import NMPattern, PatternLike

UNSPARSIFY = "proxsparse.inference.convert.unsparsify_"  # what unpacks a model in memory, for messages


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks of a causal language model of transformers, in order.

    They are the outermost list with num_hidden_layers modules that have linear layers; where no single list has this
    length, the only list, or all lists if their modules are of one class (two stacks that the model repeats). Raises
    InputError if there is no such list, or if the parts of the blocks are in several.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        remedy = "load it with AutoModelForCausalLM, or leave out model="
        raise InputError(f"model: {type(model).__name__} is not a language model of transformers; {remedy}")
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    # get_decoder of some classes returns the output layer
    lists = outermost_lists(decoder) or outermost_lists(model)
    lists = {name: blocks for name, blocks in lists.items() if len(blocks) == count} or lists
    if not lists:
        raise InputError(f"{type(model).__name__} has no list of decoder blocks; give a decoder-only language model")
    blocks = nn.ModuleList(block for each in lists.values() for block in each)
    if len(lists) > 1 and len(set(map(type, blocks))) > 1:
        several = f"its layers are in the lists {', '.join(lists)} instead of one list of decoder blocks"
        raise InputError(f"{type(model).__name__}: {several}; such models are not supported")
    return blocks


def body_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> every module in the decoder blocks, in model order."""
    inside = {module for block in decoder_blocks(model) for module in block.modules()}
    return {name: module for name, module in model.named_modules() if module in inside}


def body_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Name -> every nn.Linear in the decoder blocks, in model order. Of layers that share a weight, the first one.

    The matrices of adapters (peft) are left out.
    """
    found, modules = {}, body_modules(model)
    tuned = tuple(f"{name}." for name, module in modules.items() if hasattr(module, "base_layer"))  # what peft wraps
    for name, module in modules.items():
        is_adapter = any(name.startswith(each) and not name.startswith(f"{each}base_layer") for each in tuned)
        if isinstance(module, nn.Linear) and not is_adapter:
            found.setdefault(id(module._parameters.get("weight", module)), (name, module))
    return dict(found.values())


def body_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of `body_linears` except `routers`. `model` may be in a wrapper, as of DDP."""
    model = getattr(model, "module", model)
    linears, dense = body_linears(model), routers(model)
    return [stored_weight(name, layer) for name, layer in linears.items() if name not in dense]


def outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Name -> every nn.ModuleList that is in no other one, in model order; only those with linear layers, if any.

    Lists of an encoder of images or sound are left out.
    """
    found = {}
    for name, module in model.named_modules():
        inner = name.startswith(tuple(f"{outer}." for outer in found))
        if isinstance(module, nn.ModuleList) and not inner and not re.search("vision|visual|image|audio", name):
            found[name] = module
    linear = {name: blocks for name, blocks in found.items() if any(isinstance(m, nn.Linear) for m in blocks.modules())}
    return linear or found


def routers(model: nn.Module) -> dict[str, str]:
    """Name -> name of the module that holds it, for every nn.Linear that assigns tokens to experts.

    It is one that has "router" as a word in its name; or `gate`, or in a module `gate`, next to experts; or an
    nn.Linear next to experts with one output for each expert, or a single one (the gate of a shared expert).
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (word := re.search(r"(?:^|[._])router(?=[._]|$)", name)):
            found.setdefault(name, name[: word.start()])
        experts = expert_count(module)
        for child_name, child in module.named_children() if experts else ():
            for inner, layer in child.named_modules(prefix=f"{name}.{child_name}".lstrip(".")):
                if isinstance(layer, nn.Linear) and (
                    child_name == "gate" or (layer is child and layer.out_features in (1, experts))
                ):
                    found[inner] = name
    return found


def expert_count(module: nn.Module) -> int | None:
    """Number of experts that are children of the module, or None."""
    for name, child in module.named_children():
        if isinstance(child, SplitExperts):
            return child.experts
        if fused := fused_matrices(child):
            return fused
        if isinstance(child, nn.ModuleList) and re.search(r"(^|_)experts$", name) and "shared" not in name:
            return len(child)
    return None


def fused_matrices(module: nn.Module) -> int:
    """Number of matrices in one tensor of the module, 0 if it has no such tensor."""
    fused = [p for p in module.parameters(recurse=False) if p.ndim == 3 and min(p.shape[1:]) > 1]
    # the 3-dimensional weight of a convolution is not a stack of matrices
    return len(fused[0]) if fused and not isinstance(module, nn.Conv1d) else 0


def prunable_layers(
    model: nn.Module,
    pattern: PatternLike | dict[str, PatternLike] = "2:4",
    include: list[str] | None = None,
    exclude: list[str] | None = None,
) -> dict[str, nn.Linear]:
    """Full module name -> layer to prune, in model order: every nn.Linear in the decoder blocks except `routers`.

    Layers that share one weight count once, under the first name.

    Args:
        pattern: one pattern for all layers, or layer name -> pattern; then only these layers are returned.
        include, exclude: regular expressions searched in the names; a layer must match one of `include` (if given)
            and none of `exclude`. An expression of `include` selects a router if it matches the router's name, but not
            the name of the module that holds it.
    Raises:
        InputError: no layer is left, an expression is malformed, or a layer cannot be split into blocks.
    """
    refuse_packed(model)
    candidates = body_linears(model)
    layers = {name: layer for name, layer in candidates.items() if is_selected(name, include, exclude)}
    patterns = pattern if isinstance(pattern, dict) else dict.fromkeys(layers, pattern)
    if isinstance(pattern, dict):
        if unknown := pattern.keys() - candidates.keys():
            raise InputError(f"pattern of layer {min(unknown)}: no such nn.Linear to prune; check the name")
        layers = {name: layer for name, layer in layers.items() if name in pattern}
    else:
        try:
            NMPattern.parse(pattern)
        except ValueError as error:
            raise InputError(f"--pattern: {error}") from error
        for name, holder in routers(model).items():
            if not any(re.search(word, name) and not re.search(word, holder) for word in include or []):
                layers.pop(name, None)
    refuse_fused_weights(model, include, exclude)
    if not candidates:
        raise InputError("no layer to prune: the decoder blocks have no nn.Linear, or the model has no decoder block")
    if not layers:
        found = f"{len(candidates)} nn.Linear layers in the decoder blocks"
        raise InputError(
            f"no layer to prune: {found}, none selected by --include {include} --exclude {exclude}; change them"
        )
    for name, layer in layers.items():
        weight = stored_weight(name, layer)
        try:
            NMPattern.parse(patterns[name]).check_blocks(weight.shape)
        except ValueError as error:
            raise InputError(f"{name}: {error} (--exclude {name.rpartition('.')[2]}, --pattern)") from error
    return layers


def stored_weight(name: str, layer: nn.Linear) -> nn.Parameter:
    """The weight of a layer. Raises InputError if it is computed or part of another one, so that a change is lost."""
    if "weight" not in layer._parameters:
        if not parametrize.is_parametrized(layer) and not any("weight_" in key for key in layer._parameters):
            raise InputError(f"{name}: its weight is part of a flat parameter, as of FSDP1; use FSDP2's fully_shard")
        what = f"{name}: it computes its weight from other parameters, as weight_norm and torch.nn.utils.prune do"
        remedy = "call torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
        raise InputError(f"{what}; {remedy}, or exclude {name.rpartition('.')[2]!r}")
    return layer.weight


def is_selected(name: str, include: list[str] | None, exclude: list[str] | None) -> bool:
    """Whether `name` matches an `include` expression (None: any name) and no `exclude` expression."""
    for flag, given in (("include", include), ("exclude", exclude)):
        if not isinstance(given, list | tuple | None) or not all(isinstance(each, str) for each in given or ()):
            raise InputError(f"{flag}={given!r}: must be a list of regular expressions, such as ['mlp']")
    try:
        included = not include or any(re.search(expression, name) for expression in include)
        return included and not any(re.search(expression, name) for expression in exclude or [])
    except re.error as error:
        raise InputError(f"include/exclude {error.pattern!r}: not a regular expression ({error}); fix it") from error


@torch.no_grad()
def pruned_layers(layers: dict[str, nn.Linear], pattern: NMPattern) -> list[str]:
    """The names of the layers that have at most n weights other than 0 in every m, and are not 0 everywhere."""
    return [name for name, layer in layers.items() if pattern.is_feasible(layer.weight) and layer.weight.any()]


def dense_share(model: nn.Module, layers: dict[str, nn.Linear]) -> float:
    """The share of the decoder blocks' weights that are not in `layers`; norms and biases are not counted."""
    sizes = {id(p): p.numel() for block in decoder_blocks(model) for p in block.parameters() if p.ndim > 1}
    return 1 - sum(sizes.get(id(layer.weight), 0) for layer in layers.values()) / sum(sizes.values())


def refuse_fused_weights(model: nn.Module, include: list[str] | None, exclude: list[str] | None) -> None:
    """Raises InputError for selected modules with several matrices in one tensor, which would not be pruned."""
    fused = {name: module for name, module in body_modules(model).items() if fused_matrices(module)}
    fused = {name: module for name, module in fused.items() if is_selected(name, include, exclude)}
    if fused:
        first, module = next(iter(fused.items()))
        leaves = dict.fromkeys(f"{name.rpartition('.')[2]}$" for name in fused)
        raise InputError(
            f"{first}: {type(module).__name__} has its matrices in one tensor of 3 dimensions instead of nn.Linear "
            f"layers; leave them dense with --exclude {' '.join(leaves)}"
        )


def quant_method(model: nn.Module) -> str | None:
    """quant_method in the config of a model of transformers; None for dense weights and other models."""
    entry = getattr(getattr(model, "config", None), "quantization_config", None)
    return entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)


def refuse_packed(
    model: nn.Module, unpack: str = f"proxsparse pack MODEL_DIR --unpack, in Python {UNSPARSIFY}"
) -> None:
    """Raises InputError for a model whose weights are packed or quantized; `unpack` is the remedy for a packed one."""
    if (method := quant_method(model)) is not None:
        remedy = f"give the dense model (to unpack a packed one: {unpack})"
        raise InputError(f"model {model.name_or_path!r}: not dense (quant_method {method}); {remedy}")
