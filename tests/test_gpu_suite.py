"""gpu_suite.py and gpu_run.sh without a GPU: parts that fail, hang or are killed, what is saved, and what travels."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import common
import gpu_parts
import gpu_suite
import pytest
import torch
from gpu_parts import Part

ROOT = Path(gpu_suite.__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_run.sh"


def python(code: str, limit_s: float = 20, **settings) -> Part:
    """A part that runs this code in the rehearsal."""
    return Part(cuda=[], cpu=[sys.executable, "-c", code], limit_s=limit_s, **settings)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """suite(parts, *flags) -> exit code: runs these parts as a rehearsal that is saved as a run on a GPU is."""
    (tmp_path / "results").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(gpu_suite, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(gpu_suite, "TUNED", tmp_path / "tuned.json")
    monkeypatch.setattr(gpu_suite, "results_file", lambda name: tmp_path / "results" / f"{name}.jsonl")
    monkeypatch.setattr(gpu_suite.Suite, "is_saved", lambda self: True)
    monkeypatch.setattr(gpu_suite, "SLOWER_REHEARSAL", 1)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PROXSPARSE_WHEN", "")  # restored after the test

    def run(parts: dict[str, Part], *flags: str) -> int:
        monkeypatch.setattr(gpu_suite, "PARTS", parts)
        monkeypatch.setattr(gpu_suite, "GROUPS", {"first": parts})
        return gpu_suite.main(["--device", "cpu", *flags])

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)


def table(printed: str) -> dict[str, tuple[str, str]]:
    """Part -> its outcome and last line."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    return {row[0]: (row[1], row[3]) for row in rows[2:]}


def archived(tmp_path: Path) -> dict[str, str]:
    """Name -> content of what is in the archive."""
    with tarfile.open(tmp_path / "out" / "gpu_suite_first.tar.gz") as tar:
        return {entry.name: tar.extractfile(entry).read().decode() for entry in tar.getmembers()}


# ------------------------------------------------------------------------------------------ running


def test_without_a_gpu_the_suite_reports_it_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(suite, capsys):
    nap = "import subprocess; print('started'); subprocess.run(['sleep', '60'])"
    parts = {
        "good": python("print('fine')"),
        "bad": python("print('so'); raise SystemExit(3)"),
        "crashes": python("import os; print('now', flush=True); os.abort()"),
        "hangs": python(nap, limit_s=1.5),
        "cannot": python("print('Device not supported'); raise SystemExit(1)", skipped_if="Device not supported"),
        "empty": python("raise SystemExit(5)", skipped_codes=(5,)),
        "there": python("raise SystemExit(1)", needless_if="import json"),
        "needed": python("print('built')", needless_if="import no_such_module"),
        "gpu only": Part(cuda=[], cpu=None, limit_s=20),
        "absent": Part(cuda=[], cpu=["no-such-program"], limit_s=20),
        "last": python("import proxsparse; print('imports', proxsparse.__version__)"),
    }
    start = time.monotonic()
    assert suite(parts) == 1
    assert time.monotonic() - start < 40
    outcomes = table(capsys.readouterr().out)
    assert outcomes["good"] == ("passed", "fine")
    assert outcomes["bad"] == ("failed", "so")
    assert outcomes["crashes"] == ("failed", "now")
    assert outcomes["hangs"] == ("failed", "stopped after 2 s; last line: started")
    assert [outcomes[name][0] for name in ("cannot", "empty", "there", "gpu only", "absent")] == ["skipped"] * 5
    assert outcomes["needed"] == ("passed", "built")
    assert outcomes["last"][0] == "passed"
    assert suite(parts, "good", "absent") == 0
    assert suite(parts, "--limit", "0", "good") == 0
    assert "no time was left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        suite(parts, "better")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("then", "session"), [("", False), ("time.sleep(60)", False), ("time.sleep(60)", True)])
