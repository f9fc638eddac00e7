"""Several processes that are killed or stopped, and disks that are too small or lost."""

import os
import re
from signal import SIGKILL, SIGTERM

import pytest
from commands import result_of, rows_in

from proxsparse.io import output_folder

SAVES = ["--num_samples", "8", "--save_steps", "3", "--num_train_epochs", "2", "--resume_from_checkpoint", "last"]
FINISH, CLEAR = "proxsparse.io.checkpoints.finish", "proxsparse.io.checkpoints.clear"


def outcome(run_dir):
    """What two runs must have in common to be the same."""
    result = result_of(run_dir)
    rows = rows_in(run_dir / "metrics.jsonl")
    same = ("masks_sha256", "perplexity", "mask_similarity", "feasible_share", "steps", "tokens", "reg_lambda")
    return {name: result[name] for name in same}, [{**row, "seconds": None} for row in rows]


def saved(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("[!.]*"))


def log_of(run_dir):
    return run_dir.with_suffix(".log").read_text()


@pytest.fixture(scope="module")
def run(forks, flags):
    """run(folder, *more flags, processes, how to disturb it) -> exit codes; what it prints is in `log_of(folder)`."""

    def run(run_dir, *more, processes=1, **how):
        arguments = [*flags, *SAVES, *more, "--output_dir", run_dir]
        return forks.run(arguments, processes, **{"output": run_dir.with_suffix(".log")} | how)

    return run


@pytest.fixture(scope="module")
def undisturbed(run, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert run(run_dir) == [0]
    return outcome(run_dir)


def test_all_processes_end_together(run, tmp_path):
    """When another run holds the lock, and when the first process alone gets a signal, while it writes a checkpoint."""
    run_dir = tmp_path / "run"
    with output_folder.opened(run_dir, "train", {}):
        assert run(run_dir, processes=2) == [2, 2]
    (run_dir / output_folder.MARKER).unlink()
    (line,) = [line for line in log_of(run_dir).splitlines() if "error" in line.lower()]
    assert line.startswith(f"error: another run (pid {os.getpid()} on ")
    assert run(run_dir, processes=2, before=(FINISH, 2, "term")) == [128 + SIGTERM] * 2, log_of(run_dir)[-2000:]
    assert result_of(run_dir)["status"] == "interrupted"
    assert run(run_dir, processes=2) == [0, 0]
    assert not (run_dir / output_folder.LOCK).exists()


@pytest.mark.slow
def test_threads_of_two_processes_write_checkpoints(run, tmp_path):
    """They communicate in a group of their own, while the processes learn."""
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(a, processes=2) == [0, 0]
    assert -SIGKILL in run(b, processes=2, in_thread=True, before=(FINISH, 2, "kill"))
    assert "another process of this run has ended" in log_of(b)
    assert saved(b) == ["step-3"]
    assert run(b, processes=2, in_thread=True) == [0, 0], log_of(b)[-2000:]
    assert outcome(b) == outcome(a)


@pytest.mark.slow
def test_a_full_disk_ends_both_processes_when_a_thread_writes(disk, run, tmp_path):
    run_dir, log = mounted("-t tmpfs -o size=20m tmpfs", disk) / "run", tmp_path / "log"
    how = {"processes": 2, "in_thread": True, "output": log}
    assert run(run_dir, before=(CLEAR, 2, "fill", str(disk)), **how) == [2, 2]
    assert "error: checkpoint step-6 could not be written to" in log.read_text()
    assert saved(run_dir) == ["step-3"]
    (disk / "filler").unlink()
    assert run(run_dir, **how) == [0, 0], log.read_text()[-2000:]


@pytest.mark.slow
def test_other_numbers_of_processes_continue_within_rounding(run, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"

    def run_on(processes, run_dir, **how):
        more = ["--gradient_accumulation_steps", 4 // processes, "--num_train_epochs", "5"]
        return run(run_dir, *more, processes=processes, **how)

    assert run_on(1, a) == [0]
    for processes, checkpoint in ((4, "step-3"), (2, "step-6")):
        assert -SIGKILL in run_on(processes, b, before=(FINISH, 2, "kill"))
        assert saved(b) == [checkpoint]
    assert run_on(1, b) == [0]
    (one, rows), (other, other_rows) = outcome(a), outcome(b)
    assert [row["loss"] for row in other_rows] == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert other["perplexity"]["proxsparse"] == pytest.approx(one["perplexity"]["proxsparse"], rel=1e-4)


def mounted(options, folder):
    """Mounts `mount OPTIONS` there, or skips the test."""
    folder.mkdir(exist_ok=True)
    if os.system(f"mount {options} {folder} 2>/dev/null"):
        pytest.skip("needs the right to mount")
    return folder


@pytest.fixture
def disk(tmp_path):
    """An empty folder to mount on; unmounted after the test."""
    yield tmp_path / "disk"
    os.system(f"umount -l {tmp_path / 'disk'} 2>/dev/null")


def test_a_disk_that_is_too_small_is_refused_before_the_work(disk, run, tmp_path):
    log = tmp_path / "log"
    assert run(mounted("-t tmpfs -o size=10m tmpfs", disk) / "run", output=log) == [2]
    error = log.read_text().splitlines()[-1]
    assert re.search(r"run' has 10 MiB free, but the result needs about 16 MiB; free some space or", error)


@pytest.mark.parametrize("loss", ["full", "unmounted"])
def test_a_lost_disk_leaves_the_last_good_state(disk, run, undisturbed, tmp_path, loss):
    """During the run another program fills the disk, or it is unmounted: the next save fails, the last one is good."""
    run_dir, log, source = disk / "run", tmp_path / "log", tmp_path / "source"
    source.mkdir()
    mounted("-t tmpfs -o size=20m tmpfs" if loss == "full" else f"--bind {source}", disk)
    event = "fill" if loss == "full" else "unmount"
    assert run(run_dir, output=log, before=(CLEAR, 2, event, str(disk))) == [2]
    error = log.read_text().splitlines()[-1]
    assert error.startswith("error: checkpoint step-6 could not be written to")
    if loss == "full":
        assert "the disk is full" in error
        command = f"the same command with --output_dir {run_dir} --resume_from_checkpoint last"
        assert error.endswith(f"checkpoints/step-3 saved; to resume, run {command}")
        (disk / "filler").unlink()
    else:
        assert f"{run_dir} cannot be reached; to resume, run the same command with" in error
        mounted(f"--bind {source}", disk)
    assert run(run_dir, output=log) == [0], log.read_text()[-2000:]
    assert outcome(run_dir) == undisturbed
