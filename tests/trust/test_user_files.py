"""What every command trusts, replaces and removes, one case each: the rows of the table in docs/training.md."""

import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from proxsparse import evaluate, pack, report
from proxsparse.errors import InputError
from proxsparse.io import output_folder
from proxsparse.io.atomic import SCRATCH, atomic_write, write_file
from proxsparse.io.mask_files import save_masks
from proxsparse.io.output_folder import COMPLETE, FINISHED_BLOCKS, MARKER, NEXT, RESULT, opened
from proxsparse.io.reading import files_to_read, require_unchanged
from proxsparse.run import folder

NAMES = ("README.md", "config.json", "config.yaml", "masks.safetensors", "metrics.jsonl", "model.safetensors")


def fill(run, content, names=NAMES):
    """Writes a complete result into an opened folder."""
    for name in names:
        (run.path / name).write_text(content)
    (run.path / RESULT).write_text(json.dumps({"status": "complete", "run_id": run.run_id}))


def save_run(final, content, **how):
    with opened(final, "train", {"seed": 1}, **how) as run:
        fill(run, content)
        output_folder.publish(run)
    return run


def assert_holds(final, content):
    assert {(final / name).read_text() for name in NAMES} == {content}


# ---------------------------------------------------------------------------------------------- replacing


@pytest.mark.parametrize("number", [2, 5, 9])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"])
def test_an_error_while_a_result_is_moved_removes_none_of_its_files(error, number, tmp_path, monkeypatch):
    final, calls, replace = tmp_path / "run", [], os.replace
    save_run(final, "old")

    def replace_once(source, target):
        if (final / COMPLETE).exists():
            calls.append(source)
            if len(calls) == number:
                raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_once)
    with pytest.raises(type(error)):
        save_run(final, "new", overwrite=True)
    monkeypatch.setattr(os, "replace", replace)
    if isinstance(error, KeyboardInterrupt):  # the remaining renames are still done
        assert not (final / COMPLETE).exists()
    with opened(final, "train", {"seed": 1}, resume=True) as run:
        assert run.complete
    assert_holds(final, "new")


def test_a_folder_that_no_run_has_marked_is_not_cleaned(tmp_path):
    save_run(tmp_path / "run", "old")
    project = tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("mine")
    shutil.copytree(tmp_path / "run", project / COMPLETE)
    with pytest.raises(InputError, match="no run of proxsparse has written there"):
        save_run(project, "new", overwrite=True)
    assert (project / "README.md").read_text() == "mine"
    assert (project / COMPLETE / "model.safetensors").exists()


