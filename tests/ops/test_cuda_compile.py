"""Every CUDA kernel compiles for three generations of GPUs, into registers alone, with 16-byte accesses; needs nvcc."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ops.aot import Compiled, disassembled
from ptx.gpu import cutlass_flags, setup

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


LOADS = {  # of a lane for a step of a tile: bytes of a load of values or codes, how many of them, loads of scales
    "Bits16": (16, 4, 0),
    "Bits8": (16, 2, 0),
    "Bits4": (8, 2, 2),
}


def sources(files: list[Path], slow: tuple[str, ...]) -> list:
    """Those whose name begins with one of `slow` take up to a minute each, and some gigabytes of memory."""
    return [pytest.param(x, marks=[pytest.mark.slow] * x.name.startswith(slow), id=x.name) for x in files]


pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: no kernel was compiled")


@pytest.fixture
def fatbin(tmp_path):
    """fatbin(source): compiled for all ARCHITECTURES; returns the file and what ptxas says about it."""
    known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if missing := [f"sm_{name}" for name in ARCHITECTURES if f"sm_{name}" not in known]:
        pytest.skip(f"this nvcc does not know {', '.join(missing)}")

    def compiled(source: Path) -> tuple[Path, str]:
        target = tmp_path / "kernels.fatbin"
        targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ARCHITECTURES]
        strict = ["-Werror", "all-warnings", "-Xptxas", "-v,-warn-spills,-warn-lmem-usage", "--threads", "2"]
        command = ["nvcc", *setup()["NVCC_FLAGS"], *strict, *targets, "-fatbin", "-o", target, source]
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
        (groups, tiles, aligned, windows), (size, values, scales) = map(int, numbers), LOADS[bits]
        code = kernel.instructions
        if aligned:
            first = next(i for i, name in enumerate(code) if name.startswith("LDGSTS"))
            of_a_tile = values + scales + 2  # 2 of places
            assert sum(name.startswith("LDG.") for name in code[:first]) == of_a_tile * tiles
        if "EF_CUDA_SM80" not in kernel.head:
            assert sum(name.startswith("MEMBAR") for name in code) == 1  # of the sums of a cluster
        if "BFloat16" in kernel.head and (groups, tiles, windows) in ((1, 4, 0), (4, 2, 0)):
            steps = [loop for loop in kernel.loops() if any(name.startswith("HMMA") for name in loop)]
            loops.append((groups, tiles, size, values, min(steps, key=len)))  # a step of 256 columns
    assert len(loops) == 2 * len(ARCHITECTURES)
    for groups, tiles, size, values, loop in loops:
        wide = [name for name in loop if name.startswith("LDG.") and name.endswith(f".{8 * size}")]
        assert len(wide) == (values + 2 * (size == 8)) * tiles  # places have 8 bytes
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


@pytest.mark.parametrize("source", sources(TILES, slow=("sm90", "sm80_128")))
def test_cutlass_tiles_compile_into_registers(source, tmp_path):
    target = ["-gencode=arch=compute_90a,code=sm_90a"] if "sm90" in source.name else ["-arch=sm_80"]
    flags = [*cutlass_flags(), "-Xptxas", "-v,-warn-spills"]
    command = ["nvcc", *flags, *target, "-cubin", "-o", tmp_path / "tile.cubin", source]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    check_report(process.stdout + process.stderr)
    for kernel in disassembled(tmp_path / "tile.cubin"):
        assert kernel.starting_with(PRODUCTS[source.name[:4]]), kernel.head
