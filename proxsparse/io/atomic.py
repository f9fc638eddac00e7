"""Writing files and folders whole or not at all."""

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.model_files import is_inside

SCRATCH = ".incomplete"  # how the name of what is being written begins; it outlives a killed process only


def copy_files(source: Path, target: Path, but: Iterable[str], keep: Iterable[str] = ()) -> None:
    """Copies the files of a folder, but not the hidden ones and not what matches `but` and not `keep` (patterns).

    A link out of the folder is left out, aloud: a stranger's folder must not choose what of this machine is copied. The
    blobs of the Hugging Face cache that it is part of are its own.
    """
    for path in sorted(source.iterdir()):
        wanted = any(map(path.match, keep)) or not any(map(path.match, but))
        if not wanted or not path.is_file() or path.name.startswith("."):
            continue
        if is_inside(path, source):
            shutil.copyfile(path, target / path.name)
        else:
            print(f"left out: {path.name}, a link out of {str(source)!r}", file=sys.stderr)


def require_space(path: Path, needed_bytes: int, what: str = "the result needs") -> None:
    """Raises InputError if the disk has less than `needed_bytes` free."""
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        raise InputError(
            f"the disk of --output_dir {str(path)!r} has {free / 2**20:.0f} MiB free, {what} about "
            f"{needed_bytes / 2**20:.0f} MiB; free some space or choose another --output_dir"
        )


@contextmanager
def atomic_directory(folder: Path):
    """Yields a scratch folder inside `folder`; on success all in it is synced and moved up, on any error it is removed.

    The move is a few renames on one disk, the weights last: whoever finds weights finds the rest of the save too.
    New files get the permissions of the umask.
    """
    scratch = folder / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for path in scratch.rglob("*"):
            sync(path)
        probe = scratch / f"{SCRATCH}-mode"  # safetensors are written readable by their owner alone
        probe.touch()
        mode = mode_of(probe)
        probe.unlink()
        for entry in sorted(scratch.iterdir(), key=weights_last):
            target = folder / entry.name
            if entry.is_file():
                entry.chmod(mode)
            elif target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
        sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def weights_last(path: Path) -> tuple[bool, str]:
    """The order in which the files of a model are moved to their place."""
    return path.suffix == ".safetensors", path.name


def mode_of(path: Path) -> int:
    """The permissions; of a new file those of the umask, or of the folder's default ACL."""
    return path.stat().st_mode & 0o777


@contextmanager
def atomic_write(path: Path):
    """Yields a path beside `path` to write to; on success it is synced and renamed, on any error removed.

    So no reader sees half of the file, and neither a kill nor a power cut leaves half of it. Two processes may write
    the same file at once, as a run and `proxsparse report` do: each has a scratch file of its own.
    """
    beside = path.with_name(f"{SCRATCH}-{secrets.token_hex(4)}-{path.name}")
    try:
        beside.touch()
        mode = mode_of(beside)  # safetensors are written readable by their owner alone
        yield beside
        beside.chmod(mode)
        sync(beside)
        os.replace(beside, path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file whole or not at all, see `atomic_write`."""
    with atomic_write(path) as beside:
        beside.write_bytes(content)


def sync(path: Path) -> None:
    """What was written to a file, or renamed in a folder, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EBADF, errno.EINVAL)):  # some disks cannot sync a folder
            raise
    finally:
        os.close(descriptor)
