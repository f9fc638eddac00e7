"""The output directory of a run. One run writes to it at a time, and only files that runs have written are removed.

    DIR/.proxsparse.json   the marker: format, run id, command and flags of the run that writes here; written first
    DIR/.proxsparse.lock   locked by the operating system while a run writes; names the process that holds the lock
    DIR/.next/             a run that will replace an existing result works here until it is complete
    DIR/.complete/         the same run after it is complete, while its files are moved to DIR

A directory without a marker must be empty, whatever the flags. In a marked directory the names that
`is_written_by_runs` accepts belong to runs. All other files belong to the user and are never removed or replaced.
"""

import json
import os
import re
import secrets
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from proxsparse.errors import InputError, different_flags
from proxsparse.io.atomic import SCRATCH, sync, weights_last, write_file
from proxsparse.io.file_lock import lock_directory

MARKER, LOCK, NEXT, COMPLETE = ".proxsparse.json", ".proxsparse.lock", ".next", ".complete"
FORMAT, MOST_BYTES = "proxsparse-run-1", 1 << 20  # limit for a marker; a run writes about 3,000 bytes
RESULT, METRICS, MASKS = "result.json", "metrics.jsonl", "masks.safetensors"
FINISHED_BLOCKS = "finished_blocks"  # a folder from which an interrupted `proxsparse prune` resumes
# The fixed names that the commands write. Tokenizers are saved under the names of transformers.
FOLDERS = {FINISHED_BLOCKS, "tensorboard", "wandb"}
TOKENIZERS = {
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
}
FILES = {
    *TOKENIZERS,
    *("config.yaml", RESULT, METRICS, MASKS, "report.md", "README.md"),
    *("loss.png", "held_out_loss.png", "feasible_share.png", "mask_similarity.png", "norm_gap.png"),
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
}
CHECKPOINT, SHARD = re.compile(r"checkpoint-\d+"), re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# Temporary names: a save, a checkpoint (or an old one that is being removed), a file, the check for a shared directory.
SCRATCH_NAME = re.compile(re.escape(SCRATCH) + r"((-old)?-checkpoint-\d+|-[0-9a-f]{8}-.+|-sign)?")


def is_written_by_runs(name: str) -> bool:
    """Whether a file or folder with this name in a marked directory belongs to a run."""
    return name in FILES or bool(SHARD.fullmatch(name)) or is_folder_of_runs(name)


def is_scratch(entry: Path) -> bool:
    """Whether this is a temporary file or folder of a run; only a killed process leaves one."""
    return bool(SCRATCH_NAME.fullmatch(entry.name)) and not entry.is_symlink()


def is_folder_of_runs(name: str) -> bool:
    """Whether runs write a folder with this name, not a file."""
    return name in FOLDERS or bool(CHECKPOINT.fullmatch(name))


@dataclass(frozen=True)
class OutputFolder:
    """Where a run writes.

    Attributes:
        path: the directory in which the run works: `final`, or `final`/.next if `final` already has a result.
        final: the --output_dir.
        run_id: the id of the run, unchanged when the run is resumed.
        begun: whether the run is resumed.
    """

    path: Path
    final: Path
    run_id: str
    begun: bool

    @property
    def complete(self) -> bool:
        """Whether the resumed run has nothing left to do."""
        return self.begun and is_complete(self.path)


