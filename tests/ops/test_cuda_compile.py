"""Every CUDA kernel compiles for three generations of GPUs, into registers alone, with 16-byte accesses; needs nvcc."""

import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import setuptools
from torch.utils import cpp_extension

CHECKOUT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 100)
KERNELS = sorted((CHECKOUT / "csrc" / "cuda").glob("*.cu"))

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: no kernel was compiled")


@pytest.fixture
def setup(monkeypatch):
    """The names that setup.py defines."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.chdir(CHECKOUT)
    return runpy.run_path("setup.py")


@pytest.fixture
def fatbin(setup, tmp_path):
    """fatbin(source): compiled for all ARCHITECTURES; returns the file and what ptxas says about it."""
    known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if missing := [f"sm_{name}" for name in ARCHITECTURES if f"sm_{name}" not in known]:
        pytest.skip(f"this nvcc does not know {', '.join(missing)}")

    def compiled(source: Path) -> tuple[Path, str]:
        target = tmp_path / "kernels.fatbin"
        targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ARCHITECTURES]
        strict = ["-Werror", "all-warnings", "-Xptxas", "-v,-warn-spills,-warn-lmem-usage", "--threads", "2"]
        command = ["nvcc", *setup["NVCC_FLAGS"], *strict, *targets, "-fatbin", "-o", target, source]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout + process.stderr
        return target, process.stdout + process.stderr

    return compiled


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.name)
def test_kernels_compile_into_registers_and_16_byte_accesses(source, fatbin):
    file, report = fatbin(source)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(frames) == len(re.findall("Compiling entry function", report)) > 0, "the report was not understood"
    assert set(frames) == {("0", "0", "0")}, report

    triton = pytest.importorskip("triton", reason="cuobjdump comes with triton")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([cuobjdump, "-sass", file], capture_output=True, text=True, check=True).stdout
    functions = re.split(r"\n\s+Function : ", code)[1:]
    assert len(functions) == len(frames)
    for function in functions:
        assert {"LDG.E.128", "STG.E.128"} <= set(re.findall(r"\b(?:LD|ST)[A-Z]*\.[\w.]+", function)), function[:200]
        assert not re.search(r"\b(LDL|STL|LD\.E|ST\.E)\b", function), function[:200]  # spills; unknown address spaces


def test_the_bindings_compile(setup, monkeypatch):
    """Against the headers of this torch, CUDA build or not; only checked, because code takes twice the time."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME)  # setup.py sets it, and the list of GPUs
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    if not (toolkits := setup["toolkits"]()):
        pytest.skip("there is no CUDA toolkit where setup.py looks for one")
    extension = setup["cuda_kernels"](toolkits[0])
    folders = [*extension.include_dirs, *cpp_extension.include_paths(), sysconfig.get_path("include")]
    includes = [f"-I{folder}" for folder in folders]
    macros = ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C_cuda"]
    command = [os.environ.get("CXX", "g++"), "-fsyntax-only", *extension.extra_compile_args["cxx"], *macros, *includes]
    process = subprocess.run([*command, "csrc/cuda/bindings.cpp"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
