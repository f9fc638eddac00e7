"""The `proxsparse` command: its help, how fast it starts, how a command names itself, and how it ends."""

import errno
import importlib
import os
import re
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
import torch
from commands import QUICK, call, refused, result_of

from proxsparse import __main__, apply, env, evaluate, finetune, pack, prune, report, serve, train
from proxsparse._start import COMMANDS
from proxsparse.errors import BROKEN_PIPE, InputError, describe_error, run_command
from proxsparse.ops import registry
from proxsparse.ops.backends import cpp
from proxsparse.run.folder import progress_in_errors
from proxsparse.runtime import distributed
from proxsparse.runtime.command import command_line

BY_NAME = [sys.executable, "-m", "proxsparse"]


def run(*arguments, **settings):
    """The finished process of `python -m proxsparse ...`."""
    return subprocess.run([*BY_NAME, *arguments], capture_output=True, text=True, **settings)


def test_help_lists_every_command_and_imports_no_torch():
    done = run("--help", env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    for name, what in COMMANDS.items():
        assert f"  {name:<8}  {what}\n" in done.stdout
        assert importlib.import_module(f"proxsparse.{name}").main
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "proxsparse.errors" in imported
    assert not imported & {"torch", "tqdm", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--version"], 0, "proxsparse 0.", ""),
        ([], 0, "usage: proxsparse COMMAND", ""),
        (["trian"], 2, "", f"error: trian: no such command; choose from {', '.join(COMMANDS)}\n"),
    ],
)
def test_version_and_an_unknown_command(arguments, code, out, err, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["proxsparse", *arguments])
    assert __main__.main() == code
    captured = capsys.readouterr()
    assert captured.out.startswith(out)
    assert captured.err == err


STARTS = {
    "/venv/bin/proxsparse {}": "proxsparse {}",
    "/lib/proxsparse/__main__.py {}": "python -m proxsparse {}",
    "/lib/proxsparse/{}.py": "python -m proxsparse.{}",
}


@pytest.mark.parametrize(("started", "shown"), STARTS.items())
@pytest.mark.parametrize("main", [train, prune, evaluate, pack, report, env], ids=lambda module: module.__name__)
def test_a_command_names_itself_as_it_was_started(started, shown, main, monkeypatch, capsys):
    name = main.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [*started.format(name).split(), "--limit", "a b"])
    with pytest.raises(SystemExit):
        main.main(["--help"])
    assert f"usage: {shown.format(name)} " in capsys.readouterr().out
    assert command_line() == f"{shown.format(name)} --limit 'a b'"


@pytest.mark.parametrize("command", [["--help"], ["prune", "--list"]], ids=" ".join)
def test_a_reader_that_leaves_ends_a_command_quietly(command):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*BY_NAME, *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


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


def test_a_warning_is_one_line(capsys):
    run_command(lambda: warnings.warn("two\n  lines", stacklevel=1))
    assert capsys.readouterr().err == "warning: two lines\n"


@pytest.mark.parametrize(
    ("size", "more", "words"),
    [
        ("2", {}, "(not set: RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT); start several processes"),
        ("two", dict.fromkeys(distributed.SET_BY_TORCHRUN, "0"), "(not a number); start several processes"),
    ],
)
def test_a_world_size_that_is_not_from_torchrun_is_refused(size, more, words, monkeypatch, capsys):
    for name, value in ({"WORLD_SIZE": size} | more).items():
        monkeypatch.setenv(name, value)
    words = f"WORLD_SIZE={size}", words, "with torchrun, or unset WORLD_SIZE"
    assert refused(capsys, train.main, [], *words) == []


OUT = ["--output_dir", "b"]


@pytest.mark.parametrize(
    ("main", "more"), [(evaluate, []), (apply, ["--masks", "m", *OUT]), (pack, OUT), (serve, []), (report, [])], ids=str
)
def test_a_command_of_one_process_refuses_torchrun(main, more, monkeypatch, capsys):
    for name in ("WORLD_SIZE", *distributed.SET_BY_TORCHRUN):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    words = f"{main.__name__.rpartition('.')[2]}: runs in one process, not in 2; start it without torchrun"
    assert refused(capsys, main.main, ["a", *more], words) == []


