"""`python -m proxsparse.prune --resume_from_checkpoint`: killed, stopped or out of disk, nothing is lost."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from safetensors.torch import load_file
from tiny_models import COMMON, byte_tokenizer

from proxsparse import prune
from proxsparse.errors import run_command
from proxsparse.run import job

RESUME = ["--resume_from_checkpoint", "last"]
BLOCKS = [f"model.layers.{index}.safetensors" for index in range(3)]


@pytest.fixture(scope="session")
def three_blocks(tmp_path_factory):
    """A folder with a tiny random Llama of three decoder blocks."""
    folder = tmp_path_factory.mktemp("models") / "three-blocks"
    config = transformers.AutoConfig.for_model("llama", **COMMON | {"num_hidden_layers": 3})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def flags(three_blocks, text_file, tmp_path):
    """flags(*more): the flags of a quick run into tmp_path / "run"."""
    quick = ["--num_samples", "6", "--seq_len", "32", "--precision", "fp32", "--eval_data", "none"]
    common = ["--model", str(three_blocks), "--data", str(text_file), *quick]
    return lambda *more: [*common, "--output_dir", str(tmp_path / "run"), *more]


@pytest.fixture
def in_child(tmp_path):
    """in_child(arguments, sabotage) -> (exit code, or minus the signal that killed it; its stderr).

    The command in a forked process, which `sabotage()` has prepared before: what is killed is a real process. It has
    one thread, as the threads of this one are not forked with it.
    """

    def run(arguments, sabotage=lambda: None):
        if (child := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
                with (tmp_path / "stderr").open("w", buffering=1) as stderr:
                    sys.stderr = stderr
                    sabotage()
                    code = run_command(lambda: prune.main(arguments))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, (tmp_path / "stderr").read_text()

    return run


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def at_rename(number, act, before=False):
    """Sabotage: `act()` right behind (or before) the rename of that number; every file of a run ends with a rename."""

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


def result_of(run_dir):
    """What must not depend on the kills: the digest of the masks, all masks and all weights, bit by bit."""
    digest = json.loads((run_dir / "result.json").read_text())["masks_sha256"]
    tensors = load_file(run_dir / "masks.safetensors") | load_file(run_dir / "model.safetensors")
    return digest, {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def files(folder):
    """The names, and a star for the eight digits in that of a scratch file."""
    return sorted(re.sub(r"^(\.incomplete-)[0-9a-f]{8}", r"\1*", path.name) for path in folder.iterdir())


RUNS = {
    "wanda": ["--method", "wanda"],
    "sparsegpt": ["--method", "sparsegpt"],
    "swap": ["--method", "swap"],
    "admm": ["--method", "admm"],
    "wanda with owl": ["--method", "wanda", "--allocation", "owl", "--spread", "6", "--outlier_factor", "2"],
}


@pytest.mark.parametrize("name", RUNS)
def test_killed_three_times_and_bit_identical(name, flags, in_child, tmp_path):
    """Before the first block is in its place, in the middle of the second one's write, and right behind the last."""
    arguments, run_dir = flags(*RUNS[name]), tmp_path / "run"
    assert in_child(arguments)[0] == 0
    undisturbed = result_of(run_dir)
    shutil.rmtree(run_dir)
    assert in_child(arguments, at_rename(4, die, before=True))[0] == -signal.SIGKILL  # after marker, config, start
    assert files(run_dir / "finished_blocks") == [f".incomplete-*-{BLOCKS[0]}", "start.json"]
    assert in_child([*arguments, *RESUME], in_the_write_of(1, die))[0] == -signal.SIGKILL
    assert files(run_dir / "finished_blocks") == [f".incomplete-*-{BLOCKS[1]}", BLOCKS[0], "start.json"]
    assert in_child([*arguments, *RESUME], at_rename(3, die))[0] == -signal.SIGKILL
    assert files(run_dir / "finished_blocks") == [*BLOCKS, "start.json"]
    code, said = in_child([*arguments, *RESUME])
    assert code == 0
    assert "3 finished decoder blocks" in said
    assert result_of(run_dir) == undisturbed
    assert "finished_blocks" not in files(run_dir)
    assert [name for name in files(run_dir) if name.startswith(".")] == [".proxsparse.json"]


