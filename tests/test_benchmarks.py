"""The benchmarks at tiny sizes: what they print and save, what they count, and checks that find a wrong kernel."""

import json
import subprocess
import sys
import time
from pathlib import Path

import ceilings
import checking
import checks_adamw
import checks_linear
import checks_prox
import common
import eager
import gpu_checks
import gpu_parts
import optimizer_step
import prox_speed
import pytest
import shapes
import torch

from proxsparse.ops import registry
from proxsparse.reference.paper_solvers import enum_alm
from proxsparse.run.recipes import RECIPES

CPU = torch.device("cpu")
QUICK = ["--devices", "cpu", "--seconds", "0", "--repetitions", "1"]

# ------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("name", shapes.PAPER)
def test_the_models_of_the_paper_have_recipes(name):
    assert len(shapes.PAPER) == 7
    assert (RECIPES / f"{name}.yaml").is_file()


@pytest.mark.parametrize(
    ("name", "weights"),  # all parameters of the model less embeddings, lm_head, norms and biases
    [
        ("llama-2-7b", 6_738_415_616 - 2 * 32000 * 4096 - 65 * 4096),
        ("llama-3.1-8b", 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096),
        ("mistral-7b-v0.1", 7_241_732_096 - 2 * 32000 * 4096 - 65 * 4096),
        ("llama-2-13b", 13_015_864_320 - 2 * 32000 * 5120 - 81 * 5120),
        ("qwen2.5-14b", 14_770_033_664 - 2 * 152064 * 5120 - 97 * 5120 - 48 * (5120 + 2 * 1024)),
        ("smollm2-135m", 134_515_008 - 49152 * 576 - 61 * 576),
    ],
)
def test_whole_sets_have_the_published_number_of_weights(name, weights):
    layers = shapes.prunable_layers(name)
    assert len(layers) == 7 * shapes.MODELS[name].blocks
    assert sum(rows * columns for rows, columns in layers) == weights


def test_models_of_equal_layers_are_measured_once():
    assert shapes.distinct(shapes.PAPER) == ["mistral-7b-v0.1", "qwen2.5-14b", "openllama-7b-v2", "llama-2-13b"]
    assert shapes.distinct(["llama-3.1-8b"]) == ["llama-3.1-8b"]


# ------------------------------------------------------------------------------------------ timing


def test_a_rotation_leaves_the_caches_and_is_renewed():
    sets = common.rotation([(256, 1024), (4, 8)], torch.bfloat16, CPU, sigma=1.0)
    assert len(sets) == common.ROTATION_SETS
    for weights in sets:
        assert [tuple(weight.shape) for weight in weights.weights] == [(256, 1024), (4, 8)]
        weights.weights[1].zero_()
        assert not torch.equal(weights.flat, weights.source)
        weights.renew()
        assert torch.equal(weights.weights[1].flatten(), sets[0].source[-32:])
    assert len({weights.flat.data_ptr() for weights in sets}) == len(sets)
    large = common.rotation([(2**14, 2**13)], torch.bfloat16, CPU, sigma=1.0)
    assert len(large) == 1


def test_copies_and_runs_take_turns():
    calls = []
    runs = {"slow": lambda: (calls.append("slow"), time.sleep(0.004)), "fast": lambda: calls.append("fast")}
    samples = common.interleaved(runs, lambda: calls.append("copy"), CPU, repetitions=3, seconds=0)
    assert calls == ["copy", "slow", "copy", "fast"] * 4  # once to warm up
    assert len(samples["copy"].ms) == 6
    assert samples["slow"].row()["p50_ms"] > 3.9
    assert samples["slow"].row()["share_of_copy"] < 1
    assert samples["copy"].row()["share_of_copy"] == 1


# ------------------------------------------------------------------------------------------ prox_speed


@pytest.mark.parametrize("reg_lambda", [0.25, 25.0])
def test_the_compilable_formulation_is_enum_alm(reg_lambda):
    weight = 0.02 * torch.randn(24, 64, dtype=torch.float64)
    fixed = eager.enum_alm_fixed(weight, torch.tensor(reg_lambda, dtype=torch.float64))
    assert torch.equal(fixed, enum_alm(weight, reg_lambda, tolerance=0.0, max_sweeps=eager.SWEEPS))


