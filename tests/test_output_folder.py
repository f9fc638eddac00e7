"""An output directory: whose files are removed, one run at a time, and an old result until the new one is complete."""

import contextlib
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import socket
import sys
import time

import pytest

from proxsparse.errors import InputError
from proxsparse.io import output_folder
from proxsparse.io.atomic import atomic_directory, write_file
from proxsparse.io.output_folder import COMPLETE, MARKER, NEXT, RESULT, opened

FILES = ("config.yaml", "metrics.jsonl", "model.safetensors", "masks.safetensors", "loss.png")
FOREIGN = ("notes.md", "data.jsonl", "package.json", "figure.png", "precious.safetensors", "custom.jinja", "model.h5")


def make_run(final, content="first", status="complete", **how):
    """A run that writes a result, files that only a stopped run has, and publishes."""
    with opened(final, "train", {"seed": 1}, **how) as folder:
        for name in FILES:
            (folder.path / name).write_text(content)
        (folder.path / "checkpoint-3").mkdir(exist_ok=True)
        (folder.path / RESULT).write_text(json.dumps({"status": status, "run_id": folder.run_id}))
        if status == "complete":
            output_folder.remove_in_progress(folder.path)
            output_folder.publish(folder)
    return folder


def stop(folder, error):
    """A run that writes its config and a folder, and ends with the error."""
    (folder.parent / "config.yaml").write_text("iterations: 10")
    folder.mkdir()
    raise error


def interrupt(final):
    """Another run with --overwrite_output_dir that gets Ctrl-C after its first checkpoint."""
    with pytest.raises(KeyboardInterrupt), opened(final, "train", {"seed": 2}, overwrite=True) as folder:
        stop(folder.path / "checkpoint-1", KeyboardInterrupt())
    return folder


def foreign_files(final):
    """Path -> content of files of the user with names like those of runs."""
    (final / "checkpoint-final").mkdir(parents=True)
    files = [final / name for name in (*FOREIGN, "checkpoint-final/thesis.tex")]
    for file in files:
        file.write_text(f"the user's {file.name}")
    return {file: file.read_bytes() for file in files}


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}, {"overwrite": True, "resume": True}])
@pytest.mark.parametrize("config", [None, "database: postgres\n"])
def test_a_directory_that_no_run_has_marked_must_be_empty(config, how, tmp_path):
    before = foreign_files(tmp_path)
    if config:
        (tmp_path / "config.yaml").write_text(config)
    paths = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"is not empty .* no run of proxsparse has written there; choose another"):
        make_run(tmp_path, **how)
    assert {file: file.read_bytes() for file in before} == before
    assert sorted(tmp_path.iterdir()) == paths


def test_overwriting_removes_what_runs_have_written_and_nothing_else(tmp_path, capsys):
    final = tmp_path / "run"
    make_run(final, status="interrupted")
    before = foreign_files(final)
    (final / "checkpoint-9").symlink_to(tmp_path, target_is_directory=True)
    make_run(final, "second", overwrite=True)
    assert {file: file.read_bytes() for file in before} == before
    assert (final / "checkpoint-9").is_symlink()
    assert not (final / "checkpoint-3").exists()
    assert (final / "model.safetensors").read_text() == "second"
    printed = capsys.readouterr().err
    assert "will be replaced when this run is complete: checkpoint-3, config.yaml, loss.png, masks" in printed
    assert "notes.md" not in printed


def test_the_old_result_stays_until_the_new_one_is_complete(tmp_path):
    first = make_run(tmp_path / "run")
    kept = {path.name: path.read_bytes() for path in first.final.iterdir() if path.is_file()}
    folder = interrupt(first.final)
    assert folder.path == first.final / NEXT
    assert {path.name: path.read_bytes() for path in first.final.iterdir() if path.is_file()} == kept
    with opened(first.final, "train", {"seed": 2}, resume=True) as resumed:
        assert resumed.begun
        assert (resumed.path, resumed.run_id) == (folder.path, folder.run_id)
    with opened(first.final, "train", {"seed": 1}, resume=True) as complete:
        assert complete.complete
    second = make_run(first.final, "third", overwrite=True)
    assert json.loads((first.final / RESULT).read_text())["run_id"] == second.run_id
    assert not (first.final / NEXT).exists()


