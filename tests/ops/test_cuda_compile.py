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
TILES = sorted((CHECKOUT / "csrc" / "cutlass").glob("*.cu"))
# Instructions that each kernel of a file must have, and those it must not: spills, unknown address spaces; but the gemv
# loads from the shared memory of other thread blocks, which has no instruction of its own.
EXPECTED = {
    "adamw_prox.cu": {"LDG.E.128", "STG.E.128"},
    "prox.cu": {"LDG.E.128", "STG.E.128"},
    "gemv.cu": {"HMMA.SP.16832.F32"},  # then the type
    "metadata.cu": {"STG.E.128"},
    "pack.cu": set(),  # what a thread writes at once is a block, 8 bytes or 16
}
FORBIDDEN = {"gemv.cu": r"\b(LDL|STL|ST\.E)\b"}
FORBIDDEN_ELSEWHERE = r"\b(LDL|STL|LD\.E|ST\.E)\b"
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)

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


# Quick: without the fused step, half of the time of all.
@pytest.mark.parametrize(
    "source",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.name == "adamw_prox.cu"), id=path.name) for path in KERNELS],
)
def test_kernels_compile_into_registers_and_16_byte_accesses(source, fatbin):
    file, report = fatbin(source)
    frames = check_report(report)
    functions = disassembled(file)
    assert len(functions) == frames
    if source.name == "adamw_prox.cu":
        check_one_load_phase(functions)
    for function in functions:
        found = {name for _, name, _ in INSTRUCTION.findall(function)}
        found |= {name.removesuffix(".BF16") for name in found}
        assert EXPECTED[source.name] <= found, function[:200]
        assert not re.search(FORBIDDEN.get(source.name, FORBIDDEN_ELSEWHERE), function), function[:200]
    if source.name == "gemv.cu":
        check_gemv(functions)


def check_gemv(functions: list[str]) -> None:
    """The loops for 1 and for 16 rows, and what may come before the previous kernel has ended."""
    loops = []
    for function in functions:
        groups, tiles, aligned = map(int, re.search(r"ELi(\d)ELi(\d)ELb(\d)", function[:200]).groups())
        code = [name for _, name, _ in INSTRUCTION.findall(function)]
        if "EF_CUDA_SM80" in function[:400]:
            assert not {"ACQBULK", "PREEXIT"} & set(code)
        else:  # the next kernel may start; weights; the previous kernel has ended; x
            before = code[: code.index("ACQBULK")]
            assert "PREEXIT" in before
            assert sum(name.startswith("LDG.") for name in before) == 6 * tiles * aligned
            assert not any(name.startswith(("LDGSTS", "ST")) for name in before)
            assert sum(name.startswith("MEMBAR") for name in code) == 1  # of the sums of a cluster
        if "BFloat16" in function[:200] and (groups, tiles) in ((1, 4), (4, 2)):
            loops.append((groups, tiles, gemv_loop(function)))
    assert len(loops) == 2 * len(ARCHITECTURES)
    for groups, tiles, loop in loops:
        assert sum(name.startswith("LDG.") and ".128" in name for name in loop) == 4 * tiles
        assert sum(name.startswith("LDGSTS") for name in loop) == 8  # 4 rows of x, for the next step
        assert sum(name.startswith("LDSM") for name in loop) == 4 * groups
        assert sum(name.startswith("HMMA.SP") for name in loop) == 4 * tiles * groups
        # of a lane, of 32, for 8 * tiles * 256 weights: at most 1.25 or 2; memory (H200) takes the time of about 4
        assert len(loop) <= (320 if groups == 1 else 256)


def gemv_loop(function: str) -> list[str]:
    """The instructions for a step of 256 columns: the shortest loop with tensor cores in it."""
    code = [(int(address, 16), name, operands.strip()) for address, name, operands in INSTRUCTION.findall(function)]
    loops = []
    for end, name, operands in code:
        target = re.search(r"0x([0-9a-f]+)$", operands)
        if name.startswith("BRA") and target and int(target[1], 16) < end:
            loops.append([inner for address, inner, _ in code if int(target[1], 16) <= address <= end])
    return min((loop for loop in loops if any(name.startswith("HMMA") for name in loop)), key=len)


def check_report(report: str) -> int:
    """The number of kernels that ptxas reports on; fails unless all of them stay in registers."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(frames) == len(re.findall("Compiling entry function", report)) > 0, "the report was not understood"
    assert set(frames) == {("0", "0", "0")}, report
    assert "C7510" not in report, "wgmma is serialised"
    return len(frames)


def disassembled(file: Path) -> list[str]:
    """The machine code of every kernel."""
    triton = pytest.importorskip("triton", reason="cuobjdump comes with triton")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([cuobjdump, "-sass", file], capture_output=True, text=True, check=True).stdout
    return re.split(r"\n\s+Function : ", code)[1:]


def check_one_load_phase(functions: list[str]) -> None:
    """Every load of 16 bytes comes before the first use of any: a warp waits for memory once."""
    for function in functions:
        loads, uses = wide_loads(function)
        assert loads >= 4, function[:200]  # of weights, masters, gradients, moments, pretrained weights
        assert not uses, f"a load waits for an earlier one: {uses[0]}, {function[:200]}"


def wide_loads(function: str) -> tuple[int, list[str]]:
    """How many loads of 16 bytes a kernel has, and the instructions before the last of them that use one's result."""
    code = [(name, re.findall(r"\bR(\d+)", operands)) for _, name, operands in INSTRUCTION.findall(function)]
    last = max(i for i, (name, _) in enumerate(code) if name == "LDG.E.128")
    loads, loaded, uses = 0, set(), []
    for name, registers in code[: last + 1]:
        if name.startswith("BRA") and loaded:
            uses.append(name)
        if loaded & set(map(int, registers[1:] if name.startswith("LDG") else registers)):
            uses.append(f"{name} {registers}")
        if name == "LDG.E.128":
            loads += 1
            loaded |= {int(registers[0]) + word for word in range(4)}
    return loads, uses


@pytest.mark.parametrize(
    "source",
    [pytest.param(path, marks=[pytest.mark.slow] * path.name.startswith("sm90"), id=path.name) for path in TILES],
)
def test_cutlass_tiles_compile_into_registers(source, setup, request, tmp_path):
    if not (headers := setup["cutlass_headers"]()):
        pytest.skip("nvidia-cutlass is not installed")
    if "sm90" in source.name and "slow" not in request.config.option.markexpr:
        pytest.skip("takes a minute and 5 GB of memory: pytest -m slow")
    target = ["-gencode=arch=compute_90a,code=sm_90a"] if "sm90" in source.name else ["-arch=sm_80"]
    folders = [f"-I{folder}" for folder in headers]
    flags = ["-O3", "-std=c++20", "-DNDEBUG", "-Xptxas", "-v,-warn-spills"]
    command = ["nvcc", *flags, *target, *folders, "-cubin", "-o", tmp_path / "tile.cubin", source]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    check_report(process.stdout + process.stderr)


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
