"""Packing and unpacking: models in memory (`sparsify_`, `unsparsify_`), and checkpoints as streams of (name, tensor).

`packable.packable_layers` decides in both cases which layers are packed.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from proxsparse.inference.linear import SparseLinear, check_bits, empty_weight
from proxsparse.inference.packable import first_fitting, names_of_modules, packable_layers
from proxsparse.inference.packed_checkpoint import PARTS, QUANT_METHOD, Form, check_tensors, description, forms
from proxsparse.io.model_files import Header, read_tensor
from proxsparse.models.checks import refuse_adapters, refuse_wrapped, require_module, uncompiled
from proxsparse.models.layers import is_selected, quant_method
from proxsparse.models.matching import Match, keep_from_merging_, model_names
from proxsparse.models.unfold_linears import linear
from proxsparse.ops import dequantize_nm, pack_nm, quantize_nm, unpack_nm
from proxsparse.ops.registry import AUTO
from proxsparse.patterns import FLOAT_DTYPES, NMPattern

Stream = Iterator[tuple[str, Tensor]]  # (name, tensor) of a checkpoint, one at a time


@torch.no_grad()
def sparsify_(
    model: nn.Module,
    backend: str = AUTO,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    bits: int = 16,
) -> nn.Module:
    """Packs every nn.Linear of the model whose weight is 2:4, 4:6, 6:8 or 8:10, in place, and returns the model.

    The pattern of a layer is the first of these that its zeros fit.

    Layers are packed one at a time, and each dense weight is freed before the next: peak memory is the model plus one
    layer. Dense layers (lm_head) do not change; tied weights stay tied and dense. If a layer is refused, no layer is
    replaced. A model of transformers can be saved afterwards, and `from_pretrained` loads the packed folder. Pass the
    model that you will save, not a submodule, because its config lists the packed layers.

    The packed model supports `.half()`, `.float()` and `.to(dtype)`. A model loaded by `from_pretrained` refuses the
    first two, as all quantized models of transformers do: use `.to(dtype)`, or `dtype=` in `from_pretrained`.

    Args:
        backend: backend of the packed layers, see `SparseLinear`.
        include, exclude: regular expressions searched in the names of the layers, such as ["mlp"]; layers that match
            `include` must have one of the patterns.
        bits: 16 keeps the values; 8 or 4 rounds them to codes, see `reference.quantize`.
    Raises:
        ValueError: the model is wrapped or has adapters; no layer has a pattern; at least half of the blocks of a
            layer, but not all, have one; a layer has another pattern; a layer matches `include` and has no pattern, is
            a subclass of nn.Linear, or has hooks, which packing would lose; a weight has no code, see `quantize_nm`;
            the bits are unknown. The message names the layer.
    """
    check_bits(bits)
    require_module(model)
    if (method := quant_method(model)) not in (None, QUANT_METHOD):
        raise ValueError(f"the model is quantized by {method}, so it cannot be packed; load the dense model")
    plain = uncompiled(model)
    refuse_wrapped(plain)
    refuse_adapters(plain, "pack the model before they are added")  # a merged weight is dense
    chosen = packable_layers(plain, lambda name: plain.get_submodule(name).weight, include, exclude, bits)
    for names, pattern in chosen:
        packed = SparseLinear.from_linear(plain.get_submodule(names[0]), backend, bits, pattern)
        for name in names:
            plain.set_submodule(name, packed)
    declare_(plain)
    return model


@torch.no_grad()
def unsparsify_(model: nn.Module) -> nn.Module:
    """The inverse of `sparsify_`: replaces every SparseLinear with an nn.Linear, in place, and returns the model.

    With 16 bits the weights are bit-identical, except that a -0.0 in a pruned place may become +0.0 (proxsparse writes
    +0.0 only).
    """
    require_module(model)
    plain = uncompiled(model)
    for names in names_of_modules(plain, SparseLinear):
        packed = plain.get_submodule(names[0])
        dense = linear(packed.dense_weight(), packed.bias).train(packed.training)
        for name in names:
            plain.set_submodule(name, dense)
    declare_(plain)
    return model


def pack_tensors(
    headers: dict[str, Header],
    layers: dict[str, NMPattern],
    bits: int = 16,
    rounded: dict[str, tuple[Tensor, Tensor, Tensor]] | None = None,
    buffers: Collection[str] = (),
) -> Stream:
    """Yields the tensors of a dense checkpoint, packed: three or four tensors for the weight of each of `layers`.

    layers: name -> pattern. They and `buffers`, which are not weights of the model and may contain infinity, are named
        as the files name them.
    rounded: codes, scales and indices of layers that are rounded already; for the others see `quantize_nm`.
    Raises ValueError for a weight with NaN or infinity.
    """
    for name in headers:
        layer, _, part = name.rpartition(".")
        tensor = read_tensor(headers, name)
        may_be_infinite = name in buffers or tensor.dtype not in FLOAT_DTYPES  # float8_e4m3fn has no isfinite
        if not may_be_infinite and not tensor.isfinite().all():
            raise ValueError(f"{headers[name].file}: {name} contains NaN or infinity; download the model again")
        if part != "weight" or layer not in layers:
            yield name, tensor
            continue
        if rounded and layer in rounded:
            values, scales, indices = rounded[layer]
        else:
            values, indices = pack_nm(tensor, layers[layer])
            values, scales = (values, None) if bits == 16 else quantize_nm(values, bits)
        if scales is not None:
            yield f"{layer}.scales", scales
        yield f"{layer}.values", values
        yield f"{layer}.indices", indices
        yield name, empty_weight(tensor)


def unpack_tensors(headers: dict[str, Header], layers: dict[str, tuple[NMPattern, int]]) -> Stream:
    """The inverse of `pack_tensors`; layers: name -> pattern, in_features. Raises ValueError for damaged indices."""
    for name, header in headers.items():
        layer, _, part = name.rpartition(".")
        if part not in (*PARTS, "weight") or layer not in layers:
            yield name, read_tensor(headers, name)
        elif part == "values":
            values, scales = read_tensor(headers, name), f"{layer}.scales"
            try:
                if scales in headers:
                    values = dequantize_nm(values, read_tensor(headers, scales))
                indices = read_tensor(headers, f"{layer}.indices")
                yield f"{layer}.weight", unpack_nm(values, indices, *layers[layer])
            except ValueError as error:
                raise ValueError(f"{header.file}: packed layer {layer}: {error}; download the file again") from error


def layers_to_pack(
    headers: dict[str, Header],
    model: nn.Module,
    names: Match,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    bits: int = 16,
) -> dict[str, tuple[str, NMPattern]]:
    """The layers of a dense checkpoint that `sparsify_` would pack: name in the model -> name in the files, pattern.

    The model may be on the meta device; `names`: how the files fit it. Raises as `sparsify_`.
    """
    stored = {inside: name for name, inside in names.names.items() if name not in names.merged}

    def weight_of(layer: str) -> Tensor | None:
        name = stored.get(f"{layer}.weight")
        return None if name is None else read_tensor(headers, name)

    chosen = packable_layers(model, weight_of, include, exclude, bits)
    return {
        layer: (stored[f"{layer}.weight"].removesuffix(".weight"), pattern)
        for (layer, *others), pattern in chosen
        if not others  # skips modules with two names
    }


def merged_tensors(headers: dict[str, Header], model: nn.Module, names: Match, exclude: list[str] | None) -> list[str]:
    """The N:M tensors of the files that `layers_to_pack` skips: transformers splits or joins them to make layers."""
    linears = {f"{name}.weight" for group in names_of_modules(model, nn.Linear) for name in group}
    merged = {name: names.names[name] for name in sorted(names.merged) if names.names[name] in linears}
    selected = [name for name, inside in merged.items() if is_selected(inside.removesuffix(".weight"), None, exclude)]
    tensors = ((name, read_tensor(headers, name)) for name in selected)
    return [name for name, tensor in tensors if tensor.dtype in FLOAT_DTYPES and first_fitting(tensor)]


def packed_layers(headers: dict[str, Header], model: nn.Module, config: dict) -> dict[str, tuple[str, Form]]:
    """Name in the files -> name in the model, form, for the packed layers of a checkpoint, after checking them.

    `config` is the quantization_config of config.json. Raises ValueError if other layers are packed in the files, the
    model has no such nn.Linear, or a tensor is missing or has a wrong shape or dtype.
    """
    layers = {place_of(model, name): (name, form) for name, form in forms(config).items()}
    names, _, _ = model_names(headers, model, [f"{place}.{part}" for place in layers for part in PARTS])
    files = {inside: name for name, inside in names.items()}
    packed = {
        files.get(f"{place}.values", f"{name}.values").removesuffix(".values"): (place, form)
        for place, (name, form) in layers.items()
    }
    check_tensors(headers, {name: (model.get_submodule(place), form) for name, (place, form) in packed.items()})
    return packed


def place_of(model: nn.Module, name: str) -> str:
    """The name of a packed layer in the model. Raises ValueError if the model has no nn.Linear there.

    A model and its base model can load each other's files and share a config, so their prefix may be left out or added.
    """
    prefix = f"{model.base_model_prefix}."
    for place in (name, name.removeprefix(prefix), prefix + name):
        with suppress(AttributeError):
            if isinstance(model.get_submodule(place), nn.Linear):
                return place
    raise ValueError(
        f"packed layer {name}: {type(model).__name__} has no nn.Linear with this name; load the checkpoint with the "
        "class that it was packed for (`architectures` in config.json), or download config.json again"
    )


def declare_(model: nn.Module) -> None:
    """Lists the packed layers in the config of a model of transformers, for `save_pretrained`."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    packed = {name: model.get_submodule(name) for names in names_of_modules(model, SparseLinear) for name in names}
    layers = {name: Form(layer.bits, layer.pattern) for name, layer in packed.items()}
    if layers or quant_method(model) == QUANT_METHOD:
        copy_config_(model)
    if layers:
        model.config.quantization_config = description(layers)
        keep_from_merging_(model, [f"{name}.{part}" for name in layers for part in (*PARTS, "weight")])
    elif quant_method(model) == QUANT_METHOD:
        del model.config.quantization_config
        model.hf_quantizer, model.is_quantized, model._weight_conversions = None, False, None


def copy_config_(model: nn.Module) -> None:
    """Gives the model a copy of its config, which other models may share."""
    copies: dict[int, object] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if id(config := vars(module).get("config")) in copies:
            module.config = copies[id(config)]
