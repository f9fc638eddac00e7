"""One process or many: which one this is, its rows of every parameter (FSDP2), and the few sums that all need.

`torchrun` starts the processes and says in the environment who is who. Without it there is one process, no group, and
every function here is that of a plain model. A parameter is cut along its rows, out_features; a block of M weights lies
in one row, so the prox, masks and moments need no communication.
"""

import atexit
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxsparse.errors import InputError

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)  # the others wait while the first process writes a large model


def launched() -> int:
    """How many processes torchrun has started, this one among them; without it 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_device(name: str) -> str:
    """The --device of this one of many processes: of GPUs that of its number on this machine.

    Raises:
        InputError: the device of one process is named.
    """
    if launched() == 1 or name == "cpu" or not torch.cuda.is_available():
        return name
    if ":" in name:
        raise InputError(f"--device {name}: {launched()} processes take a GPU each; give --device cuda, or auto")
    return f"cuda:{os.environ['LOCAL_RANK']}"


def start(device: torch.device) -> None:
    """Joins the processes that torchrun has started, if it has. Collectives run on gloo for CPU tensors, else nccl."""
    if launched() == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def processes() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return rank() == 0


def from_first(action: Callable[[], T]) -> T:
    """Runs `action` in the first process alone; all get what it returns. If it fails, all end, and one says why."""
    if processes() == 1:
        return action()
    answer, error = [None, False], None
    if is_first():
        try:
            answer[0] = action()
        except BaseException as raised:
            answer[1], error = True, raised
    dist.broadcast_object_list(answer)
    if answer[1]:
        dist.barrier()  # a process that ends now closes connections on which others may still be reading
    if error is not None:
        raise error
    if answer[1]:
        raise SystemExit(2)  # the first one has printed the reason
    return answer[0]


def require_one_folder(folder: Path) -> None:
    """Raises InputError in all processes if one of them does not see what the first one writes there."""
    if processes() == 1:
        return
    sign = folder / ".incomplete-sign"
    from_first(sign.touch)
    (blind,) = total([not sign.exists()])
    from_first(sign.unlink)
    if blind:
        raise InputError(
            f"--output_dir {str(folder)!r}: {blind:.0f} of {processes()} processes do not see what the first one "
            "writes there; give a folder that all machines share"
        )


def total(values: Iterable[float]) -> list[float]:
    """The sums over all processes."""
    values = list(values)
    if processes() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def total_(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if processes() > 1:
        dist.all_reduce(tensor)
    return tensor


def share(items: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """Every N-th item for this one of N processes, and whether it counts.

    All get equally many, because a forward pass of a sharded model takes all of them: where N does not divide the
    number of items, some get the last one once more, and it does not count.
    """
    rounds = math.ceil(len(items) / processes())
    for index in range(rank(), rounds * processes(), processes()):
        yield items[min(index, len(items) - 1)], index < len(items)


def in_order(own: list[T], count: int) -> list[T]:
    """What all processes have made of the items that `share` gave them, in the order of the items, for each of them."""
    if processes() == 1:
        return own
    of_all: list[list[T]] = [[] for _ in range(processes())]
    dist.all_gather_object(of_all, own)
    return [of_all[index % processes()][index // processes()] for index in range(count)]


def of_all_processes(tensor: Tensor) -> Tensor:
    """[processes, ...], the tensors of all, on the CPU, in each of them."""
    found: list[Tensor] = [tensor] * processes()
    if processes() > 1:
        dist.all_gather_object(found, tensor)
    return torch.stack(found).cpu()


# ---------------------------------------------------------------------------------------------- shards


def local(tensor: Tensor) -> Tensor:
    """The rows of a DTensor that this process holds, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def mesh(device: torch.device, within_node: bool) -> dist.DeviceMesh:
    """All processes in one dimension, or with HSDP in two: copies over the nodes, shards within each of them."""
    shards = int(os.environ["LOCAL_WORLD_SIZE"]) if within_node else processes()
    sizes, names = (processes() // shards, shards), ("copies", "shards")
    flat = shards == processes()
    return dist.init_device_mesh(device.type, sizes[flat:], mesh_dim_names=names[flat:])


@torch.no_grad()
def place_(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    keep: str,
    within_node: bool,
) -> dict[str, Tensor]:
    """Moves a model to its device and dtype, one decoder block after the other; of many processes each keeps its rows.

    Buffers (rotary frequencies) stay as precise as they were loaded.

    Args:
        keep: where W0 stays; "device", "cpu", or "disk": as it was loaded, which for safetensors is mapped memory.
        within_node: shards within a node and copies over the nodes (HSDP), instead of shards over all processes.
    Returns:
        parameter name -> W0 in the dtype of the files: the rows of this process.
    """
    from torch.distributed.fsdp import fully_shard

    shards = mesh(device, within_node) if processes() > 1 else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pretrained, placed = {}, set()
    for module in (*blocks, model):
        own = {names[id(p)]: p for p in module.parameters() if id(p) in names and names[id(p)] not in placed}
        loaded = {name: parameter.detach() for name, parameter in own.items()}
        for parameter in own.values():
            parameter.data = parameter.detach().to(device, dtype, copy=keep == "disk").contiguous()
        if shards is not None:
            fully_shard(module, mesh=shards, reshard_after_forward=True)  # also of the root: evaluation has no backward
            module.set_gradient_divide_factor(1.0)  # a sum: the loss is divided already, see learning.backward
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        for name, weight in loaded.items():
            pretrained[name] = kept(rows_of(model.get_parameter(name), weight), keep, device)
        placed |= own.keys()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return {name: pretrained[name] for name, _ in model.named_parameters()}


def kept(weight: Tensor, where: str, device: torch.device) -> Tensor:
    """A copy of the weight there; "disk": the weight itself."""
    return weight if where == "disk" else weight.to(device if where == "device" else "cpu", copy=True)


def rows_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """The rows of a whole tensor that this process holds of the parameter."""
    return whole[first_row(parameter) :][: len(local(parameter))] if parameter.ndim else whole


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor whose rows are shared out over processes."""
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def shards_of(parameter: Tensor) -> int:
    """The dimension of the parameter's device mesh over which its rows are shared out."""
    return next(i for i, placement in enumerate(parameter.placements) if placement.is_shard())


def first_row(parameter: Tensor) -> int:
    """The number, in the whole parameter, of the first row that this process holds."""
    if not is_sharded(parameter):
        return 0
    dimension = shards_of(parameter)
    number, shards = parameter.device_mesh.get_local_rank(dimension), parameter.device_mesh.size(dimension)
    return min(number * math.ceil(len(parameter) / shards), len(parameter))


def sum_of_shards(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The sum over the processes that hold shards of the parameter; of other parameters the tensor itself."""
    if is_sharded(parameter):
        tensor = tensor.to(parameter.device_mesh.device_type, copy=True)  # a group of nccl alone takes no CPU tensor
        dist.all_reduce(tensor, group=parameter.device_mesh.get_group(shards_of(parameter)))
    return tensor


def mean_of_shards(values: Tensor, parameter: Tensor) -> Tensor:
    """The mean of a tensor of the parameter's shape, given this process's rows of it."""
    if not is_sharded(parameter):
        return values.mean()
    return sum_of_shards(values.sum(), parameter) / parameter.numel()


def whole(rows: Tensor, parameter: Tensor) -> Tensor:
    """All rows, given those that this process holds: a tensor of as many rows as the parameter, cut like it."""
    if not is_sharded(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(parameter), *rows.shape[1:]))
    device_mesh, placements = parameter.device_mesh, parameter.placements
    rows = rows.to(device_mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, device_mesh, placements, shape=shape, stride=stride).full_tensor()
