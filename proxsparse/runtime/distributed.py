"""One process or many: which one this is, and the few collectives that all need.

`torchrun` starts the processes and says in the environment who is who. Without it there is one process, no group, and
every function here is that of a plain model.
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
from torch import Tensor

from proxsparse.errors import InputError

T = TypeVar("T")
SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(hours=2)  # the others wait while the first process writes a large model


def launched_world_size() -> int:
    """How many processes torchrun has started, this one among them; without it 1.

    Raises:
        InputError: WORLD_SIZE is set, but not what torchrun sets with it.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return 1
    missing = [name for name in SET_BY_TORCHRUN if not os.environ.get(name)]
    if missing or not size.isdecimal():
        reason = f"not set: {', '.join(missing)}" if missing else "not a number"
        raise InputError(
            f"WORLD_SIZE={size} in the environment is not from torchrun ({reason}); start several processes with "
            "torchrun, or unset WORLD_SIZE"
        )
    return int(size)


def local_device(name: str) -> str:
    """The --device of this one of many processes: of GPUs that of its number on this machine.

    Raises:
        InputError: the device of one process is named.
    """
    if launched_world_size() == 1 or name == "cpu" or not torch.cuda.is_available():
        return name
    if ":" in name:
        raise InputError(
            f"--device {name}: {launched_world_size()} processes take a GPU each; give --device cuda, or auto"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}"


def init_process_group(device: torch.device) -> None:
    """Joins the processes that torchrun has started, if it has. Collectives run on gloo for CPU tensors, else nccl."""
    if launched_world_size() == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def world_size() -> int:
    """How many there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    """Whether this process is the one that prints and writes files."""
    return rank() == 0


def on_rank_zero(action: Callable[[], T]) -> T:
    """Runs `action` in the first process alone; all get what it returns. If it fails, all end, and one says why."""
    if world_size() == 1:
        return action()
    answer, error = [None, False], None
    if is_rank_zero():
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


def require_shared_directory(folder: Path) -> None:
    """Raises InputError in all processes if one of them does not see what the first one writes there."""
    if world_size() == 1:
        return
    sign = folder / ".incomplete-sign"
    on_rank_zero(sign.touch)
    (blind,) = all_reduce_sum([not sign.exists()])
    on_rank_zero(sign.unlink)
    if blind:
        raise InputError(
            f"--output_dir {str(folder)!r}: {blind:.0f} of {world_size()} processes do not see what the first one "
            "writes there; give a folder that all machines share"
        )


def all_reduce_sum(values: Iterable[float]) -> list[float]:
    """The sums over all processes."""
    values = list(values)
    if world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def shard_items(items: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """Every N-th item for this one of N processes, and whether it counts.

    All get equally many, because a forward pass of a sharded model takes all of them: where N does not divide the
    number of items, some get the last one once more, and it does not count.
    """
    rounds = math.ceil(len(items) / world_size())
    for index in range(rank(), rounds * world_size(), world_size()):
        yield items[min(index, len(items) - 1)], index < len(items)


def gather_in_order(own: list[T], count: int) -> list[T]:
    """What all processes have made of the items that `share` gave them, in the order of the items, for each of them."""
    if world_size() == 1:
        return own
    of_all: list[list[T]] = [[] for _ in range(world_size())]
    dist.all_gather_object(of_all, own)
    return [of_all[index % world_size()][index // world_size()] for index in range(count)]


def all_gather(tensor: Tensor) -> Tensor:
    """[processes, ...], the tensors of all, on the CPU, in each of them."""
    found: list[Tensor] = [tensor] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, tensor)
    return torch.stack(found).cpu()
