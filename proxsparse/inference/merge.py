"""Merged projections: linear layers with the same input are computed as one matrix product.

The rows of a weight are independent, so W = [Wq; Wk; Wv] gives x W^T = [x Wq^T, x Wk^T, x Wv^T]: one product and three
slices. A decoder block then has 4 products instead of 7. The weights are stored once: the merged tensor contains all
rows, and the tensors of each layer become slices of it, with the same names and shapes.
"""

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from proxsparse.inference.linear import SparseLinear

# In models of transformers, layers with these names and the same parent read the same input.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
ORDINARY = (Tensor, nn.Parameter)  # not DTensor or fake tensors
MAX_INCOMPLETE = 2  # consecutive products; a single one may be due to an exception between the calls
_separate: ContextVar[bool] = ContextVar("proxsparse_separate_products", default=False)


@torch.no_grad()
def merge_projections_(model: nn.Module) -> nn.Module:
    """Merges q_proj, k_proj and v_proj of every attention, and gate_proj and up_proj of every MLP; in place.

    Equivalent to, for the layers of a group:

        y = x @ torch.cat([layer.weight for layer in group]).T;  y.split([layer.out_features for layer in group], -1)

    The first layer that is called computes the product for all layers. The others return their slice if they get the
    same unmodified tensor x under the same autocast. The layers compute separately, with the same result, if a gradient
    is needed, under torch.compile, and under torch.inference_mode (inference tensors have no version counter; use
    torch.no_grad). If the layers of a group get different inputs (cross-attention) or are not all called, the group
    is no longer merged after two such products.

    Dense and packed layers are merged, but not with each other. A group stays separate if its layers differ in type,
    in_features, dtype, bits, grid, device, backend or presence of a bias, have hooks or their own forward, are
    subclasses, or share a weight with another module. Names outside of GROUPS are never merged.

    state_dict, save_pretrained, `unsparsify_` and load_state_dict see separate layers. Copies and pickles of a model
    have separate layers. After the model was moved or cast (`.to()`), call this function again. While a group is being
    merged, its weights exist twice; afterwards the model has its original size.

    Args:
        model: any module; all its submodules are searched for groups.
    Returns:
        The model.
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in own_tensors(module).values())
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in GROUPS:
            layers = [children[name] for name in names if name in children]
            if len(layers) != len(names) or is_merged(layers):
                continue
            split(layers)
            if can_merge(layers, owners):
                Group(layers)
    return model


@torch.no_grad()
def split_projections_(model: nn.Module) -> nn.Module:
    """The inverse of `merge_projections_`: restores the class and the own memory of every layer, in place."""
    split([module for module in model.modules() if isinstance(module, MergedPart)])
    return model


@contextlib.contextmanager
def separate_products() -> Iterator[None]:
    """Within the block the layers of merged groups compute separately, in this thread; for comparisons."""
    token = _separate.set(True)
    try:
        yield
    finally:
        _separate.reset(token)


class State(threading.local):
    """The state of a group between the calls of its first and last part, for each thread.

    pending: (x, conditions of the call, index of a part -> its output), or None.
    """

    pending: tuple[Tensor, tuple, dict[int, Tensor]] | None = None


class Group:
    """Layers that are computed as one product.

    Attributes:
        layer: the merged layer, with the plain class of its parts; None if the group is no longer merged.
        incomplete: number of consecutive products whose slices were not all used.
    """

    def __init__(self, parts: list[nn.Module]):
        kind, first = type(parts[0]), parts[0]
        self.parts, self.state, self.incomplete = parts, State(), 0
        self.device = next(iter(own_tensors(first).values())).device
        self.sizes = [part.out_features for part in parts]
        self.layer = kind(first.in_features, sum(self.sizes), first.bias is not None, device="meta")
        if kind is SparseLinear:
            self.layer.backend, self.layer.bits, self.layer.grid = first.backend, first.bits, first.grid
            self.layer.weight = first.weight
        self.places = []  # (dict with the tensors of a part, name, expected address)
        for name, tensor in own_tensors(first).items():
            merged = torch.cat([getattr(part, name).detach() for part in parts])
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(self.layer, name, nn.Parameter(merged, tensor.requires_grad) if is_parameter else merged)
            for part, rows in zip(parts, merged.split(self.sizes), strict=True):
                getattr(part, name).data = rows  # keeps the Parameter, which an optimizer may hold
                table = part._parameters if is_parameter else part._buffers
                self.places.append((table, name, rows.data_ptr()))
        for index, part in enumerate(parts):
            part.__class__ = MERGED[kind]
            part.group, part.index = self, index

    def output(self, part: "MergedPart", x: Tensor) -> Tensor | None:
        """The output of the part for x, from one product of all parts; None: the part must compute separately."""
        layer, conditions = self.layer, self.conditions(x)
        pending, self.state.pending = self.state.pending, None
        if layer is not None and part.weight.dtype != layer.weight.dtype:  # only some parts were cast
            self.layer = layer = None
        if layer is None or conditions is None:
            return None
        if pending is not None:
            seen, seen_conditions, slices = pending
            if x is seen and conditions == seen_conditions and part.index in slices and self.is_intact():
                return self.taken(part.index, x, conditions, slices)
            self.incomplete += 1
        if self.incomplete >= MAX_INCOMPLETE or not self.is_intact():
            self.layer = None  # frees the merged tensors
            return None
        y = layer.forward(x)
        slices, begin = {}, 0
        for index, size in enumerate(self.sizes):  # narrow, not split: its views may be modified in place
            slices[index] = y.narrow(-1, begin, size)
            begin += size
        return self.taken(part.index, x, conditions, slices)

    def taken(self, index: int, x: Tensor, conditions: tuple, slices: dict[int, Tensor]) -> Tensor:
        """The slice of a part. The other slices are kept until their parts are called."""
        rest = {other: slice_ for other, slice_ in slices.items() if other != index}
        if rest:
            self.state.pending = (x, conditions, rest)
        else:
            self.incomplete = 0
        return slices[index]

    def conditions(self, x: Tensor) -> tuple | None:
        """What must be equal in all calls of one product; None if the parts must compute separately."""
        if _separate.get() or x.is_inference() or x.device != self.device:
            return None
        if torch.is_grad_enabled() and (x.requires_grad or any(needs_gradient(part) for part in self.parts)):
            return None
        device = self.device.type
        return x._version, torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def is_intact(self) -> bool:
        """Whether the tensors of the parts are still slices of the merged tensors."""
        return all(
            type(tensor := table.get(name)) in ORDINARY and tensor.data_ptr() == address
            for table, name, address in self.places
        )


class MergedPart(nn.Module):
    """A layer of a merged group; the base class before nn.Linear or SparseLinear."""

    group: Group
    index: int

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or self.group.parts[self.index] is not self:  # a replica of DataParallel
            return super().forward(x)
        y = self.group.output(self, x)
        return super().forward(x) if y is None else y

    def _apply(self, fn, recurse: bool = True) -> "MergedPart":
        super()._apply(fn, recurse)
        self.changed()
        return self

    def _load_from_state_dict(self, *arguments) -> None:
        super()._load_from_state_dict(*arguments)
        self.changed()

    def changed(self) -> None:
        """Drops pending outputs and the prepared weight, and the merged tensors if this layer no longer uses them."""
        self.group.state.pending = None
        if not self.group.is_intact():
            self.group.layer = None
        elif isinstance(self.group.layer, SparseLinear):
            self.group.layer.prepared, self.group.layer.weight = None, self.weight

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Copies and pickles are plain layers with their own tensors."""
        state = super().__getstate__() if isinstance(self, SparseLinear) else dict(self.__dict__)
        del state["group"], state["index"]
        for table in ("_parameters", "_buffers"):
            state[table] = {name: own_copy(tensor) for name, tensor in state[table].items()}
        return new_layer, (plain_class(self),), state


