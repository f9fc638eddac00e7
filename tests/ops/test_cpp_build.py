"""What setup.py does without a working C++ compiler; the kernels themselves are tested against the reference."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path):
    """Runs setup.py on a copy of the sources, with a compiler that always fails."""
    shutil.copy(CHECKOUT / "setup.py", tmp_path)
    shutil.copytree(CHECKOUT / "csrc", tmp_path / "csrc")
    (tmp_path / "proxsparse").mkdir()

    def run(mode: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            env=os.environ | {"CXX": "false", "CC": "false", "PROXSPARSE_EXTENSION": mode},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


def test_failed_build_is_one_warning_that_names_the_remedy(build):
    process = build("auto")
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("WITHOUT its compiled CPU kernels") == 1
    assert "apt install g++ python3-dev" in process.stderr


def test_failed_build_is_an_error_when_the_kernels_are_demanded(build):
    process = build("1")
    assert process.returncode != 0
    assert "WITHOUT its compiled CPU kernels" not in process.stderr


def test_build_can_be_skipped(build):
    process = build("0")
    assert process.returncode == 0, process.stderr
    assert "WITHOUT its compiled CPU kernels" not in process.stderr


def test_unknown_mode_is_refused_with_the_choices(build):
    process = build("yes")
    assert process.returncode != 0
    assert "PROXSPARSE_EXTENSION='yes': choose one of auto, 0, 1" in process.stderr
