"""benchmarks/studies.py on a tiny model: what each study leaves, shared and resumed runs, hard constraints."""

import json

import common
import pytest
import studies
import torch
from tiny_models import save_texts, save_tiny_model

from proxsparse.errors import InputError
from proxsparse.io.mask_files import load_masks
from proxsparse.optim import ProxAdamW
from proxsparse.run.parse import parse_config

RUNS = {"constraints": 4, "lambda1": 3, "lambda2": 3, "samples": 3, "convergence": 3, "early_mask": 3, "norm_gap": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and a text file; what all studies leave there, and how often the learning ran."""
    folder = tmp_path_factory.mktemp("studies")
    save_tiny_model("llama", folder / "tiny")
    save_texts(folder / "text.jsonl")
    return folder


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    """The pages and plots of each single run are tested elsewhere and take half of the time."""
    monkeypatch.setattr(studies.train, "write_report", lambda run_dir: None)


@pytest.fixture
def command(folder):
    """name, flags -> the study run with them."""

    def run(name, *flags):
        text, own = str(folder / "text.jsonl"), ["--output_dir", str(folder / "out")]
        train = ["--model", str(folder / "tiny"), "--data", text, "--eval_data", text, "--device", "cpu"]
        studies.main([name, "--quick", *own, "--results", str(folder / "rows.jsonl"), *train, *flags])

    return run


@pytest.fixture
def runs(monkeypatch):
    """The flags of every run of proxsparse.train from here on."""
    seen, main = [], studies.train.main
    monkeypatch.setattr(studies.train, "main", lambda arguments: seen.append(arguments) or main(arguments))
    return seen


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_all_studies_leave_rows_and_pictures_and_share_their_runs(folder, command, runs, capsys):
    command("all", "--metric", "none")
    rows = rows_of(folder)
    assert {name: sum(row["study"] == name for row in rows) for name in studies.STUDIES} == RUNS
    # 3 of lambda1, then 2 of lambda2, 2 of samples, hard sparsity and both hard; the base run is in all of them
    assert len(runs) == 3 + 2 + 2 + 2
    assert str(folder) not in (folder / "rows.jsonl").read_text()
    for name, study in studies.STUDIES.items():
        assert (folder / "out" / f"{name}-tiny-none-dense.png").read_bytes().startswith(b"\x89PNG")
        curves = [row["curve"] for row in rows if row["study"] == name and study.curve]
        assert all(curve[-1][0] == 16 and len(curve) > 10 for curve in curves)
    assert not list(folder.glob("out/cells/*/model*.safetensors"))  # dozens of models would fill the disk
    assert len(list(folder.glob("out/cells/*/masks.safetensors"))) == len(runs)
    printed = capsys.readouterr().out
    assert all(study.title in printed for study in studies.STUDIES.values())
    check_what_the_runs_show(rows)


def check_what_the_runs_show(rows):
    """The swept constants reached the learning."""
    cells = {(row["study"], row["cell"]): row for row in rows}
    shares = [cells["lambda1", factor]["feasible_share"] for factor in ("0.1", "1", "10")]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]
    assert (
        cells["constraints", "hard sparsity"]["feasible_share"]
        == cells["constraints", "both hard"]["feasible_share"]
        == 1
    )
    gaps = [cells["norm_gap", strength]["norm_gap"] for strength in ("0", "20", "inf")]
    assert gaps[0] > gaps[1] > gaps[2]
    assert cells["constraints", "hard frozen weights"]["masks_sha256"] == cells["lambda2", "inf"]["masks_sha256"]
    assert [cells["samples", count]["steps"] for count in ("4", "8", "16")] == [4, 8, 16]
    assert cells["early_mask", "1"]["curve"][-1] == [16, 1]


def test_a_second_call_runs_nothing_and_adds_no_row(folder, command, runs):
    command("lambda1", "--metric", "none")
    before = rows_of(folder)
    runs.clear()
    command("lambda1", "--metric", "none")
    assert (runs, rows_of(folder)) == ([], before)
    command("lambda1", "--metric", "none", "--again", "--values", "1")
    assert len(runs) == 1
    command("lambda1", "--metric", "none", "--seed", "1", "--values", "1")  # another setting: another run
    assert len(runs) == 2


def test_a_run_that_is_not_the_same_or_not_whole_is_repeated(folder, command, runs):
    flags = ("--metric", "none", "--max_steps", "2", "--values", "1")
    command("lambda1", *flags)
    (cell,) = [
        path.parent for path in folder.glob("out/cells/*/result.json") if json.loads(path.read_text())["steps"] == 2
    ]
    result = json.loads((cell / "result.json").read_text())
    for changed in (
        {"status": "interrupted"},
        {"perplexity": None},  # Ctrl-C in the last evaluation
        {"config": result["config"] | {"seq_len": 63}},  # a default that has changed since
    ):
        (cell / "result.json").write_text(json.dumps(result | changed))
        runs.clear()
        command("lambda1", *flags)
        assert len(runs) == 1, changed
    del result["config"]["metric_samples"]  # a flag that is newer than the run
    (cell / "result.json").write_text(json.dumps(result))
    runs.clear()
    command("lambda1", *flags)
    assert not runs


def test_a_study_goes_on_where_it_stopped(folder, command, runs, monkeypatch):
    flags = ("--metric", "activation", "--seed", "2")
    with monkeypatch.context() as patch:
        learn = studies.train.learn_masks

        def breaks_at_the_second(*arguments):
            if len(runs) == 2:
                raise InputError("power cut")
            return learn(*arguments)

        patch.setattr(studies.train, "learn_masks", breaks_at_the_second)
        with pytest.raises(InputError, match="power cut"):
            command("lambda1", *flags)
    command("lambda1", *flags)
    assert len(runs) == 2 + 2  # the first run is kept, the second starts again
    assert sum(row["metric"] == "activation" for row in rows_of(folder)) == 3


@pytest.mark.parametrize("name", ["constraints", "lambda2", "norm_gap"])
def test_constraints_on_weights_are_studied_where_the_loss_sees_the_weights(folder, command, name):
    value = "both hard" if name == "constraints" else "20"
    command(name, "--metric", "activation", "--max_steps", "2", "--values", value)
    row = rows_of(folder)[-1]
    assert (row["study"], row["metric"], row["forward"]) == (name, "activation", "dense")


def test_the_command_of_a_row_repeats_it(folder, command, runs):
    command("constraints", "--metric", "none")
    for row in [row for row in rows_of(folder) if row["study"] == "constraints"]:
        words = row["command"].replace("--data text.jsonl", f"--data {folder / 'text.jsonl'}").split()
        if row["cell"] in ("both soft", "hard sparsity"):
            assert words[:3] == ["python", "-m", "proxsparse.train"]
            assert parse_config(words[3:]).metric == "none"
        else:  # proxsparse.train has no flag for lambda_2 = infinity
            assert words[:3] == ["python", "benchmarks/studies.py", "constraints"]


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
    optimizer.step()  # the constraint has ended with its block
    assert not (weight == pretrained).any()


def test_list_names_the_papers_tables_and_figures(capsys):
    studies.main(["--list"])
    printed = capsys.readouterr().out
    assert all(name in printed and study.paper in printed for name, study in studies.STUDIES.items())


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("lambda1", ["--values", "often"], "--values often: lambda1 takes values such as"),
        ("constraints", ["--values", "both"], "constraints takes 'both soft'"),
        ("lambda2", ["--eval_data", "none"], "lambda2: its figure is the perplexity"),
        ("samples", ["--lambda", "3"], "unrecognized arguments: --lambda"),
    ],
)
def test_bad_input_names_the_remedy(command, name, flags, message):
    with pytest.raises(InputError, match=message):
        command(name, *flags)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (
            "lambda1",
            ["--metric", "activation", "--reg_lambda", "0.002", "--values", "1", "inf"],
            "--reg_lambda 1000000000",
        ),
        ("lambda2", ["--metric", "activation", "--forward", "masked"], "--frozen_lambda 20"),
    ],
)
def test_a_cell_that_cannot_run_is_refused_before_the_first_run(command, runs, name, flags, message):
    with pytest.raises(InputError, match=message):
        command(name, *flags)
    assert not runs


def test_masks_of_a_run_are_whole(folder, command):
    command("lambda1", "--metric", "none", "--values", "1")
    for path in folder.glob("out/cells/*/masks.safetensors"):
        assert len(load_masks(path)) == 14


def test_a_magnitude_mask_far_above_does_not_press_the_runs_together():
    pytest.importorskip("matplotlib")
    rows = [row for row in studies.read_rows(common.results_file("studies")) if row["study"] == "lambda1"]
    axes = studies.study_plots.line(rows, "title").axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[1] == "magnitude mask: 2,569, beyond the picture"
    assert max(row["perplexity"]["proxsparse"] for row in rows) < axes.get_ylim()[1] < 300
