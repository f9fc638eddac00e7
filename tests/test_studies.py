"""benchmarks/studies.py on a tiny model: rows and pictures, shared and resumed runs, hard constraints."""

import math

import pytest
import studies
import torch
from lib import common, plots, runs
from tiny_models import save_texts, save_tiny_model

from proxsparse.errors import InputError
from proxsparse.io.mask_files import load_masks
from proxsparse.optim import ProxAdamW
from proxsparse.run import folder as run_folder

RUNS = {"constraints": 4, "lambda1": 3, "lambda2": 3, "samples": 3, "convergence": 3, "early_mask": 3, "norm_gap": 3}
RUNS["recovery"] = 3
PAPER = ("--objective", "paper")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and a text file; the files that all studies of this module write."""
    folder = tmp_path_factory.mktemp("studies")
    save_tiny_model("llama", folder / "tiny")
    save_texts(folder / "text.jsonl")
    return folder


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    """The page and plots of a run are tested elsewhere and take half of the time; a commit that counts."""
    monkeypatch.setattr(run_folder, "write_report", lambda run_dir: None)
    monkeypatch.setattr(common, "commit", lambda: "0123456789ab")


@pytest.fixture
def command(folder):
    """name, flags -> the study run with them."""

    def run(name, *flags):
        text, own = str(folder / "text.jsonl"), ["--output_dir", str(folder / "out")]
        train = ["--model", str(folder / "tiny"), "--data", text, "--eval_data", text, "--device", "cpu"]
        studies.main([name, "--quick", *own, "--results", str(folder / "rows.jsonl"), *train, *flags])

    return run


@pytest.fixture
def started(monkeypatch):
    """The configs of all runs of the job from here on."""
    seen, run = [], runs.job.run
    monkeypatch.setattr(runs.job, "run", lambda config, method: seen.append(config) or run(config, method))
    return seen


def rows_of(folder):
    return common.read_rows(folder / "rows.jsonl")


def test_all_studies_write_rows_and_pictures_and_share_their_runs(folder, command, started, capsys):
    command("all", *PAPER)
    rows = rows_of(folder)
    assert {name: sum(row["study"] == name for row in rows) for name in studies.STUDIES} == RUNS
    # 3 of lambda1, then 2 of lambda2, 2 of samples, hard sparsity and both hard (the base run is in all of them); and
    # those of recovery, each with its fine-tuning
    assert len(started) == 3 + 2 + 2 + 2 + 6
    assert str(folder) not in (folder / "rows.jsonl").read_text()
    for name, study in studies.STUDIES.items():
        assert (folder / "out" / f"{name}-tiny-none-dense.png").read_bytes().startswith(b"\x89PNG")
        curves = [row["curve"] for row in rows if row["study"] == name and study.curve]
        assert all(curve[-1][0] == 16 and len(curve) > 10 for curve in curves)
    models = list(folder.glob("out/cells/*/model*.safetensors"))
    assert len(models) == 6  # those of recovery: dozens of models would fill the disk
    masks = list(folder.glob("out/cells/*/masks.safetensors"))
    assert len(masks) == len(started)
    assert all(len(load_masks(path)) == 14 for path in masks)
    printed = capsys.readouterr().out
    assert all(study.title in printed for study in studies.STUDIES.values())

    cells = {(row["study"], row["cell"]): row for row in rows}  # the swept constants reached the learning
    shares = [cells["lambda1", factor]["feasible_share"] for factor in ("0.1", "1", "10")]
    assert shares == sorted(shares) != shares[:1] * 3
    assert [cells["constraints", cell]["feasible_share"] for cell in ("hard sparsity", "both hard")] == [1, 1]
    gaps = [cells["norm_gap", strength]["norm_gap"] for strength in ("0", "20", "inf")]
    assert gaps[0] > gaps[1] > gaps[2]
    assert cells["constraints", "hard frozen weights"]["masks_sha256"] == cells["lambda2", "inf"]["masks_sha256"]
    assert [cells["samples", count]["steps"] for count in ("4", "8", "16")] == [4, 8, 16]
    assert cells["early_mask", "1"]["curve"][-1] == [16, 1]
    for count in ("4", "8", "16"):
        row = cells["recovery", count]
        assert math.isfinite(row["finetuned"])
        assert row["finetuned"] != row["perplexity"]["proxsparse"]


def test_a_run_is_repeated_only_if_it_is_asked_for_or_was_of_uncommitted_code(folder, command, started, monkeypatch):
    flags = (*PAPER, "--max_steps", "2", "--values", "1")
    command("lambda1", *flags)
    before = rows_of(folder)
    command("lambda1", *flags)
    assert (len(started), rows_of(folder)) == (1, before)
    command("lambda1", *flags, "--again")
    assert len(started) == 2
    monkeypatch.setattr(common, "commit", lambda: "a-dirty")
    command("lambda1", *flags, "--seed", "1")  # another setting: another run
    command("lambda1", *flags, "--seed", "1")
    assert len(started) == 3
    monkeypatch.setattr(common, "commit", lambda: "b")
    command("lambda1", *flags, "--seed", "1")
    command("lambda1", *flags)
    assert len(started) == 4
    words = rows_of(folder)[-1]["command"].split()  # it repeats the row; paths without their folders
    args, others = studies.parse_arguments(words[2:])
    assert (words[:2], args.study, args.values) == (["python", "benchmarks/studies.py"], "lambda1", ["1"])
    assert args.quick
    assert others[:6] == ["--model", "tiny", "--data", "text.jsonl", "--eval_data", "text.jsonl"]


def test_a_study_continues_where_it_stopped(folder, command, started, monkeypatch):
    flags = ("--seed", "2")
    with monkeypatch.context() as patch:
        run = runs.job.run

        def stops_at_the_second(config, method):
            if len(started) == 1:
                raise InputError("power cut")
            return run(config, method)

        patch.setattr(runs.job, "run", stops_at_the_second)
        with pytest.raises(InputError, match="power cut"):
            command("lambda1", *flags)
    command("lambda1", *flags)
    assert len(started) == 3
    assert sum(row["scaling"] == "activation" for row in rows_of(folder)) == 3


@pytest.mark.parametrize(("name", "value"), [("constraints", "both hard"), ("norm_gap", "20")])
def test_constraints_on_weights_are_studied_where_the_loss_sees_the_weights(folder, command, name, value):
    command(name, "--max_steps", "2", "--values", value)
    row = rows_of(folder)[-1]
    assert (row["study"], row["scaling"], row["forward"]) == (name, "activation", "dense")


def test_hard_frozen_weights_keep_pretrained_values():
    weight = torch.nn.Parameter(torch.randn(8, 16))
    pretrained = weight.detach().clone()
    optimizer = ProxAdamW([weight], lr=0.05, reg_lambda=0.01)
    with studies.hard_frozen_weights():
        for _ in range(5):
            weight.grad = torch.randn(8, 16)
            optimizer.step()
            back = (weight == pretrained).view(8, 4, 4).sum(-1)
            assert (back >= 2).all()
    assert not torch.equal(weight, pretrained)
    weight.grad = torch.randn(8, 16)
    optimizer.step()  # the constraint has ended with its context
    assert not (weight == pretrained).any()


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("lambda1", ["--values", "often"], "--values often: lambda1 takes values such as"),
        ("constraints", ["--values", "both"], "constraints takes 'both soft'"),
        ("lambda2", ["--eval_data", "none"], "lambda2: measures the perplexity"),
        ("samples", ["--lambda", "3"], "unrecognized arguments: --lambda"),
        # of a later cell: refused before the first run
        ("lambda1", ["--reg_lambda", "0.002", "--values", "1", "inf"], "--reg_lambda 1000000000"),
    ],
)
def test_bad_input_names_the_remedy(command, started, name, flags, message):
    with pytest.raises(InputError, match=message):
        command(name, *flags)
    assert not started


def test_list_names_the_papers_tables_and_figures(capsys):
    studies.main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed and study.paper in printed for name, study in studies.STUDIES.items())


def test_the_committed_rows_are_drawn_and_a_far_magnitude_mask_does_not_compress_the_picture():
    pytest.importorskip("matplotlib")
    rows = common.read_rows(common.results_file("studies"))
    for name in studies.STUDIES.keys() - {"recovery"}:  # which takes hours, and has not been measured yet
        own = [row for row in rows if row["study"] == name]
        (plots.curves if studies.STUDIES[name].curve else plots.perplexities)(own, "title")
    lambda1 = [row for row in rows if row["study"] == "lambda1"]
    axes = plots.perplexities(lambda1, "title").axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[1] == "magnitude mask: 2,569, outside the picture"
    assert max(row["perplexity"]["proxsparse"] for row in lambda1) < axes.get_ylim()[1] < 300
