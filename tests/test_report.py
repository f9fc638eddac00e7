"""Synthetic run directories in, report.md, plots and model card out."""

import json
import math
import re
import sys

import pytest
import yaml

from proxsparse.errors import InputError, run_command
from proxsparse.io.output_folder import FORMAT, MARKER
from proxsparse.report import main
from proxsparse.run.model_card import card_text
from proxsparse.run.report import number, table, write_report
from proxsparse.run.sections import shareable

MARKED = json.dumps({"format": FORMAT, "run_id": "", "command": "train", "settings": {}})
PLOTS = {"loss.png", "feasible_share.png", "mask_similarity.png", "norm_gap.png"}


def rows(steps=60):
    constant = {"learning_rate": 1e-4, "grad_norm": 1.0, "mask_change": 0.01}
    return [
        {"step": i, "loss": 3 + math.sin(i), "feasible_share": i / steps, "norm_gap": 0.001 * i, "tokens": 64 * i}
        | {"seconds": 1.5 * i, **constant}
        for i in range(1, steps + 1)
    ]


def result(**changes):
    return {
        **{"status": "complete", "version": "0.1.0", "model": "owner/tiny-1b", "data": "wikitext", "pattern": "2:4"},
        **{"method": "proxsparse", "objective": "masked", "layers": 12},
        **{"kept": 0.5, "arithmetic": 0.5078125, "bytes_a_weight": 1.125},
        "command": "python -m proxsparse.train --model owner/tiny-1b",
        **{"config": {"learning_rate": 1e-4, "output_dir": "out"}, "weights": 1234567, "steps": 60},
        **{"tokens": 3840, "seconds": 3725.0, "reg_lambda": {"min": 0.1, "max": 0.1}, "feasible_share": 0.9876},
        **{"magnitude_agreement": 0.8125, "masks_sha256": "ab12" * 16, "warnings": [], "peak_memory_bytes": 3 << 30},
        "mask_similarity": [{"step": 0, "to_final": 0.8}, {"step": 60, "to_final": 1.0}],
        "perplexity": perplexity(),
        "environment": {"python": "3.11.0", "torch": "2.13.0", "transformers": "5.23", "device": "cpu", "threads": 1},
    } | changes


def perplexity(**changes):
    scores = {"data": "wikitext test", "seq_len": 2048, "windows": 12, "tokens": 24564}
    return {**scores, "dense": 20.684, "magnitude": 3015.3, "proxsparse": 66.21} | changes


def make_run(folder, metrics, outcome=None):
    text = metrics if isinstance(metrics, str) else "".join(json.dumps(row) + "\n" for row in metrics)
    (folder / "metrics.jsonl").write_text(text)
    if outcome is not None:
        (folder / "result.json").write_text(outcome if isinstance(outcome, str) else json.dumps(outcome))
    return folder


def written(folder):
    """Rebuilds the report of `folder`: report.md."""
    write_report(folder)
    return (folder / "report.md").read_text()


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_complete_run_has_verdict_figures_settings_and_plots(tmp_path, plots):
    report, card = written(make_run(tmp_path, rows(), result())), card_text(result())
    assert names(tmp_path) == {"metrics.jsonl", "result.json", "report.md", *PLOTS}
    for text in (report, card):
        assert "perplexity of the dense model: 20.68; magnitude mask: 3,015; ProxSparse mask: 66.21.**" in text
        assert "wikitext test; 12 windows of 2,048 tokens" in text
        assert "| magnitude mask | 3,015 |" in text
        assert "ab12" * 16 in text
        assert "Warning" not in text
    assert "| `learning_rate` | 0.0001 |" in card
    assert (
        "\nThe linear layers of the decoder blocks, packed, need 0.51 times the dense arithmetic and 1.12 bytes" in card
    )
    figures = "| weights in these layers | 1,234,567 |", "| 1:02:05 |", "98.7600 %", "81.2500 %", "3.00 GiB"
    figures += "| 50.0000 % |", "(dense: 1) | 0.5078 |", "in bf16 (dense: 2) | 1.125 |"
    assert all(figure in report for figure in (*figures, "python -m proxsparse.train"))
    for plot in PLOTS:
        assert f"]({plot})" in report
        png = (tmp_path / plot).read_bytes()
        assert png.startswith(b"\x89PNG")
        assert len(png) < 150_000
    assert written(tmp_path) == report  # again: nothing changes, no other file is left
    assert names(tmp_path) == {"metrics.jsonl", "result.json", "report.md", *PLOTS}


def test_card_front_matter_names_the_base_model_only_from_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    for model in ("owner/tiny-1b", "./models/tiny", "models/tiny", "tiny"):
        card = card_text(result(model=model))
        assert yaml.safe_load(card.split("---\n")[1]) == {
            **({"base_model": model, "base_model_relation": "quantized"} if model == "owner/tiny-1b" else {}),
            **{"library_name": "transformers", "pipeline_tag": "text-generation"},
            "tags": ["2:4", "semi-structured-sparsity", "pruned", "proxsparse"],
        }
        assert f"# {model.rpartition('/')[2]}, pruned to 2:4" in card
        assert "+0.0" in card
        assert "from_pretrained" in card


def test_shared_results_do_not_name_the_folders_of_this_machine():
    command = "proxsparse train --model /home/jane/tiny --data=/home/jane/a.jsonl --output_dir 'runs/my run'"
    shared = shareable({"command": command, "config": {"data": "/home/jane/a.jsonl", "seed": 1, "include": ["/x/y"]}})
    assert shared == {
        "command": "proxsparse train --model tiny --data=a.jsonl --output_dir 'runs/my run'",
        "config": {"data": "a.jsonl", "seed": 1, "include": ["y"]},
    }