@contextmanager
def opened(
    final: Path,
    command: str,
    settings: dict,
    *,
    overwrite: bool = False,
    resume: bool = False,
    may_differ: Iterable[str] = (),
    inputs: dict[str, str] | None = None,
) -> Iterator[OutputFolder]:
    """Locks, checks and marks an output directory for one run, and unlocks it afterwards.

    If the block ends in an error before the run has saved anything to resume from, the files of this run are removed,
    and the directory too if it was created here.

    Args:
        command: such as "train"; only the same command can resume a run.
        settings: the flags as JSON values; a resumed run must have the same, except those in `may_differ`.
        overwrite: an existing result may be replaced when the new one is complete.
        resume: continue the run in this directory, or start one if there is none.
        inputs: flag -> file that the run reads; none of them may be a file that a new run would replace.
    Raises:
        InputError: another run writes to the directory; the directory is not writable; it contains files but no marker;
            it contains a run and neither `overwrite` nor `resume` is given; the run to resume has another command or
            other flags; an input file would be replaced.
    """
    if final.exists() and not final.is_dir():
        raise InputError(f"--output_dir {str(final)!r} is a file; give a directory")
    made = [path for path in (final, *final.parents) if not path.exists()]
    with lock_directory(final, LOCK, made):
        finish_replacement(final)
        publish_waiting(final / NEXT, final, inputs or {})
        folder = choose_directory(final, command, settings, overwrite, resume, may_differ, inputs or {})
        if not folder.begun:
            begin(folder, command, settings)
        remove_scratch(final, folder.path)
        try:
            yield folder
        except BaseException:
            with suppress(OSError, InputError):  # the disk may be unavailable, or the marker damaged
                remove_unfinished(folder)
            raise


# ---------------------------------------------------------------------------------------------- choosing the directory


