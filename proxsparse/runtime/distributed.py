"""Rank, world size and collectives.

`torchrun` starts the processes and sets the environment variables. Without it there is one process and no process
group, and every function here works for that process alone.
"""

import atexit
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from proxsparse.errors import InputError

T = TypeVar("T")
SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(days=1)  # the other ranks wait while rank zero tokenizes a text or writes a large model


def launched_world_size() -> int:
    """The number of processes that torchrun has started; 1 without torchrun.

    Raises InputError if WORLD_SIZE is set, but the other variables of torchrun are not.
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


def require_one_process(what: str) -> None:
    """Raises InputError, which begins with `what`, if torchrun has started several processes."""
    if all(map(os.environ.get, SET_BY_TORCHRUN)) and (count := launched_world_size()) > 1:
        raise InputError(f"{what}: runs in one process, not in {count}; start it without torchrun")


def local_device(name: str) -> str:
    """The --device of this process: with GPUs, the one with the local rank of the process.

    Raises InputError for a single GPU, such as "cuda:0", if there are several processes.
    """
    if launched_world_size() == 1 or name == "cpu" or not torch.cuda.is_available():
        return name
    if ":" in name:
        raise InputError(
            f"--device {name}: each of {launched_world_size()} processes needs its own GPU; use --device cuda or auto"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}"


def init_process_group(device: torch.device) -> None:
    """Joins the process group of torchrun, if there is one. Collectives use gloo for CPU tensors and nccl for CUDA."""
    if launched_world_size() == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def world_size() -> int:
    """World size; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int:
    """The number of processes on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank_zero() -> bool:
    """Whether this process has rank zero, which prints and writes files."""
    return rank() == 0


@cache
def thread_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A second group of the processes in `world`, for a thread besides the main one; made once, on the CPU.

    All processes must call it. `world`: `torch.distributed.group.WORLD`; None: there is no process group.
    """
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if world else None


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Runs `action` on rank zero only and returns its result on all ranks. If it fails, all processes end.

    group: a group of all processes for the communication; None: the default one.
    """
    if world_size() == 1:
        return action()
    answer, error = [None, False], None
    if is_rank_zero():
        try:
            answer[0] = action()
        except BaseException as raised:
            answer[1], error = True, raised
    dist.broadcast_object_list(answer, group=group)
    if answer[1]:
        dist.barrier(group)  # a process that ends now closes connections on which others may still be reading
        raise error or SystemExit(2)  # rank zero prints the reason
    return answer[0]


def require_shared_directory(folder: Path) -> None:
    """Raises InputError on all ranks if one of them does not see the files that rank zero writes to the folder."""
    if world_size() == 1:
        return
    probe = folder / ".incomplete-sign"
    on_rank_zero(probe.touch)
    (missing,) = all_reduce_sum([not probe.exists()])
    on_rank_zero(probe.unlink)
    if missing:
        raise InputError(
            f"--output_dir {str(folder)!r}: {missing:.0f} of {world_size()} processes do not see the files that rank "
            "zero writes there; give a folder that all machines share"
        )


def all_reduce_sum(values: list[float]) -> list[float]:
    """The sums over all processes."""
    return all_reduce_sum_(torch.tensor(values, dtype=torch.float64)).tolist()


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def shard_items(items: Sequence[T]) -> Iterator[tuple[T, bool]]:
    """Yields every N-th item, for N processes, and whether the item counts.

    All processes get the same number of items, because a forward pass of a sharded model needs all processes. If N does
    not divide the number of items, some processes get the last item again; this copy does not count.
    """
    rounds = math.ceil(len(items) / world_size())
    for index in range(rank(), rounds * world_size(), world_size()):
        yield items[min(index, len(items) - 1)], index < len(items)


def all_gather(tensor: Tensor) -> Tensor:
    """The tensors of all processes, stacked to [world_size, ...] on the CPU, on all ranks."""
    found: list[Tensor] = [tensor] * world_size()
    if world_size() > 1:
        dist.all_gather_object(found, tensor)
    return torch.stack(found).cpu()
