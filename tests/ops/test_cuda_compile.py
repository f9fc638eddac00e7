"""Every CUDA kernel compiles for three generations of GPUs, into registers alone, with 16-byte accesses; needs nvcc."""

import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import setuptools
from ops.aot import Compiled, disassembled
from torch.utils import cpp_extension

CHECKOUT = Path(__file__).parents[2]
ARCHITECTURES = (80, 90, 100)
KERNELS = sorted((CHECKOUT / "csrc" / "cuda").glob("*.cu"))
TILES = sorted((CHECKOUT / "csrc" / "cutlass").glob("*.cu"))
# Instructions that each kernel of a file must have, and those it must not: spills, unknown address spaces; but the gemv
# loads from the shared memory of other thread blocks, which has no instruction of its own.
EXPECTED = {
    "adamw_prox.cu": {"LDG.E.128", "STG.E.128"},
    "masked_weight.cu": {"LDG.E.128", "STG.E.128"},
    "prox.cu": {"LDG.E.128", "STG.E.128"},
    "gemv.cu": {"HMMA.SP.16832.F32"},  # then the type
    "gemv_8.cu": {"HMMA.SP.16832.F32"},
    "gemv_4.cu": {"HMMA.SP.16832.F32"},
    "metadata.cu": {"STG.E.128"},
    "pack.cu": set(),  # what a thread writes at once is a block, 8 bytes or 16
}
# The same for the tiles of CUTLASS, by the first four characters of their names.
PRODUCTS = {"sm80": "HMMA.SP", "sm90": "HGMMA.SP"}
GEMV = ("gemv.cu", "gemv_8.cu", "gemv_4.cu")
FORBIDDEN = dict.fromkeys(GEMV, ("LDL", "STL", "ST.E"))
FORBIDDEN_ELSEWHERE = ("LDL", "STL", "LD.E", "ST.E")


@dataclass(frozen=True)
class Loads:
    """What a lane loads for a step of a tile: bytes of a load of values or codes, how many of them, loads of scales."""

    bytes: int
    values: int
    scales: int


LOADS = {
    "Bits16": Loads(16, 4, 0),
    "Bits8": Loads(16, 2, 0),
    "Bits4": Loads(8, 2, 2),
}


def sources(files: list[Path], slow: tuple[str, ...]) -> list:
    """Those whose name begins with one of `slow` take up to a minute each, and some gigabytes of memory."""
    return [pytest.param(x, marks=[pytest.mark.slow] * x.name.startswith(slow), id=x.name) for x in files]


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


@pytest.mark.parametrize("source", sources(KERNELS, slow=("adamw_prox", "gemv", "prox", "masked")))
def test_kernels_compile_into_registers_and_16_byte_accesses(source, fatbin):
    file, report = fatbin(source)
    frames, kernels = check_report(report), disassembled(file)
    assert len(kernels) == frames
    if source.name == "adamw_prox.cu":
        check_one_load_phase(kernels)
    for kernel in kernels:
        found = {name.removesuffix(".BF16") for name in kernel.instructions}
        assert EXPECTED[source.name] <= found, kernel.head
        assert not kernel.starting_with(*FORBIDDEN.get(source.name, FORBIDDEN_ELSEWHERE)), kernel.head
    if source.name in GEMV:
        check_gemv(kernels)


