"""The benchmarks of kernels at tiny sizes: what they count, print and save, and failures that cost one row."""

import itertools
import subprocess
import sys
import time
from pathlib import Path

import optimizer_step
import prox_speed
import pytest
import solver_quality
import torch
from lib import common, measure, plots, shapes

from proxsparse.io.text_table import text_table
from proxsparse.ops import registry
from proxsparse.run.recipes import RECIPE_NAMES

CPU = torch.device("cpu")
QUICK = ["--devices", "cpu", "--seconds", "0", "--repetitions", "1"]


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """benchmark -> the rows that it has saved so far, in a folder of the test."""
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.Model(2, 8, 4, 16))
    return lambda name: common.read_rows(tmp_path / f"{name}.jsonl")


def breaks(*arguments):
    raise RuntimeError("no such\nkernel")


def test_a_text_table_aligns_numbers_to_the_right():
    table = text_table(["method", "ppl", "note"], [["wanda", "191.6", ""], ["dense", "21.6", "W0"], ["x", "-", ""]])
    assert table.splitlines() == ["method    ppl  note", "wanda   191.6", "dense    21.6  W0", "x           -"]
    assert text_table(["a"], []) == "a"


PARAMETERS = {  # less embeddings, lm_head, norms and biases
    "llama-2-7b": 6_738_415_616 - 2 * 32000 * 4096 - 65 * 4096,
    "llama-3.1-8b": 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096,
    "mistral-7b-v0.1": 7_241_732_096 - 2 * 32000 * 4096 - 65 * 4096,
    "llama-2-13b": 13_015_864_320 - 2 * 32000 * 5120 - 81 * 5120,
    "qwen2.5-14b": 14_770_033_664 - 2 * 152064 * 5120 - 97 * 5120 - 48 * (5120 + 2 * 1024),
    "smollm2-135m": 134_515_008 - 49152 * 576 - 61 * 576,
}


def test_the_layers_have_the_published_number_of_weights_and_equal_ones_are_measured_once():
    for name, weights in PARAMETERS.items():
        layers = shapes.prunable_layers(name)
        assert len(layers) == 7 * shapes.MODELS[name].blocks
        assert sum(rows * columns for rows, columns in layers) == weights
    assert len(shapes.PAPER) == 7
    assert set(shapes.PAPER) <= set(RECIPE_NAMES)
    assert shapes.distinct(shapes.PAPER) == ["mistral-7b-v0.1", "qwen2.5-14b", "openllama-7b-v2", "llama-2-13b"]


def test_a_rotation_leaves_the_caches_and_is_renewed():
    sets = measure.rotation([(256, 1024), (4, 8)], torch.bfloat16, CPU, sigma=1.0)
    assert len(sets) == measure.ROTATION_SETS
    for weights in sets:
        assert [tuple(weight.shape) for weight in weights.weights] == [(256, 1024), (4, 8)]
        weights.weights[1].zero_()
        assert not torch.equal(weights.flat, weights.source)
        weights.renew()
        assert torch.equal(weights.weights[1].flatten(), sets[0].source[-32:])
    assert len({weights.flat.data_ptr() for weights in sets}) == len(sets)


def test_copies_and_runs_take_turns():
    calls = []
    runs = {"slow": lambda: (calls.append("slow"), time.sleep(0.004)), "fast": lambda: calls.append("fast")}
    samples = measure.interleaved(runs, lambda: calls.append("copy"), CPU, repetitions=3, seconds=0)
    assert calls == ["copy", "slow", "copy", "fast"] * 4  # once to warm up
    assert len(samples["copy"].ms) == 6
    assert samples["slow"].row()["p50_ms"] > 3.9
    assert samples["slow"].row()["share_of_copy"] < 1
    assert samples["copy"].row()["share_of_copy"] == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_what_a_step_allocates():
    """In a process of its own: in this one, memory that earlier tests have freed would serve the step."""
    program = "from lib import measure; import torch; "
    program += "print(measure.peak_bytes(lambda: torch.ones(2**25), torch.device('cpu')))"
    command, folder = [sys.executable, "-c", program], Path(measure.__file__).parents[1]
    held = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    assert held == "None" or 2**26 <= int(held) <= 2**29


def test_prox_speed_prints_and_saves_a_row_for_every_provider(rows_of, tmp_path, capsys):
    flags = ["--shapes", "16x64", "8x32", "--slow_weights", "300", "--models", "Tiny", "--lambdas", "25"]
    assert prox_speed.main([*QUICK, *flags]) == 0
    rows = rows_of("prox_speed")
    fast = {*registry.list_backends("prox_nm_")} - {"triton", "cuda", "reference"}
    found = {(row["weights"], row["dtype"], row["kernel"]) for row in rows}
    for dtype in ("bfloat16", "float32"):
        for weights in ("16x64", "8x32", "tiny"):
            assert {(weights, dtype, kernel) for kernel in ("copy", *fast)} <= found
        assert {("8x32", dtype, kernel) for kernel in ("reference", "EnumALM")} <= found
        assert ("16x64", dtype, "EnumALM") not in found  # more than --slow_weights
    for row in rows:
        assert row["lambda_mean"] == pytest.approx(25 * 0.02 * 0.798, rel=0.2)
        size = {"16x64": 1024, "8x32": 256, "tiny": 2 * (2 * 64 + 2 * 32 + 3 * 128)}[row["weights"]]
        moved = 2 * size * (2 if row["dtype"] == "bfloat16" else 4)
        assert row["gb_per_s"] == pytest.approx(moved / row["p50_ms"] / 1e6)
        assert row["commit"]
    assert (tmp_path / "prox_speed_cpu.png").stat().st_size > 1000
    assert "lowest share of the copy's speed" in capsys.readouterr().out


