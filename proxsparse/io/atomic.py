"""Atomic writes: a file or folder is written completely or not at all."""

import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.model_files import CHAT_TEMPLATES, is_inside

SCRATCH = ".incomplete"  # name prefix of files that are being written; only a killed process leaves such files


def copy_files(source: Path, target: Path, exclude: Iterable[str], keep: Iterable[str] = ()) -> None:
    """Copies the files and chat templates of a folder; not hidden ones, nor those that match `exclude` but not `keep`.

    A link that points outside the folder, see `is_inside`, is skipped with a message: an untrusted folder must not
    decide which files of this machine are copied.
    """
    for path in sorted([*source.iterdir(), *source.glob(CHAT_TEMPLATES)]):
        wanted = any(map(path.match, keep)) or not any(map(path.match, exclude))
        if not wanted or not path.is_file() or path.name.startswith("."):
            continue
        if is_inside(path, source):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        else:
            print(f"not copied: {path.name}, a link to a file outside {str(source)!r}", file=sys.stderr)


def require_space(path: Path, needed_bytes: int, what: str = "the result needs") -> None:
    """Raises InputError if the disk has less than `needed_bytes` free."""
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        short = f"has {free / 2**20:.0f} MiB free, but {what} about {needed_bytes / 2**20:.0f} MiB"
        remedy = "free some space or write to another disk"
        raise InputError(f"the disk of --output_dir {str(path)!r} {short}; {remedy}")


@contextmanager
def atomic_directory(folder: Path):
    """Yields a scratch folder inside `folder`. On success its files are synced and moved to `folder`; on error removed.

    The weights are moved last: a reader that finds weights finds the other files too.
    """
    scratch = folder / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for path in scratch.rglob("*"):
            sync(path)
        mode = scratch.stat().st_mode & 0o666  # of the umask; safetensors writes files that only their owner can read
        for entry in sorted(scratch.iterdir(), key=lambda entry: (entry.suffix == ".safetensors", entry.name)):
            target = folder / entry.name
            if entry.is_file():
                entry.chmod(mode)
            elif target.is_dir():
                shutil.rmtree(target)
            os.replace(entry, target)
        sync(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder. It is renamed first: a killed process leaves no partial one."""
    aside = folder.rename(folder.with_name(f"{SCRATCH}-{secrets.token_hex(4)}"))
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def atomic_write(path: Path):
    """Yields a temporary path in the same folder. On success the file is synced and renamed, on error removed.

    A reader never sees a partial file, even after a kill or a power failure. Two processes, such as a run and
    `proxsparse report`, may write the same file at the same time.
    """
    temporary = path.with_name(f"{SCRATCH}-{secrets.token_hex(4)}-{path.name}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # as in `atomic_directory`
        yield temporary
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Writes a small file atomically, see `atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in (errno.EBADF, errno.EINVAL)):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
