"""The tuning sweep with kernels that sleep, err, crash and hang, its rules, tuned.json, and the predictions."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import common
import predictions
import pytest
import torch
import tune
import tune_choice
import tune_kernels
from tune_fake_kernel import FAKE, KERNELS
from tune_kernels import Case, gemv_parameters

from proxsparse.ops import tuning

CPU = torch.device("cpu")
DEFAULTS, A, B = {}, {"warps": 4}, {"warps": 8}

# ------------------------------------------------------------------------------------------ the rules


def rows(condition: str, *times: tuple[dict, float]) -> list[dict]:
    return [{"condition": condition, "parameters": parameters, "p50_ms": ms} for parameters, ms in times]


def chosen(*times: tuple[dict, float]) -> dict | None:
    return tune_choice.chosen_parameters(rows("", *times))


def test_parameters_replace_the_defaults_if_they_are_faster_by_more_than_the_noise():
    assert chosen((DEFAULTS, 1.00), (A, 0.90), (B, 0.95), (DEFAULTS, 1.02)) == A
    assert chosen((DEFAULTS, 1.00), (A, 0.90), (DEFAULTS, 1.20)) == {}  # a noise of 20%
    assert chosen((DEFAULTS, 1.00), (A, 0.995), (DEFAULTS, 1.00)) == {}  # less than the least noise
    assert chosen((DEFAULTS, 1.00), (A, 1.1), (DEFAULTS, 1.00)) == {}
    assert chosen((DEFAULTS, 1.00), (A, 0.5)) is None  # the noise is unknown
    assert chosen((A, 0.5)) is None


def test_parameters_that_failed_once_are_never_chosen():
    failed = {"condition": "", "parameters": A, "note": "wrong: off by one"}
    times = rows("", (DEFAULTS, 1.0), (A, 0.5), (B, 0.8), (DEFAULTS, 1.0))
    assert tune_choice.chosen_parameters([*times, failed]) == B


@pytest.mark.parametrize(
    ("at_first", "at_last", "wanted"),
    [
        ((0.90, 0.91), (3.0, 2.0), B),  # within 2% at the first, better at the last
        ((0.90, 0.93), (3.0, 2.0), A),  # not within 2%
        ((0.90, 0.91), (2.0, 3.0), A),
        ((1.00, 1.005), (5.0, 3.0), B),  # as fast as the defaults at the first, better at the last
        ((1.00, 1.03), (5.0, 3.0), {}),
    ],
)
def test_of_two_strengths_the_first_decides(at_first, at_last, wanted):
    first = rows("lambda 0.25", (DEFAULTS, 1.0), (A, at_first[0]), (B, at_first[1]), (DEFAULTS, 1.0))
    last = rows("lambda 25", (DEFAULTS, 5.0), (A, at_last[0]), (B, at_last[1]), (DEFAULTS, 5.0))
    assert tune_choice.chosen_parameters(first + last) == wanted


def backend_rows(*times: tuple[float, float, float]) -> list[dict]:
    """(lambda * mean, ms of triton, ms of cuda)."""
    found = []
    for strength, triton, cuda in times:
        case = {"condition": f"{strength}", "lambda_mean": strength}
        for backend, ms in (("triton", triton), ("cuda", cuda), ("triton", triton)):
            found.append(case | {"parameters": {"backend": backend}, "p50_ms": ms})
    return found


def test_cuda_is_chosen_from_where_it_stays_faster():
    assert tune_choice.cuda_from(backend_rows((0.1, 1, 2), (0.2, 1, 0.9), (0.3, 1, 0.8))) == {"cuda_from": 0.2}
    assert tune_choice.cuda_from(backend_rows((0.3, 1, 0.8), (0.1, 1, 0.5), (0.2, 1, 1.1))) == {"cuda_from": 0.3}
    assert tune_choice.cuda_from(backend_rows((0.1, 1, 0.5), (0.2, 1, 0.995))) == {}  # within the noise at the last
    failed = {"condition": "0.3", "lambda_mean": 0.3, "parameters": {"backend": "cuda"}, "note": "crashed"}
    assert tune_choice.cuda_from([*backend_rows((0.1, 1, 0.5)), failed]) is None
    assert tune_choice.cuda_from([]) is None


# ------------------------------------------------------------------------------------------ tuned.json


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The table of launch parameters and the rows go to a folder of the test."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned.json")
    for module in (common, tune):
        monkeypatch.setattr(module, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    tuning.forget()
    yield tmp_path / "tuned.json"
    tuning.forget()


def test_an_entry_is_replaced_and_all_others_stay(tuned):
    kind = tuning.device_kind(CPU)
    tune_choice.write_tuned("sm_80", "gemv bfloat16", {"device": "an A100"}, {"1x4x1": {"warps": 2}})
    tune_choice.write_tuned(kind, "prox bfloat16", {"device": "old"}, {"64": {"blocks": 128}})
    tune_choice.write_tuned(kind, "gemv bfloat16", {"device": "old"}, {"9x9x9": {"warps": 1}})
    tune_choice.write_tuned(kind, "gemv bfloat16", {"device": "new"}, {"8x4x1": {}, "8x4x16": {"warps": 4}})
    table = json.loads(tuned.read_text())
    assert table["sm_80"]["gemv bfloat16"]["fastest"] == {"1x4x1": {"warps": 2}}
    assert table[kind]["prox bfloat16"]["fastest"] == {"64": {"blocks": 128}}
    assert table[kind]["gemv bfloat16"]["measured"] == {"device": "new"}
    for rows_of_x, wanted in ((1, {}), (2, {}), (16, {"warps": 4})):
        assert tuning.launch_parameters("gemv", torch.bfloat16, CPU, (8, 4, rows_of_x)) == wanted
    assert not list(tuned.parent.glob(".tuned*"))


# ------------------------------------------------------------------------------------------ the sweep


@pytest.fixture
def sweep(tuned, monkeypatch):
    """sweep(kinds, limit, flags): exit code and rows, of kernels whose parameters are of these kinds."""
    fake = Path(__file__).with_name("tune_fake_kernel.py")
    folders = [Path(tune.__file__).parent, fake.parents[1]]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, folders)))
    monkeypatch.setattr(tune, "WORKER", [sys.executable, str(fake)])
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(tune.KERNELS, name, kernel)
    monkeypatch.setitem(tune.STALL_S, "cpu", 3.0)
    parse = tune.parse_arguments

    def saving(arguments):  # a sweep on a CPU saves nothing: what it would save on a GPU is wanted
        args = parse(arguments)
        args.no_save = "--no-save" in arguments
        return args

    monkeypatch.setattr(tune, "parse_arguments", saving)

    def run(kinds: str, limit: float = 60, flags: tuple[str, ...] = ("--kernels", "gemv")) -> tuple[int, list[dict]]:
        monkeypatch.setenv("FAKE_KINDS", kinds)
        code = tune.main(["--device", "cpu", "--limit", str(limit), *flags])
        file = tuned.with_name("tune.jsonl")
        return code, [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    return run


def test_the_fastest_right_parameters_are_written_and_read_back(sweep, tuned):
    code, found = sweep("slow faster fast", flags=("--kernels", "gemv", "prox"))
    assert code == 0
    assert len(found) == 5 + 5 + 5  # two sizes and one; three parameters and the defaults twice
    for row in found:
        assert row["kernel"] in ("gemv", "prox")
        assert row["p50_ms"] > 1.9
        assert row["commit"]
        assert row["device_kind"] == tuning.device_kind(CPU)
    entry = json.loads(tuned.read_text())[tuning.device_kind(CPU)]
    assert entry["gemv bfloat16"]["fastest"] == {"8x4x1": {"kind": "faster"}, "8x4x16": {"kind": "faster"}}
    assert entry["prox bfloat16"]["fastest"] == {"32": {"kind": "faster"}}
    assert {"device", "torch", "commit", "date"} <= entry["gemv bfloat16"]["measured"].keys()
    assert tuning.launch_parameters("gemv", torch.bfloat16, CPU, (8, 4, 2)) == {"kind": "faster"}


def test_wrong_parameters_and_a_crash_cost_their_own_row(sweep, tuned, capsys):
    code, found = sweep("wrong raises crashes hangs fast")
    assert code == 1
    notes = {(row["size"], row["parameters"].get("kind")): row.get("note") for row in found}
    for size in ("8x4x1", "8x4x16"):
        assert notes[size, "wrong"] == "wrong: off by one"
        assert notes[size, "raises"] == "failed: RuntimeError: no such launch"
        assert notes[size, "crashes"] == "crashed: its process ended with exit code -6"
        assert notes[size, "hangs"] == "crashed: its process stalled"
        assert notes[size, "fast"] is None
        assert sum((row["size"], row["parameters"]) == (size, {}) for row in found) == 2
    assert len(found) == 14
    entry = json.loads(tuned.read_text())[tuning.device_kind(CPU)]
    assert entry["gemv bfloat16"]["fastest"] == {"8x4x1": {"kind": "fast"}, "8x4x16": {"kind": "fast"}}
    assert "crashed" in capsys.readouterr().out


def test_a_crash_in_the_compiling_costs_nothing_but_time(sweep, monkeypatch):
    monkeypatch.setenv("FAKE_COMPILER", "crashes")
    code, found = sweep("fast", flags=("--kernels", "prox"))
    assert code == 0
    assert len(found) == 3


def test_the_sweep_ends_by_its_own_clock(sweep, monkeypatch, capsys):
    assert sweep("fast", limit=1) == (0, [])
    assert "no time is left" in capsys.readouterr().out
    code, found = sweep("slow fast", limit=60, flags=("--kernels", "gemv", "--no-save"))
    assert (code, found) == (0, [])


def test_at_the_deadline_the_defaults_have_their_second_turn(tmp_path, monkeypatch):
    """Without it nothing could be chosen from what has been measured."""
    measured = []
    monkeypatch.setattr(tune.time, "monotonic", lambda: 100.0 if len(measured) >= 3 else 0.0)
    monkeypatch.setattr(tune, "measured", lambda kernel, item, device: measured.append(item) or {"p50_ms": 1.0})
    monkeypatch.setattr(tune.sys, "stdin", io.StringIO("50\n"))
    args = tune.argparse.Namespace(device="cpu", compile=False, journal=tmp_path / "journal.jsonl")
    many = [{"kind": str(number)} for number in range(9)]
    assert tune.work(replace(FAKE, parameters=lambda device: many), args) == 0
    assert [item.parameters for item in measured] == [{}, many[0], many[1], {}]
    assert {item.case.name for item in measured} == {"8x4x1"}


def test_the_coarse_parameters_come_first_in_all_cases():
    kernel = replace(FAKE, parameters=lambda device: [A, B], cases=lambda device: [Case((1,)), Case((2,))], coarse=1)
    order = [(item.case.name, item.parameters, item.turn) for item in tune.items(kernel, CPU)]
    first = [("1", {}, 0), ("1", A, 0), ("1", {}, 1), ("2", {}, 0), ("2", A, 0), ("2", {}, 1)]
    then = [("1", {}, 2), ("1", B, 0), ("1", {}, 3), ("2", {}, 2), ("2", B, 0), ("2", {}, 3)]
    assert order == first + then
    coarse = gemv_parameters(CPU)[:8]
    assert {tuple(one.values()) for one in coarse} == {(w, s, t) for w in (8, 16) for s in (1, 4) for t in (1, 4)}
    assert len(gemv_parameters(CPU)) == 36


# ------------------------------------------------------------------------------------------ predictions


def test_a_prediction_stands_beside_the_row_it_was_made_for(tmp_path):
    row = {
        "backend": "gemv",
        "weights": "14336x4096",
        "rows": 1,
        "dtype": "bfloat16",
        "device": "NVIDIA H100 80GB HBM3",
    }
    assert predictions.predicted("linear_speed", **row) == 0.875
    assert predictions.predicted("linear_speed", **row | {"device": "NVIDIA H200"}) == 0.835
    assert predictions.predicted("linear_speed", predictions.TIMES_DENSE, **row) == 1.65
    assert predictions.predicted("linear_speed", **row | {"device": "an EPYC"}) is None
    assert predictions.predicted("linear_speed", **row | {"rows": 2}) is None
    assert predictions.predicted("prox_speed", **row) is None
    file = tmp_path / "linear_speed.jsonl"
    common.append_rows(file, [row | {"p50_ms": 0.025}, row | {"device": "an EPYC"}])
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["predicted_share"], first["predicted_times_dense"]) == (0.875, 1.65)
    assert not [name for name in second if name.startswith("predicted")]


def test_of_two_predictions_the_later_one_counts(monkeypatch):
    newer = predictions.gemv(predictions.WIDE, range(1, 5), predictions.SHARE, 0.9, None, "prefetch")
    monkeypatch.setattr(predictions, "PREDICTIONS", [*predictions.PREDICTIONS, newer])
    row = {"backend": "gemv", "weights": "14336x4096", "rows": 1, "dtype": "bfloat16"}
    assert predictions.predicted("linear_speed", **row, device="H100") == 0.9
    assert predictions.predicted("linear_speed", **row | {"rows": 4}, device="H100") == 0.9


def test_every_prediction_has_its_arithmetic_and_values_in_range():
    for known in predictions.PREDICTIONS:
        assert known.because, known
        for value in (known.h100, known.h200):
            assert value is None or 0 < value <= (1 if known.field == predictions.SHARE else 2), known


# ------------------------------------------------------------------------------------------ checks of the results


def test_a_few_weights_that_a_kernel_forgets_are_found():
    exact = torch.randn(2**17, dtype=torch.float64)
    result = exact.bfloat16()
    assert tune_kernels.difference(result, exact) is None
    assert tune_kernels.difference(result.view(-1, 64), exact) is None
    one = result.clone()
    one[77] = 5.0  # two minimisers that nearly tie
    assert tune_kernels.difference(one, exact) is None
    tail = result.clone()
    tail[-16:] = 5.0
    said = f"16 of {2**17} weights differ from float64, the first at {2**17 - 16}"
    assert tune_kernels.difference(tail, exact) == said
    assert tune_kernels.difference(torch.full_like(result, torch.nan), exact) is not None


@pytest.mark.parametrize("name", ["gemv", "cutlass"])
def test_a_wrong_product_is_found(name, monkeypatch):
    """With the reference in the place of a kernel that needs a GPU."""
    from proxsparse.ops import registry

    served = replace(registry.get_kernel("sparse_linear", "reference"), backend=name)
    wrong = replace(served, run=lambda *arguments: 1.02 * served.run(*arguments))
    monkeypatch.setattr(tune_kernels, "GEMV_ROWS", [1, 3])
    monkeypatch.setattr(tune_kernels, "CUTLASS_ROWS", [3])
    monkeypatch.setitem(tune_kernels.COPY_BYTES, "cpu", 2**16)
    tune_kernels.weights_of.cache_clear()
    tune_kernels.memory_to_copy.cache_clear()
    for kernel, problem in ((served, False), (wrong, True)):
        monkeypatch.setitem(registry._kernels["sparse_linear"], name, kernel)
        trial = tune_kernels.linear_trial(name, Case((16, 64, 3)), CPU)
        assert (trial.problem() is not None) == problem
        trial.run()
        assert trial.moved == trial.calls * (16 * 32 * 2 + 16 * 8 + 2 * 3 * (64 + 16))
    tune_kernels.weights_of.cache_clear()
    tune_kernels.memory_to_copy.cache_clear()


def test_the_trials_of_the_prox_and_the_step_accept_right_kernels():
    """On the CPU's own backend."""
    (case, *_) = tune_kernels.prox_cases(CPU, [], [0.25], "cpp")
    (step,) = tune_kernels.adamw_cases(CPU)
    for trial in (tune_kernels.prox_trial(case, CPU), tune_kernels.fused_trial(step, CPU)):
        for _ in range(2):  # what a run changes does not disturb the next check
            assert trial.problem() is None
            trial.renew()
            trial.run()
    trial = tune_kernels.fused_trial(step, CPU)
    assert trial.moved == 22 * 512 * trial.calls