def test_names_that_are_not_utf8_are_shown(tmp_path):
    folder = make_run(tmp_path, rows(2), result(command="proxsparse train \udcff.jsonl"))
    assert "proxsparse train ?.jsonl" in written(folder)


def test_a_running_run_says_so(tmp_path, plots):
    assert "0 finished steps" in written(make_run(tmp_path, ""))
    assert names(tmp_path) == {"metrics.jsonl", "report.md"}  # no plots of nothing
    report = written(make_run(tmp_path, rows(5)))
    assert "no result.json" in report.split("## ")[0]
    assert "5 finished steps" in report
    assert names(tmp_path) == {"metrics.jsonl", "report.md", *PLOTS - {"mask_similarity.png"}}


WORSE = "the learned mask is worse than the magnitude mask: take more steps"


@pytest.mark.parametrize(
    ("changes", "at_the_top"),
    [
        ({"status": "interrupted"}, "The run was interrupted after 60 steps"),
        ({"warnings": ["loss rose", "few\nblocks"]}, "> **Warning:** loss rose\n>\n> **Warning:** few blocks\n"),
        ({"warnings": [WORSE], "perplexity": perplexity(proxsparse=4000.0)}, WORSE),
        ({"perplexity": None}, "Held-out perplexity was not measured."),
    ],
)
def test_what_the_reader_must_know_is_at_the_top_of_both_files(tmp_path, changes, at_the_top):
    for text in (written(make_run(tmp_path, rows(), result(**changes))), card_text(result(**changes))):
        assert at_the_top in text.split("## ")[0]


def test_values_that_are_not_finite_are_drawn_and_written(tmp_path, plots):
    metrics = rows()
    metrics[10]["loss"], metrics[11]["loss"], metrics[12]["loss"] = math.nan, None, math.inf
    outcome = result(feasible_share=None, magnitude_agreement=None, peak_memory_bytes=None, mask_similarity=[])
    report = written(make_run(tmp_path, metrics, outcome))
    assert "| peak memory | n/a |" in report
    assert PLOTS - names(tmp_path) == {"mask_similarity.png"}


def test_without_matplotlib_the_report_says_how_to_get_the_plots(tmp_path, plots, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = written(make_run(tmp_path, rows(), result()))
    assert "pip install matplotlib" in report
    assert ".png" not in report.replace("*.png", "")
    assert not names(tmp_path) & PLOTS


@pytest.mark.parametrize("tail", ['{"step": 61, "lo', "{"])
def test_unfinished_last_line_is_left_out(tmp_path, tail):
    text = "".join(json.dumps(row) + "\n" for row in rows(5)) + tail
    report = written(make_run(tmp_path, text))
    assert "5 finished steps" in report


@pytest.mark.parametrize("broken", ["{", "\udcff", "", "7", '{"step": 2, "loss": "x"}'])
def test_a_broken_line_in_the_middle_is_refused(tmp_path, plots, broken):
    first, last = (json.dumps(row) for row in rows(2))
    make_run(tmp_path, "")
    (tmp_path / "metrics.jsonl").write_bytes(f"{first}\n{broken}\n{last}\n".encode(errors="surrogateescape"))
    is_json = broken in ("7", '{"step": 2, "loss": "x"}')
    named = r"metrics\.jsonl or result\.json cannot be shown" if is_json else r"metrics\.jsonl, line 2: not valid JSON"
    with pytest.raises(InputError, match=named):
        write_report(tmp_path)
    assert names(tmp_path) == {"metrics.jsonl"}


@pytest.mark.parametrize(
    ("outcome", "named"),
    [
        ('{\n"status": ', "line 2"),
        ("[]", "list"),
        (result(steps="many"), "must be real number, not str"),
        (result(perplexity={"dense": 1.0}), "data"),
    ],
)
def test_malformed_result_is_named(tmp_path, outcome, named):
    make_run(tmp_path, rows(2), outcome)
    with pytest.raises(InputError, match=rf"result\.json.*{named}"):
        write_report(tmp_path)


def test_command_line_reports_bad_input_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / MARKER).write_text(MARKED)
    for folder, reason in (
        (tmp_path, "no metrics.jsonl: the run has not logged a step yet"),
        (tmp_path / "absent", "not a folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["report", str(folder)])
        assert run_command(main) == 2
        assert re.search(rf"^error: .*{reason}.*--output_dir.*\n$", capsys.readouterr().err)
    monkeypatch.setattr(sys, "argv", ["report", str(make_run(tmp_path, rows(2), result()))])
    assert run_command(main) == 0
    assert (tmp_path / "report.md").exists()


def test_a_report_replaces_only_what_a_run_may_have_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (tmp_path / "report.md").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match=r"no \.proxsparse\.json in this folder, so no run wrote it"):
        main([str(tmp_path)])
    (tmp_path / MARKER).write_text(MARKED)
    main([str(tmp_path)])
    assert "Report of a run" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(66.2134, "66.21"), (3015.3, "3,015"), (1e-4, "0.0001"), (60, "60"), (1e30, "1e+30")],
        *[(0, "0"), (None, "n/a"), (math.nan, "NaN"), (math.inf, "infinite")],
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_table_cells_stay_in_their_cell():
    assert table(("a", "b"), ("x|y", "one\ntwo")) == "| a | b |\n| --- | --- |\n| x\\|y | one two |"