@pytest.mark.parametrize("before", [False, True])
def test_killed_at_every_file(before, flags, in_child, tmp_path):
    """The same command line, again and again, each time killed at one file later; at last it gets through."""
    arguments, run_dir = flags("--method", "sparsegpt", *RESUME), tmp_path / "run"
    assert in_child(arguments)[0] == 0
    undisturbed = result_of(run_dir)
    shutil.rmtree(run_dir)
    for files_written in itertools.count(1):
        code, said = in_child(arguments, at_rename(files_written, die, before))
        if code == 0:
            break
        assert code == -signal.SIGKILL, said
    assert files_written > 5
    assert result_of(run_dir) == undisturbed
    assert in_child(arguments)[0] == 0
    assert result_of(run_dir) == undisturbed


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_a_signal_ends_it_with_a_line_that_says_how_to_go_on(number, words, flags, in_child, tmp_path):
    arguments, run_dir = flags("--method", "sparsegpt"), tmp_path / "run"
    code, said = in_child(arguments, at_rename(5, lambda: os.kill(os.getpid(), number)))
    assert code == 128 + number
    line = said.strip().splitlines()[-1]
    assert line == (
        f"{words}; 2 finished decoder blocks in finished_blocks/ kept; to continue: the same command with "
        f"--output_dir {run_dir} --resume_from_checkpoint last"
    )
    assert in_child([*arguments, *RESUME])[0] == 0
    resumed = result_of(run_dir)
    assert in_child([*arguments, "--overwrite_output_dir"])[0] == 0
    assert result_of(run_dir) == resumed


@pytest.mark.parametrize("moment", ["a block's write", "a block's rename", "the last save"])
def test_a_full_disk_keeps_what_is_finished(moment, flags, in_child, tmp_path):
    def no_space():
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    arguments, run_dir = flags("--method", "sparsegpt"), tmp_path / "run"
    sabotage, count = {
        "a block's write": (in_the_write_of(1, full_disk), 1),
        "a block's rename": (at_rename(5, no_space, before=True), 1),
        "the last save": (at_rename(7, no_space, before=True), 3),
    }[moment]
    code, said = in_child(arguments, sabotage)
    assert code == 2
    line = said.strip().splitlines()[-1]
    assert line.startswith("error: the disk is full")
    assert f"{count} finished decoder block" in line
    assert line.endswith(f"--output_dir {run_dir} --resume_from_checkpoint last")
    assert files(run_dir / "finished_blocks") == [*BLOCKS[:count], "start.json"]
    assert files(run_dir) == [".proxsparse.json", "config.yaml", "finished_blocks"]
    assert in_child([*arguments, *RESUME])[0] == 0


@pytest.fixture
def stopped(flags, in_child, tmp_path):
    """The flags of a run in tmp_path / "run" that was killed behind its first decoder block."""
    arguments = flags("--method", "sparsegpt")
    assert in_child(arguments, at_rename(4, die))[0] == -signal.SIGKILL
    return arguments