@pytest.mark.parametrize("function", ["os.replace", "pathlib.Path.unlink", "proxsparse.io.output_folder.write_marker"])
@pytest.mark.parametrize("number", range(1, 8))
def test_a_kill_while_results_are_exchanged_never_mixes_two_runs(function, number, tmp_path, monkeypatch):
    """At any moment all files next to a complete result.json are of its run, and the next run finishes the exchange."""

    class Killed(BaseException):
        pass

    def contents():
        return {(final / name).read_text() for name in FILES}

    final, calls, publish = tmp_path / "run", itertools.count(1), output_folder.publish
    old = make_run(final, "old")
    (final / "notes.md").write_text("mine")
    owner, _, name = function.rpartition(".")
    owner = {"os": os, "pathlib.Path": type(final), "proxsparse.io.output_folder": output_folder}[owner]
    original = getattr(owner, name)

    def call(*arguments, **keywords):
        if next(calls) == number:
            raise Killed
        return original(*arguments, **keywords)

    def publish_and_be_killed(folder):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, call)
            publish(folder)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(output_folder, "publish", publish_and_be_killed)
        patch.setattr(output_folder, "remove_unfinished", lambda final: None)  # a killed process removes nothing
        make_run(final, "new", overwrite=True)
    result = output_folder.read_result(final)
    if result.get("status") == "complete":
        assert contents() == {"old" if result["run_id"] == old.run_id else "new"}
    with opened(final, "train", {"seed": 1}, resume=True) as folder:
        assert folder.begun
    if not (final / NEXT).exists():
        assert contents() == {"new"}
        assert output_folder.is_complete(final)
    assert not (final / COMPLETE).exists()
    assert (final / "notes.md").read_text() == "mine"


def test_a_complete_run_that_was_killed_before_it_replaced_the_old_result_replaces_it(tmp_path, monkeypatch):
    final = tmp_path / "run"
    make_run(final, "old")
    with monkeypatch.context() as patch:
        patch.setattr(output_folder, "publish", lambda folder: None)
        second = make_run(final, "second", overwrite=True)
    (final / NEXT / "checkpoint-3").mkdir()
    with pytest.raises(InputError, match="is not empty"), opened(final, "prune", {"seed": 3}):
        pass
    assert output_folder.read_result(final)["run_id"] == second.run_id
    assert (final / "model.safetensors").read_text() == "second"
    assert not (final / NEXT).exists()
    assert not (final / "checkpoint-3").exists()


def test_an_unfinished_run_is_removed_in_one_piece(tmp_path, monkeypatch):
    """A kill while it is removed leaves no half of it under its name, which `last` would continue."""
    final = tmp_path / "run"
    make_run(final)
    interrupt(final)
    with monkeypatch.context() as patch:
        patch.setattr(output_folder.shutil, "rmtree", lambda path, **_how: sys.exit())
        with pytest.raises(SystemExit), opened(final, "train", {"seed": 3}, overwrite=True):
            pass
    assert not (final / NEXT).exists()
    make_run(final, "third", overwrite=True)
    assert not list(final.glob(".incomplete*"))


def test_an_input_file_is_never_replaced(tmp_path):
    final = tmp_path / "run"
    make_run(final)
    (final / "my.jsonl").write_text("{}")
    link = tmp_path / "link"
    link.symlink_to(final / "masks.safetensors")
    for name in (final / "masks.safetensors", final / "metrics.jsonl", link):
        with pytest.raises(InputError, match=r"--data .* is a file of --output_dir .* that this run would replace"):
            make_run(final, overwrite=True, inputs={"data": str(name)})
    inputs = {"data": str(final / "my.jsonl"), "eval_data": "c4"}
    make_run(final, overwrite=True, inputs=inputs)
    assert (final / "my.jsonl").read_text() == "{}"