def test_what_a_part_has_started_ends_with_it(then, session, suite, tmp_path):
    """Otherwise it would use the GPU while others are measured. Workers of tune.py have sessions of their own."""
    pid = tmp_path / "pid"
    code = f"import subprocess, time; child = subprocess.Popen(['sleep', '60'], start_new_session={session}); "
    code += f"open({str(pid)!r}, 'w').write(str(child.pid)); {then}"
    suite({"leaves": python(code, limit_s=2), "next": python("print('fine')")})
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_build_in_the_background_is_waited_for_by_the_part_that_needs_it(suite, tmp_path, capsys):
    built = tmp_path / "built"
    parts = {
        "build": python(f"import time; time.sleep(1.5); open({str(built)!r}, 'w')", background=True),
        "at once": python(f"import os; print(os.path.exists({str(built)!r}))"),
        "needs": python(f"import os; print(os.path.exists({str(built)!r}))", waits_for="build"),
        "hangs": python("import time; print('so', flush=True); time.sleep(60)", limit_s=2, background=True),
        "last": python("print('fine')"),
    }
    assert suite(parts) == 1
    outcomes = table(capsys.readouterr().out)
    assert outcomes["at once"] == ("passed", "False")
    assert outcomes["needs"] == ("passed", "True")
    assert outcomes["hangs"] == ("failed", "stopped after 2 s; last line: so")


def test_the_last_part_may_take_what_is_left(suite, capsys):
    parts = {name: python("print('fine')", limit_s=3) for name in ("one", "two")}
    assert suite(parts, "--limit", "100") == 0
    limits = [
        line.split(" s)")[0].rpartition(" ")[2] for line in capsys.readouterr().out.splitlines() if "at most" in line
    ]
    assert int(limits[0]) == 3
    assert int(limits[1]) > 90


def test_all_parts_end_when_the_time_of_all_is_over(suite, capsys):
    nap = python("import time; time.sleep(60)", limit_s=50)
    start = time.monotonic()
    assert suite({"one": nap, "two": nap}, "--limit", "3") == 1
    assert time.monotonic() - start < 10
    assert [outcome for outcome, _ in table(capsys.readouterr().out).values()] == ["failed", "skipped"]


# ------------------------------------------------------------------------------------------ results


def append(file: Path, row: dict, then: str = "") -> Part:
    """A part that appends a row to a file of results, and does something after that."""
    line = json.dumps(row) + "\n"
    return python(f"open({str(file)!r}, 'a').write({line!r}); print('measured', flush=True); {then}", limit_s=2)


def test_the_archive_holds_what_was_written_before_a_part_was_killed(suite, tmp_path, monkeypatch, capsys):
    rows, tuned = tmp_path / "results" / "speed.jsonl", tmp_path / "tuned.json"
    rows.write_text('{"old": 1}\n')
    (tmp_path / "results" / "old.png").write_bytes(b"picture")
    parts = {
        "hangs": append(rows, {"new": 1}, "import time; time.sleep(60)"),
        "crashes": append(rows, {"new": 2}, "import os; os.abort()"),
        "tunes": python(f"open({str(tuned)!r}, 'w').write('[]')"),
    }
    assert suite(parts) == 1
    found = archived(tmp_path)
    assert found["results/speed.jsonl"] == '{"new": 1}\n{"new": 2}\n'  # and no row that was there before
    assert found["tuned.json"] == "[]"
    assert found["output/hangs.txt"].endswith("measured\n")
    assert "results/old.png" not in found
    assert [json.loads(line)["part"] for line in found["results/gpu_suite.jsonl"].splitlines()] == list(parts)
    back = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert back == ["gpu_suite_first.md", "gpu_suite_first.tar.gz", "tuned.json"]  # eight files come back at most
    assert table((tmp_path / "out" / "gpu_suite_first.md").read_text()) == table(capsys.readouterr().out)

    # in another checkout: rows are added once, other files replaced
    monkeypatch.setattr(gpu_suite, "results_file", lambda name: tmp_path / "there" / f"{name}.jsonl")
    monkeypatch.setattr(gpu_suite, "TUNED", tmp_path / "there" / "tuned.json")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "speed.jsonl").write_text('{"other": 1}\n')
    for _ in range(2):
        assert gpu_suite.main(["--take", str(tmp_path / "out" / "gpu_suite_first.tar.gz")]) == 0
    assert (tmp_path / "there" / "speed.jsonl").read_text() == '{"other": 1}\n{"new": 1}\n{"new": 2}\n'
    assert (tmp_path / "there" / "tuned.json").read_text() == "[]"


