"""The rule for output directories: new or empty, or that of the run that is resumed; one run at a time."""

import errno
import fcntl
import multiprocessing
import os
import socket
import time

import pytest

from proxsparse.errors import InputError, describe_error
from proxsparse.io.atomic import SCRATCH, atomic_directory, atomic_write, write_file
from proxsparse.io.output_folder import LOCK, MARKER, RESULT, opened

FORK = multiprocessing.get_context("fork")


def begin(path, settings=None, **how):
    with opened(path, "train", settings or {"seed": 1}, **how) as folder:
        return folder


RUN_1, RUN_2 = b'{"format": "proxsparse-run-1"}', b'{"format": "proxsparse-run-2"}'
DAMAGED = [b"", b"[]", b"\xff", b"{", RUN_1, RUN_2, b"[" * 100_000]
FOREIGN = ["notes.md", "config.yaml", "model.safetensors", "checkpoints", ".hidden"]
REFUSED = [  # name and content of the file in the directory, message
    *((name, b"mine", rf"is not empty \({name}\) and no run of proxsparse has written there") for name in FOREIGN),
    *((MARKER, content, "damaged, or .* so it is unknown which run wrote here; choose another") for content in DAMAGED),
]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("name", "content", "words"), REFUSED)
def test_a_directory_that_is_not_of_a_run_is_refused_and_unchanged(name, content, words, resume, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        begin(tmp_path, resume=resume)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: content}


def test_a_run_that_fails_before_it_saves_anything_leaves_nothing(tmp_path):
    def fail(path):
        with opened(path, "train", {}):
            write_file(path / "config.yaml", b"seed: 1")
            (path / "metrics.jsonl").touch()
            (path / "checkpoints").mkdir(parents=True)
            raise InputError("wrong option")

    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "new" / "run", tmp_path / "empty"):
        with pytest.raises(InputError, match="wrong option"):
            fail(path)
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("call", ["mkdir", "open", "pwrite", "replace"])
def test_a_full_disk_is_named_and_leaves_nothing(call, tmp_path, monkeypatch):
    def full(*_arguments, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    if call == "pwrite":  # a full disk accepts the next file neither
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as raised:
        begin(tmp_path / "new" / "run")
    monkeypatch.undo()
    assert describe_error(raised.value) == "the disk is full; free some space or write to another disk"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "saved",
    [RESULT, "masks.safetensors", "metrics.jsonl", "checkpoints/step-2", "checkpoints/a.0", "checkpoints/patterns"],
)
def test_a_run_that_fails_later_keeps_everything(saved, tmp_path):
    def fail():
        with opened(tmp_path / "run", "train", {}):
            (tmp_path / "run" / saved).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "run" / saved).write_text("saved")
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {MARKER, saved.partition("/")[0]}


def test_what_a_killed_process_leaves_is_removed(tmp_path):
    begin(tmp_path)
    for name in (f"{SCRATCH}-step-2", f"checkpoints/{SCRATCH}-step-4"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / f"{SCRATCH}-1234abcd-config.yaml").touch()
    begin(tmp_path, resume=True)
    assert not list(tmp_path.rglob(f"{SCRATCH}*"))
    (tmp_path / MARKER).rename(tmp_path / f"{SCRATCH}-1234abcd-{MARKER}")  # killed before the first file had its name
    (tmp_path / "checkpoints").rmdir()
    assert not begin(tmp_path, resume=True).resumed


def test_a_second_run_is_refused_until_the_first_one_dies(tmp_path):
    """Also of another host, which has the folder under another path."""
    final, link, ready = tmp_path / "run", tmp_path / "link", FORK.Event()
    link.symlink_to(final)

    def hold():
        socket.gethostname = lambda: "node-2"
        with opened(final, "train", {"seed": 1}):
            ready.set()
            time.sleep(60)

    holder = FORK.Process(target=hold, daemon=True)
    holder.start()
    assert ready.wait(30)
    words = rf"another run \(pid {holder.pid} on node-2, since 20.*\) writes to '.*'; wait for it"
    for path, how in ((final, {}), (link, {"resume": True})):
        with pytest.raises(InputError, match=words), opened(path, "prune", {}, **how):
            pass
    assert (final / MARKER).exists()  # a refused run removes nothing
    holder.kill()
    holder.join()
    assert begin(final, settings={"seed": 2}, resume=True, may_differ=["seed"]).resumed
    assert not (final / LOCK).exists()


def test_one_of_many_that_start_at_once_gets_the_directory(tmp_path):
    start, end, results = FORK.Event(), FORK.Event(), FORK.Queue()

    def contend():
        start.wait()
        try:
            with opened(tmp_path / "run", "train", {}):
                results.put("in")
                end.wait(60)
        except InputError as error:
            results.put(str(error))

    for _ in range(8):
        FORK.Process(target=contend, daemon=True).start()
    start.set()
    messages = [results.get(timeout=30) for _ in range(8)]
    end.set()
    assert messages.count("in") == 1
    assert sum("another run (" in message for message in messages) == 7


def test_without_locks_a_warning_is_printed_but_other_errors_are_raised(tmp_path, monkeypatch, capsys):
    def flock(_file, _how):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    error = errno.EIO
    with pytest.raises(InputError, match="cannot be written"), opened(tmp_path / "run", "train", {}):
        pass
    error = errno.ENOLCK
    with opened(tmp_path / "run", "train", {}):
        pass
    assert "has no file locks: make sure that no other run writes to it" in capsys.readouterr().err


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(precious)
    with pytest.raises(InputError, match="cannot be written"), opened(tmp_path / "run", "train", {}):
        pass
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_new_files_follow_the_umask(umask, tmp_path):
    tmp_path.chmod(0o777)
    before = os.umask(umask)
    try:
        with atomic_directory(tmp_path) as scratch:
            (scratch / "model.safetensors").touch(0o600)
        write_file(tmp_path / "result.json", b"{}")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {oct(0o666 & ~umask)}


def test_two_processes_write_the_same_file(tmp_path):
    """As a run and proxsparse.report on its folder do: neither removes what the other one is writing."""
    path = tmp_path / "report.md"
    with atomic_write(path) as first:
        first.write_text("first")
        write_file(path, b"second")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["report.md"]
