"""The output directory of a run. A run writes to a new or empty directory, or resumes the run that wrote to it.

DIR/.proxsparse.json   the marker: id, command and flags of the run; written first
DIR/.proxsparse.lock   locked by the operating system while the run writes; names the process that holds the lock
DIR/checkpoints/       what an interrupted run resumes from, see `checkpoints`; a complete run removes it
DIR/result.json        written last
"""

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from proxsparse.errors import InputError, different_flags
from proxsparse.io.atomic import SCRATCH, remove_folder, write_file
from proxsparse.io.checkpoints import CHECKPOINTS, saved_names
from proxsparse.io.file_lock import lock_directory

MARKER, LOCK = ".proxsparse.json", ".proxsparse.lock"
FORMAT = "proxsparse-run-2"  # of the marker
RESULT, METRICS, MASKS, CONFIG = "result.json", "metrics.jsonl", "masks.safetensors", "config.yaml"


@dataclass(frozen=True)
class OutputFolder:
    """Where a run writes."""

    path: Path  # the --output_dir
    run_id: str  # unchanged when the run is resumed
    resumed: bool  # whether the run was started before

    @property
    def complete(self) -> bool:
        """Whether the resumed run has nothing left to do."""
        return self.resumed and read_result(self.path).get("status") == "complete"


@contextmanager
def opened(
    path: Path, command: str, settings: dict, *, resume: bool = False, may_differ: Iterable[str] = ()
) -> Iterator[OutputFolder]:
    """Locks, checks and marks the output directory of a run, and unlocks it afterwards.

    If the block ends in an error before the run has saved anything, the files of the run are removed, and the directory
    too if it was created here.

    Args:
        command: such as "train"; only the same command can resume a run.
        settings: the flags as JSON values; a resumed run must have the same, except those in `may_differ`.
        resume: continue the run in this directory, or start one if the directory is empty.
    Raises:
        InputError: another run writes to the directory; it is not writable; as `check_owner`.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"--output_dir {str(path)!r} is a file; give a directory")
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with lock_directory(path, LOCK, made):
        marker = check_owner(path, command, settings, resume, may_differ)
        for folder in (path, path / CHECKPOINTS):  # what a killed process has left
            for entry in folder.glob(f"{SCRATCH}*"):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        folder = OutputFolder(path, marker["run_id"] if marker else uuid.uuid4().hex, resumed=bool(marker))
        if not folder.resumed:
            since = datetime.now(UTC).isoformat(timespec="seconds")
            entries = {"run_id": folder.run_id, "command": command, "since": since, "settings": settings}
            write_file(path / MARKER, (json.dumps({"format": FORMAT} | entries, indent=2) + "\n").encode())
        try:
            yield folder
        except BaseException:
            with suppress(OSError):  # the disk may be unavailable
                remove_unsaved(path)
            raise


def check_owner(path: Path, command: str, settings: dict, resume: bool, may_differ: Iterable[str]) -> dict | None:
    """The marker of the run to resume, or None for a new run.

    Raises InputError if the directory is not empty and `resume` is False, or no run has written to it; or if the run to
    resume has another command or other flags.
    """
    marker, where = read_marker(path), f"--output_dir {str(path)!r} is not empty"
    if marker is None:
        foreign = [entry.name for entry in path.iterdir() if not entry.name.startswith((LOCK, SCRATCH))]
        if foreign:
            reason = "no run of proxsparse has written there"
            raise InputError(f"{where} ({min(foreign)}) and {reason}; choose another directory")
        return None
    if not resume:
        complete = read_result(path).get("status") == "complete" or marker["command"] in ("pack", "apply")
        hint = "" if complete else "; to continue the run in it, add --resume_from_checkpoint last"
        raise InputError(f"{where}; choose another, or delete it{hint}")
    different = different_flags(marker["settings"], settings, set(may_differ))
    if marker["command"] != command:
        different = f"the command proxsparse {marker['command']} (now {command})"
    if different:
        remedy = "give the same, or choose another --output_dir"
        raise InputError(f"--resume_from_checkpoint: the run in {str(path)!r} has {different}; {remedy}")
    return marker


def read_marker(path: Path) -> dict | None:
    """The marker of a directory; None if there is none. Raises InputError for a damaged marker."""
    if not (path / MARKER).exists():
        return None
    marker, entries = read_object(path / MARKER), {"run_id": str, "command": str, "settings": dict}
    if marker.get("format") != FORMAT or not all(isinstance(marker.get(key), kind) for key, kind in entries.items()):
        reason = "damaged, or written by another version of proxsparse"
        raise InputError(f"{path / MARKER}: {reason}, so it is unknown which run wrote here; choose another directory")
    return marker


def read_result(path: Path) -> dict:
    """The content of result.json; {} if it is missing or not a JSON object."""
    return read_object(path / RESULT)


def read_object(file: Path) -> dict:
    """The JSON object in a file; {} if there is none."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def remove_unsaved(path: Path) -> None:
    """After an error: removes the files of a run that has saved nothing to resume from and has no metrics."""
    has_metrics = (path / METRICS).exists() and (path / METRICS).stat().st_size > 0
    if has_metrics or any((path / name).exists() for name in (RESULT, MASKS)) or saved_names(path):
        return
    shutil.rmtree(path / CHECKPOINTS, ignore_errors=True)
    for name in (METRICS, CONFIG, MARKER):
        (path / name).unlink(missing_ok=True)


def remove_checkpoints(path: Path) -> None:
    """Removes the checkpoints of a complete run."""
    if (path / CHECKPOINTS).exists():
        remove_folder(path / CHECKPOINTS)