def test_what_a_part_has_written_is_saved_while_it_runs(suite, tmp_path, monkeypatch):
    """The whole suite may be killed."""
    monkeypatch.setattr(gpu_suite, "SAVE_EVERY_S", 0.2)
    rows, seen = tmp_path / "results" / "speed.jsonl", tmp_path / "seen"
    archive = tmp_path / "out" / "gpu_suite_first.tar.gz"
    copy = f"import time, shutil; time.sleep(1); shutil.copy({str(archive)!r}, {str(seen)!r})"
    assert suite({"measures": append(rows, {"new": 1}, copy)}) == 0
    with tarfile.open(seen) as tar:
        assert "results/speed.jsonl" in tar.getnames()


def test_a_suite_that_is_terminated_ends_its_parts_and_saves(tmp_path):
    pid, output, out = tmp_path / "pid", tmp_path / "output", tmp_path / "out"
    out.mkdir()
    program = f"""
import sys; sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu_suite; from pathlib import Path; from gpu_parts import Part
code = "import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
parts = {{"hangs": Part(cuda=[], cpu=[sys.executable, "-c", code], limit_s=60)}}
gpu_suite.PARTS, gpu_suite.GROUPS = parts, {{"first": parts}}
gpu_suite.OUTPUT = Path({str(output)!r})
gpu_suite.results_file = lambda name: Path({str(tmp_path)!r}) / (name + ".jsonl")
gpu_suite.Suite.is_saved = lambda self: True
gpu_suite.main(["--device", "cpu"])
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"OUT": str(out)})
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert (out / "gpu_suite_first.tar.gz").exists()


def test_a_rehearsal_saves_nothing(suite, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(gpu_suite, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(gpu_suite, "PARTS", {"good": python("print('fine')")})
    monkeypatch.setattr(gpu_suite, "GROUPS", {})
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("PROXSPARSE_WHEN", "")
    assert gpu_suite.main(["--device", "cpu", "good"]) == 0
    assert not list((tmp_path / "out").iterdir())


# ------------------------------------------------------------------------------------------ the parts


@pytest.mark.parametrize("group", gpu_parts.GROUPS)
def test_the_limits_of_a_group_fit_into_nine_minutes(group):
    parts = gpu_parts.GROUPS[group].values()
    assert sum(part.limit_s for part in parts if not part.background) <= gpu_suite.LIMIT_S
    assert gpu_suite.LIMIT_S + 30 <= 600  # a command of a lent machine: with unpacking


def test_what_matters_most_comes_first():
    order = gpu_suite.parts(["first"])
    for earlier, later in [
        ("build", "smoke"),
        ("smoke", "linear_gemv"),
        ("linear_dense", "linear_gemv"),
        ("linear_gemv", "prox_speed"),
        ("generate_speed", "tune"),
        ("tune", "checks"),
    ]:
        assert order.index(earlier) < order.index(later)
    assert gpu_suite.parts(["checks", "second"])[0] == "checks"
    assert gpu_suite.parts(["first", "second", "third"]).count("build") == 1
    assert set(gpu_suite.parts(["first", "second", "third"])) == set(gpu_parts.PARTS)


@pytest.mark.parametrize("name", gpu_parts.PARTS)
def test_commands_of_benchmarks_are_understood(name, monkeypatch):
    """Those for a GPU and those of the rehearsal, without running them."""
    monkeypatch.setattr(common, "devices", lambda: ["cuda"])
    part = gpu_parts.PARTS[name]
    for command in filter(None, (part.cuda, part.cpu)):
        script = next((word for word in command if word.startswith("benchmarks/")), None)
        if script:
            assert (ROOT / script).is_file(), script
            module = importlib.import_module(Path(script).stem)
            module.parse_arguments(command[command.index(script) + 1 :])


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


def test_files_of_tests_are_there():
    named = {word for part in gpu_parts.PARTS.values() for word in part.cuda if word.startswith("tests/")}
    assert len(named) > 8
    assert all((ROOT / name).exists() for name in named)


# ------------------------------------------------------------------------------------------ gpu_run.sh


def bash(program: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program that may call the functions of gpu_run.sh."""
    command = ["bash", "-c", f"source {SCRIPT} source\ncd {cwd}\n{program}"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_a_dry_run_prints_three_commands_and_writes_nothing(tmp_path):
    before = sorted((ROOT / "build").rglob("*")) if (ROOT / "build").exists() else []
    done = subprocess.run(["bash", SCRIPT, "prepare", "--dry_run"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (0, 1)  # 1: there is no Python with the GPU machine's torch here, say
    assert "would run: " in done.stdout
    commands = [line.partition(":")[2].strip() for line in done.stdout.splitlines() if line.startswith("command:")]
    assert [command.split()[-1] for command in commands] == ["first", "second", "third"]
    assert all(command.startswith("PROXSPARSE_COMMIT=") and len(command) <= 2000 for command in commands)
    carried = [json.loads(line.partition(":")[2]) for line in done.stdout.splitlines() if line.startswith("carry:")]
    assert len(carried) == 3
    assert all(0 < len(folders) <= 8 for folders in carried)
    assert (sorted((ROOT / "build").rglob("*")) if (ROOT / "build").exists() else []) == before


def test_halves_of_a_file_are_joined_to_the_same_file(tmp_path):
    content = os.urandom(100_001)
    (tmp_path / "llm.whl").write_bytes(content)
    (tmp_path / "work").mkdir()
    assert bash("WORK=work; halve llm.whl travel", tmp_path).returncode == 0
    halves = [tmp_path / "travel" / f"model_{i}" / f"llm.whl.{i}" for i in (1, 2)]
    assert all(40_000 < half.stat().st_size < 60_000 for half in halves)
    assert bash("join travel joined", tmp_path).returncode == 0
    assert (tmp_path / "joined" / "llm.whl").read_bytes() == content

    halves[0].write_bytes(halves[0].read_bytes()[:-1] + b"?")
    (tmp_path / "joined" / "llm.whl").unlink()
    assert bash("join travel joined", tmp_path).returncode != 0  # damaged
    assert not (tmp_path / "joined" / "llm.whl").exists()
    halves[0].unlink()
    assert bash("join travel joined", tmp_path).returncode != 0  # the machine of the first half was given back


def test_kernels_that_were_compiled_there_stay_until_others_are_carried(tmp_path):
    for folder in ("build/gpu/kernels", "proxsparse"):
        (tmp_path / folder).mkdir(parents=True)
    carried, used = tmp_path / "build/gpu/kernels/_C.so", tmp_path / "proxsparse/_C.so"
    for content, compiled, expected in [("one", None, "one"), ("one", "compiled", "compiled"), ("two", None, "two")]:
        carried.write_text(content)
        if compiled:
            used.write_text(compiled)
        assert bash("unpack; true", tmp_path).returncode == 0
        assert used.read_text() == expected


def test_what_cannot_be_prepared_is_reported_and_the_rest_goes_on(tmp_path):
    done = bash("failed=; step one false; step two true; echo $failed", tmp_path)
    assert "FAILED: one" in done.stderr
    assert done.stdout.split("\n")[:3] == ["== one", "== two", ", one"]


def test_the_script_names_no_path_of_a_machine():
    text = SCRIPT.read_text()
    assert "/work" not in text
    assert "/tmp" not in text
    assert "/root" not in text
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
