"""`python -m proxsparse.X` imports no module from the current folder: its files may be untrusted."""

import subprocess
import sys

import pytest

from proxsparse._start import COMMANDS

SHADOWED = ("yaml", "json", "pathlib", "numpy", "torch", "transformers", "safetensors", "datasets", "triton", "ninja")
SCRIPT = "import sys\nfrom proxsparse.__main__ import main\nsys.exit(main())\n"  # what pip installs as bin/proxsparse
QUICK = [["-m", "proxsparse"], ["SCRIPT"], ["-u", "-mproxsparse.pack"]]
SLOW = [["-m", "proxsparse", "pack"], ["SCRIPT", "pack"], *(["-m", f"proxsparse.{name}"] for name in COMMANDS)]


@pytest.mark.parametrize(
    "command", [*QUICK, *(pytest.param(command, marks=pytest.mark.slow) for command in SLOW)], ids=" ".join
)
def test_no_module_of_the_current_folder_is_imported(command, tmp_path):
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').write(__name__)\nraise SystemExit('imported')\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "proxsparse").write_text(SCRIPT)
    command = [word.replace("SCRIPT", str(tmp_path / "bin" / "proxsparse")) for word in command]
    arguments = [] if command[-1] == "proxsparse.env" else ["--help"]
    done = subprocess.run([sys.executable, *command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    assert "proxsparse" in done.stdout


def test_an_import_leaves_the_search_path_alone(tmp_path):
    """A program of the user's own, in its own folder, may import what lies there."""
    (tmp_path / "mine.py").write_text("import proxsparse, helper\nprint(helper.VALUE)\n")
    (tmp_path / "helper.py").write_text("VALUE = 'found'\n")
    done = subprocess.run([sys.executable, "-m", "mine"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "found", done.stderr[-2000:]