class MergedLinear(MergedPart, nn.Linear):
    """A nn.Linear of a merged group."""


class MergedSparseLinear(MergedPart, SparseLinear):
    """A SparseLinear of a merged group."""


MERGED = {nn.Linear: MergedLinear, SparseLinear: MergedSparseLinear}


def new_layer(kind: type) -> nn.Module:
    """A layer without state, for unpickling."""
    return kind.__new__(kind)


def plain_class(layer: nn.Module) -> type:
    """The class of a layer outside of a group."""
    return {merged: plain for plain, merged in MERGED.items()}.get(type(layer), type(layer))


def is_merged(layers: list[nn.Module]) -> bool:
    """Whether the layers are the parts of one group whose merged tensors are in use."""
    if not all(isinstance(layer, MergedPart) for layer in layers):
        return False
    group = layers[0].group
    return group.layer is not None and len(group.parts) == len(layers) and all(map(operator.is_, group.parts, layers))


def can_merge(layers: list[nn.Module], owners: Counter) -> bool:
    """Whether these plain layers can be merged; `owners` counts the modules that hold a tensor, by its id."""
    first, tensors = layers[0], [own_tensors(layer) for layer in layers]
    return (
        type(first) in MERGED
        and len({description(layer) for layer in layers}) == 1
        and len({id(layer) for layer in layers}) == len(layers)
        and first.in_features > 0
        and all(layer.out_features > 0 for layer in layers)
        and not any("forward" in vars(layer) or has_hooks(layer) for layer in layers)
        and all(owners[id(tensor)] == 1 and is_plain(tensor) for found in tensors for tensor in found.values())
        and len({tensor.device for found in tensors for tensor in found.values()}) == 1
        and torch.amp.is_autocast_available(next(iter(tensors[0].values())).device.type)
    )


def description(layer: nn.Module) -> tuple:
    """The properties that all layers of a group must share."""
    found, dtype = own_tensors(layer), getattr(getattr(layer, "weight", None), "dtype", None)
    of_tensors = tuple((name, tensor.dtype, type(tensor), tensor.requires_grad) for name, tensor in found.items())
    return type(layer), getattr(layer, "in_features", None), getattr(layer, "backend", None), dtype, of_tensors


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor in memory, not a DTensor or a fake, quantized, meta or inference tensor."""
    ordinary = type(tensor) in ORDINARY and tensor.layout == torch.strided
    return ordinary and not (tensor.is_meta or tensor.is_inference())


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself, by name, except those without elements."""
    found = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}


def needs_gradient(layer: nn.Module) -> bool:
    """Whether a parameter of the layer requires a gradient."""
    return any(parameter is not None and parameter.requires_grad for parameter in layer._parameters.values())


def has_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks."""
    return any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks"))


def own_copy(tensor: Tensor | None) -> Tensor | None:
    """A copy of the tensor."""
    if tensor is None:
        return None
    copy = tensor.detach().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def split(layers: list[nn.Module]) -> None:
    """Restores the class and the own memory of the merged layers in the list."""
    for layer in layers:
        if isinstance(layer, MergedPart):
            layer.group.layer, layer.group.state.pending = None, None
            for tensor in own_tensors(layer).values():
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor.data = tensor.data.clone()
            layer.__class__ = plain_class(layer)
            del layer.group, layer.index
