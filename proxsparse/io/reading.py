"""Detects that a run has replaced a result while it was read: the lock of a run does not exclude readers."""

from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.output_folder import COMPLETE, RESULT


def files_to_read(folder: Path) -> list[tuple[str, int, int]]:
    """Name, inode and modification time (ns) of the files of a result; [] if `folder` is not a folder.

    Raises:
        InputError: a run is replacing the result, or was killed while replacing it.
    """
    if (folder / COMPLETE).is_dir():
        raise InputError(
            f"{str(folder)!r}: a run is replacing the result, or was killed while replacing it; wait, or repeat the "
            "command of that run with --resume_from_checkpoint last"
        )
    stats = [(path.name, path.stat()) for path in folder.glob("*") if is_of_result(path.name) and path.is_file()]
    return sorted((name, stat.st_ino, stat.st_mtime_ns) for name, stat in stats)


def is_of_result(name: str) -> bool:
    return name in ("config.json", RESULT) or name.endswith(".safetensors")


def require_unchanged(folder: Path, before: list[tuple[str, int, int]]) -> None:
    """Raises InputError if a run has replaced files of `folder` since `before` was taken."""
    if (folder / COMPLETE).is_dir() or files_to_read(folder) != before:
        raise InputError(f"{str(folder)!r}: a run replaced the files while they were read; repeat the command")
