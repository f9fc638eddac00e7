"""A run that is killed or stopped continues from its last checkpoint and ends with the same bits."""

import json
import os
import random
import re
import shutil
from signal import SIGKILL, SIGTERM

import pytest
from safetensors.torch import load_file, save_file

from proxsparse.errors import InputError
from proxsparse.io import output_folder
from proxsparse.io.atomic import SCRATCH
from proxsparse.io.output_folder import checkpoints
from proxsparse.train import main

KILLS, STEPS = 20, 16
SAVES = ["--num_samples", "8", "--save_steps", "3", "--num_train_epochs", "2", "--resume_from_checkpoint", "last"]
FINISH = "proxsparse.training.checkpoint.finish"
EVERYTHING = "--distill 0.5 --precision bf16 --gradient_accumulation_steps 2 --moment_dtype fp32"
FORMS = [
    f"{EVERYTHING} --save_total_limit 2 --save_steps 1",
    pytest.param("--objective paper --precision bf16 --frozen_lambda 0.2", marks=pytest.mark.slow),
    pytest.param("--objective paper --precision bf16 --master_weights", marks=pytest.mark.slow),
]


def result_of(run_dir):
    return json.loads((run_dir / "result.json").read_text())


def outcome(run_dir):
    """What two runs must have in common to be the same."""
    result = result_of(run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    same = ("masks_sha256", "perplexity", "mask_similarity", "feasible_share", "steps", "tokens", "reg_lambda")
    return {name: result[name] for name in same}, [{**row, "seconds": None} for row in rows]


def saved(run_dir):
    return [path.name for path in checkpoints(run_dir)]


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


@pytest.mark.slow
def test_killed_at_random_moments(run, undisturbed, tmp_path):
    """kill -9 twenty times, each some milliseconds after a step that the last checkpoint does not hold yet."""
    moments, run_dir, kills = random.Random(0), tmp_path / "run", 0
    while kills < KILLS:
        done = int(saved(run_dir)[-1].partition("-")[2]) if saved(run_dir) else 0
        codes = run(run_dir, kill=(moments.randint(done, STEPS), moments.uniform(0, 0.1)))
        kills += codes == [-SIGKILL]
        if codes == [0]:
            assert outcome(run_dir) == undisturbed
            shutil.rmtree(run_dir)
        else:
            assert codes == [-SIGKILL], log_of(run_dir)[-2000:]
    assert run(run_dir) == [0]
    assert outcome(run_dir) == undisturbed
    assert saved(run_dir) == [], "a complete run needs none"
    assert run(run_dir) == [0]
    assert "nothing to do" in log_of(run_dir).splitlines()[-1]


@pytest.mark.parametrize("form", FORMS)
def test_killed_in_the_middle(run, tmp_path, form):
    a, b, more = tmp_path / "a", tmp_path / "b", ["--eval_data", "none", *form.split()]
    assert run(a, *more) == [0]
    for moment in ((FINISH, 2), ("proxsparse.training.checkpoint.sync", 4)):
        assert run(b, *more, die_in=moment) == [-SIGKILL]
    assert run(b, *more) == [0]
    assert outcome(a) == outcome(b)
    weights, expected = (load_file(path / "model.safetensors") for path in (b, a))
    assert all(weights[name].equal(weight) for name, weight in expected.items())


def test_a_signal_saves_the_masks_and_a_checkpoint(run, undisturbed, tmp_path):
    run_dir, more = tmp_path / "run", ["--save_steps", "0"]  # no other checkpoint than that of the signal
    assert run(run_dir, *more, kill=(5, 0.0), number=SIGTERM) == [128 + SIGTERM]
    assert result_of(run_dir)["status"] == "interrupted"
    assert (run_dir / "model.safetensors").exists()
    assert len(saved(run_dir)) == 1
    assert run(run_dir, *more) == [0]
    assert outcome(run_dir) == undisturbed


def test_a_signal_after_the_last_step_discards_nothing(run, flags, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    assert run(run_dir, term_in=("proxsparse.run.folder.save_checkpoint", 1)) == [128 + SIGTERM]
    result = result_of(run_dir)
    assert (result["status"], result["perplexity"]) == ("complete", None)
    assert result["masks_sha256"] == undisturbed[0]["masks_sha256"]
    with pytest.raises(InputError, match=r"has --learning_rate 0.005 \(now 0.1\)"):
        main([str(flag) for flag in (*flags, *SAVES, "--output_dir", run_dir, "--learning_rate", "0.1")])
    assert run(run_dir) == [0]
    assert "nothing to do" in log_of(run_dir).splitlines()[-1]


def test_all_processes_end_together(run, tmp_path):
    """When another run holds the lock, and when the first process alone gets a signal, while it writes a checkpoint."""
    run_dir = tmp_path / "run"
    with output_folder.opened(run_dir, "train", {}):
        assert run(run_dir, processes=2) == [2, 2]
    (line,) = [line for line in log_of(run_dir).splitlines() if "error" in line.lower()]
    assert line.startswith(f"error: another run (pid {os.getpid()} on ")
    assert run(run_dir, processes=2, term_in=(FINISH, 2)) == [128 + SIGTERM] * 2, log_of(run_dir)[-2000:]
    assert result_of(run_dir)["status"] == "interrupted"
    assert run(run_dir, processes=2) == [0, 0]
    assert not (run_dir / output_folder.LOCK).exists()


@pytest.mark.slow
def test_other_numbers_of_processes_continue_within_rounding(run, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"

    def run_on(processes, run_dir, **how):
        more = ["--gradient_accumulation_steps", 4 // processes, "--num_train_epochs", "5"]
        return run(run_dir, *more, processes=processes, **how)

    assert run_on(1, a) == [0]
    for processes, checkpoint in ((4, "checkpoint-3"), (2, "checkpoint-6")):
        assert -SIGKILL in run_on(processes, b, die_in=(FINISH, 2))
        assert saved(b) == [checkpoint]
    assert run_on(1, b) == [0]
    (one, rows), (other, other_rows) = outcome(a), outcome(b)
    assert [row["loss"] for row in other_rows] == pytest.approx([row["loss"] for row in rows], abs=1e-5)
    assert other["perplexity"]["proxsparse"] == pytest.approx(one["perplexity"]["proxsparse"], rel=1e-4)


def test_an_older_checkpoint_is_continued_and_newer_ones_stay_until_the_next(run, tmp_path):
    run_dir, more = tmp_path / "run", ["--eval_data", "none", "--save_total_limit"]
    assert run(run_dir, *more, "9", die_in=(FINISH, 5)) == [-SIGKILL]
    assert saved(run_dir) == [f"checkpoint-{step}" for step in (3, 6, 9, 12)]
    older = ["--resume_from_checkpoint", run_dir / "checkpoint-6"]
    assert run(run_dir, *more, "2", *older, die_in=(FINISH, 2)) == [-SIGKILL]
    assert saved(run_dir) == ["checkpoint-6", "checkpoint-9"]


# ---------------------------------------------------------------------------------------------- from one checkpoint


@pytest.fixture
def stopped(run, flags, tmp_path):
    """The only checkpoint of a killed run, and the flags to continue."""
    assert run(tmp_path / "run", "--eval_data", "none", die_in=(FINISH, 2)) == [-SIGKILL]
    (path,) = checkpoints(tmp_path / "run")
    return path, [str(x) for x in (*flags, *SAVES, "--eval_data", "none", "--output_dir", tmp_path / "run")]


def test_the_start_of_a_resumption_loses_nothing(stopped, undisturbed, forks, tmp_path):
    """In another folder, and in the same one although it is killed twice."""
    path, arguments = stopped
    elsewhere = [str(path) if flag == "last" else flag for flag in arguments[:-1]] + [str(tmp_path / "other")]
    assert main(elsewhere) == 0
    for number in (1, 2):
        assert forks.run(arguments, die_in=("proxsparse.run.folder.write_file", number)) == [-SIGKILL]
        assert checkpoints(path.parent) == [path]
    assert main(arguments) == 0
    for run_dir in (tmp_path / "other", path.parent):
        result, rows = outcome(run_dir)
        assert rows == undisturbed[1]
        assert result["masks_sha256"] == undisturbed[0]["masks_sha256"]


def test_without_a_checkpoint_the_run_starts_from_the_beginning(stopped, capsys):
    path, arguments = stopped
    shutil.rmtree(path)
    (path.parent / f"{SCRATCH}-checkpoint-3").mkdir()  # of a save that was cut off
    assert main(arguments) == 0
    assert "nothing finished yet" in capsys.readouterr().err
    assert not list(path.parent.glob(f"{SCRATCH}*"))


def change_file(change, pattern="*.safetensors"):
    def damage(path):
        (file,) = path.glob(pattern)
        file.write_bytes(change(file.read_bytes()))

    return damage


def remove_a_tensor(path):
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("monitor.mask")
    save_file(tensors, file)
    state = json.loads((path / "state.json").read_text())
    state["files"][file.name] = file.stat().st_size
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_file(lambda text: text[:100], "state.json"), "damaged .*; give another"),
        (change_file(lambda text: b"[" * 100_000, "state.json"), "damaged .*; give another"),
        (change_file(lambda text: b"[]", "state.json"), "damaged .*; give another"),
        (change_file(lambda data: data[:-5]), "bytes, not"),
        (lambda path: next(path.glob("*.safetensors")).unlink(), "damaged .*No such file"),
        (remove_a_tensor, "monitor.mask is missing, expected"),
    ],
    ids=["half", "deep", "a list", "truncated", "gone", "a tensor less"],
)
def test_a_damaged_checkpoint_is_refused_by_name(stopped, damage, words):
    path, arguments = stopped
    damage(path)
    with pytest.raises(InputError, match=f"checkpoint-3.*{words}"):
        main(arguments)


def test_a_run_that_cannot_be_continued_is_refused(stopped, flags, documents, tmp_path):
    path, arguments = stopped
    last = arguments.index("--resume_from_checkpoint")
    nowhere = [str(tmp_path / "other"), "--resume_from_checkpoint", str(tmp_path / "nowhere")]
    for given, words in (
        (
            [*arguments, "--learning_rate", "1e-3"],
            r"run' has --learning_rate 0.005 \(now 0.001\); give the same flags, or",
        ),
        (
            [*arguments, "--gradient_accumulation_steps", "2"],
            r"made with 1 batches per step, but this run has 2 on 1 processes; change --gradient_acc",
        ),
        ([*arguments[:-1], *nowhere], r"nowhere: not a checkpoint directory \(no state.json\)"),
        ([*arguments[:last], *arguments[-2:]], r"is not empty; .*--resume_from_checkpoint last"),
        ([*map(str, flags), "--resume_from_checkpoint", "last"], "last requires --output_dir"),
    ):
        with pytest.raises(InputError, match=words):
            main(given)
    text = documents.read_text()
    try:
        documents.write_text(text.replace("lazy", "busy"))
        with pytest.raises(InputError, match=r"checkpoint-3: the files of --model or --data have changed since"):
            main(arguments)
    finally:
        documents.write_text(text)
    assert path.is_dir()


# ---------------------------------------------------------------------------------------------- disks


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
    moment = ("proxsparse.training.checkpoint.clear", 2, str(disk))
    assert run(run_dir, output=log, **{"fill" if loss == "full" else "unmount": moment}) == [2]
    error = log.read_text().splitlines()[-1]
    assert error.startswith("error: checkpoint-6 could not be written to")
    if loss == "full":
        assert "the disk is full" in error
        command = f"the same command with --output_dir {run_dir} --resume_from_checkpoint last"
        assert error.endswith(f"checkpoint-3 saved; to resume, run {command}")
        (disk / "filler").unlink()
    else:
        assert f"{run_dir} cannot be reached; to resume, run the same command with" in error
        mounted(f"--bind {source}", disk)
    assert run(run_dir, output=log) == [0], log.read_text()[-2000:]
    assert outcome(run_dir) == undisturbed