def test_home_is_expanded_where_the_shell_does_not(monkeypatch, tmp_path, tiny_llama, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("method: magnitude\neval_data: none\nmodel: ~/model\n")
    (tmp_path / "model").symlink_to(tiny_llama)
    call(prune.main, "--config=~/c.yaml", "--output_dir=~/run")
    call(pack.main, "~/run", "--output_dir=~/packed")
    call(apply.main, "~/model", "~/run", "--output_dir=~/applied")
    options = evaluate.parse(["~/model", "--masks=~/m", "--json=~/j"])
    assert (options.masks, options.json) == (f"{tmp_path}/m", f"{tmp_path}/j")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["applied", "c.yaml", "model", "packed", "run"]
    refused(capsys, report.main, ["~/run"], f"{tmp_path}/run: no metrics.jsonl")


def test_a_name_that_stdout_cannot_encode_is_escaped():
    code = "import sys; sys.argv = ['proxsparse']; import proxsparse; print('\\xf6')"
    settings = {"env": os.environ | {"PYTHONIOENCODING": "ascii"}, "capture_output": True, "text": True}
    assert subprocess.run([sys.executable, "-c", code], **settings).stdout == "\\xf6\n"


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:24: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "", "a"), "the disk is full while writing a; free some space"),
        (OSError(errno.ENOSPC, "", "source", None, "copy"), "the disk is full while writing copy; free some space"),
        (OSError(errno.EDQUOT, "", "a"), "the disk quota is used up while writing a; free some space"),
        (OSError(errno.EFBIG, "", "a"), "the file would be larger than allowed (ulimit -f) while writing a; free"),
        (RuntimeError(f"I/O error: File too large (os error {errno.EFBIG})"), "the file would be larger than allowed"),
        (RuntimeError(GLOO), "another process of this run has ended"),
        (torch.OutOfMemoryError("no memory."), "no memory; lower --seq_len, or use --precision bf16, in training --"),
    ],
)
def test_errors_of_disk_memory_and_other_processes_are_named(error, text):
    assert describe_error(error).startswith(text)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (KeyboardInterrupt(), True),
        (OSError("No space left on device"), True),
        (RuntimeError("safetensors: No space left on device (os error 28)"), True),
        (torch.distributed.DistBackendError("another process has ended"), True),
        (torch.AcceleratorError("unspecified launch failure"), True),
        (RuntimeError(GLOO), True),
        (OverflowError("cannot convert float infinity to integer"), False),
        (MemoryError(), False),
        (RuntimeError("nm_mask: backend 'cpp' was chosen explicitly but does not support this call"), False),
        (InputError("--seq_len 0"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_same_command_is_recommended_only_where_it_helps(error, helps, tmp_path):
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    with pytest.raises(type(error)) as raised, progress_in_errors(tmp_path):
        raise error
    assert bool(getattr(raised.value, "__notes__", [])) is helps


def test_env_names_versions_compilers_backends_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(cpp, "_missing", "the compiled extension is missing; remedy: apt install g++")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert env.TYPICAL_ARGUMENTS.keys() == {*registry._kernels} - {"sparse_linear"}
    call(env.main)
    printed = capsys.readouterr().out
    for words in (f"torch {version('torch')}", "Python 3.", "transformers ", "triton ", "CUDA ", "ROCm ", "nvcc "):
        assert words in printed
    assert "compilers: missing;" in printed
    if not torch.cuda.is_available():
        reason = r"  cpp for prox_nm_, .*, sparse_linear\(512 rows\): the .* missing; remedy: apt install g\+\+"
        assert re.search(reason, printed)
        assert "supports only CUDA GPUs" in printed
        assert re.search("torch.*GPU|GPU.*torch", printed.splitlines()[-1])
    monkeypatch.setenv("PROXSPARSE_BACKEND", "reference")
    env.main([])
    printed = capsys.readouterr().out
    assert "unset PROXSPARSE_BACKEND=reference: each op then uses the fastest" in printed
    rows = {line.split("  ")[0]: line.split() for line in printed.splitlines() if line}
    assert rows["prox_nm_"][-1] == rows["sparse_linear(512 rows)"][-1] == "selected"


def test_commands_run_in_a_thread(tiny_llama, text_file, tmp_path):
    """Python sets signal handlers only in the main thread."""
    pruned, quick = tmp_path / "prune", [*QUICK, "--data", text_file, "--eval_data", text_file, "--max_steps", 2]
    with ThreadPoolExecutor(1) as pool:
        for main, flags in (
            (prune.main, ["--model", tiny_llama, "--method", "magnitude", *QUICK, "--eval_data", text_file]),
            (train.main, ["--model", tiny_llama, *quick]),
            (finetune.main, [pruned, *quick, "--packing", "false"]),
        ):
            folder = tmp_path / main.__module__.rpartition(".")[2]
            assert pool.submit(main, [str(flag) for flag in (*flags, "--output_dir", folder)]).result() == 0
            assert result_of(folder)["status"] == "complete"