def test_what_fails_costs_prox_speed_its_own_rows(rows_of, monkeypatch, capsys):
    """Too little memory for a case, or a broken backend; rows are saved as they are measured."""
    broken = registry.Kernel("cpp", breaks, supports=lambda *arguments: None)
    monkeypatch.setitem(registry._kernels, "prox_nm_", registry._kernels["prox_nm_"] | {"cpp": broken})
    benchmark, saved = prox_speed.benchmark, []

    def measured(case, args):
        saved.append(len(rows_of("prox_speed")))
        if case.name == "16x64":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        yield from benchmark(case, args)

    monkeypatch.setattr(prox_speed, "benchmark", measured)
    flags = ["--shapes", "8x32", "16x64", "4x32", "--models", "--dtypes", "float32", "--lambdas", "1", "2"]
    assert prox_speed.main([*QUICK, *flags, "--slow_weights", "0"]) == 1
    assert 0 == saved[0] < saved[1] == saved[2]
    rows = rows_of("prox_speed")
    assert {(row["weights"], row["lambda"]) for row in rows} == {(w, x) for w in ("8x32", "4x32") for x in (1, 2)}
    assert {row["kernel"] for row in rows if "p50_ms" in row} == {"copy"}
    assert {row["note"] for row in rows if row["kernel"] == "cpp"} == {"RuntimeError: no such kernel"}
    assert "failed: 16x64 in torch.float32: OutOfMemoryError" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")
def test_optimizer_step_counts_the_bytes_of_every_optimizer(rows_of, monkeypatch, capsys):
    monkeypatch.setitem(optimizer_step.OPTIMIZERS, "broken", breaks)
    assert optimizer_step.main([*QUICK, "--model", "tiny", "--blocks", "2"]) == 1
    rows = rows_of("optimizer_step")
    found = {(row["dtype"], row["optimizer"]): row for row in rows}
    assert found["float32", "broken"]["note"] == "RuntimeError: no such kernel"
    assert "no such kernel" in capsys.readouterr().out
    expected = {  # weight read and written, gradient read, state read and written; the state
        **{("float32", "AdamW"): (28, 8), ("float32", "AdamW + EnumALM"): (28, 8)},
        **{("float32", "ProxOptimizer(AdamW), scaling"): (28, 8), ("float32", "ProxAdamW, scaling"): (28, 8)},
        **{("float32", "ProxAdamW, bf16 moments"): (20, 4), ("bfloat16", "AdamW"): (14, 4)},
        **{("bfloat16", "ProxAdamW"): (22, 8), ("bfloat16", "ProxAdamW, masters"): (30, 12)},
        ("bfloat16", "ProxAdamW, stochastic rounding, bf16 moments"): (14, 4),
    }
    sizes = {case: (row.get("bytes_a_weight"), row.get("state_bytes_a_weight")) for case, row in found.items()}
    assert expected.items() <= sizes.items()
    assert all(row["p50_ms"] > 0 and row["gb_per_s"] > 0 for row in rows if row["optimizer"] != "broken")


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_solver_quality_compares_all_solvers_and_draws(full, rows_of, tmp_path, capsys):
    flags = ["--hard", "--plots", str(tmp_path)] if full else ["--no-plots"]
    solver_quality.main(["--instances", "4", "--lambdas", "3", *flags])
    rows = rows_of("solver_quality")
    assert len(rows) == (1 + full) * 6
    assert all(row["misses"] == 0 and row["max_suboptimality"] < 1e-9 for row in rows if "ours" in row["solver"])
    assert all((tmp_path / f"{name}.png").exists() is full for name in ("regularisation_path", "enum_alm_misses"))
    assert "561.70" in capsys.readouterr().out  # the paper's seconds
    limits = solver_quality.thresholds(torch.tensor(solver_quality.PATH_Y, dtype=torch.float64))
    assert list(limits.values()) == pytest.approx([0.27553, 0.64935, 0.66733], abs=2e-5)


def test_bars_of_one_text_or_backend_are_named_in_the_title_and_ticks_do_not_overlap():
    pytest.importorskip("matplotlib")
    row = {"method": "wanda", "data": "a.txt", "perplexity": 9.0, "model": "m", "device": "cpu", "seq_len": 8}
    one, two = (plots.comparison([row, *more]).axes[0] for more in ([], [row | {"data": "b.txt"}]))
    assert (one.get_legend(), one.get_title()) == (None, "a.txt")
    assert [text.get_text() for text in two.get_legend().get_texts()] == ["a.txt", "b.txt"]
    where = {"model": "m", "data": "d", "seq_len": 8, "windows": 1, "name": "dense", "form": "dense", "updated": False}
    sizes = [{"bits": 8, "bits_a_weight": size, "perplexity": value} for size, value in ((3, 1137.0), (8, 20.4))]
    figure = plots.bits_quality([where | size for size in sizes])
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels(which="both") if text.get_text()]
    boxes = sorted((box.y0, box.y1) for box in boxes)
    assert len(boxes) > 2
    assert all(low[1] <= high[0] for low, high in itertools.pairwise(boxes))
