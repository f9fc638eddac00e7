"""The decoder blocks of a language model and the linear layers in them that can be pruned."""

import re

from torch import nn

from proxsparse.errors import InputError
from proxsparse.patterns import NMPattern, PatternLike


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks of a causal language model of transformers, in order.

    Raises:
        InputError: the model has no list of num_hidden_layers modules.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(
        f"{type(model).__name__} has no list of {count} decoder blocks; give a decoder-only language model"
    )


def prunable_layers(
    model: nn.Module,
    pattern: PatternLike | dict[str, PatternLike] = "2:4",
    include: list[str] | None = None,
    exclude: list[str] | None = None,
) -> dict[str, nn.Linear]:
    """Full module name -> layer to prune, in model order: every nn.Linear in the decoder blocks.

    Args:
        pattern: one pattern for all layers, or layer name -> pattern; then only these layers are returned.
        include, exclude: regular expressions searched in the names; a layer must match one of `include` (if given)
            and none of `exclude`.
    Raises:
        InputError: no layer is left, an expression is malformed, or a layer cannot be split into blocks.
    """
    refuse_packed(model)
    blocks = {id(block) for block in decoder_blocks(model)}
    inside = [f"{name}." for name, module in model.named_modules() if id(module) in blocks]
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(tuple(inside))
    }
    layers = {name: layer for name, layer in candidates.items() if is_selected(name, include, exclude)}
    if isinstance(pattern, dict):
        if unknown := pattern.keys() - candidates.keys():
            raise InputError(f"pattern of layer {sorted(unknown)[0]}: no such nn.Linear to prune; check the name")
        layers = {name: layer for name, layer in layers.items() if name in pattern}
    refuse_fused_weights(model, tuple(inside), include, exclude)
    if not layers:
        raise InputError(
            f"no layer to prune: {len(candidates)} nn.Linear layers in the decoder blocks, none selected by "
            f"--include {include} --exclude {exclude}; change these flags"
        )
    for name, layer in layers.items():
        m = NMPattern.parse(pattern[name] if isinstance(pattern, dict) else pattern).m
        if layer.in_features % m:
            raise InputError(
                f"{name}: in_features={layer.in_features} is not a multiple of {m}; "
                f"leave it dense with --exclude {name.rpartition('.')[2]}, or choose another --pattern"
            )
    return layers


def is_selected(name: str, include: list[str] | None, exclude: list[str] | None) -> bool:
    """Whether `name` matches an `include` expression (None: any name) and no `exclude` expression.

    Raises:
        InputError: an expression is malformed.
    """
    try:
        included = not include or any(re.search(expression, name) for expression in include)
        return included and not any(re.search(expression, name) for expression in exclude or [])
    except re.error as error:
        raise InputError(f"include/exclude {error.pattern!r}: not a regular expression ({error}); fix it") from error


def refuse_fused_weights(
    model: nn.Module, inside: tuple[str, ...], include: list[str] | None, exclude: list[str] | None
) -> None:
    """Raises InputError for a selected module with several matrices in one tensor, which would not be pruned."""
    for name, module in model.named_modules():
        fused = [p for p in module.parameters(recurse=False) if p.ndim == 3 and min(p.shape) > 1]
        convolution = isinstance(module, nn.Conv1d)  # its 3-dimensional weight is not a stack of matrices
        if fused and not convolution and name.startswith(inside) and is_selected(name, include, exclude):
            raise InputError(
                f"{name}: {type(module).__name__} has {len(fused[0])} matrices in one tensor instead of nn.Linear "
                f"layers; leave them dense with --exclude {name.rpartition('.')[2]}"
            )


def refuse_packed(model: nn.Module) -> None:
    """Raises InputError for a model whose weights are packed or quantized."""
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        raise InputError(
            f"model {model.name_or_path!r}: not dense (quant_method {quantizer.quantization_config.quant_method}); "
            "give the dense model (for a packed one, run: proxsparse pack MODEL_DIR --unpack)"
        )
