"""setup.py without a working C++ compiler, what it builds where, and the kernels' variants for other CPUs."""

import glob
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import torch
from ptx.gpu import setup
from torch.utils import cpp_extension

CHECKOUT = Path(__file__).parents[2]


CUDA_VARIABLES = ("TORCH_CUDA_ARCH_LIST", "CUDA_PATH")


@pytest.fixture
def build(tmp_path):
    """Runs setup.py on a copy of the sources, with a compiler that always fails."""
    shutil.copy(CHECKOUT / "setup.py", tmp_path)
    shutil.copytree(CHECKOUT / "csrc", tmp_path / "csrc")
    (tmp_path / "proxsparse").mkdir()

    def run(mode: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"CXX": "false", "CC": "false", "PROXSPARSE_EXTENSION": mode}
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return run


LEFT_OUT = "WITHOUT its compiled CPU kernels"


@pytest.mark.parametrize(("mode", "code", "warnings"), [("auto", 0, 1), ("1", 1, 0)])
def test_a_build_that_fails_is_a_warning_unless_the_kernels_are_demanded(mode, code, warnings, build):
    process = build(mode)
    assert process.returncode == code, process.stderr
    assert process.stderr.count(LEFT_OUT) == process.stderr.count("apt install g++ python3-dev") == warnings


@pytest.fixture
def described(monkeypatch):
    """described(variable=value, ...): the extensions that setup.py asks for, by name, in that environment."""

    def run(**environment: str) -> dict[str, setuptools.Extension]:
        asked = {}
        monkeypatch.setattr(setuptools, "setup", asked.update)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
        for name in ("PROXSPARSE_EXTENSION", "PROXSPARSE_CUDA", "PROXSPARSE_CUTLASS", *CUDA_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.chdir(CHECKOUT)
        runpy.run_path("setup.py")
        return {extension.name: extension for extension in asked["ext_modules"]}

    return run


def test_kernels_that_are_not_wanted_and_a_mode_that_does_not_exist(described):
    assert described(PROXSPARSE_EXTENSION="0") == {}
    with pytest.raises(SystemExit, match="PROXSPARSE_EXTENSION='yes': choose one of auto, 0, 1"):
        described(PROXSPARSE_EXTENSION="yes")


@pytest.fixture
def toolkit(tmp_path):
    """What setup.py takes for a CUDA toolkit."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    return str(tmp_path)


@pytest.mark.parametrize("torch_cuda", [None, "13.0"])
@pytest.mark.parametrize(("gpu", "listed"), [(False, {}), (True, {}), (False, {"TORCH_CUDA_ARCH_LIST": "9.0"})])
def test_the_cuda_kernels_are_built_for_a_gpu(torch_cuda, gpu, listed, described, toolkit, capsys, monkeypatch):
    """Of this machine or a listed one, where torch is a CUDA build; otherwise a line says what is missing."""
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert "proxsparse._C_cuda" not in described(CUDA_HOME=toolkit, PROXSPARSE_CUDA="0", **listed)
    assert capsys.readouterr().out == ""
    found = "proxsparse._C_cuda" in described(CUDA_HOME=toolkit, **listed)
    assert found == (torch_cuda is not None and (gpu or bool(listed)))
    line = "the CUDA kernels are not built: there is no GPU; set TORCH_CUDA_ARCH_LIST, e.g. 9.0+PTX\n"
    assert capsys.readouterr().out == ("" if found or torch_cuda is None else line)


@pytest.mark.parametrize(
    ("gpus", "hopper", "older"), [("8.0;9.0", True, True), ("9.0a", True, False), ("8.6", False, True)]
)
def test_the_cutlass_tiles_are_those_of_the_gpus(gpus, hopper, older, described, toolkit, tmp_path, monkeypatch):
    """Where its headers are; those of Hopper, which take minutes, only for Hopper."""
    monkeypatch.syspath_prepend(tmp_path)
    wanted = {"CUDA_HOME": toolkit, "PROXSPARSE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": gpus}
    package = tmp_path / "cutlass_library"
    if importlib.util.find_spec("cutlass_library") is None:
        assert "proxsparse._C_cutlass" not in described(**wanted)
    package.mkdir()
    (package / "__init__.py").touch()
    importlib.invalidate_caches()
    extension = described(**wanted)["proxsparse._C_cutlass"]
    assert str(package / "source" / "include") in extension.include_dirs
    assert any("sm80" in source for source in extension.sources) == older
    assert any("sm90" in source for source in extension.sources) == hopper
    flags = extension.extra_compile_args["nvcc"]
    assert ("-gencode=arch=compute_90a,code=sm_90a" in flags) == hopper
    assert any("compute_80" in flag for flag in flags) == older
    assert "-DNDEBUG" in flags
    assert "proxsparse._C_cutlass" not in described(PROXSPARSE_CUDA="0")
    assert "proxsparse._C_cutlass" not in described(**wanted, PROXSPARSE_CUTLASS="0")


def test_demanded_cuda_kernels_are_refused_with_what_is_missing(described, toolkit, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU; set TORCH_CUDA_ARCH_LIST"):
        described(PROXSPARSE_CUDA="1", CUDA_HOME=toolkit)
    monkeypatch.setattr(os.path, "exists", lambda path: "cuda_runtime_api" not in str(path) and exists(path))
    with pytest.raises(SystemExit, match="no CUDA toolkit; set CUDA_HOME"):
        described(PROXSPARSE_CUDA="1")


def test_the_newest_toolkit_is_found_without_its_link(monkeypatch):
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(os.path, "exists", lambda path: "cuda_runtime_api.h" in str(path) and "cuda-" in str(path))
    for names in ("cuda-9.2 cuda-12.8 cuda-13.0", "cuda-new cuda-13.0 cuda-13"):
        monkeypatch.setattr(glob, "glob", lambda *_, n=names, **__: [f"/usr/local/{name}" for name in n.split()])
        assert setup()["toolkits"]()[0] == "/usr/local/cuda-13.0"


def test_failed_cuda_kernels_leave_the_cpu_kernels_alone(described, toolkit, capsys, monkeypatch):
    """One warning that names the remedy; the other extension is built."""
    builder, built = setup()["BuildKernels"], []

    def build_extension(self, extension):
        if extension.name == "proxsparse._C_cuda":
            raise RuntimeError("Error compiling objects for extension")
        built.append(extension.name)

    monkeypatch.setattr(cpp_extension.BuildExtension, "build_extension", build_extension, raising=False)
    command = builder(setuptools.Distribution())
    for extension in described(CUDA_HOME=toolkit, PROXSPARSE_CUDA="1", TORCH_CUDA_ARCH_LIST="9.0").values():
        command.build_extension(extension)
    assert [name for name in built if name != "proxsparse._C_cutlass"] == ["proxsparse._C"]
    warning = capsys.readouterr().err
    assert warning.count("WITHOUT its compiled CUDA kernels") == 1
    assert "remedy install the CUDA toolkit" in warning


# ------------------------------------------------------------------------------------------ one build, many CPUs


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512", "avx512_bf16", "amx"])
def test_exact_and_within_its_memory_with_every_instruction_set(capability, compiled):
    """Of cpu_kernel_cases.py, which prints the instruction set that ran."""
    environment = os.environ | {"PROXSPARSE_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/ops/cpu_kernel_cases.py"]
    process = subprocess.run(command, env=environment, cwd=CHECKOUT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr or process.returncode
    if process.stdout.strip() != capability:
        pytest.skip(f"this CPU has no {capability}; it ran {process.stdout.strip()}")