@pytest.mark.parametrize("name", [NEXT, COMPLETE, "config.yaml", "model.safetensors", "tensorboard"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_link_in_place_of_a_runs_file_is_refused(name, resume, tmp_path):
    final, mine = tmp_path / "run", tmp_path / "mine"
    run = save_run(final, "old")
    shutil.copytree(final, mine)
    (final / name).unlink(missing_ok=True)
    (final / name).symlink_to(mine, target_is_directory=True)
    with pytest.raises(InputError, match=rf"{name}: not written by a run, but the run needs this name; move it away"):
        save_run(final, "new", overwrite=True, resume=resume)
    assert_holds(mine, "old")
    assert output_folder.read_result(mine)["run_id"] == run.run_id


def test_a_folder_that_gets_in_the_way_during_the_run_costs_nothing(tmp_path):
    final = tmp_path / "run"
    save_run(final, "old")
    with opened(final, "train", {"seed": 2}, overwrite=True) as run:
        fill(run, "new", (*NAMES, "tokenizer.json"))
        (final / "tokenizer.json").mkdir()
        with pytest.raises(InputError, match=r"tokenizer\.json: not written by a run"):
            output_folder.publish(run)
    assert_holds(final, "old")
    (final / "tokenizer.json").rmdir()
    with opened(final, "train", {"seed": 2}, resume=True) as run:
        assert run.complete
        output_folder.publish(run)
    assert_holds(final, "new")


def test_only_scratch_files_of_runs_are_removed(tmp_path):
    final = tmp_path / "run"
    save_run(final, "old")
    mine = (".incomplete-thesis", ".incomplete-checkpoint-old", ".incompletely")
    theirs = (SCRATCH, f"{SCRATCH}-01234567-result.json", f"{SCRATCH}-checkpoint-12", f"{SCRATCH}-old-checkpoint-3")
    (final / FINISHED_BLOCKS).mkdir()
    for path in (*(final / name for name in (*mine, *theirs)), final / FINISHED_BLOCKS / theirs[1]):
        path.write_text("half")
    with opened(final, "train", {"seed": 2}, overwrite=True):  # which works in .next
        assert sorted(path.name for path in final.glob(".incomplete*")) == sorted(mine)
        assert not list((final / FINISHED_BLOCKS).iterdir())


def test_an_input_among_the_files_to_replace_is_refused(tmp_path):
    final = tmp_path / "run"
    with opened(final, "train", {"seed": 1}) as run:  # killed before it has saved anything
        (run.path / "config.yaml").write_text("seed: 1")
    with pytest.raises(InputError, match=r"--config .*config\.yaml is a file of --output_dir"):
        save_run(final, "new", inputs={"config": str(final / "config.yaml")})
    assert (final / "config.yaml").read_text() == "seed: 1"


def test_a_run_that_waits_to_replace_a_result_is_not_forgotten(tmp_path):
    """The user removes the old result; the run in .next has a checkpoint, so that no other run may start."""
    final = tmp_path / "run"
    save_run(final, "old")
    with opened(final, "train", {"seed": 2}, overwrite=True) as run:
        (run.path / "checkpoint-3").mkdir()
    for name in (*NAMES, RESULT):
        (final / name).unlink()
    with pytest.raises(InputError, match="is not empty"):
        save_run(final, "new")
    with opened(final, "train", {"seed": 2}, resume=True) as run:
        assert run.begun
        (run.path / "checkpoint-3").rmdir()
    save_run(final, "new")
    assert not (final / NEXT).exists()


def test_pack_does_not_replace_the_model_that_it_reads(tmp_path, monkeypatch):
    final = tmp_path / "run"
    save_run(final, "old")
    shutil.copytree(final, final / NEXT)
    for module, name, value in (
        *((pack, "headers", {}), (pack, "skeleton", None), (pack, "file_bytes", 0), (pack, "weight_files", [])),
        *((pack, "check_folder", None), (pack.disk, "read_packed_config", {})),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)
    with pytest.raises(InputError, match=r"\.next is a file of --output_dir .* that this run would replace"):
        pack.main([str(final / NEXT), "--output_dir", str(final), "--overwrite_output_dir"])
    assert_holds(final / NEXT, "old")


def test_a_resumed_run_has_no_result_until_it_ends(tmp_path):
    (tmp_path / RESULT).write_text('{"status": "interrupted"}')
    folder.start_run(tmp_path, SimpleNamespace(seed=1))
    assert not (tmp_path / RESULT).exists()


# ---------------------------------------------------------------------------------------------- at the same time


def test_two_processes_write_the_same_file(tmp_path):
    """As a run and proxsparse.report on its folder do: neither removes what the other one is writing."""
    path = tmp_path / "report.md"
    with atomic_write(path) as first:
        first.write_text("first")
        write_file(path, b"second")
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["report.md"]


def test_files_that_are_replaced_while_they_are_read_are_not_used(tmp_path):
    final = tmp_path / "run"
    save_run(final, "old")
    before = files_to_read(final)
    require_unchanged(final, before)
    save_run(final, "new", overwrite=True)
    with pytest.raises(InputError, match="a run replaced the files while they were read; repeat"):
        require_unchanged(final, before)
    (final / COMPLETE).mkdir()
    with pytest.raises(InputError, match="a run is replacing the result, or was killed while replacing it; wait, or"):
        files_to_read(final)


@pytest.mark.skipif(os.system("unshare -u true >/dev/null 2>&1") != 0, reason="needs the right to set a host name")
def test_the_lock_holds_between_hosts(tmp_path):
    """Tested on one machine: with another host name, and the folder under another path."""
    code = f"""
import socket; socket.sethostname("node-2")
from proxsparse.io.output_folder import opened
with opened(__import__("pathlib").Path({str(tmp_path / "run")!r}), "train", {{}}):
    print("in", flush=True); input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["unshare", "-u", sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == "in\n"
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "run")
        with pytest.raises(InputError, match=r"another run \(pid \d+ on node-2, since .*\) writes to"):
            save_run(link, "mine", resume=True)
        other.communicate("\n")
    assert socket.gethostname() != "node-2"
    save_run(tmp_path / "run", "mine")


def test_a_signal_during_garbage_collection_is_not_lost():
    code = """
import os, signal, sys, time
from proxsparse.errors import run_command
class Loud:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
def main():
    Loud()
    time.sleep(30)
sys.exit(run_command(main))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "\nstopped by SIGTERM\n")


# ---------------------------------------------------------------------------------------------- single files


def test_a_report_replaces_only_what_a_run_may_have_written(tmp_path):
    final = tmp_path / "run"
    final.mkdir()
    (final / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "feasible_share": 0.5, "norm_gap": 0.1}\n')
    report.main([str(final)])
    (final / "report.md").write_text("mine")
    with pytest.raises(InputError, match=r"report\.md: its folder has no .*; move it away"):
        report.main([str(final)])
    assert (final / "report.md").read_text() == "mine"
    save_run(tmp_path / "marked", "old")
    shutil.copy(tmp_path / "marked" / MARKER, final / MARKER)
    report.main([str(final)])
    assert (final / "report.md").read_text() != "mine"
    (final / "loss.png").unlink(missing_ok=True)
    (final / "loss.png").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"loss\.png: is a link or a folder, and the report would replace it"):
        report.main([str(final)])


