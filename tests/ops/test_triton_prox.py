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
# (files and options of pytest); each call of the interpreter takes a quarter second
INTERPRETED = [
    ("triton_prox_cases.py",),
    ("test_prox.py",),
    ("test_every_op.py", "-k", "(not strides or bfloat16) and not (guards and (8 or 10))"),
]
INTERPRETED += [("test_adamw_prox.py", "-k", "not mean_over")]
COMPILED = [("triton_compiled_prox.py", "-m", "slow or not slow"), ("triton_rocm_cases.py", "-m", "slow or not slow")]


def run_in_own_process(*options: str, **environment: str):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = [str(FOLDER / option) if option.endswith(".py") else option for option in options]
    command = [sys.executable, "-m", "pytest", *options, "--tb=short", "--disable-warnings", "-p", "no:cacheprovider"]
    folder, both = FOLDER.parent.parent, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.run(command, env=inherited | environment, cwd=folder, **both)
    assert process.returncode == 0, f"{options} failed:\n{process.stdout[-6000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("command", INTERPRETED)
def test_interpreted(command, tmp_path):
    run_in_own_process(*command, "-x", TRITON_INTERPRET="1", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMPILED)
def test_compiled_ahead_of_time(command, tmp_path):
    run_in_own_process(*command, "-x", TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_on_the_gpu():
    """To the end, whatever fails, and with the kernels that other processes have compiled: minutes on a GPU are few."""
    run_in_own_process("triton_prox_cases.py")
