"""benchmarks/compare_methods.py from the command line to its rows, on a tiny model in a folder."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxsparse.checkpoint import save_masks
from proxsparse.errors import InputError
from proxsparse.methods import prune_

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compare_methods.py"
WORDS = ["<eos>", *(f"w{i}" for i in range(95))]


@pytest.fixture
def script(monkeypatch):
    """The script as a module, at a commit of its own."""
    spec = importlib.util.spec_from_file_location("compare_methods", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_methods", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.common, "commit", lambda: "0123456789ab")
    return module


@pytest.fixture
def command(tiny_model, tmp_path):
    """The flags of a small comparison; model, text and masks are in tmp_path."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(WORDS[1 + (i * j) % 95] for j in range(1, 20 + i))} for i in range(1, 13)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_masks(tmp_path / "masks.safetensors", prune_(model, "magnitude"), "2:4", "tiny")
    text = str(tmp_path / "text.jsonl")
    flags = ["--model", str(tmp_path / "model"), "--data", text, "--eval_data", text, "--device", "cpu"]
    flags += ["--num_samples", "4", "--seq_len", "16", "--eval_seq_len", "32", "--eval_max_windows", "3"]
    return [*flags, "--results", str(tmp_path / "rows.jsonl")]


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_a_row_for_every_method(script, command, tmp_path, capsys):
    script.main([*command, "--masks", f"learned={tmp_path / 'masks.safetensors'}"])
    rows = {row["method"]: row for row in rows_of(tmp_path)}
    assert list(rows) == ["dense", "magnitude", "sparsegpt", "wanda", "learned"]
    assert rows["learned"]["perplexity"] == rows["magnitude"]["perplexity"] != rows["dense"]["perplexity"]
    assert len({rows[name]["perplexity"] for name in ("dense", "magnitude", "wanda", "sparsegpt")}) == 4
    assert all(row["windows"] == 3 and row["seq_len"] == 32 for row in rows.values())
    assert "num_samples" in rows["wanda"]["settings"]
    assert "num_samples" not in rows["magnitude"]["settings"]
    assert str(tmp_path) not in (tmp_path / "rows.jsonl").read_text()
    printed = capsys.readouterr().out
    printed_rows = {
        tuple(cell.strip() for cell in line.split("|")[1:4]) for line in printed.splitlines() if "|" in line
    }
    for name, row in rows.items():
        assert (name, row["settings"]["weights"], f"{row['perplexity']:.2f}") in printed_rows


def test_rows_are_not_measured_twice(script, command, tmp_path, monkeypatch):
    command += ["--methods", "dense", "wanda"]
    script.main(command)
    script.main(command)
    assert len(rows_of(tmp_path)) == 2
    script.main([*command, "--seed", "1"])  # does not concern the dense row
    assert [row["method"] for row in rows_of(tmp_path)[2:]] == ["wanda"]
    script.main([*command, "--again"])
    assert len(rows_of(tmp_path)) == 5
    monkeypatch.setattr(script.common, "commit", lambda: "0123456789ab-dirty")
    script.main(command)
    script.main(command)
    assert len(rows_of(tmp_path)) == 9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "obs"], "'obs'.*choose from"),
        (["--methods", "--masks", "masks.safetensors"], "must be NAME=FILE"),
        (["--methods", "--masks", "a=absent.safetensors"], "no such file"),
        (["--methods"], "nothing to compare"),
    ],
)
def test_bad_input_names_the_remedy(script, command, flags, message):
    with pytest.raises(InputError, match=message):
        script.main(command + flags)