def test_prox_speed_prints_and_saves_a_row_for_every_provider(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prox_speed, "FOLDER", tmp_path)
    monkeypatch.setattr(prox_speed, "results_file", lambda name: tmp_path / "results" / f"{name}.jsonl")
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.Model(2, 8, 4, 16))
    prox_speed.main(
        [*QUICK, "--shapes", "16x64", "8x32", "--slow_weights", "300", "--models", "Tiny", "--lambdas", "25"]
    )
    rows = [json.loads(line) for line in (tmp_path / "results" / "prox_speed.jsonl").read_text().splitlines()]
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
    assert (tmp_path / "results" / "prox_speed_cpu.png").stat().st_size > 1000
    assert "least share of copying" in capsys.readouterr().out


def test_a_compiler_that_fails_or_dawdles_costs_one_row(monkeypatch, capsys):
    def fails(weight, limit_s):
        raise RuntimeError("no compiler\nwith a long story")

    monkeypatch.setattr(prox_speed, "compiled", fails)
    prox_speed.main([*QUICK, "--shapes", "8x32", "--models", "--lambdas", "1", "--compile", "--no-save"])
    printed = capsys.readouterr().out
    assert printed.count("torch.compile failed: RuntimeError no compiler") == 2
    with pytest.raises(TimeoutError, match=r"more than 0.05 s"), eager.time_limit(0.05):
        time.sleep(1)


@pytest.fixture
def prox_rows(tmp_path, monkeypatch):
    """() -> the rows that prox_speed has saved so far."""
    file = tmp_path / "prox_speed.jsonl"
    monkeypatch.setattr(prox_speed, "FOLDER", tmp_path)
    monkeypatch.setattr(prox_speed, "results_file", lambda name: file)
    (tmp_path / "results").mkdir()
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_rows_of_prox_speed_are_kept_as_they_are_measured(prox_rows, monkeypatch, capsys):
    """Too little memory for a case, or an end from outside, costs that case and no other."""
    measure, kept = prox_speed.benchmark, []

    def benchmark(case, args):
        kept.append(len(prox_rows()))
        if case.name == "16x64":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        yield from measure(case, args)

    monkeypatch.setattr(prox_speed, "benchmark", benchmark)
    flags = ["--shapes", "8x32", "16x64", "4x32", "--models", "--dtypes", "float32", "--lambdas", "1", "2"]
    assert prox_speed.main([*QUICK, *flags, "--slow_weights", "0"]) == 1
    assert 0 == kept[0] < kept[1] == kept[2]
    assert {(row["weights"], row["lambda"]) for row in prox_rows()} == {
        (weights, reg_lambda) for weights in ("8x32", "4x32") for reg_lambda in (1, 2)
    }
    assert "failed: 16x64 in torch.float32: OutOfMemoryError" in capsys.readouterr().out


def test_a_backend_that_fails_costs_prox_speed_one_row(prox_rows, monkeypatch):
    def fails(weight, *settings):
        raise RuntimeError("no such\nkernel")

    broken = registry.Kernel("cpp", fails, supports=lambda *arguments: None)
    monkeypatch.setitem(registry._kernels, "prox_nm_", registry._kernels["prox_nm_"] | {"cpp": broken})
    flags = ["--shapes", "8x32", "--models", "--dtypes", "float32", "--lambdas", "1", "--slow_weights", "0"]
    assert prox_speed.main([*QUICK, *flags]) == 1
    rows = {row["kernel"]: row for row in prox_rows()}
    assert rows["cpp"]["note"] == "RuntimeError: no such kernel"
    assert {name for name, row in rows.items() if "p50_ms" in row} == {"copy"}


# ------------------------------------------------------------------------------------------ optimizer_step


@pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")
def test_optimizer_step_counts_the_bytes_of_every_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.Model(2, 8, 4, 16))
    optimizer_step.main([*QUICK, "--model", "tiny", "--blocks", "2"])
    rows = [json.loads(line) for line in (tmp_path / "optimizer_step.jsonl").read_text().splitlines()]
    found = {(row["dtype"], row["optimizer"]): (row["bytes_a_weight"], row["state_bytes_a_weight"]) for row in rows}
    expected = {  # weight read and written, gradient read, state read and written
        ("float32", "AdamW"): (28, 8),
        ("float32", "AdamW + EnumALM"): (28, 8),
        ("float32", "ProxOptimizer(AdamW)"): (28, 8),
        ("float32", "ProxOptimizer(AdamW), metric"): (28, 8),
        ("float32", "ProxAdamW"): (28, 8),
        ("float32", "ProxAdamW, metric"): (28, 8),
        ("float32", "ProxAdamW, bf16 moments"): (20, 4),
        ("bfloat16", "AdamW"): (14, 4),
        ("bfloat16", "ProxAdamW"): (22, 8),
        ("bfloat16", "ProxAdamW, stochastic rounding"): (22, 8),
        ("bfloat16", "ProxAdamW, the same, bf16 moments"): (14, 4),
        ("bfloat16", "ProxAdamW, masters"): (30, 12),
    }
    assert expected.items() <= found.items()
    assert all(row["p50_ms"] > 0 and row["gb_per_s"] > 0 for row in rows)


@pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")
def test_an_optimizer_that_fails_costs_one_row(tmp_path, monkeypatch, capsys):
    def fails(parameters, reg_lambda):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.Model(2, 8, 4, 16))
    monkeypatch.setitem(optimizer_step.OPTIMIZERS, "broken", fails)
    flags = ["--model", "tiny", "--blocks", "1", "--dtypes", "float32", "--no-slow"]
    assert optimizer_step.main([*QUICK, *flags]) == 1
    rows = {
        row["optimizer"]: row for row in map(json.loads, (tmp_path / "optimizer_step.jsonl").read_text().splitlines())
    }
    assert rows["broken"]["note"] == "RuntimeError: no such kernel"
    assert all("p50_ms" in row for name, row in rows.items() if name != "broken")
    assert "ProxAdamW" in rows
    assert "no such kernel" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:adamw_prox_. not on the cpp backend")
def test_the_pauses_of_optimizer_step_fit_into_its_part_of_the_suite(monkeypatch):
    """Before each run a GPU waits, so that launches are not counted: for 7 layers much longer than the run takes."""
    clock, limit_s = 1.755e9, gpu_parts.PARTS["optimizer_step"].limit_s
    launches = []
    monkeypatch.setattr(common, "elapsed_ms", lambda run, device, count=1: launches.append(count + 4) or 1.0)
    args = optimizer_step.parse_arguments(["--devices", "cpu", "--no-slow"])
    chosen = common.filled(args, optimizer_step.DEFAULTS["cuda"])
    for dtype in args.dtypes:
        layers = common.weight_set([(4, 8)] * 7 * chosen.blocks, getattr(torch, dtype), CPU, 0.02)
        assert all("p50_ms" in row for row in optimizer_step.benchmark(layers, chosen))
    assert sum(launches) * common.LAUNCH_CYCLES / clock < limit_s / 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_what_a_step_allocates():
    """In a process of its own: in this one, memory that earlier tests left behind would serve the step."""
    program = "import optimizer_step, torch; allocate = lambda: torch.ones(2**25); "
    program += "print(optimizer_step.allocated_by(allocate, torch.device('cpu')))"
    folder = Path(optimizer_step.__file__).parent
    command = [sys.executable, "-c", program]
    held = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    assert held == "None" or 2**26 <= int(held) <= 2**29


# ------------------------------------------------------------------------------------------ ceilings


def test_ceilings_count_what_is_moved_and_computed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    ceilings.main([*QUICK, "--megabytes", "4", "--size", "64"])
    copy, read, matmul = map(json.loads, (tmp_path / "ceilings.jsonl").read_text().splitlines())
    assert copy["gb_per_s"] == pytest.approx(2 * 4e6 / copy["p50_ms"] / 1e6)
    assert read["gb_per_s"] == pytest.approx(4e6 / read["p50_ms"] / 1e6)
    assert matmul["tflop_per_s"] == pytest.approx(2 * 64**3 / matmul["p50_ms"] / 1e9)
    assert [row["ceiling"] for row in (copy, read, matmul)] == ["copy 4 MB", "read 4 MB", "matmul 64^3 bf16"]
    assert "TFLOP/s" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ gpu_checks


