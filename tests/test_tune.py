"""benchmarks/tune.py: the sweep with kernels that are slow, wrong or fail, its choice, tuned.json, the real trials."""

import contextlib
import json
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import tune
from lib import common, measure, tune_kernels
from lib.tune_kernels import Case, Kernel, Trial

from proxsparse.ops import registry, tuning

CPU = torch.device("cpu")
DEFAULTS, A, B = {}, {"warps": 4}, {"warps": 8}


def rows(reg_lambda: float, *times: tuple[dict, float | None]) -> list[dict]:
    """Rows of the log; no time: the kernel was wrong."""
    outcomes = [(parameters, {"p50_ms": ms} if ms else {"note": "wrong: off by one"}) for parameters, ms in times]
    return [{"lambda": reg_lambda, "parameters": parameters, **outcome} for parameters, outcome in outcomes]


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ([(DEFAULTS, 1.00), (A, 0.90), (B, 0.95), (DEFAULTS, 1.02)], A),
        ([(DEFAULTS, 1.00), (A, 0.90), (DEFAULTS, 1.20)], {}),  # a noise of 20%
        ([(DEFAULTS, 1.00), (A, 0.995), (DEFAULTS, 1.00)], {}),  # less than the least noise
        ([(DEFAULTS, 1.00), (A, 0.5)], None),  # the noise is unknown
        ([(A, 0.5)], None),
        ([(DEFAULTS, 1.0), (A, 0.5), (B, 0.8), (DEFAULTS, 1.0), (A, None)], B),  # A failed once
    ],
)
def test_parameters_replace_the_defaults_if_they_are_faster_by_more_than_the_noise(times, wanted):
    assert tune.fastest_parameters(rows(1, *times)) == wanted


@pytest.mark.parametrize(
    ("at_first", "at_last", "wanted"),
    [
        ((0.90, 0.91), (3.0, 2.0), B),  # the fastest over both
        ((0.90, 0.95), (3.0, 2.9), A),
        ((1.00, 1.03), (5.0, 3.0), {}),  # B is slower than the defaults at the first
        ((1.00, 1.005), (5.0, 3.0), B),  # within the noise at the first, faster at the last
    ],
)
def test_parameters_are_nowhere_slower(at_first, at_last, wanted):
    first = rows(0.25, (DEFAULTS, 1.0), (A, at_first[0]), (B, at_first[1]), (DEFAULTS, 1.0))
    last = rows(25, (DEFAULTS, 5.0), (A, at_last[0]), (B, at_last[1]), (DEFAULTS, 5.0))
    assert tune.fastest_parameters(first + last) == wanted


def test_cuda_is_chosen_from_where_it_stays_faster():
    def found(*times: tuple[float, float, float]) -> list[dict]:  # (lambda, ms of triton, ms of cuda)
        pairs = [(x, name, ms) for x, a, b in times for name, ms in (("triton", a), ("cuda", b), ("triton", a))]
        return [{"lambda": x, "lambda_mean": x, "parameters": {"backend": n}, "p50_ms": ms} for x, n, ms in pairs]

    assert tune.cuda_from(found((0.1, 1, 2), (0.2, 1, 0.9), (0.3, 1, 0.8))) == {"cuda_from": 0.2}
    assert tune.cuda_from(found((0.3, 1, 0.8), (0.1, 1, 0.5), (0.2, 1, 1.1))) == {"cuda_from": 0.3}
    assert tune.cuda_from(found((0.1, 1, 0.5), (0.2, 1, 0.995))) == {}  # within the noise at the last
    failed = {"lambda": 0.3, "lambda_mean": 0.3, "parameters": {"backend": "cuda"}, "note": "failed"}
    assert tune.cuda_from([*found((0.1, 1, 0.5)), failed]) is None
    assert tune.cuda_from([]) is None


SLEEPS = {None: 20, "fast": 5, "faster": 2, "slow": 40, "wrong": 1}  # parameter "kind" -> milliseconds


def fake_trial(case: Case, device: torch.device) -> Trial:
    kind = tuning.launch_parameters("fake", torch.bfloat16, device, case.size).get("kind")
    if kind == "raises":
        raise RuntimeError("no such\nlaunch")
    problem, milliseconds = ("off by one" if kind == "wrong" else None), SLEEPS[kind]
    run = partial(time.sleep, milliseconds / 1000)
    return Trial(problem=lambda: problem, run=run, renew=lambda: None, calls=1, moved=1000, copied=1000)


FAKE = Kernel(
    cases=lambda device: [Case((8, 4, 1)), Case((8, 4, 16))],
    parameters=lambda device: [{"kind": kind} for kind in ("slow", "faster", "raises", "fast", "wrong")],
    trial=fake_trial,
    force=lambda parameters: tuning.use_launch_parameters("fake", **parameters),
    in_triton=True,  # so that it runs on a CPU
)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """limit -> exit code, rows and tuned.json of a sweep of a fake kernel that is saved as on a GPU."""
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned.json")
    monkeypatch.setattr(common, "results_file", lambda name: tmp_path / f"{name}.jsonl")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # restored after the test
    monkeypatch.setitem(tune.KERNELS, "gemv", FAKE)
    parse = tune.parse_arguments

    def saving(arguments):
        args = parse(arguments)
        args.no_save = False
        return args

    monkeypatch.setattr(tune, "parse_arguments", saving)
    tuning.forget()

    def run(limit: float) -> tuple[int, list[dict], dict]:
        code = tune.main(["--device", "cpu", "--kernels", "gemv", "--limit", str(limit)])
        table = json.loads(tuning.TUNED.read_text()) if tuning.TUNED.exists() else {}
        return code, common.read_rows(tmp_path / "tune.jsonl"), table

    yield run
    tuning.forget()


