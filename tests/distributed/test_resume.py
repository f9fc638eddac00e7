"""A run that is killed goes on where its last checkpoint is, and ends with the same bits."""

import json
import os
import random
import re
import shutil
import signal

import pytest
from safetensors.torch import load_file, save_file

from proxsparse.errors import InputError
from proxsparse.io import output_folder
from proxsparse.io.atomic import SCRATCH
from proxsparse.io.output_folder import checkpoints
from proxsparse.train import main

KILLS, STEPS = 20, 16
SAVES = ["--num_samples", "8", "--save_steps", "3", "--num_train_epochs", "2", "--resume_from_checkpoint", "last"]


def outcome(run_dir):
    """What two runs must have in common to be the same."""
    result = json.loads((run_dir / "result.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    same = ("masks_sha256", "perplexity", "mask_similarity", "feasible_share", "steps", "tokens", "reg_lambda")
    return {name: result[name] for name in same}, [{**row, "seconds": None} for row in rows]


def run(forks, arguments, run_dir, processes=1, **how):
    return forks.run([*arguments, "--output_dir", run_dir], processes, output=run_dir.with_suffix(".log"), **how)


FORMS = {
    "everything": [
        *("--distill", "0.5", "--average_runs", "2", "--precision", "bf16", "--gradient_accumulation_steps", "2"),
        *("--moment_dtype", "fp32", "--save_total_limit", "2", "--save_steps", "1"),
    ],
    "paper": ["--objective", "paper", "--precision", "bf16", "--frozen_lambda", "0.2"],
    "masters": ["--objective", "paper", "--precision", "bf16", "--master_weights"],
}


@pytest.fixture(scope="module")
def undisturbed(forks, flags, tmp_path_factory):
    """The outcome of the form "masked"."""
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert run(forks, [*flags, *SAVES], run_dir) == [0]
    return outcome(run_dir)


def test_killed_at_random_moments(forks, flags, undisturbed, tmp_path):
    """kill -9 twenty times, each some milliseconds behind a step that is at or behind the last checkpoint's."""
    moments, run_dir, kills = random.Random(0), tmp_path / "run", 0
    while kills < KILLS:
        done = int(checkpoints(run_dir)[-1].name.partition("-")[2]) if checkpoints(run_dir) else 0
        codes = run(forks, [*flags, *SAVES], run_dir, kill=(moments.randint(done, STEPS), moments.uniform(0, 0.1)))
        kills += codes == [-signal.SIGKILL]
        if codes == [0]:
            assert outcome(run_dir) == undisturbed
            shutil.rmtree(run_dir)
        else:
            assert codes == [-signal.SIGKILL], run_dir.with_suffix(".log").read_text()[-2000:]
    assert run(forks, [*flags, *SAVES], run_dir) == [0]
    assert outcome(run_dir) == undisturbed
    assert checkpoints(run_dir) == []  # a complete run needs none
    assert run(forks, [*flags, *SAVES], run_dir) == [0]
    assert "nothing is left to do" in run_dir.with_suffix(".log").read_text().splitlines()[-1]


@pytest.mark.parametrize("form", ["everything", "paper", "masters"])
def test_killed_in_the_middle(forks, flags, tmp_path, form):
    arguments = [*flags, *SAVES, "--eval_data", "none", *FORMS[form]]
    assert run(forks, arguments, tmp_path / "a") == [0]
    for moment in (("proxsparse.training.checkpoint.finish", 2), ("proxsparse.training.checkpoint.sync", 4)):
        assert run(forks, arguments, tmp_path / "b", die_in=moment) == [-signal.SIGKILL]
    assert run(forks, arguments, tmp_path / "b") == [0]
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(a[name].equal(b[name]) for name in a)


def test_a_signal_saves_both_the_masks_and_where_to_go_on(forks, flags, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [*flags, *SAVES, "--save_steps", "0"]  # none but when it is stopped
    assert run(forks, arguments, run_dir, kill=(5, 0.0), number=signal.SIGTERM) == [128 + signal.SIGTERM]
    assert json.loads((run_dir / "result.json").read_text())["status"] == "interrupted"
    assert (run_dir / "model.safetensors").exists()
    assert len(checkpoints(run_dir)) == 1
    assert run(forks, arguments, run_dir) == [0]
    assert outcome(run_dir) == undisturbed


def test_a_second_torchrun_is_refused_in_all_its_processes(forks, flags, tmp_path):
    """One lock a run: the first process holds it. The other processes of the second run end as its first one does."""
    run_dir, log = tmp_path / "run", tmp_path / "run.log"
    with output_folder.opened(run_dir, "train", {}):
        assert run(forks, [*flags, *SAVES], run_dir, 2) == [2, 2]
    (line,) = [line for line in log.read_text().splitlines() if "error" in line.lower()]
    assert line.startswith(f"error: another run (pid {os.getpid()} on ")
    assert run(forks, [*flags, *SAVES], run_dir, 2) == [0, 0]
    assert not (run_dir / output_folder.LOCK).exists()


def test_other_numbers_of_processes_go_on_within_rounding(forks, flags, tmp_path):
    def arguments(processes):
        return [*flags, *SAVES, "--gradient_accumulation_steps", 4 // processes, "--num_train_epochs", "5"]

    assert run(forks, arguments(1), tmp_path / "a") == [0]
    die_in = ("proxsparse.training.checkpoint.finish", 2)
    assert -signal.SIGKILL in run(forks, arguments(4), tmp_path / "b", 4, die_in=die_in)
    assert [path.name for path in checkpoints(tmp_path / "b")] == ["checkpoint-3"]
    assert -signal.SIGKILL in run(forks, arguments(2), tmp_path / "b", 2, die_in=die_in)
    assert [path.name for path in checkpoints(tmp_path / "b")] == ["checkpoint-6"]
    assert run(forks, arguments(1), tmp_path / "b") == [0]
    (one, rows), (other, other_rows) = outcome(tmp_path / "a"), outcome(tmp_path / "b")
    assert [row["loss"] for row in other_rows] == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert other["perplexity"]["proxsparse"] == pytest.approx(one["perplexity"]["proxsparse"], rel=1e-4)


# ---------------------------------------------------------------------------------------------- what cannot go on


@pytest.fixture
def stopped(forks, flags, tmp_path):
    """A run's folder with one checkpoint, and the flags to go on."""
    arguments = [*flags, *SAVES, "--eval_data", "none"]
    assert run(forks, arguments, tmp_path / "run", die_in=("proxsparse.training.checkpoint.finish", 2)) == [
        -signal.SIGKILL
    ]
    (path,) = checkpoints(tmp_path / "run")
    return path, [str(flag) for flag in (*arguments, "--output_dir", tmp_path / "run")]


def damaged(path, name, change):
    content = (path / name).read_bytes()
    (path / name).write_bytes(change(content))


def without_a_tensor(path):
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors.pop("monitor.mask")
    save_file(tensors, file)
    state = json.loads((path / "state.json").read_text())
    state["files"][file.name] = file.stat().st_size
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: damaged(path, "state.json", lambda text: text[:100]), "damaged .*; give another"),
        (lambda path: damaged(path, "state.json", lambda text: b"[" * 100_000), "damaged .*; give another"),
        (lambda path: damaged(path, "state.json", lambda text: b"[]"), "damaged .*; give another"),
        (lambda path: damaged(path, next(path.glob("*.safetensors")).name, lambda data: data[:-5]), "bytes, not"),
        (lambda path: next(path.glob("*.safetensors")).unlink(), "damaged .*No such file"),
        (without_a_tensor, "monitor.mask is not there, this run needs"),
    ],
    ids=["half", "deep", "a list", "truncated", "gone", "a tensor less"],
)
def test_a_damaged_checkpoint_is_refused_by_name(stopped, damage, words):
    path, arguments = stopped
    damage(path)
    with pytest.raises(InputError, match=f"checkpoint-3.*{words}"):
        main(arguments)


def test_what_cannot_be_gone_on_with_is_refused(stopped, tmp_path):
    path, arguments = stopped
    with pytest.raises(InputError, match=r"run' has --learning_rate 0.005 \(now 0.001\); give the same, or"):
        main([*arguments, "--learning_rate", "1e-3"])
    with pytest.raises(InputError, match=r"its steps take 1 batches, these 2 \(1 processes\); change --gradient_acc"):
        main([*arguments, "--gradient_accumulation_steps", "2"])
    with pytest.raises(InputError, match=r"nowhere: not a checkpoint directory, which holds a state.json"):
        main([*arguments[:-1], str(tmp_path / "other"), "--resume_from_checkpoint", str(tmp_path / "nowhere")])
    again = [*arguments[: arguments.index("--resume_from_checkpoint")], "--output_dir", arguments[-1]]
    with pytest.raises(InputError, match=r"is not empty; .*--resume_from_checkpoint last"):
        main(again)
    assert path.is_dir()


def test_nothing_to_go_on_from_is_a_beginning(stopped, tmp_path, capsys):
    path, arguments = stopped
    shutil.rmtree(path)
    (path.parent / f"{SCRATCH}-checkpoint-3").mkdir()  # of a save that was cut off
    assert main(arguments) == 0
    assert "nothing finished yet" in capsys.readouterr().err
    assert not list(path.parent.glob(f"{SCRATCH}*"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.md").write_text("years of work")
    with pytest.raises(InputError, match="is not empty"):
        main([*arguments[:-1], str(foreign)])
    assert (foreign / "thesis.md").exists()


def test_the_beginning_of_a_resumption_loses_nothing(stopped, undisturbed, forks):
    path, arguments = stopped
    for moment in (("proxsparse.run.folder.write_file", 1), ("proxsparse.run.folder.write_file", 2)):
        assert forks.run(arguments, die_in=moment) == [-signal.SIGKILL]
        assert checkpoints(path.parent) == [path]
    assert main(arguments) == 0
    assert outcome(path.parent)[0]["masks_sha256"] == undisturbed[0]["masks_sha256"]


def test_an_older_checkpoint_goes_on_beside_newer_ones(forks, flags, tmp_path):
    """Those of the steps that it has left behind stay the last resort until a new one is whole, and then go."""
    arguments = [*flags, *SAVES, "--eval_data", "none", "--save_total_limit", "9"]
    run_dir = tmp_path / "run"
    assert run(forks, arguments, run_dir, die_in=("proxsparse.training.checkpoint.finish", 5)) == [-signal.SIGKILL]
    assert [path.name for path in checkpoints(run_dir)] == [f"checkpoint-{step}" for step in (3, 6, 9, 12)]
    again = [*arguments, "--resume_from_checkpoint", run_dir / "checkpoint-6", "--save_total_limit", "2"]
    assert run(forks, again, run_dir, die_in=("proxsparse.training.checkpoint.finish", 2)) == [-signal.SIGKILL]
    assert [path.name for path in checkpoints(run_dir)] == ["checkpoint-6", "checkpoint-9"]


def test_a_signal_in_one_process_ends_both(forks, flags, undisturbed, tmp_path):
    """It comes to the first one while a checkpoint is written, and the other has not seen it."""
    log = tmp_path / "run.log"
    codes = run(forks, [*flags, *SAVES], tmp_path / "run", 2, term_in=("proxsparse.training.checkpoint.finish", 2))
    assert codes == [128 + signal.SIGTERM] * 2, log.read_text()[-2000:]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
    assert run(forks, [*flags, *SAVES], tmp_path / "run", 2) == [0, 0]


def test_a_signal_behind_the_last_step_throws_nothing_away(forks, flags, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    codes = run(forks, [*flags, *SAVES], run_dir, term_in=("proxsparse.run.folder.save_checkpoint", 1))
    assert codes == [128 + signal.SIGTERM]
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["perplexity"]) == ("complete", None)
    assert result["masks_sha256"] == undisturbed[0]["masks_sha256"]
    with pytest.raises(InputError, match=r"has --learning_rate 0.005 \(now 0.1\)"):
        main([str(flag) for flag in (*flags, *SAVES, "--output_dir", run_dir, "--learning_rate", "0.1")])
    assert run(forks, [*flags, *SAVES], run_dir) == [0]
    assert "nothing is left to do" in run_dir.with_suffix(".log").read_text().splitlines()[-1]


def test_other_documents_behind_the_same_name_are_noticed(stopped, documents):
    _, arguments = stopped
    text = documents.read_text()
    try:
        documents.write_text(text.replace("lazy", "busy"))
        with pytest.raises(InputError, match=r"checkpoint-3: the files of --model or --data have changed since"):
            main(arguments)
    finally:
        documents.write_text(text)


def test_of_which_run_is_the_last_checkpoint(flags):
    with pytest.raises(InputError, match="last requires --output_dir"):
        main([*map(str, flags), "--resume_from_checkpoint", "last"])


def test_a_checkpoint_elsewhere_starts_another_folder(stopped, undisturbed, tmp_path):
    path, arguments = stopped
    arguments[arguments.index("last")] = str(path)
    assert main([*arguments[:-1], str(tmp_path / "other")]) == 0
    (_, rows), (expected, expected_rows) = outcome(tmp_path / "other"), undisturbed
    assert rows == expected_rows
    assert outcome(tmp_path / "other")[0]["masks_sha256"] == expected["masks_sha256"]


@pytest.fixture
def disk(tmp_path):
    """Makes a disk of so many megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(megabytes: int):
        if os.system(f"mount -t tmpfs -o size={megabytes}m tmpfs {folder} 2>/dev/null"):
            pytest.skip("needs the right to mount a tmpfs")
        return folder

    yield mount
    os.system(f"umount -l {folder} 2>/dev/null")


def test_a_disk_that_is_too_small_is_refused_before_the_work(disk, forks, flags, tmp_path):
    assert forks.run([*flags, "--output_dir", disk(10) / "run"], output=tmp_path / "log") == [2]
    error = (tmp_path / "log").read_text().splitlines()[-1]
    assert re.search(r"run' has 10 MiB free, the result needs about 16 MiB; free some space or choose another", error)


def test_a_full_disk_leaves_the_last_good_state(disk, forks, flags, undisturbed, tmp_path):
    """Something else fills the disk while the run is under way: the next save fails, and what was saved is good."""
    small_disk = disk(20)
    run_dir = small_disk / "run"
    log = tmp_path / "log"
    arguments = [*flags, *SAVES, "--output_dir", run_dir]
    go_on = f"--output_dir {run_dir} --resume_from_checkpoint last"
    assert forks.run(arguments, output=log, fill=("proxsparse.training.checkpoint.clear", 2, str(small_disk))) == [2]
    error = log.read_text().splitlines()[-1]
    assert error.startswith("error: checkpoint-6 could not be written to")
    assert "the disk is full" in error
    assert error.endswith(f"checkpoint-3 kept; to continue: the same command with {go_on}")
    (small_disk / "filler").unlink()
    assert forks.run(arguments, output=log) == [0], log.read_text()[-2000:]
    assert outcome(run_dir) == undisturbed


def test_a_lost_mount_leaves_the_last_good_state(forks, flags, undisturbed, tmp_path):
    disk, place, log = tmp_path / "disk", tmp_path / "place", tmp_path / "log"
    disk.mkdir()
    place.mkdir()
    if os.system(f"mount --bind {disk} {place} 2>/dev/null"):
        pytest.skip("needs the right to mount")
    arguments = [*flags, *SAVES, "--output_dir", place / "run"]
    try:
        lost = ("proxsparse.training.checkpoint.clear", 2, str(place))
        assert forks.run(arguments, output=log, unmount=lost) == [2]
        error = log.read_text().splitlines()[-1]
        assert error.startswith("error: checkpoint-6 could not be written to")
        assert f"{place / 'run'} cannot be reached; to continue: the same command with" in error
        assert os.system(f"mount --bind {disk} {place}") == 0
        assert forks.run(arguments, output=log) == [0], log.read_text()[-2000:]
        assert outcome(place / "run") == undisturbed
    finally:
        os.system(f"umount -l {place} 2>/dev/null")
