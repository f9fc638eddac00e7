"""gpu_suite.py and gpu_run.sh without a GPU: parts that fail, hang or are killed, what is saved, and what travels."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu_suite
import pytest
import torch
from lib import common, gpu_parts
from lib.gpu_parts import Part

ROOT = Path(gpu_suite.__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_run.sh"
NAP = "import time; print('started', flush=True); time.sleep(60)"


def python(code: str, limit_s: float = 20, **settings) -> Part:
    """A part that runs this code in the rehearsal."""
    return Part(cuda=[], cpu=[sys.executable, "-c", code], limit_s=limit_s, **settings)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """suite(parts, *flags) -> exit code, outcomes: runs these parts as a rehearsal that is saved as a run on a GPU."""
    (tmp_path / "results").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(gpu_suite, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(gpu_suite, "results_file", lambda name: tmp_path / "results" / f"{name}.jsonl")
    monkeypatch.setattr(gpu_suite, "SLOWER_REHEARSAL", 1)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PROXSPARSE_WHEN", "")  # restored after the test

    class Saving(gpu_suite.Suite):
        def __init__(self, args):
            super().__init__(args)
            self.saves = True

    def run(parts: dict[str, Part], *flags: str) -> tuple[int, dict[str, tuple[str, str]]]:
        monkeypatch.setattr(gpu_suite, "PARTS", parts)
        monkeypatch.setattr(gpu_suite, "GROUPS", {"first": parts})
        code = gpu_suite.main(["--device", "cpu", *flags])
        page = (tmp_path / "out" / "gpu_suite_first.md").read_text()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"][2:]
        return code, {row[0]: (row[1], row[3]) for row in rows}

    monkeypatch.setattr(gpu_suite, "Suite", Saving)
    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(suite, tmp_path, capsys):
    built = str(tmp_path / "built")
    asks = f"import os; print(os.path.exists({built!r}))"
    parts = {
        "build": python(f"import time; time.sleep(1.5); open({built!r}, 'w')", background=True),
        "at once": python(asks),
        "needs": python(asks, waits_for="build"),
        "good": python("print('fine')"),
        "bad": python("print('so'); raise SystemExit(3)"),
        "crashes": python("import os; print('now', flush=True); os.abort()"),
        "hangs": python(NAP, limit_s=1.5),
        "cannot": python("print('Device not supported'); raise SystemExit(1)", skipped_if="Device not supported"),
        "empty": python("raise SystemExit(5)", skipped_codes=(5,)),
        "there": python("raise SystemExit(1)", needless_if="import json"),
        "needed": python("print('built')", needless_if="import no_such_module"),
        "gpu only": Part(cuda=[], cpu=None, limit_s=20),
        "absent": Part(cuda=[], cpu=["no-such-program"], limit_s=20),
        "last": python("import proxsparse; print('imports')"),
    }
    start = time.monotonic()
    code, outcomes = suite(parts)
    assert code == 1
    assert time.monotonic() - start < 40
    skipped = {name for name, (outcome, _) in outcomes.items() if outcome == "skipped"}
    assert skipped == {"cannot", "empty", "there", "gpu only", "absent"}
    assert outcomes.pop("build")[0] == "passed"
    assert {name: outcome for name, outcome in outcomes.items() if name not in skipped} == {
        **{"at once": ("passed", "False"), "needs": ("passed", "True"), "good": ("passed", "fine")},
        **{"bad": ("failed", "so"), "crashes": ("failed", "now"), "needed": ("passed", "built")},
        **{"hangs": ("failed", "stopped after 2 s; last line: started"), "last": ("passed", "imports")},
    }
    limits = [int(found) for found in re.findall(r"at most (\d+) s", capsys.readouterr().out)]
    assert limits[0] == 20
    assert limits[-1] > 100  # the last part may take what is left
    with pytest.raises(SystemExit):
        suite(parts, "better")


def test_all_parts_end_when_the_time_of_all_is_over(suite):
    start = time.monotonic()
    code, outcomes = suite({"one": python(NAP, limit_s=50), "two": python(NAP)}, "--limit", "3")
    assert code == 1
    assert time.monotonic() - start < 10
    assert outcomes["one"][0] == "failed"
    assert outcomes["two"] == ("skipped", "no time was left")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("then", "session"), [("", False), ("time.sleep(60)", True)])
def test_what_a_part_has_started_ends_with_it(then, session, suite, tmp_path):
    """Otherwise it would use the GPU while others are measured."""
    pid = tmp_path / "pid"
    code = f"import subprocess, time; child = subprocess.Popen(['sleep', '60'], start_new_session={session}); "
    code += f"open({str(pid)!r}, 'w').write(str(child.pid)); {then}"
    suite({"leaves": python(code, limit_s=2), "next": python("print('fine')")})
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_archive_holds_what_was_written_before_a_part_was_killed(suite, tmp_path, monkeypatch):
    rows, out = tmp_path / "results" / "speed.jsonl", tmp_path / "out"
    archive = out / "gpu_suite_first.tar.gz"
    monkeypatch.setattr(gpu_suite, "SAVE_EVERY_S", 0.2)
    rows.write_text('{"old": 1}\n')
    (tmp_path / "results" / "old.png").write_bytes(b"picture")

    def append(number: int, then: str) -> Part:
        line = json.dumps({"new": number}) + "\n"
        return python(f"open({str(rows)!r}, 'a').write({line!r}); print('measured', flush=True); {then}", limit_s=2)

    copy = f"import time, shutil; time.sleep(1); shutil.copy({str(archive)!r}, {str(tmp_path / 'seen')!r})"
    parts = {
        "hangs": append(1, "import time; time.sleep(60)"),
        "crashes": append(2, "import os; os.abort()"),
        "copies": append(3, copy),
    }
    assert suite(parts)[0] == 1
    with tarfile.open(archive) as tar:
        found = {entry.name: tar.extractfile(entry).read().decode() for entry in tar.getmembers()}
    new = '{"new": 1}\n{"new": 2}\n{"new": 3}\n'
    assert found["results/speed.jsonl"] == new  # and no row that was there before
    assert found["output/hangs.txt"].endswith("measured\n")
    assert "results/old.png" not in found
    assert [json.loads(line)["part"] for line in found["results/gpu_suite.jsonl"].splitlines()] == list(parts)
    assert sorted(file.name for file in out.iterdir()) == ["gpu_suite_first.md", archive.name]
    with tarfile.open(tmp_path / "seen") as tar:  # the whole suite may be killed: it is saved while a part runs
        assert tar.extractfile("results/speed.jsonl").read().decode() == new

    # in another checkout: rows are added once, other files replaced
    there = tmp_path / "there"
    monkeypatch.setattr(gpu_suite, "results_file", lambda name: there / f"{name}.jsonl")
    there.mkdir()
    (there / "speed.jsonl").write_text('{"other": 1}\n')
    for _ in range(2):
        assert gpu_suite.main(["--take", str(archive)]) == 0
    assert (there / "speed.jsonl").read_text() == '{"other": 1}\n' + new


def test_a_suite_that_is_terminated_ends_its_parts_and_saves(suite, tmp_path):
    pid = tmp_path / "pid"
    code = f"import os, signal, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "
    code += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    with pytest.raises(SystemExit) as ended:
        suite({"hangs": python(code)})
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert (tmp_path / "out" / "gpu_suite_first.tar.gz").exists()


def test_a_rehearsal_saves_nothing_and_without_a_gpu_there_is_one_line(tmp_path, monkeypatch, capsys):
    parts = {"good": python("print('fine')")}
    for name, value in {"OUTPUT": tmp_path / "output", "GROUPS": {"first": parts}, "PARTS": parts}.items():
        monkeypatch.setattr(gpu_suite, name, value)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PROXSPARSE_WHEN", "")
    before = common.results_file("gpu_suite").exists()
    assert gpu_suite.main(["--device", "cpu", "good"]) == 0
    assert not (tmp_path / "out").exists()
    assert common.results_file("gpu_suite").exists() == before
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_limits_of_a_group_fit_into_nine_minutes():
    for parts in gpu_parts.GROUPS.values():
        assert sum(part.limit_s for part in parts.values() if not part.background) <= gpu_suite.LIMIT_S
    assert gpu_suite.LIMIT_S + 30 <= 600  # a command of a lent machine: with unpacking


def test_the_commands_of_all_parts_are_understood(monkeypatch):
    """Those for a GPU and those of the rehearsal, without running them."""
    monkeypatch.setattr(common, "devices", lambda: ["cuda"])
    for part in gpu_parts.PARTS.values():
        for command in filter(None, (part.cuda, part.cpu)):
            if script := next((word for word in command if word.startswith("benchmarks/")), None):
                assert (ROOT / script).is_file(), script
                module = importlib.import_module(Path(script).stem)
                module.parse_arguments(command[command.index(script) + 1 :])


@pytest.mark.slow
def test_pytest_finds_the_tests_of_all_parts():
    commands = [command for part in gpu_parts.PARTS.values() for command in (part.cuda, part.cpu) if command]
    tests = {word for command in commands for word in command if word.startswith("tests/")}
    pytest_command = gpu_parts.pytest("--collect-only", "-q", "--gpu", "-m", "gpu", *sorted(tests))
    done = subprocess.run(pytest_command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    missing = [test for test in gpu_parts.SMALL_TESTS if test not in done.stdout]
    assert not missing, "no GPU cases"


@pytest.mark.parametrize(("name", "kept"), [("build", {"_C_cutlass"}), ("build_cutlass", {"_C", "_C_cuda"})])
def test_kernels_that_do_not_work_are_compiled_again(name, kept, tmp_path):
    """setup.py would leave them: they are newer than the sources."""
    (tmp_path / "proxsparse").mkdir()
    for file in ("_C", "_C_cuda", "_C_cutlass"):
        (tmp_path / "proxsparse" / f"{file}.cpython-312.so").touch()
    (tmp_path / "setup.py").write_text("import os, sys; print(sys.argv[1:], *os.listdir('proxsparse'))")
    done = subprocess.run(gpu_parts.BUILD[name].cuda, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("['build_ext', '--inplace']")
    assert {file.partition(".")[0] for file in done.stdout.split()[2:]} == kept


def bash(program: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs a program that may call the functions of gpu_run.sh."""
    command = ["bash", "-c", f"source {SCRIPT} source\ncd {cwd}\n{program}"]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_dry_run_prints_three_commands_and_writes_nothing(tmp_path):
    def built() -> list[Path]:
        return sorted((ROOT / "build").rglob("*")) if (ROOT / "build").exists() else []

    before = built()
    done = subprocess.run(["bash", SCRIPT, "prepare", "--dry_run"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (0, 1)  # 1: there is no Python with the GPU machine's torch here, say
    assert "would run: " in done.stdout
    commands = re.findall("^command: *(.*)", done.stdout, re.MULTILINE)
    assert [command.split()[-1] for command in commands] == ["first", "second", "third"]
    assert all(command.startswith("PROXSPARSE_COMMIT=") and len(command) <= 2000 for command in commands)
    carried = re.findall("^carry:(.*)", done.stdout, re.MULTILINE)
    assert [0 < len(json.loads(folders)) <= 8 for folders in carried] == [True] * 3
    assert built() == before
    assert not re.search("/(work|tmp|root)", SCRIPT.read_text())


def test_halves_of_a_file_are_joined_to_the_same_file(tmp_path):
    content = os.urandom(100_001)
    (tmp_path / "llm.whl").write_bytes(content)
    (tmp_path / "work").mkdir()
    assert bash("WORK=work; halve llm.whl travel", tmp_path).returncode == 0
    halves = [tmp_path / "travel" / f"model_{i}" / f"llm.whl.{i}" for i in (1, 2)]
    assert all(40_000 < half.stat().st_size < 60_000 for half in halves)
    assert bash("join travel joined", tmp_path).returncode == 0
    joined = tmp_path / "joined" / "llm.whl"
    assert joined.read_bytes() == content
    halves[0].write_bytes(halves[0].read_bytes()[:-1] + b"?")
    joined.unlink()
    assert bash("join travel joined", tmp_path).returncode != 0  # damaged
    assert not joined.exists()


def test_kernels_that_were_compiled_there_stay_until_others_are_carried(tmp_path):
    (tmp_path / "build/gpu/kernels").mkdir(parents=True)
    (tmp_path / "proxsparse").mkdir()
    carried, used = tmp_path / "build/gpu/kernels/_C.so", tmp_path / "proxsparse/_C.so"
    for content, compiled, expected in [("one", None, "one"), ("one", "compiled", "compiled"), ("two", None, "two")]:
        carried.write_text(content)
        if compiled:
            used.write_text(compiled)
        assert bash("unpack; true", tmp_path).returncode == 0
        assert used.read_text() == expected