def test_a_resumed_run_has_the_same_command_and_flags(tmp_path):
    final = tmp_path / "run"
    with opened(final, "prune", {"seed": 1, "device": "cpu"}) as folder:
        (folder.path / "finished_blocks").mkdir()
        (folder.path / "finished_blocks" / "model.layers.0.safetensors").touch()
    for command, settings, words in (
        ("train", {"seed": 1}, r"the command proxsparse\.prune \(now proxsparse\.train\)"),
        ("prune", {"seed": 2}, r"--seed 1 \(now 2\)"),
    ):
        with pytest.raises(InputError, match=words), opened(final, command, settings, resume=True):
            pass
    assert (final / "finished_blocks" / "model.layers.0.safetensors").exists()
    with opened(final, "prune", {"seed": 1, "device": "cuda"}, resume=True, may_differ=("device",)) as same:
        assert same.run_id == folder.run_id


def test_a_run_that_failed_before_its_first_result_blocks_nothing(tmp_path):
    final = tmp_path / "a" / "run"
    with pytest.raises(InputError, match="wrong option"), opened(final, "prune", {"iterations": 10}) as folder:
        stop(folder.path / "finished_blocks", InputError("wrong option"))  # as a method does
    assert not (tmp_path / "a").exists()
    with opened(final, "prune", {"iterations": 10}) as folder:  # as after a kill -9
        (folder.path / "config.yaml").write_text("iterations: 10")
        (folder.path / "metrics.jsonl").write_text("{}")
    (final / "notes.md").write_text("mine")
    for resume, iterations in ((False, 20), (True, 30)):
        with opened(final, "prune", {"iterations": iterations}, resume=resume) as folder:
            assert not folder.begun
            assert not (final / "metrics.jsonl").exists()
    assert (final / "notes.md").read_text() == "mine"


def test_other_names_are_noted_before_they_are_written(tmp_path):
    with opened(tmp_path / "run", "pack", {}) as folder:
        output_folder.claim(folder.path, ["LICENSE", "model.safetensors"])
        (folder.path / "LICENSE").write_text("theirs")
        (folder.path / "NOTICE").write_text("the user's")
        output_folder.claim(folder.path, ["LICENSE"])
        with pytest.raises(InputError, match="NOTICE: not written by this run"):
            output_folder.claim(folder.path, ["NOTICE"])
    assert json.loads((tmp_path / "run" / MARKER).read_text())["others"] == ["LICENSE"]


FORK = multiprocessing.get_context("fork")


def test_a_second_run_is_refused_until_the_first_one_dies(tmp_path):
    final, ready = tmp_path / "run", FORK.Event()

    def hold():
        with opened(final, "train", {"seed": 1}):
            ready.set()
            time.sleep(60)

    holder = FORK.Process(target=hold, daemon=True)
    holder.start()
    assert ready.wait(30)
    words = rf"another run \(pid {holder.pid} on {socket.gethostname()}, since 20.*\) writes to '.*run'; wait for it"
    for how in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match=words), opened(final, "prune", {}, **how):
            pass
    assert (final / MARKER).exists()  # a refused run removes nothing
    holder.kill()
    holder.join()
    with opened(final, "train", {"seed": 1}, resume=True) as folder:
        assert folder.begun
    assert not (final / output_folder.LOCK).exists()


def test_one_of_many_that_start_at_once_gets_the_directory(tmp_path):
    start, results = FORK.Event(), FORK.Queue()

    def contend():
        start.wait()
        try:
            with opened(tmp_path / "run", "train", {}):
                results.put("in")
                time.sleep(1)
        except InputError as error:
            results.put(str(error))

    for _ in range(8):
        FORK.Process(target=contend, daemon=True).start()
    start.set()
    messages = [results.get(timeout=30) for _ in range(8)]
    assert messages.count("in") == 1
    assert sum("another run (" in message for message in messages) == 7


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_without_locks_a_warning_is_printed(code, tmp_path, monkeypatch, capsys):
    def flock(_file, _how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    make_run(tmp_path / "run")
    assert "has no file locks: make sure that no other run writes to it" in capsys.readouterr().err


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / output_folder.LOCK).symlink_to(precious)
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
