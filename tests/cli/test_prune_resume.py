"""`python -m proxsparse.prune --resume_from_checkpoint`: killed, stopped or out of disk, nothing is lost."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
from functools import partial

import pytest
import torch
from commands import refused
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from proxsparse import prune
from proxsparse.run import job

RESUME = ["--resume_from_checkpoint", "last"]
BLOCKS = [f"model.layers.{index}.safetensors" for index in range(3)]


@pytest.fixture(scope="session")
def three_blocks(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "three-blocks", num_hidden_layers=3)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def flags(three_blocks, text_file, run_dir):
    """flags(*more): the flags of a quick run into run_dir."""
    quick = ["--num_samples", "6", "--seq_len", "32", "--precision", "fp32", "--eval_data", "none"]
    common = ["--model", str(three_blocks), "--data", str(text_file), *quick]
    return lambda *more: [*common, "--output_dir", str(run_dir), *more]


@pytest.fixture
def in_child(command_in_child):
    """in_child(arguments, sabotage): `proxsparse prune` in a forked process."""
    return partial(command_in_child, prune.main)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def at_rename(number, act, before=False):
    """Sabotage: `act()` right after (or before) the rename of that number; every file of a run ends with a rename."""

    def prepare():
        replace, count = os.replace, itertools.count(1)

        def sabotaged(*paths):
            now = next(count) == number
            if now and before:
                act()
            replace(*paths)
            if now and not before:
                act()

        os.replace = sabotaged

    return prepare


def in_the_write_of(block, act):
    """Sabotage: half of a decoder block's file is written, then `act()`."""

    def prepare():
        save = safetensors_torch.save_file

        def sabotaged(tensors, path, metadata):
            save(tensors, path, metadata)
            if path.name.endswith(BLOCKS[block]):
                os.truncate(path, path.stat().st_size // 2)
                act()

        safetensors_torch.save_file = sabotaged

    return prepare


def full_disk():
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device", "somewhere")


def result_of(run_dir):
    """What must not depend on the kills: the digest of the masks, all masks and all weights, bit by bit."""
    digest = json.loads((run_dir / "result.json").read_text())["masks_sha256"]
    tensors = load_file(run_dir / "masks.safetensors") | load_file(run_dir / "model.safetensors")
    return digest, {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def files(folder):
    """The names, and a star for the eight digits in that of a scratch file."""
    return sorted(re.sub(r"^(\.incomplete-)[0-9a-f]{8}", r"\1*", path.name) for path in folder.iterdir())


OWL = ["wanda", "--allocation", "owl", "--spread", "6", "--outlier_factor", "2"]


@pytest.mark.parametrize(
    "method",
    [["sparsegpt"], OWL, *(pytest.param([name], marks=pytest.mark.slow) for name in ("wanda", "swap", "admm"))],
    ids=" ".join,
)
def test_killed_three_times_and_bit_identical(method, flags, in_child, run_dir):
    """Before the first block is in its place, in the middle of the second one's write, and right after the last."""
    arguments, blocks = flags("--method", *method), run_dir / "finished_blocks"
    assert in_child(arguments)[0] == 0
    undisturbed = result_of(run_dir)
    shutil.rmtree(run_dir)
    assert in_child(arguments, at_rename(4, die, before=True))[0] == -signal.SIGKILL  # after marker, config, start
    assert files(blocks) == [f".incomplete-*-{BLOCKS[0]}", "start.json"]
    assert in_child([*arguments, *RESUME], in_the_write_of(1, die))[0] == -signal.SIGKILL
    assert files(blocks) == [f".incomplete-*-{BLOCKS[1]}", BLOCKS[0], "start.json"]
    assert in_child([*arguments, *RESUME], at_rename(3, die))[0] == -signal.SIGKILL
    assert files(blocks) == [*BLOCKS, "start.json"]
    code, stderr = in_child([*arguments, *RESUME])
    assert code == 0
    assert "3 finished decoder blocks" in stderr
    assert result_of(run_dir) == undisturbed
    assert not blocks.exists()
    assert [name for name in files(run_dir) if name.startswith(".")] == [".proxsparse.json"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_killed_at_every_file(before, flags, in_child, run_dir):
    """The same command line, again and again, each time killed at one file later; at last it gets through."""
    arguments = flags("--method", "sparsegpt", *RESUME)
    assert in_child(arguments)[0] == 0
    undisturbed = result_of(run_dir)
    shutil.rmtree(run_dir)
    for files_written in itertools.count(1):
        code, stderr = in_child(arguments, at_rename(files_written, die, before))
        if code == 0:
            break
        assert code == -signal.SIGKILL, stderr
    assert files_written > 5
    assert result_of(run_dir) == undisturbed
    assert in_child(arguments)[0] == 0
    assert result_of(run_dir) == undisturbed


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_a_signal_ends_it_with_a_line_that_says_how_to_continue(number, words, flags, in_child, run_dir):
    arguments = flags("--method", "sparsegpt")
    code, stderr = in_child(arguments, at_rename(5, lambda: os.kill(os.getpid(), number)))
    assert code == 128 + number
    assert stderr.strip().splitlines()[-1] == (
        f"{words}; 2 finished decoder blocks in finished_blocks/ saved; to resume, run the same command with "
        f"--output_dir {run_dir} --resume_from_checkpoint last"
    )
    assert in_child([*arguments, *RESUME])[0] == 0
    resumed = result_of(run_dir)
    assert in_child([*arguments, "--overwrite_output_dir"])[0] == 0
    assert result_of(run_dir) == resumed


@pytest.mark.parametrize(
    ("sabotage", "count"),
    [
        (in_the_write_of(1, full_disk), 1),
        (at_rename(5, no_space, before=True), 1),
        (at_rename(7, no_space, before=True), 3),
    ],
    ids=["a block's write", "a block's rename", "the last save"],
)
def test_a_full_disk_keeps_what_is_finished(sabotage, count, flags, in_child, run_dir):
    arguments = flags("--method", "sparsegpt")
    code, stderr = in_child(arguments, sabotage)
    assert code == 2
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("error: the disk is full")
    assert f"{count} finished decoder block" in line
    assert line.endswith(f"--output_dir {run_dir} --resume_from_checkpoint last")
    assert files(run_dir / "finished_blocks") == [*BLOCKS[:count], "start.json"]
    assert files(run_dir) == [".proxsparse.json", "config.yaml", "finished_blocks"]
    assert in_child([*arguments, *RESUME])[0] == 0


@pytest.fixture
def stopped(flags, in_child):
    """The flags of a run into run_dir that was killed after its first decoder block."""
    arguments = flags("--method", "sparsegpt")
    assert in_child(arguments, at_rename(4, die))[0] == -signal.SIGKILL
    return arguments


def refuses(capsys, arguments, *words):
    assert refused(capsys, prune.main, arguments, *words) == []


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(job, "load_model", lambda _: pytest.fail("the model was loaded"))


def test_other_flags_are_refused_by_name(stopped, tiny_llama, capsys, no_model):
    for flags, *words in (
        [["--seed", "1"], "--seed 42 (now 1)", "--overwrite_output_dir"],
        [["--damping", "0.5"], "--damping 0.01 (now 0.5)"],
        [["--method", "wanda"], "--method sparsegpt (now wanda)"],
        [["--method", "proxsparse"], "proxsparse.prune (now"],
        [["--include", "mlp"], "--include not set (now ['mlp'])"],
        [["--model", tiny_llama], "--model ", "three-blocks", str(tiny_llama)],
        [["--allocation", "owl", "--num_samples", "7"], "--allocation uniform (now owl)", "--num_samples 6 (now 7)"],
    ):
        refuses(capsys, [*stopped, *RESUME, *flags], *words)
    refuses(capsys, stopped, "not empty", "--overwrite_output_dir", "--resume_from_checkpoint last")


def test_flags_of_the_evaluation_may_differ(stopped, text_file, run_dir):
    evaluation = ["--eval_data", str(text_file), "--eval_seq_len", "32", "--eval_max_windows", "1", "--device", "cpu"]
    assert prune.main([*stopped, *RESUME, *evaluation]) == 0
    result = json.loads((run_dir / "result.json").read_text())
    assert result["perplexity"]["windows"] == 1
    assert result["resumed"]


def test_changed_data_is_refused(flags, text_file, in_child, tmp_path, capsys):
    shutil.copy(text_file, data := tmp_path / "text.jsonl")
    arguments = flags("--method", "wanda", "--data", str(data))
    assert in_child(arguments, at_rename(4, die))[0] == -signal.SIGKILL
    data.write_text(data.read_text().replace("Document", "Paper"))
    refused(capsys, prune.main, [*arguments, *RESUME], "--data have changed")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{", b'{"format": "proxsparse-run-1"}', b"[" * 100_000])
def test_a_damaged_marker_is_refused(content, stopped, capsys, no_model, run_dir):
    (run_dir / ".proxsparse.json").write_bytes(content)
    for more in (RESUME, ["--overwrite_output_dir"]):
        refuses(capsys, [*stopped, *more], ".proxsparse.json", "damaged", "choose another")
    assert (run_dir / "finished_blocks" / BLOCKS[0]).is_file()


def test_by_its_path(stopped, capsys, no_model, monkeypatch, run_dir):
    path, index = run_dir / "finished_blocks", stopped.index("--output_dir")
    nowhere = [*stopped[:index], *stopped[index + 2 :]]
    refuses(capsys, [*stopped, "--resume_from_checkpoint", path / "absent"], "absent", "no such directory")
    elsewhere = ["--output_dir", run_dir.with_name("elsewhere")]
    refuses(capsys, [*stopped, "--resume_from_checkpoint", path, *elsewhere], "elsewhere", "omit --output_dir")
    refuses(capsys, [*nowhere, *RESUME], "--output_dir")
    monkeypatch.undo()
    assert prune.main([*nowhere, "--resume_from_checkpoint", str(path)]) == 0
    assert "model.safetensors" in files(run_dir)


def test_last_without_anything_starts_and_a_complete_run_is_left_alone(flags, capsys, run_dir, monkeypatch):
    arguments = flags("--method", "wanda", *RESUME)
    assert prune.main(arguments) == 0
    assert f"no run to resume in {str(run_dir)!r}: starting from the beginning" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    (run_dir / "finished_blocks").mkdir()  # as of a kill after the last file
    monkeypatch.setattr(job, "load_model", None)
    assert prune.main(arguments) == 0
    assert "complete" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    refuses(capsys, [*arguments, "--seed", "1"], "--seed 42 (now 1)")


def test_a_method_without_blocks_starts_again(flags, in_child, run_dir):
    arguments = flags("--method", "magnitude", *RESUME)
    assert in_child(arguments, at_rename(4, die))[0] == -signal.SIGKILL
    code, stderr = in_child(arguments)
    assert code == 0
    assert "nothing finished yet" in stderr
    assert result_of(run_dir)
