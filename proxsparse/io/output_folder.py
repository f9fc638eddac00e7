"""The output directory of a run: one run writes it at a time, and only files that runs have written are ever removed.

    DIR/.proxsparse.json   the marker: format, run id, command and flags of the run that writes here; written first
    DIR/.proxsparse.lock   locked by the operating system while a run writes; names the process that holds the lock
    DIR/.next/             a run that will replace an existing result works here until it is complete
    DIR/.complete/         the same run, complete: its files are being moved up

A directory without a marker must be empty, whatever the flags. In a marked directory the names that
`is_written_by_runs` lists belong to runs, and all others to the user: those are never removed or replaced.
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

from proxsparse.errors import InputError
from proxsparse.io.atomic import SCRATCH, sync, weights_last, write_file
from proxsparse.io.file_lock import lock_directory

MARKER, LOCK, NEXT, COMPLETE = ".proxsparse.json", ".proxsparse.lock", ".next", ".complete"
FORMAT, MOST_BYTES = "proxsparse-run-1", 1 << 20  # of a marker; one that a run writes has about 3,000 bytes
RESULT, METRICS, MASKS = "result.json", "metrics.jsonl", "masks.safetensors"
FINISHED_BLOCKS = "finished_blocks"  # a folder with what a stopped `proxsparse prune` continues from
# All that train, prune, pack and report write by fixed names; tokenizers are saved under the names of transformers.
FOLDERS = {FINISHED_BLOCKS, "tensorboard", "wandb"}
TOKENIZERS = {
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
}
FILES = {
    *TOKENIZERS,
    *("config.yaml", RESULT, METRICS, MASKS, "report.md", "README.md"),
    *("loss.png", "feasible_share.png", "mask_similarity.png", "norm_gap.png"),
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
}
CHECKPOINT, SHARD = re.compile(r"checkpoint-\d+"), re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# What is being written: a save, a checkpoint (an old one while it is removed), a file, a check of many processes.
SCRATCH_NAME = re.compile(re.escape(SCRATCH) + r"((-old)?-checkpoint-\d+|-[0-9a-f]{8}-.+|-sign)?")


def is_written_by_runs(name: str) -> bool:
    """Whether a file or folder of this name in a marked directory was written by a run."""
    return name in FILES or bool(SHARD.fullmatch(name)) or is_folder_of_runs(name)


def is_scratch(entry: Path) -> bool:
    """Whether this is what a run writes to before it gets its name; it outlives a killed process only."""
    return bool(SCRATCH_NAME.fullmatch(entry.name)) and not entry.is_symlink()


def is_folder_of_runs(name: str) -> bool:
    """Whether runs write a folder of this name, not a file."""
    return name in FOLDERS or bool(CHECKPOINT.fullmatch(name))


@dataclass(frozen=True)
class OutputFolder:
    """Where a run writes.

    Attributes:
        path: the directory in which the run works: `final`, or `final`/.next if that has a result already.
        final: the --output_dir.
        run_id: the id of the run, kept when it is resumed.
        begun: the run is resumed; it has written in `path` before.
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

    If the block ends in an error before the run has saved anything to resume from, what this run has written is
    removed, and the directory too if it was made here.

    Args:
        command: "train", "prune" or "pack"; only the same command can resume a run.
        settings: the flags, JSON values; a resumed run must have the same, except `may_differ`.
        overwrite: a result that is there may be replaced, once the new one is complete.
        resume: continue the run that has begun here; begin one where there is none.
        inputs: flag -> file that the run reads; none of them may be a file that a new run would replace.
    Raises:
        InputError: another run writes to the directory; it cannot be written; it holds files and no marker; it holds a
            run and neither `overwrite` nor `resume` is given; the run to resume has another command or other flags; an
            input file would be replaced.
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
            with suppress(OSError, InputError):  # the disk itself may be gone, the marker damaged
                remove_unfinished(folder)
            raise


# ---------------------------------------------------------------------------------------------- whose directory


