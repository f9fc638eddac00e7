"""Progress: quiet for library calls, a bar on a terminal, lines without a carriage return elsewhere."""

import io
import re
import sys
import time
import types

import pytest
from tiny_models import byte_tokenizer, tiny_model

from proxsparse import prune, prune_
from proxsparse.data.calibration import calibration_batches
from proxsparse.errors import run_command
from proxsparse.runtime import progress
from proxsparse.runtime.progress import phase, shown


class Terminal(io.StringIO):
    encoding, isatty = "utf-8", lambda self: True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "TERMINAL_INTERVAL_S", 0.01)
    monkeypatch.setattr(progress, "FILE_INTERVAL_S", 0.01)


def count_to(steps, pause=0.0):
    """A phase of some steps that ends with a result."""
    with shown(), phase("counting", steps, "window") as current:
        for _ in range(steps):
            time.sleep(pause)
            current.step()
        current.result = "17.30"


def test_a_library_call_prints_nothing(capsys):
    with phase("counting", 1) as current:
        current.step()
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    batches = calibration_batches(["some text"] * 2, tokenizer, num_samples=2, seq_len=8)
    prune_(model, "wanda", batches)
    assert capsys.readouterr() == ("", "")
    with shown():
        prune_(model, "wanda", batches)
    assert "\nwanda: done (2 decoder blocks, " in capsys.readouterr().err


def test_a_file_gets_lines(capsys, quick):
    count_to(2, 0.05)
    *between, last = capsys.readouterr().err.split("\n")[:-1]
    assert between
    assert all(line.startswith("counting: ") for line in between)
    assert any("50% 1/2" in line for line in between)
    assert last.startswith("counting: 17.30 (2 windows, 0.")
    assert "\r" not in "".join(between)


def test_a_terminal_gets_a_bar(monkeypatch, quick):
    monkeypatch.setattr(sys, "stderr", Terminal())
    count_to(2, 0.05)
    *bars, last, end = sys.stderr.getvalue().split("\r")
    assert any("counting:  50%|" in bar and "1/2 [00:00<" in bar for bar in bars)
    assert not last.strip(" "), "the bar is gone"
    assert re.fullmatch(r"counting: 17\.30 \(2 windows, 0\..* s\)\n", end)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_phase_that_fails_leaves_nothing(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    with pytest.raises(ZeroDivisionError), shown(), phase("dividing"):
        _ = 1 / 0
    assert sys.stderr.getvalue().rpartition("\r")[2] == ""


def test_other_ranks_are_quiet(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    count_to(1)
    assert capsys.readouterr().err == ""


def test_a_resumed_phase_counts_on(capsys):
    with shown(), phase("learning", 10, done=8) as current:
        current.step()
    assert capsys.readouterr().err.startswith("learning: done (9 of 10 steps, ")


def test_the_bars_of_other_libraries_count_in_the_phase(capsys):
    tqdm = lambda *_, **__: pytest.fail("a bar of its own")  # noqa: E731
    library = types.SimpleNamespace(tqdm=tqdm)
    with shown(), phase("loading", unit="tensor") as current, current.instead_of_tqdm(library):
        assert list(library.tqdm({"a": 1}.items(), desc="Loading weights")) == [("a", 1)]
        bar = library.tqdm(total=5, disable=False)
        bar.update(2)
        bar.close()
    assert capsys.readouterr().err.startswith("loading: done (2 of 5 tensors, ")
    assert library.tqdm is tqdm


@pytest.mark.parametrize(
    ("flags", "phases"),
    [
        (["--method", "proxsparse", "--distill", "0.5"], "measuring|learning"),
        (["--method", "maskllm", "--prior", "wanda", "--allocation", "sensitivity"], "sensitivity|wanda|maskllm"),
        (["--method", "magnitude"], "magnitude"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_every_phase_of_a_run_has_its_line(flags, phases, tiny_llama, text_file, tmp_path, capsys):
    flags += ["--model", str(tiny_llama), "--data", str(text_file), "--output_dir", str(tmp_path / "run")]
    flags += ["--num_samples", "4", "--seq_len", "16", "--eval_seq_len", "64", "--eval_max_windows", "1"]
    assert run_command(lambda: prune.main(flags)) == 0
    captured = capsys.readouterr()
    names = ["loading", "checking the weights", "digest of the weights"]
    names += [] if flags[1] == "magnitude" else ["reading", "tokenizing the calibration text"]
    names += ["reading builtin", "tokenizing the evaluation text", "moving the model to cpu"]
    names += ["perplexity of the dense model", *phases.split("|"), "saving the model", "perplexity of the "]
    lines = iter(captured.err.splitlines())
    for name in names:
        assert any(line.startswith(name) for line in lines), f"{name} in this order:\n{captured.err}"
    assert "\r" not in captured.err
    assert captured.out.splitlines()[-1].startswith("saved to ")