def test_the_fastest_right_parameters_are_written_and_read_back(sweep):
    kind = tuning.device_kind(CPU)
    others = {"sm_80": {"gemv bfloat16": {"fastest": {}}}, kind: {"prox bfloat16": {"fastest": {"64": {}}}}}
    tuning.TUNED.write_text(json.dumps(others))
    code, found, table = sweep(60)
    assert code == 1  # some failed
    assert len(found) == 2 * 7  # two sizes; five parameters and the defaults twice
    notes = {row["parameters"].get("kind"): row["note"] for row in found if "note" in row}
    assert notes == {"wrong": "wrong: off by one", "raises": "failed: RuntimeError: no such launch"}
    entry = table[kind]["gemv bfloat16"]
    assert entry["fastest"] == {"8x4x1": {"kind": "faster"}, "8x4x16": {"kind": "faster"}}
    assert {"device", "torch", "commit", "command", "date"} == entry["measured"].keys()
    assert table["sm_80"] == others["sm_80"]
    assert table[kind]["prox bfloat16"] == others[kind]["prox bfloat16"]
    for rows_of_x in (1, 2, 16):
        assert tuning.launch_parameters("gemv", torch.bfloat16, CPU, (8, 4, rows_of_x)) == {"kind": "faster"}
    assert not list(tuning.TUNED.parent.glob(".tuned*"))


def test_the_sweep_ends_by_its_own_clock(sweep, capsys, monkeypatch):
    assert sweep(1) == (0, [], {})
    assert "no time is left" in capsys.readouterr().out
    clock = iter([0.0] * 4 + [100.0] * 99)  # the time is over after four measurements
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    found = list(tune.sweep("gemv", 50.0, CPU))
    assert [row["parameters"] for row in found] == [{}, {"kind": "slow"}, {"kind": "faster"}, {"kind": "raises"}, {}]
    assert {row["size"] for row in found} == {"8x4x1"}  # and the defaults have their second turn


def test_the_coarse_parameters_come_first_in_all_cases():
    kernel = replace(FAKE, parameters=lambda device: [A, B], coarse=1)
    order = [(case.size[2], parameters) for case, parameters in tune.measurements(kernel, CPU)]
    assert order == [(rows, p) for some in (A, B) for rows in (1, 16) for p in ({}, some, {})]
    coarse = tune_kernels.gemv_parameters(CPU)[:8]
    assert {tuple(one.values()) for one in coarse} == {(w, s, t) for w in (8, 16) for s in (1, 4) for t in (1, 4)}


def test_a_few_weights_that_a_kernel_forgets_are_found():
    exact = torch.randn(2**17, dtype=torch.float64)
    result = exact.bfloat16()
    assert tune_kernels.difference(result.view(-1, 64), exact) is None
    one = result.clone()
    one[77] = 5.0  # two minimisers that nearly tie
    assert tune_kernels.difference(one, exact) is None
    tail = result.clone()
    tail[-16:] = 5.0
    message = f"16 of {2**17} weights differ from float64, the first at {2**17 - 16}"
    assert tune_kernels.difference(tail, exact) == message
    assert tune_kernels.difference(torch.full_like(result, torch.nan), exact) is not None


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_a_wrong_product_is_found(factor, monkeypatch):
    """With the reference in place of a kernel that needs a GPU."""
    right = registry.get_kernel("sparse_linear", "reference")
    served = replace(right, backend="gemv", run=lambda *arguments: factor * right.run(*arguments))
    monkeypatch.setitem(registry._kernels["sparse_linear"], "gemv", served)
    monkeypatch.setattr(tune_kernels, "GEMV_ROWS", [1, 3])
    monkeypatch.setattr(tune_kernels, "CUTLASS_ROWS", [3])
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 2**16)
    tune_kernels.linear_problem.cache_clear()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(tune_kernels.linear_problem.cache_clear)
        trial = tune_kernels.linear_trial("gemv", Case((16, 64, 3)), CPU)
        assert (trial.problem() is None) == (factor == 1)
        trial.run()
        assert trial.moved == trial.calls * (16 * 32 * 2 + 16 * 8 + 2 * 3 * (64 + 16))


@pytest.mark.parametrize("name", ["prox", "adamw_prox"])
def test_the_trials_of_the_prox_and_the_step_accept_right_kernels(name):
    """On the CPU's own backend."""
    kernel = tune_kernels.KERNELS[name]
    trial = kernel.trial(kernel.cases(CPU)[0], CPU)
    for _ in range(2):  # what a run changes does not disturb the next check
        assert trial.problem() is None
        trial.renew()
        trial.run()
    assert trial.moved == (4 if name == "prox" else 22) * 512 * trial.calls