def refused(capsys, arguments, *words):
    """The command must fail with one line that holds all the words, before it loads the model."""
    assert run_command(lambda: prune.main(list(map(str, arguments)))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line, line


@pytest.fixture
def no_model(monkeypatch):
    """Whoever loads a model fails."""

    def load(_name):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(job, "load_model", load)


def test_other_flags_are_refused_by_name(stopped, tiny_llama, capsys, no_model):
    refused(capsys, [*stopped, *RESUME, "--seed", "1"], "--seed 42 (now 1)", "--overwrite_output_dir")
    refused(capsys, [*stopped, *RESUME, "--damping", "0.5"], "--damping 0.01 (now 0.5)")
    refused(capsys, [*stopped, *RESUME, "--method", "wanda"], "--method sparsegpt (now wanda)")
    refused(capsys, [*stopped, "--resume_from_checkpoint", "last", "--method", "proxsparse"], "proxsparse.prune (now")
    refused(capsys, [*stopped, *RESUME, "--include", "mlp"], "--include None (now ['mlp'])")
    refused(capsys, [*stopped, *RESUME, "--model", tiny_llama], "--model ", "three-blocks", str(tiny_llama))
    both = ["--allocation", "owl", "--num_samples", "7"]
    refused(capsys, [*stopped, *RESUME, *both], "--allocation uniform (now owl)", "--num_samples 6 (now 7)")
    refused(capsys, stopped, "not empty", "--overwrite_output_dir", "--resume_from_checkpoint last")


def test_flags_of_the_evaluation_may_differ(stopped, text_file, tmp_path):
    evaluation = ["--eval_data", str(text_file), "--eval_seq_len", "32", "--eval_max_windows", "1", "--device", "cpu"]
    assert prune.main([*stopped, *RESUME, *evaluation]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["perplexity"]["windows"] == 1
    assert result["resumed"]


def test_changed_data_is_refused(flags, text_file, in_child, tmp_path, capsys):
    shutil.copy(text_file, data := tmp_path / "text.jsonl")
    arguments = flags("--method", "wanda", "--data", str(data))
    assert in_child(arguments, at_rename(4, die))[0] == -signal.SIGKILL
    data.write_text(data.read_text().replace("Document", "Paper"))
    assert run_command(lambda: prune.main([*arguments, *RESUME])) == 2
    assert "--data have changed" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_damaged_block_is_pruned_anew(stopped, in_child, tmp_path):
    block = tmp_path / "run" / "finished_blocks" / BLOCKS[0]
    block.write_bytes(block.read_bytes()[:-10])
    code, said = in_child([*stopped, *RESUME])
    assert code == 0
    assert f"{BLOCKS[0]} is damaged (" in said
    resumed = result_of(tmp_path / "run")
    assert in_child([*stopped, "--overwrite_output_dir"])[0] == 0
    assert result_of(tmp_path / "run") == resumed


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{", b'{"format": "proxsparse-run-1"}', b"[" * 100_000])
def test_a_damaged_marker_is_refused(content, stopped, capsys, no_model, tmp_path):
    (tmp_path / "run" / ".proxsparse.json").write_bytes(content)
    for more in (RESUME, ["--overwrite_output_dir"]):
        refused(capsys, [*stopped, *more], ".proxsparse.json", "damaged", "choose another")
    assert (tmp_path / "run" / "finished_blocks" / BLOCKS[0]).is_file()


def test_by_its_path(stopped, flags, capsys, no_model, monkeypatch, tmp_path):
    path = tmp_path / "run" / "finished_blocks"
    refused(capsys, [*stopped, "--resume_from_checkpoint", path / "absent"], "absent", "no such directory")
    elsewhere = ["--output_dir", tmp_path / "elsewhere"]
    refused(capsys, [*stopped, "--resume_from_checkpoint", path, *elsewhere], "elsewhere", "leave out")
    monkeypatch.undo()
    index = stopped.index("--output_dir")
    assert prune.main([*stopped[:index], *stopped[index + 2 :], "--resume_from_checkpoint", str(path)]) == 0
    assert "model.safetensors" in files(tmp_path / "run")


def test_last_needs_a_folder(stopped, capsys, no_model):
    index = stopped.index("--output_dir")
    refused(capsys, [*stopped[:index], *stopped[index + 2 :], *RESUME], "--output_dir")


def test_last_without_anything_starts_and_a_complete_run_is_left_be(flags, capsys, tmp_path, monkeypatch):
    arguments, run_dir = flags("--method", "wanda", *RESUME), tmp_path / "run"
    assert prune.main(arguments) == 0
    assert f"no run to resume in {str(run_dir)!r}: starting from the beginning" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    (run_dir / "finished_blocks").mkdir()  # as of a kill after the last file
    monkeypatch.setattr(job, "load_model", None)
    assert prune.main(arguments) == 0
    assert "complete" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()} == before
    refused(capsys, [*arguments, "--seed", "1"], "--seed 42 (now 1)")


def test_last_does_not_touch_what_is_somebody_elses(flags, capsys, no_model, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    assert run_command(lambda: prune.main(flags("--method", "wanda", *RESUME))) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_method_without_blocks_starts_again(flags, in_child, tmp_path):
    arguments = flags("--method", "magnitude", *RESUME)
    assert in_child(arguments, at_rename(4, die))[0] == -signal.SIGKILL
    code, said = in_child(arguments)
    assert code == 0
    assert "nothing finished yet" in said
    assert result_of(tmp_path / "run")