def read_marker(path: Path) -> dict | None:
    """The marker of a directory; None if there is none. Raises InputError for a damaged marker."""
    try:
        with (path / MARKER).open("rb") as file:
            marker = json.loads(file.read(MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        marker = error
    entries = {"format": str, "run_id": str, "command": str, "settings": dict, "others": list}
    if not isinstance(marker, dict) or not all(isinstance(marker.get(name), kind) for name, kind in entries.items()):
        raise InputError(f"{path / MARKER}: damaged, so it is unknown which files runs wrote; choose another directory")
    return marker


def choose_directory(
    final: Path,
    command: str,
    settings: dict,
    overwrite: bool,
    resume: bool,
    may_differ: Iterable[str],
    inputs: dict[str, str],
) -> OutputFolder:
    """Where the run works, and whether it is resumed. Raises InputError if it may not write there, see `opened`."""
    marker = read_marker(final)
    if marker is None:
        foreign = sorted(entry.name for entry in final.iterdir() if entry.name != LOCK and not is_scratch(entry))
        if foreign:
            raise InputError(
                f"--output_dir {str(final)!r} is not empty ({foreign[0]}) and no run of proxsparse has written there; "
                "choose another directory"
            )
        return OutputFolder(final, final, uuid.uuid4().hex, begun=False)
    refuse_links(final, {NEXT, COMPLETE, *FOLDERS, *FILES} - TOKENIZERS)  # no model has all tokenizer files
    begun = [(path, found) for path in (final / NEXT, final) if (found := read_marker(path) if path.is_dir() else None)]
    if resume:
        differences = [difference(found, command, settings, may_differ) for _, found in begun]
        for (path, found), different in zip(begun, differences, strict=True):
            if not different:
                return OutputFolder(path, final, found["run_id"], begun=True)
        if has_progress(final) and not overwrite:
            raise InputError(
                f"--resume_from_checkpoint: the run in {str(final)!r} has {differences[-1]}; give the same flags, or "
                "start again with --overwrite_output_dir and without --resume_from_checkpoint"
            )
    refuse_inputs(final, inputs)
    if not has_progress(final) and not has_progress(final / NEXT):  # no results to lose
        unused = [*written(final), *filter(is_own_folder, [final / NEXT])]
        names = ", ".join(path.name for path in unused)
        remove(unused, names and f"{final}: removed the files of a run that stopped before its first save: {names}")
        return OutputFolder(final, final, uuid.uuid4().hex, begun=False)
    if not overwrite:
        stopped = not is_complete(final) and marker["command"] == command not in ("pack", "apply")
        hint = ", or --resume_from_checkpoint last to continue the interrupted run" if stopped else ""
        raise InputError(
            f"--output_dir {str(final)!r} is not empty; choose another, or add --overwrite_output_dir{hint}"
        )
    if (final / NEXT).exists():
        remove([final / NEXT], f"{final / NEXT}: removed (an unfinished run)")
    names = ", ".join(path.name for path in written(final))
    print(f"{final}: these files will be replaced when this run is complete: {names}", file=sys.stderr)
    return OutputFolder(final / NEXT, final, uuid.uuid4().hex, begun=False)


def difference(marker: dict, command: str, settings: dict, may_differ: Iterable[str]) -> str:
    """The differences because of which a run with these flags cannot resume the marked run; "" if there are none."""
    if marker["command"] != command:
        return f"the command proxsparse.{marker['command']} (now proxsparse.{command})"
    return different_flags(marker["settings"], settings, set(may_differ))


def refuse_links(final: Path, names: Iterable[str]) -> None:
    """Raises InputError if one of these names is a link, a folder instead of a file, or a file instead of a folder."""
    for path in (final / name for name in names):
        folder = path.name in (NEXT, COMPLETE) or is_folder_of_runs(path.name)
        if path.is_symlink() or (path.exists() and path.is_dir() != folder):
            raise InputError(f"{path}: not written by a run, but the run needs this name; move it away")


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder, not a link to a folder."""
    return path.is_dir() and not path.is_symlink()


def refuse_inputs(final: Path, inputs: dict[str, str]) -> None:
    """Raises InputError if the run would replace a file that it reads."""
    for flag, name in inputs.items():
        try:
            inside = Path(name).resolve(strict=True).relative_to(final.resolve()).parts
        except (OSError, ValueError):  # not a file, such as "c4", or outside `final`
            continue
        if inside and (is_written_by_runs(inside[0]) or inside[0] in (NEXT, COMPLETE)):
            raise InputError(
                f"--{flag} {name} is a file of --output_dir {str(final)!r} that this run would replace; copy it to "
                "another place, or choose another --output_dir"
            )


def begin(folder: OutputFolder, command: str, settings: dict) -> None:
    """Writes the marker of this run."""
    folder.path.mkdir(exist_ok=True)
    marker = read_marker(folder.path) if folder.path == folder.final else None
    since = datetime.now(UTC).isoformat(timespec="seconds")
    others = marker["others"] if marker else []
    head = {"format": FORMAT, "run_id": folder.run_id, "command": command, "since": since}
    write_marker(folder.path, head | {"settings": settings, "others": others})


def write_marker(path: Path, marker: dict) -> None:
    write_file(path / MARKER, (json.dumps(marker, indent=2) + "\n").encode())


def claim(path: Path, names: Iterable[str]) -> None:
    """Records names that are not in the fixed list, such as a copied LICENSE, before the run writes them.

    Raises:
        InputError: the user has a file with that name in the directory.
    """
    names = list(names)
    refuse_links(path, filter(is_written_by_runs, names))
    marker = read_marker(path)
    others = [name for name in names if not is_written_by_runs(name) and name not in marker["others"]]
    for name in others:
        if os.path.lexists(path / name):
            raise InputError(f"{path / name}: not written by this run, but the run needs this name; move it away")
    if others:
        write_marker(path, marker | {"others": [*marker["others"], *others]})


# ---------------------------------------------------------------------------------------------- existing files


def written(path: Path) -> list[Path]:
    """The entries of a marked directory that runs have written, except the marker.

    A link belongs to the user, and so does a folder with the name of a file.
    """
    return sorted(
        entry
        for entry in (path.iterdir() if path.is_dir() else ())
        if is_written_by_runs(entry.name) and not entry.is_symlink() and entry.is_dir() == is_folder_of_runs(entry.name)
    )


def is_complete(path: Path) -> bool:
    """Whether the run has written result.json, its last file, with status "complete"."""
    return read_result(path).get("status") == "complete"


def read_result(path: Path) -> dict:
    """The content of result.json; {} if it is missing or not a JSON object."""
    try:
        result = json.loads((path / RESULT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def has_progress(path: Path) -> bool:
    """Whether a directory contains a result, or files to resume from."""
    return any(
        entry.suffix == ".safetensors" or entry.name == RESULT or entry.name.startswith("checkpoint-")
        for entry in (*written(path), *(path / FINISHED_BLOCKS).glob("*.safetensors"))
    )


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints checkpoint-STEP of `proxsparse train`, sorted by step."""
    return sorted((entry for entry in written(path) if entry.name.startswith("checkpoint-")), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The training step of a checkpoint."""
    return int(checkpoint.name.partition("-")[2])


# ---------------------------------------------------------------------------------------------- removing, replacing


def remove(paths: Iterable[Path], message: str = "") -> None:
    """Removes files and folders that runs have written. Links to folders are not followed."""
    if message:
        print(message, file=sys.stderr)
    for path in paths:
        if path.is_dir() and not path.is_symlink():  # renamed first: a kill must not leave a partial folder
            aside = path.rename(path.with_name(f"{SCRATCH}-{secrets.token_hex(4)}-{path.name}"))
            shutil.rmtree(aside, ignore_errors=True)  # the next run removes the rest
        else:
            path.unlink(missing_ok=True)


def remove_scratch(*paths: Path) -> None:
    """Removes the temporary files of killed processes."""
    folders = filter(is_own_folder, {folder for path in paths for folder in (path, path / FINISHED_BLOCKS)})
    remove([entry for folder in folders for entry in folder.iterdir() if is_scratch(entry)])


def remove_in_progress(path: Path) -> None:
    """Removes the checkpoints and finished blocks of a complete run."""
    remove([*checkpoints(path), path / FINISHED_BLOCKS])


def remove_unfinished(folder: OutputFolder) -> None:
    """After an error: removes the files of the run if there is nothing to resume from and no metrics."""
    path = folder.path
    if (folder.final / COMPLETE).exists() or (path / NEXT).exists():  # contains results of other runs
        return
    if read_marker(path) and not has_progress(path) and not (path / METRICS).exists():
        remove(written(path))
        remove_scratch(path)
        remove([path / MARKER])
        if path != folder.final:
            path.rmdir()


def publish(folder: OutputFolder) -> None:
    """Replaces the old result with the new one. Does nothing if the run worked in the final directory."""
    if folder.path != folder.final:
        refuse_links(folder.final, [entry.name for entry in folder.path.iterdir() if is_written_by_runs(entry.name)])
        folder.path.rename(folder.final / COMPLETE)
        sync(folder.final)
        try:
            finish_replacement(folder.final)
        except KeyboardInterrupt:  # only a few renames are left
            finish_replacement(folder.final)
            raise


def publish_waiting(path: Path, final: Path, inputs: dict[str, str]) -> None:
    """Publishes a complete run that was killed before it replaced the old result, unless this run reads its files."""
    is_read = any(Path(name).resolve().is_relative_to(path.resolve()) for name in inputs.values())
    if read_marker(final) and is_own_folder(path) and is_complete(path) and not is_read:
        remove_in_progress(path)
        publish(OutputFolder(path, final, "", begun=True))


def finish_replacement(final: Path) -> None:
    """Removes the old result and moves the new one to `final`; continues the work of a killed process.

    The old result.json is removed first; the new one is moved last, after the weights. So result.json never describes
    files of another run, and loadable weights are never next to the files of another model. The marker is moved after
    the old files are removed, so a second attempt does not remove new files.
    """
    source = final / COMPLETE
    if not is_own_folder(source) or read_marker(final) is None:
        return
    if (new := read_marker(source)) is not None:
        (final / RESULT).unlink(missing_ok=True)
        remove(written(final))
        old = read_marker(final)
        write_marker(source, new | {"others": sorted({*new["others"], *(old["others"] if old else [])})})
        os.replace(source / MARKER, final / MARKER)
    others = read_marker(final)["others"]
    for entry in sorted(source.iterdir(), key=lambda entry: (entry.name == RESULT, weights_last(entry))):
        target = final / entry.name
        if entry.name == RESULT:
            sync(final)
        if not is_written_by_runs(entry.name) and os.path.lexists(target) and entry.name not in others:
            print(f"{target}: not replaced, because it was not written by a run", file=sys.stderr)
            continue
        os.replace(entry, target)
    shutil.rmtree(source)
    sync(final)
