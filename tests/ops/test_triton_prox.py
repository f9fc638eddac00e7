"""The Triton kernels without a GPU: interpreted on the CPU, and compiled ahead of time for NVIDIA and AMD.

Both need a process of their own: triton decides at its import whether it interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent
ROUNDING = "test_adamw_prox_rounding.py"
# file -> tests that are left out: each call of the interpreter takes a quarter second
QUICK = {"triton_prox_cases.py": "", "test_prox_list.py": ""}
SLOW = {"test_prox.py": "", "test_prox_edges.py": "", "test_adamw_prox.py": "any_size", ROUNDING: "mean_over_seeds"}


def run_in_own_process(file: str, *options: str, **environment: str):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = [*options, "--tb=short", "--disable-warnings", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(FOLDER / file)]
    folder, both = FOLDER.parent.parent, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.run(command, env=inherited | environment, cwd=folder, **both)
    assert process.returncode == 0, f"{file} failed:\n{process.stdout[-6000:]}"


@pytest.mark.parametrize(
    ("file", "left_out"),
    [*QUICK.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())],
)
def test_interpreted(file, left_out, tmp_path):
    options = ["-k", f"not {left_out}"] if left_out else []
    run_in_own_process(file, "-x", *options, TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("triton_compiled_prox.py", ["-m", "not slow"]),
        pytest.param("triton_compiled_prox.py", ["-m", "slow"], marks=pytest.mark.slow),
        ("triton_rocm_cases.py", []),
    ],
)
def test_compiled_ahead_of_time(file, options, tmp_path):
    run_in_own_process(file, "-x", *options, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_on_the_gpu():
    """To the end, whatever fails, and with the kernels that other processes have compiled: minutes on a GPU are few."""
    run_in_own_process("triton_prox_cases.py")