def read_marker(path: Path) -> dict | None:
    """The marker of a directory; None if there is none. Raises InputError for one that cannot be read."""
    try:
        with (path / MARKER).open("rb") as file:
            marker = json.loads(file.read(MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        marker = error
    entries = {"format": str, "run_id": str, "command": str, "settings": dict, "others": list}
    if not isinstance(marker, dict) or not all(isinstance(marker.get(name), kind) for name, kind in entries.items()):
        raise InputError(f"{path / MARKER} is damaged, so the directory's files cannot be assigned; choose another one")
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
    """Where the run works, and whether it has begun there. Raises InputError where it may not write, see `opened`."""
    marker = read_marker(final)
    if marker is None:
        foreign = sorted(entry.name for entry in final.iterdir() if entry.name != LOCK and not is_scratch(entry))
        if foreign:
            raise InputError(
                f"--output_dir {str(final)!r} is not empty ({foreign[0]}) and no run of proxsparse has written there; "
                "choose another or an empty directory"
            )
        return OutputFolder(final, final, uuid.uuid4().hex, begun=False)
    refuse_links(final, {NEXT, COMPLETE, *FOLDERS, *FILES} - TOKENIZERS)  # not every model has all of the latter
    begun = [(path, found) for path in (final / NEXT, final) if (found := read_marker(path) if path.is_dir() else None)]
    if resume:
        differences = [difference(found, command, settings, may_differ) for _, found in begun]
        for (path, found), different in zip(begun, differences, strict=True):
            if not different:
                return OutputFolder(path, final, found["run_id"], begun=True)
        if has_progress(final) and not overwrite:
            raise InputError(
                f"--resume_from_checkpoint: the run in {str(final)!r} has {differences[-1]}; give the same, or start "
                "again: leave out --resume_from_checkpoint and add --overwrite_output_dir"
            )
    refuse_inputs(final, inputs)
    if not has_progress(final) and not has_progress(final / NEXT):  # nothing was saved: nothing is lost
        unused = [*written(final), *filter(is_own_folder, [final / NEXT])]
        names = ", ".join(path.name for path in unused)
        remove(unused, names and f"{final}: removed what a run left that had not saved anything yet: {names}")
        return OutputFolder(final, final, uuid.uuid4().hex, begun=False)
    if not overwrite:
        stopped = not is_complete(final) and marker["command"] == command != "pack"
        hint = ", or --resume_from_checkpoint last to continue the run that was stopped there" if stopped else ""
        raise InputError(
            f"--output_dir {str(final)!r} is not empty; choose another, or add --overwrite_output_dir{hint}"
        )
    if (final / NEXT).exists():
        remove([final / NEXT], f"{final / NEXT}: an unfinished run, removed")
    names = ", ".join(path.name for path in written(final))
    print(f"{final}: will be replaced when this run is complete: {names}", file=sys.stderr)
    return OutputFolder(final / NEXT, final, uuid.uuid4().hex, begun=False)


def difference(marker: dict, command: str, settings: dict, may_differ: Iterable[str]) -> str:
    """What keeps a run with these flags from continuing the marked one; "" if nothing does."""
    if marker["command"] != command:
        return f"the command proxsparse.{marker['command']} (now proxsparse.{command})"
    before, free = marker["settings"], set(may_differ)
    names = [name for name in settings if name not in free and before.get(name) != settings[name]]
    return ", ".join(f"--{name} {before.get(name)} (now {settings[name]})" for name in names)


def refuse_links(final: Path, names: Iterable[str]) -> None:
    """Raises InputError if a link, or a folder in the place of a file, has one of these names that a run has to use."""
    for path in (final / name for name in names):
        folder = path.name in (NEXT, COMPLETE) or is_folder_of_runs(path.name)
        if path.is_symlink() or (path.exists() and path.is_dir() != folder):
            raise InputError(f"{path} was not written by a run, which needs this name; move it away")


def is_own_folder(path: Path) -> bool:
    """Whether it is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def refuse_inputs(final: Path, inputs: dict[str, str]) -> None:
    """Raises InputError if a file that the run reads is one that it would replace."""
    for flag, name in inputs.items():
        try:
            inside = Path(name).resolve(strict=True).relative_to(final.resolve()).parts
        except (OSError, ValueError):  # not a file, such as "c4", or in another place
            continue
        if inside and (is_written_by_runs(inside[0]) or inside[0] in (NEXT, COMPLETE)):
            raise InputError(
                f"--{flag} {name} is a file of --output_dir {str(final)!r} that this run would replace; copy it to "
                "another place, or choose another --output_dir"
            )


def begin(folder: OutputFolder, command: str, settings: dict) -> None:
    """Marks the directory as this run's."""
    folder.path.mkdir(exist_ok=True)
    marker = read_marker(folder.path) if folder.path == folder.final else None
    since = datetime.now(UTC).isoformat(timespec="seconds")
    others = marker["others"] if marker else []
    head = {"format": FORMAT, "run_id": folder.run_id, "command": command, "since": since}
    write_marker(folder.path, head | {"settings": settings, "others": others})


def write_marker(path: Path, marker: dict) -> None:
    write_file(path / MARKER, (json.dumps(marker, indent=2) + "\n").encode())


def claim(path: Path, names: Iterable[str]) -> None:
    """Notes names outside of the fixed list, such as a copied LICENSE, which the run is about to write.

    Raises:
        InputError: the user has a file of that name there.
    """
    names = list(names)
    refuse_links(path, filter(is_written_by_runs, names))
    marker = read_marker(path)
    others = [name for name in names if not is_written_by_runs(name) and name not in marker["others"]]
    for name in others:
        if os.path.lexists(path / name):
            raise InputError(f"{path / name} was not written by this run, which has a file of that name; move it away")
    if others:
        write_marker(path, marker | {"others": [*marker["others"], *others]})


# ---------------------------------------------------------------------------------------------- what is there


def written(path: Path) -> list[Path]:
    """The entries of a marked directory that runs have written, except the marker.

    A link is the user's, as is a folder with the name of a file.
    """
    return sorted(
        entry
        for entry in (path.iterdir() if path.is_dir() else ())
        if is_written_by_runs(entry.name) and not entry.is_symlink() and entry.is_dir() == is_folder_of_runs(entry.name)
    )


def is_complete(path: Path) -> bool:
    """Whether the run there has written its result, which it does last."""
    return read_result(path).get("status") == "complete"


def read_result(path: Path) -> dict:
    """The content of result.json; {} if it is missing or not a JSON object."""
    try:
        result = json.loads((path / RESULT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


def has_progress(path: Path) -> bool:
    """Whether a directory holds a result or something to resume from."""
    return any(
        entry.suffix == ".safetensors" or entry.name == RESULT or entry.name.startswith("checkpoint-")
        for entry in (*written(path), *(path / FINISHED_BLOCKS).glob("*.safetensors"))
    )


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints of `proxsparse train`, checkpoint-STEP, the newest last."""
    return sorted((entry for entry in written(path) if entry.name.startswith("checkpoint-")), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which it was written."""
    return int(checkpoint.name.partition("-")[2])


# ---------------------------------------------------------------------------------------------- removing, replacing


def remove(paths: Iterable[Path], message: str = "") -> None:
    """Removes files and folders that runs have written. A link to a folder is not followed."""
    if message:
        print(message, file=sys.stderr)
    for path in paths:
        if path.is_dir() and not path.is_symlink():  # renamed: a kill leaves no half of it under its own name
            aside = path.rename(path.with_name(f"{SCRATCH}-{secrets.token_hex(4)}-{path.name}"))
            shutil.rmtree(aside, ignore_errors=True)  # the next run removes the rest
        else:
            path.unlink(missing_ok=True)


def remove_scratch(*paths: Path) -> None:
    """Removes what killed processes were writing."""
    folders = filter(is_own_folder, {folder for path in paths for folder in (path, path / FINISHED_BLOCKS)})
    remove([entry for folder in folders for entry in folder.iterdir() if is_scratch(entry)])


def remove_in_progress(path: Path) -> None:
    """Removes the checkpoints and finished blocks of a run that is complete."""
    remove([*checkpoints(path), path / FINISHED_BLOCKS])


def remove_unfinished(folder: OutputFolder) -> None:
    """After an error: removes what the run has written if there is nothing to resume from, not even metrics."""
    path = folder.path
    if (folder.final / COMPLETE).exists() or (path / NEXT).exists():  # results that this run has not written alone
        return
    if read_marker(path) and not has_progress(path) and not (path / METRICS).exists():
        remove(written(path))
        remove_scratch(path)
        remove([path / MARKER])
        if path != folder.final:
            path.rmdir()


def publish(folder: OutputFolder) -> None:
    """Replaces the old result by the complete new one; does nothing where the run worked in the directory itself."""
    if folder.path != folder.final:
        refuse_links(folder.final, [entry.name for entry in folder.path.iterdir() if is_written_by_runs(entry.name)])
        folder.path.rename(folder.final / COMPLETE)
        sync(folder.final)
        try:
            finish_replacement(folder.final)
        except KeyboardInterrupt:  # a few renames are left: no reason to leave them to the next run
            finish_replacement(folder.final)
            raise


def publish_waiting(path: Path, final: Path, inputs: dict[str, str]) -> None:
    """Publishes a complete run that was killed before it had replaced the old result, unless it is read now."""
    is_read = any(Path(name).resolve().is_relative_to(path.resolve()) for name in inputs.values())
    if read_marker(final) and is_own_folder(path) and is_complete(path) and not is_read:
        remove_in_progress(path)
        publish(OutputFolder(path, final, "", begun=True))


def finish_replacement(final: Path) -> None:
    """Removes the old result and moves the complete new one up; continues where a killed process has stopped.

    result.json is the first file that goes and the last that comes, and the weights come after the other files: at no
    moment does result.json stand beside other files than those of its run, or a model that can be loaded beside files
    of another one. The marker comes once the old files are gone, so that a second attempt removes nothing new.
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
            print(f"{target} is not replaced: it was not written by a run", file=sys.stderr)
            continue
        os.replace(entry, target)
    shutil.rmtree(source)
    sync(final)
