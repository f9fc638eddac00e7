"""Reading the result of a run that another run may replace meanwhile: the lock of a run does not keep readers out."""

from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.output_folder import COMPLETE, RESULT


def files_to_read(folder: Path) -> list[tuple[str, int, int]]:
    """The name, inode and time of change of the files that make a result; [] for what is not a folder.

    Raises:
        InputError: a run is replacing the result, or was killed while it did.
    """
    if (folder / COMPLETE).is_dir():
        raise InputError(
            f"{str(folder)!r}: a run is replacing the result there, or was killed while it did; wait, or repeat the "
            "command of that run with --resume_from_checkpoint last"
        )
    stats = [(path.name, path.stat()) for path in folder.glob("*") if is_of_result(path.name) and path.is_file()]
    return sorted((name, stat.st_ino, stat.st_mtime_ns) for name, stat in stats)


def is_of_result(name: str) -> bool:
    return name in ("config.json", RESULT) or name.endswith(".safetensors")


def require_unchanged(folder: Path, before: list[tuple[str, int, int]]) -> None:
    """Raises InputError if a run has replaced files of `folder` since: what was read may be of two runs."""
    if (folder / COMPLETE).is_dir() or files_to_read(folder) != before:
        raise InputError(f"{str(folder)!r}: a run has replaced the files while they were read; start again")