def test_the_checks_pass_on_this_cpu(capsys):
    small = ["--device", "cpu", "--small", "--seed", "1"]
    assert gpu_checks.main([*small, "--backends", "cpp"]) == 0, capsys.readouterr().out
    assert gpu_checks.main([*small, "--backends", "reference", "--only", "prox_nm_.layouts", "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "passed   prox_nm_.exact" in printed
    assert printed.count("0 failed") == 2


def test_a_check_without_a_kernel_to_check_starts_no_process(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(
        gpu_checks, "in_a_process", lambda check, backend, args: started.append((check, backend)) or ["passed"]
    )
    gpu_checks.main(["--device", "cpu", "--small", "--jobs", "2", "--backends", "cpp", "triton"])
    capsys.readouterr()
    assert all(check.concerns(backend) for check, backend in started)
    assert started[0][0].op == "sparse_linear"  # what matters most comes first
    assert len(started) == len({(check.name, backend) for check, backend in started})


def test_a_check_that_hangs_fails_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "SMALL_LIMIT_S", 0.2)  # no Python starts in this time
    flags = [
        "--device",
        "cpu",
        "--small",
        "--jobs",
        "2",
        "--backends",
        "cpp",
        "--only",
        "nm_mask.mask_equals_reference",
    ]
    assert gpu_checks.main(flags) == 1
    assert "failed   nm_mask.mask_equals_reference cpp: stopped after 0.2 s" in capsys.readouterr().out


def test_without_judging_the_kernels_run_and_nothing_is_compared(monkeypatch, capsys):
    def judged(*arguments):
        raise AssertionError("compared")

    monkeypatch.setattr(checks_prox, "judge_prox", judged)
    monkeypatch.setattr(checks_linear, "judge_linear", judged)
    monkeypatch.setattr(checks_adamw, "judge", judged)
    flags = ["--device", "cpu", "--small", "--backends", "cpp"]
    assert gpu_checks.main([*flags, "--no_judge"]) == 0, capsys.readouterr().out
    assert gpu_checks.main(flags) == 1
    failed = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("failed")}
    assert {"prox_nm_.exact", "sparse_linear.cpp", "adamw_prox_.against_float64"} <= failed


def does_nothing(weight, *settings):
    """Leaves the weight as it is."""


def writes_behind(weight, *settings):
    """Right, and one element too far."""
    right().run(weight, *settings)
    weight.as_strided((1,), (1,), weight.storage_offset() + weight.numel()).fill_(1.0)


def is_not_exact(weight, *settings):
    """A hundredth off."""
    right().run(weight, *settings)
    weight.mul_(0.99)


def makes_negative_zeros(weight, *settings):
    """Right, but for the sign of zeros."""
    before = weight.clone()
    right().run(weight, *settings)
    weight.copy_(torch.where(weight == 0, torch.zeros_like(weight).copysign(before), weight))


def right() -> registry.Kernel:
    return registry.get_kernel("prox_nm_", "reference")


@pytest.mark.parametrize("kernel", [does_nothing, writes_behind, is_not_exact, makes_negative_zeros])
def test_the_checks_find_a_wrong_prox(kernel, monkeypatch):
    wrong = registry.Kernel("cpp", kernel, supports=lambda *arguments: None)
    monkeypatch.setitem(registry._kernels, "prox_nm_", registry._kernels["prox_nm_"] | {"cpp": wrong})
    found = [check for check in checking.CHECKS if check.op == "prox_nm_"]
    place = checking.Place(CPU, "cpp", small=True)
    assert "failed" in [gpu_checks.outcome(check, place, seed=0) for check in found]


def forgets_the_moments(weight, grad, exp_avg, *others):
    """Steps on copies of the moments."""
    adamw("reference").run(weight, grad, exp_avg.clone(), *others)


def ignores_the_seed(*arguments):
    """Rounds to nearest."""
    adamw("reference").run(*arguments[:-1], None)


def decays_twice(weight, *others):
    """As with twice the learning rate, a little."""
    adamw("reference").run(weight, *others)
    weight.mul_(1 - 1e-3)


def adamw(backend: str) -> registry.Kernel:
    return registry.get_kernel("adamw_prox_", backend)


@pytest.mark.parametrize("kernel", [forgets_the_moments, ignores_the_seed, decays_twice])
def test_the_checks_find_a_wrong_step(kernel, monkeypatch):
    wrong = registry.Kernel("cpp", kernel, supports=lambda *arguments: None)
    monkeypatch.setitem(registry._kernels, "adamw_prox_", registry._kernels["adamw_prox_"] | {"cpp": wrong})
    found = [check for check in checking.CHECKS if check.op == "adamw_prox_"]
    place = checking.Place(CPU, "cpp", small=True)
    assert "failed" in [gpu_checks.outcome(check, place, seed=0) for check in found]