def test_json_replaces_only_an_earlier_report(tmp_path):
    mine, earlier, fifo, link = (tmp_path / name for name in ("mine.json", "scores.jsonl", "fifo", "link"))
    mine.write_text('{"model": "a", "data": "b"}')
    os.mkfifo(fifo)
    row = json.dumps({"model": "a", "precision": "fp32", "data": "b", "perplexity": 1.0})
    for path in (mine, fifo):
        with pytest.raises(InputError, match=r"not written by `proxsparse evaluate`; name another file"):
            evaluate.parse(["model", "--json", str(path)])
    earlier.write_text(row + "\n")
    link.symlink_to(earlier)
    assert evaluate.parse(["model", "--json", str(earlier)]).json == str(earlier)
    with pytest.raises(InputError, match="name another file"):
        evaluate.parse(["model", "--data", str(earlier), "--json", str(link)])
    evaluate.Report({"model": "a", "precision": "fp32"}, str(link)).add({"task": "piqa", "error": "none"})
    assert link.is_symlink()
    assert json.loads(earlier.read_text())["task"] == "piqa"


def test_the_callback_replaces_only_masks(tmp_path):
    from proxsparse.integrations.transformers_trainer import ProxCallback

    callback = ProxCallback()
    callback.keep_pretrained = lambda model: next(iter(()))  # stops the callback: the file was accepted
    arguments = (SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=0), None)
    (tmp_path / "masks.safetensors").write_text("the user's")
    with pytest.raises(ValueError, match=r"masks\.safetensors is not a mask file, and the masks would replace it"):
        callback.on_train_begin(*arguments)
    assert (tmp_path / "masks.safetensors").read_text() == "the user's"
    save_masks(tmp_path / "masks.safetensors", {"layer": torch.tensor([[True, True, False, False]])}, "2:4", "model")
    with pytest.raises(StopIteration):
        callback.on_train_begin(*arguments)
