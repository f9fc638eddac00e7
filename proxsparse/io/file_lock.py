"""A lock on a file that the operating system releases when the process dies."""

import errno
import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from proxsparse.errors import InputError, full_disk

LOCKLESS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def lock_directory(folder: Path, name: str, made: list[Path]) -> Iterator[None]:
    """Holds the lock of an output directory, which is created; at the end, empty directories in `made` are removed."""
    file = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = acquire(folder / name)
        yield
    except OSError as error:
        if file is not None or full_disk(error):
            raise
        remedy = "fix the permissions or choose another directory"
        raise InputError(f"--output_dir {str(folder)!r} cannot be written ({error.strerror}); {remedy}") from error
    finally:
        if file is not None:
            with suppress(OSError):
                (folder / name).unlink()
            os.close(file)
        for path in made:
            with suppress(OSError):  # not empty, or not created
                path.rmdir()


def acquire(path: Path) -> int:
    """Creates and locks the file `path` until its descriptor is closed or the process ends; returns the descriptor.

    The file names this process for the InputError that others get. A file system without locks gives a warning.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(file, 1000).decode(errors="replace").strip() or "just started"
            os.close(file)
            remedy = "wait for it, stop it, or choose another --output_dir"
            raise InputError(f"another run ({holder}) writes to {str(path.parent)!r}; {remedy}") from None
        except OSError as error:
            if error.errno not in LOCKLESS:
                os.close(file)
                raise
            where = f"the file system of {str(path.parent)!r}"
            print(f"WARNING: {where} has no file locks: make sure that no other run writes to it", file=sys.stderr)
            return file
        with suppress(FileNotFoundError):  # the previous holder may have removed the file that was just locked
            if os.path.samestat(os.fstat(file), path.stat()):
                break
        os.close(file)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(file, 0)
    with suppress(OSError):  # the first file of the run says that the disk is full
        os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}, since {since}".encode(), 0)
    return file
