"""Checkpoints packed and unpacked tensor by tensor: what `proxsparse.pack` writes, as streams of (name, tensor)."""

from collections.abc import Iterator

from torch import Tensor, nn

from proxsparse.inference.convert import is_packable
from proxsparse.inference.packed_checkpoint import Header, check_layer, read
from proxsparse.ops import pack_nm, unpack_nm


def pack_tensors(
    found: dict[str, Header],
    linears: dict[str, nn.Linear],
    include: list[str] | None = None,
    exclude: list[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the packed checkpoint, one after the other: values and indices for each 2:4 nn.Linear weight.

    Args:
        found: the headers of the dense checkpoint.
        linears: layer name -> nn.Linear, of which shapes are taken; weights of other layers stay dense.
        include, exclude: see `sparsify_`.
    Raises:
        ValueError: a layer is refused, see `is_packable`, or has another shape than the model's.
    """
    for name, header in found.items():
        layer, tensor = name.removesuffix(".weight"), read(found, name)
        if layer == name or layer not in linears:
            yield name, tensor
            continue
        if tensor.shape != linears[layer].weight.shape:
            needed = list(linears[layer].weight.shape)
            raise ValueError(f"{header.file}: {name} is {list(tensor.shape)}, by config.json it must be {needed}")
        if is_packable(layer, tensor, include, exclude):
            values, indices = pack_nm(tensor)
            yield f"{layer}.values", values
            yield f"{layer}.indices", indices
        else:
            yield name, tensor


def unpack_tensors(
    found: dict[str, Header], linears: dict[str, nn.Linear], layers: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the dense checkpoint, one after the other; `layers` are the packed ones, all checked first.

    Raises:
        ValueError: a packed layer is not in the model, its tensors are absent, or its indices are damaged.
    """
    for layer in layers:
        if layer not in linears:
            raise ValueError(f"packed layer {layer}: the model of config.json has no such nn.Linear; pack it again")
        linear = linears[layer]
        check_layer(found, layer, linear.in_features, linear.out_features, linear.bias is not None)
    packed = set(layers)
    for name, header in found.items():
        layer, _, what = name.rpartition(".")
        if layer not in packed or what not in ("values", "indices"):
            yield name, read(found, name)
        elif what == "values":
            try:
                yield f"{layer}.weight", unpack_nm(read(found, name), read(found, f"{layer}.indices"))
            except ValueError as error:
                raise ValueError(f"{header.file}: packed layer {layer}: {error}; get the file again") from error
