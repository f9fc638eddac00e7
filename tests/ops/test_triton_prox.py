"""What only the Triton kernels have: the table of a list, machine code for NVIDIA and AMD, and Triton's interpreter.

Every op on the compiled kernels is in test_every_op.py and others. A process of its own is needed where triton decides
at its import whether it interprets, or for which GPU it compiles.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops.blocks import random_blocks
from ops.cases import STEP, assert_close, copied, step_in_float64, step_problem
from ops.on_each_backend import assert_alike

from proxsparse import reference
from proxsparse.ops import use_backend
from proxsparse.ops.adamw_prox_list import adamw_prox_list_

pytest.importorskip("triton")
from proxsparse.triton_kernels import adamw_prox, prox

FOLDER = Path(__file__).parent
COMPILED = ("triton_compiled_prox.py", "triton_rocm_cases.py")
INTERPRETED = """
import torch, proxsparse
from ops.blocks import random_blocks
from reference.ground_truth import assert_optimal
weight = random_blocks(128, 0.7)
with proxsparse.use_backend("triton"):
    assert_optimal(proxsparse.prox_nm(weight.float(), 0.7), weight.float(), 0.7)
"""


def in_own_process(*command: str, **environment: str):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder, both = FOLDER.parent.parent, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.run([sys.executable, *command], env=inherited | environment, cwd=folder, **both)
    assert process.returncode == 0, f"{command} failed:\n{process.stdout[-6000:]}"


@pytest.mark.slow
def test_interpreted():
    in_own_process("-c", INTERPRETED, TRITON_INTERPRET="1", PYTHONPATH=str(FOLDER.parent))


@pytest.mark.slow
@pytest.mark.parametrize("file", COMPILED)
def test_compiled_ahead_of_time(file, tmp_path):
    options = ("-x", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider")
    in_own_process("-m", "pytest", str(FOLDER / file), *options, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_list_with_rows_of_a_table(dtype, triton_on_cpu, monkeypatch):
    """Sizes below, at and above a row of the table, sizes and addresses that are no multiple of 16, and lambda = 0."""
    monkeypatch.setattr(prox, "WEIGHTS_PER_ROW", 4096)
    memory = [random_blocks(count // 4 + 1, 0.7, seed=count).flatten()[:count] for count in (16, 4096, 9984, 20, 32)]
    weights, reg_lambdas = [m.to(dtype).view(-1, 4) for m in memory], [0.7, 0.02, 2.0, 0.7, 0.0]
    expected = [reference.prox_nm(w.double(), x) for w, x in zip(weights, reg_lambdas, strict=True)]
    with triton_on_cpu.memory(weights):
        prox.prox_list_24_(weights, reg_lambdas)
    for weight, other in zip(weights, expected, strict=True):
        assert_alike(weight, other, dtype)


@pytest.mark.parametrize("row_pieces", [1, 2, 1024])
def test_weights_of_one_kind_take_one_launch(row_pieces, triton_on_cpu, monkeypatch):
    """However many pieces a row of the table has; a weight whose memory is not aligned is of another kind."""
    monkeypatch.setattr(adamw_prox, "ROW_PIECES", row_pieces)
    problems = [step_problem((rows, 272), torch.float32, parts=("scale",), seed=rows) for rows in (1, 3, 9)]
    moved = torch.empty(3 * 272 + 1)[1:].view(3, 272)
    problems.append(problems[1] | {"weight": moved.copy_(problems[1]["weight"])})
    exact = [step_in_float64(tensors, 0.3) for tensors in problems]
    settings = STEP | {"reg_lambda": 0.3, "pattern": "2:4", "seed": None}
    steps = [settings | copied(tensors) | {"weight": tensors["weight"]} for tensors in problems]
    with use_backend("triton"):
        adamw_prox_list_(steps, [None] * len(steps))
    for tensors, expected in zip(problems, exact, strict=True):
        assert_close(tensors["weight"], expected["weight"], torch.float32)
    assert len(triton_on_cpu.launches) == 2