def check_gemv(kernels: list[Compiled]) -> None:
    """The loops for 1 and for 16 rows; all weights of a step are loaded before x."""
    loops = []
    for kernel in kernels:
        bits, *numbers = re.search(r"(Bits\w+?)ELi(\d)ELi(\d)ELb(\d)ELb(\d)", kernel.head).groups()
        (groups, tiles, aligned, windows), loads = map(int, numbers), LOADS[bits]
        code = kernel.instructions
        if aligned:
            first = next(i for i, name in enumerate(code) if name.startswith("LDGSTS"))
            of_a_tile = loads.values + loads.scales + 2  # 2 of places
            assert sum(name.startswith("LDG.") for name in code[:first]) == of_a_tile * tiles
        if "EF_CUDA_SM80" not in kernel.head:
            assert sum(name.startswith("MEMBAR") for name in code) == 1  # of the sums of a cluster
        if "BFloat16" in kernel.head and (groups, tiles, windows) in ((1, 4, 0), (4, 2, 0)):
            steps = [loop for loop in kernel.loops() if any(name.startswith("HMMA") for name in loop)]
            loops.append((groups, tiles, loads, min(steps, key=len)))  # a step of 256 columns
    assert len(loops) == 2 * len(ARCHITECTURES)
    for groups, tiles, loads, loop in loops:
        wide = [name for name in loop if name.startswith("LDG.") and name.endswith(f".{8 * loads.bytes}")]
        assert len(wide) == (loads.values + 2 * (loads.bytes == 8)) * tiles  # places have 8 bytes
        assert sum(name.startswith("LDGSTS") for name in loop) == 8  # 4 rows of x, for the next step
        assert sum(name.startswith("LDSM") for name in loop) == 4 * groups
        assert sum(name.startswith("HMMA.SP") for name in loop) == 4 * tiles * groups


def check_report(report: str) -> int:
    """The number of kernels that ptxas reports on; fails unless all of them stay in registers."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(frames) == len(re.findall("Compiling entry function", report)) > 0, "the report was not understood"
    assert set(frames) == {("0", "0", "0")}, report
    assert "C7510" not in report, "wgmma is serialised"
    return len(frames)


def check_one_load_phase(kernels: list[Compiled]) -> None:
    """Every load of 16 bytes comes before the first use of any: a warp waits for memory once."""
    for kernel in kernels:
        code = [(name, [int(r) for r in re.findall(r"\bR(\d+)", operands)]) for _, name, operands in kernel.code]
        loads = [i for i, (name, _) in enumerate(code) if name == "LDG.E.128"]
        assert len(loads) >= 3, kernel.head  # of weights, masters, gradients; moments may have 8 bytes
        loaded = set()
        for name, registers in code[: loads[-1] + 1]:
            used = registers[1:] if name.startswith("LDG") else registers
            waits = (name.startswith("BRA") and loaded) or loaded & set(used)
            assert not waits, f"a load waits for an earlier one: {name} {registers}, {kernel.head}"
            if name == "LDG.E.128":
                loaded |= {registers[0] + word for word in range(4)}


@pytest.mark.parametrize("source", sources(TILES, slow=("sm90",)))
def test_cutlass_tiles_compile_into_registers(source, setup, tmp_path):
    if not (headers := setup["cutlass_headers"]()):
        pytest.skip("nvidia-cutlass is not installed")
    target = ["-gencode=arch=compute_90a,code=sm_90a"] if "sm90" in source.name else ["-arch=sm_80"]
    folders = [f"-I{folder}" for folder in headers]
    flags = ["-O3", "-std=c++20", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xptxas", "-v,-warn-spills"]
    command = ["nvcc", *flags, *target, *folders, "-cubin", "-o", tmp_path / "tile.cubin", source]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    check_report(process.stdout + process.stderr)
    for kernel in disassembled(tmp_path / "tile.cubin"):
        assert kernel.starting_with(PRODUCTS[source.name[:4]]), kernel.head


def test_the_bindings_compile(setup, monkeypatch):
    """Against the headers of this torch, CUDA build or not; only checked, because code takes twice the time."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME)  # setup.py sets it
    if not (toolkits := setup["toolkits"]()):
        pytest.skip("there is no CUDA toolkit where setup.py looks for one")
    extension = setup["cuda_kernels"](toolkits[0])
    folders = [*extension.include_dirs, *cpp_extension.include_paths(), sysconfig.get_path("include")]
    includes = [f"-I{folder}" for folder in folders]
    macros = ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C_cuda"]
    command = [os.environ.get("CXX", "g++"), "-fsyntax-only", *extension.extra_compile_args["cxx"], *macros, *includes]
    process = subprocess.run([*command, "csrc/cuda/bindings.cpp"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
