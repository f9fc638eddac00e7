"""benchmarks/gpu_run.py without a GPU: parts that fail or hang, what is saved and taken over, and what is prepared."""

import importlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_run
import pytest
from commands import call
from lib import common


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The results folder and $OUT of a run that measures on a machine of the name "test"."""
    for name in ("results", "out"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gpu_run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu_run, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(gpu_run, "provenance", lambda device: {"device": "test"})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PROXSPARSE_WHEN", "")  # restored after the test
    return tmp_path / "results", tmp_path / "out"


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(folders):
    results, out = folders
    (results / "speed.jsonl").write_text('{"old": 1}\n')
    parts = [
        ("fails", 20, f"echo '{{\"new\": 1}}' >> {results}/speed.jsonl; echo so; exit 3"),
        ("hangs", 1, f"sleep 60 & echo $! > {out}/pid; echo started; sleep 60"),
        ("leaves", 20, f"sleep 60 & echo $! > {out}/left"),
        ("absent", 20, "no-such-program"),
        ("passes", 20, f"tar -tzf {out}/gpu_run.tar.gz"),  # it was saved after each part
    ]
    assert gpu_run.run(parts) == 1
    assert not any(is_running(int((out / name).read_text())) for name in ("pid", "left"))
    rows = {row["part"]: row for row in map(json.loads, (results / "gpu_run.jsonl").read_text().splitlines())}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == dict(zip(rows, ["failed", "failed", "passed", "skipped", "passed"], strict=True))
    assert [rows[name]["last_line"] for name in ("fails", "hangs")] == ["so", "stopped after 1 s: started"]
    assert "gpu_run/" in rows["passes"]["last_line"]

    (results / "speed.jsonl").write_text('{"other": 1}\n')  # another checkout
    (results / "gpu_run.jsonl").unlink()
    for _ in range(2):  # rows are added once
        call(gpu_run.main, "take", out / "gpu_run.tar.gz")
        assert (results / "speed.jsonl").read_text() == '{"other": 1}\n{"new": 1}\n'
        assert len((results / "gpu_run.jsonl").read_text().splitlines()) == len(parts)


def test_a_terminated_run_ends_its_part(tmp_path):
    code = f"""import gpu_run, pathlib
gpu_run.OUTPUT = pathlib.Path({str(tmp_path / "output")!r})
gpu_run.PARTS = [("endless", 60, "echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 60; true")]
gpu_run.torch.cuda.is_available = lambda: True
gpu_run.main([])"""
    runner = subprocess.Popen([sys.executable, "-c", code], cwd=Path(gpu_run.__file__).parent)
    while not (tmp_path / "pid").exists():
        assert runner.poll() is None
        time.sleep(0.05)
    runner.terminate()
    assert runner.wait(20) == 128 + signal.SIGTERM
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_the_flags_of_all_parts_are_understood(monkeypatch):
    monkeypatch.setattr(common, "devices", lambda: ["cuda"])
    for _, _, command in gpu_run.PARTS:
        if found := re.search(r"benchmarks/(\w+)\.py(.*)", command):
            importlib.import_module(found[1]).parse_arguments(shlex.split(found[2]))


@pytest.mark.slow
def test_the_sanitizer_runs_every_test_it_names():
    command = f"{gpu_run.SETUP}{gpu_run.SANITIZER.partition('--tool {} ')[2]} --gpu --collect-only"
    collected = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
    assert not [name for name in re.findall(r"test_\w+", gpu_run.SANITIZER) if name not in collected]
