"""Checkpoints of a run, from which it resumes bit for bit.

    RUN/checkpoints/NAME/*.safetensors   tensors, written by torch.distributed.checkpoint
    RUN/checkpoints/NAME/facts.json      JSON values, and the sha256 of every other file; written last

NAME is a training step ("step-200"), a decoder block ("model.layers.3") or "patterns". A checkpoint is written under a
temporary name, synced and renamed: one with its final name is complete. Each process writes its rows of the tensors;
any number of processes can read them. Nothing is pickled.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from proxsparse.errors import InputError, describe_error
from proxsparse.io.atomic import SCRATCH, remove_folder, sync, write_file
from proxsparse.runtime.distributed import is_rank_zero, on_rank_zero, thread_group, world_size

CHECKPOINTS, FACTS, STEP = "checkpoints", "facts.json", re.compile(r"step-(\d+)")
TOKENS, PROGRESS = "tokens", "progress.json"  # of the calibration text
FILE_BYTES = 2**28  # approximate size of a file; each file is serialized in memory
WRITER = ThreadPoolExecutor(1, "checkpoint")
SAMPLED = 64  # weights of each parameter in the digest of a model; reading all takes as long as loading


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run."""

    run_dir: Path
    identity: dict  # JSON values that a run must have in common with the checkpoints from which it resumes
    writing: list[Future] = field(default_factory=list, compare=False, repr=False)  # at most one

    @property
    def folder(self) -> Path:
        return self.run_dir / CHECKPOINTS

    def save(
        self,
        name: str,
        tensors: dict[str, Tensor],
        facts: dict,
        then: Callable[[], object] = lambda: None,
        in_thread: bool = False,
    ) -> None:
        """Writes a checkpoint, or replaces it. All processes must call it.

        Args:
            then: called on rank zero when the checkpoint is complete.
            in_thread: a thread writes a copy of the tensors, which the caller may change; `wait`, or the next `save`,
                waits for it and raises its error.
        Raises:
            OSError: it could not be written; the other checkpoints are unchanged.
        """
        self.wait()
        facts = json.loads(json.dumps({"identity": self.identity, **facts}))
        if not in_thread:
            self.write(name, tensors, facts, then)
            return
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        tensors = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        group = thread_group(torch.distributed.group.WORLD)  # made here, because all processes must make it
        stream = device and torch.cuda.Stream(device)  # torch waits for that of the thread, not for the training
        self.writing.append(WRITER.submit(self.write, name, tensors, facts, then, group, stream))

    def wait(self) -> None:
        """Waits until the thread has written the checkpoint. Raises its error."""
        if self.writing:
            self.writing.pop().result()

    def write(
        self, name: str, tensors: dict[str, Tensor], facts: dict, then: Callable, group=None, stream=None
    ) -> None:
        """`save`, without waiting for another checkpoint; in the thread with a process group and a CUDA stream."""
        import torch.distributed.checkpoint as dcp

        scratch = self.folder / f"{SCRATCH}-{name}"
        try:
            on_rank_zero(lambda: clear(scratch), group)
            if tensors:
                tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}  # W^T of Conv1D is not
                writer = dcp.HuggingFaceStorageWriter(str(scratch), file_numbers(tensors), save_distributed=True)
                # stream(None) would create a CUDA context
                with torch.cuda.stream(stream) if stream else nullcontext(), plain_errors():
                    dcp.save(tensors, storage_writer=writer, process_group=group)
            on_rank_zero(lambda: finish(scratch, self.folder / name, facts), group)
        except BaseException as error:
            if is_rank_zero():
                shutil.rmtree(scratch, ignore_errors=True)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            reason = describe_error(error)
            raise OSError(f"checkpoint {name} could not be written to {str(self.folder)!r}: {reason}") from error
        on_rank_zero(then, group)

    def facts(self, name: str) -> dict | None:
        """The JSON values of a checkpoint, which is `verified`; None if there is no such checkpoint."""
        path = self.folder / name
        return on_rank_zero(lambda: verified(path, self.identity) if path.is_dir() else None)

    def load(
        self, name: str, into: dict[str, Tensor] | None = None, prefixes: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """Reads tensors, or the rows of this process, after `facts` has verified them. All processes must call it.

        Fills the tensors of `into` in place, and creates those whose names begin with one of `prefixes` on the CPU;
        returns both. Raises InputError if one of `into` is missing, or has another shape or dtype.
        """
        import torch.distributed.checkpoint as dcp

        path, tensors = self.folder / name, dict(into or {})
        if not any(path.glob("*.safetensors")):
            return tensors
        saved = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        for key, tensor in tensors.items():
            found, needed = saved.get(key), f"{tensor.dtype} {list(tensor.shape)}"
            held = f"{found.properties.dtype} {list(found.size)}" if found else "missing"
            if held != needed:
                remedy = "the checkpoint belongs to another model or version; delete it"
                raise InputError(f"{path}: {key} is {held}, expected {needed}; {remedy}")
        for key, found in saved.items():
            if key not in tensors and key.startswith(prefixes):
                tensors[key] = torch.empty(found.size, dtype=found.properties.dtype)
        with plain_errors():
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        return tensors

    def steps(self) -> list[str]:
        """The names of the checkpoints of training steps, in the order of the steps."""
        return sorted(filter(STEP.fullmatch, saved_names(self.run_dir)), key=step_of)

    def newest_step(self) -> tuple[str, dict] | None:
        """The name and the facts of the checkpoint of the last training step; None if there is none."""
        name = on_rank_zero(lambda: next(reversed(self.steps()), None))
        return name and (name, self.facts(name))

    def remove(self, names: Iterable[str]) -> None:
        """Removes checkpoints."""
        for name in names:
            remove_folder(self.folder / name)


def step_of(name: str) -> int:
    """The training step of the checkpoint "step-200": 200."""
    return int(STEP.fullmatch(name)[1])


def saved_names(run_dir: Path) -> list[str]:
    """The names of the complete checkpoints of a run, and `TOKENS` if some are complete, see `data.tokens`."""
    found = (run_dir / CHECKPOINTS).iterdir() if (run_dir / CHECKPOINTS).is_dir() else ()
    names = (path.name for path in found if path.name != TOKENS or (path / PROGRESS).exists())
    return sorted(name for name in names if not name.startswith(SCRATCH))


def clear(folder: Path) -> None:
    """Makes the folder, empty. Raises OSError if the directory of the run is gone, as after its disk was unmounted."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir()


def finish(scratch: Path, target: Path, facts: dict) -> None:
    """Writes facts.json and renames the folder to `target`."""
    for path in scratch.iterdir():
        sync(path)
    write_file(scratch / FACTS, (json.dumps(facts | {"files": digests(scratch)}) + "\n").encode())
    if target.exists():  # written before the run was resumed from an earlier checkpoint
        remove_folder(target)
    scratch.rename(target)
    sync(target.parent)


def digests(folder: Path) -> dict[str, str]:
    """File name -> sha256, for all files but facts.json; in parallel, because a step can have many gigabytes."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = sorted(path for path in folder.iterdir() if path.name != FACTS)
    with ThreadPoolExecutor() as pool:
        return dict(zip((path.name for path in paths), pool.map(digest, paths), strict=True))


def verified(path: Path, identity: dict) -> dict:
    """The content of facts.json. Raises InputError unless a run of this identity wrote all files as they are now."""
    try:
        facts = json.loads((path / FACTS).read_bytes())
        before, changed = dict(facts["identity"]), dict(digests(path).items() ^ facts["files"].items())
        if changed:
            raise ValueError(f"{min(changed)} has changed")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        remedy = "delete this directory, and the run resumes from the other checkpoints"
        raise InputError(f"{path}: damaged ({describe_error(error)}); {remedy}") from error
    for key, now in identity.items():
        what = f"its run has {key} {before.get(key)} (now {now})"
        if key == "digest":
            what = "the model or the calibration text has changed since the run was stopped"
        if before.get(key) != now:
            raise InputError(f"{path}: {what}; give the same, or delete {path.parent}")
    return facts


def digest_of(model: nn.Module, samples: Iterable[np.ndarray]) -> str:
    """sha256 of some weights of every parameter and of all arrays, to detect a changed model or text."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().flatten()[:SAMPLED].contiguous().view(torch.uint8).cpu().numpy())
    for array in samples:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Tensor name -> the number of its file, from 1; each file has about FILE_BYTES."""
    numbers, held, number = {}, 0, 1
    for name, tensor in tensors.items():
        held += tensor.nbytes // world_size()
        if held > FILE_BYTES:
            held, number = 0, number + 1
        numbers[name] = number
    return numbers


@contextmanager
def plain_errors() -> Iterator[None]:
    """Within the block, raises the first error inside a CheckpointException, which collects those of all processes.

    That class is not an Exception, and also holds a KeyboardInterrupt.
    """
    from torch.distributed.checkpoint import CheckpointException

    # for good, because a thread may write
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
