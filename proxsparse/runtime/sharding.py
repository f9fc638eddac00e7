"""Moving a model to its device. With several processes, each holds its rows of every parameter (FSDP2).

A parameter is split along its rows, out_features. A block of M weights lies within one row, so the prox, masks and
moments need no communication.
"""

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxsparse.runtime.distributed import is_rank_zero, local_world_size, world_size
from proxsparse.runtime.progress import phase


def local(tensor: Tensor) -> Tensor:
    """The rows of a DTensor that this process holds, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def device_mesh(device: torch.device, within_node: bool) -> dist.DeviceMesh:
    """All processes in one dimension; with HSDP in two: copies across nodes, shards within a node."""
    shards = local_world_size() if within_node else world_size()
    sizes, names = (world_size() // shards, shards), ("copies", "shards")
    flat = shards == world_size()
    return dist.init_device_mesh(device.type, sizes[flat:], mesh_dim_names=names[flat:])


@torch.no_grad()
def shard_and_move_(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    keep: str,
    within_node: bool,
) -> dict[str, Tensor]:
    """Moves a model to its device and dtype, one decoder block at a time; with several processes, shards it.

    Buffers (rotary frequencies) keep their dtype.

    Args:
        keep: where W0 is kept: "device", "cpu", or "disk", which keeps the loaded tensors (for safetensors, mapped
            memory).
        within_node: shard within a node and copy across nodes (HSDP), instead of sharding across all processes.
    Returns:
        parameter name -> W0 in the dtype of the files: the rows of this process.
    """
    from torch.distributed.fsdp import fully_shard

    shards = device_mesh(device, within_node) if world_size() > 1 else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pretrained, placed = {}, set()
    with phase(f"moving the model to {device}", unit="module") as current:
        for module in current.count([*blocks, model]):
            own = {names[id(p)]: p for p in module.parameters() if id(p) in names and names[id(p)] not in placed}
            loaded = {name: parameter.detach() for name, parameter in own.items()}
            for parameter in own.values():
                parameter.data = parameter.detach().to(device, dtype, copy=keep == "disk").contiguous()
            if shards is not None:
                # reshard the root too: evaluation has no backward pass
                fully_shard(module, mesh=shards, reshard_after_forward=True)
                module.set_gradient_divide_factor(1.0)  # a sum: the loss is already divided
                module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo supports
            for name, weight in loaded.items():
                parameter = model.get_parameter(name)
                rows = weight[first_row(parameter) :][: len(local(parameter))] if weight.ndim else weight
                pretrained[name] = rows if keep == "disk" else rows.to(device if keep == "device" else "cpu", copy=True)
            placed |= own.keys()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return {name: pretrained[name] for name, _ in model.named_parameters()}


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a sharded DTensor."""
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def shard_dimension(parameter: Tensor) -> int:
    """The dimension of the device mesh across which the parameter is sharded."""
    return next(i for i, placement in enumerate(parameter.placements) if placement.is_shard())


def first_row(parameter: Tensor) -> int:
    """Index, in the full parameter, of the first row that this process holds."""
    if not is_sharded(parameter):
        return 0
    dimension = shard_dimension(parameter)
    number, shards = parameter.device_mesh.get_local_rank(dimension), parameter.device_mesh.size(dimension)
    return min(number * math.ceil(len(parameter) / shards), len(parameter))


def sum_of_shards(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The sum over the processes that hold shards of the parameter; the tensor itself if it is not sharded."""
    if is_sharded(parameter):
        tensor = tensor.to(parameter.device_mesh.device_type, copy=True)  # nccl does not accept CPU tensors
        dist.all_reduce(tensor, group=parameter.device_mesh.get_group(shard_dimension(parameter)))
    return tensor


def mean_of_shards(values: Tensor, parameter: Tensor) -> Tensor:
    """The mean of a tensor with the shape of the parameter, given the rows of this process."""
    if not is_sharded(parameter):
        return values.mean()
    return sum_of_shards(values.sum(), parameter) / parameter.numel()


def gather_rows(rows: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor, given the rows of this process; it has as many rows as the parameter and is sharded like it."""
    if not is_sharded(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(parameter), *rows.shape[1:]))
    device_mesh, placements = parameter.device_mesh, parameter.placements
    rows = rows.to(device_mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, device_mesh, placements, shape=shape, stride=stride).full_tensor()


def gather_parameters(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Name -> the full parameter on the CPU, on rank zero; {} on other ranks, and if the model is not sharded."""
    found = {}
    for name in sorted(names) if world_size() > 1 else ():  # the same order in all processes
        parameter = model.get_parameter(name).detach()
        whole = parameter.full_tensor() if is_sharded(parameter) else parameter
        if is_rank_zero():
            found[name] = local(whole).cpu()
    return found


def gather_masks(masks: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All rows of masks on rank zero: layer name -> bool [out_features, in_features] on the CPU; {} on other ranks.

    `masks` are the rows of this process; `weights` are the parameters, which may be sharded, by layer name too.
    """
    found = {}
    for name, mask in masks.items():
        whole = gather_rows(mask, weights[name])
        if is_rank_zero():
            found[name] = whole.cpu()
    return found
