"""The rules of the layout: imports only point down, optional packages have one owner, files are short."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for folder in ("proxsparse", "triton_kernels") for path in (ROOT / folder).rglob("*.py"))
FILES.append(ROOT / "proxsparse_autoload.py")

# Layers from the lowest to the highest: packages and single modules.
LAYERS = {
    "base": "patterns errors io runtime reference _version _start",
    "ops": "ops",
    "optim": "optim",
    "parts": "models data recipes",
    "jobs": "training methods allocations evaluation",
    "inference": "inference",
    "integrations": "integrations",
    "runs": "run",
    "front door": "pruning",
    "commands": "__main__ train prune finetune apply evaluate pack serve report env",
}
LAYERS = {layer: tuple(f"proxsparse.{name}" for name in names.split()) for layer, names in LAYERS.items()}
LAYERS |= {"device code": ("triton_kernels",), "public names": ("proxsparse",), "autoload": ("proxsparse_autoload",)}
# Every layer also sees itself; the test for circles keeps that honest.
SEES = {
    "base": (),
    "device code": (),
    "autoload": (),
    "ops": ("base", "device code"),
    "optim": ("base", "ops", "parts"),
    "inference": ("base", "ops", "parts"),
    "parts": ("base", "ops"),
    "jobs": ("base", "ops", "optim", "parts"),
    "integrations": ("base", "ops", "optim", "parts", "jobs", "inference", "autoload"),
    "public names": ("base", "ops", "optim", "inference", "integrations"),
    "runs": ("base", "ops", "optim", "parts", "jobs", "inference"),
    "front door": ("base", "ops", "optim", "parts", "jobs", "inference", "runs"),
    "commands": ("base", "ops", "optim", "public names", "parts", "jobs", "inference", "integrations", "runs"),
}
# What comes with `import proxsparse` has to do with torch alone.
TORCH_ONLY = ("ops", "optim", "public names", "inference")
OWNERS = {
    "triton": "ops/backends/triton.py triton_kernels",
    "triton_kernels": "ops/backends/triton.py triton_kernels",
    "proxsparse._C": "ops/backends/cpp.py",
    "proxsparse._C_cuda": "ops/backends/cuda.py",
    "proxsparse._C_cutlass": "ops/backends/cutlass.py",
    "datasets": "data/sources.py",
    "lm_eval": "evaluation/zero_shot.py",
    "transformers": "models/loading.py models/matching.py models/unfold_linears.py integrations/transformers_",
    "safetensors": "io/mask_files.py io/model_files.py inference/packed_checkpoint.py",
    "matplotlib": "run/report.py",
    "fastapi": "integrations/transformers_server.py",
    "vllm": "integrations/vllm_",
}
COMPILED = {"proxsparse._C", "proxsparse._C_cuda", "proxsparse._C_cutlass"}
IMPORTERS = ("import_module", "import_extension", "__import__")
MAX_LINES = 400


def module_name(path: Path) -> str:
    """The dotted name of a file: proxsparse/ops/__init__.py -> proxsparse.ops."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}
OURS = {module_name(path).partition(".")[0] for path in FILES}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


def imported_names(path: Path) -> set[str]:
    """The dotted names a file imports, at its top or late: modules where they are ours, else what is written there."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{origin(node, path)}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS):
            names |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return {name.replace("proxsparse.triton_kernels", "triton_kernels") for name in names}


def origin(node: ast.ImportFrom, path: Path) -> str:
    """The X of `from X import y`, absolute."""
    if not node.level:
        return node.module
    parents = path.relative_to(ROOT).parts[: -node.level]
    return ".".join((*parents, node.module) if node.module else parents)


def arrows(path: Path) -> set[str]:
    """The modules of ours that a file imports: `from proxsparse.ops import prox_nm_` is an arrow to proxsparse.ops."""
    ours = {name for name in imported_names(path) if name.partition(".")[0] in OURS} - COMPILED
    targets = {name if name in MODULES else name.rpartition(".")[0] for name in ours}
    return targets - {module_name(path)}


def layer(module: str) -> str | None:
    """The layer of the longest listed name that is the module or a package around it."""
    listed = {name: title for title, names in LAYERS.items() for name in names}
    around = [name for name in listed if module == name or (module.startswith(f"{name}.") and name != "proxsparse")]
    return listed[max(around, key=len)] if around else None


def test_these_checks_see_known_imports_and_layers():
    assert {"proxsparse.ops", "proxsparse.optim", "proxsparse.reference"} <= arrows(ROOT / "proxsparse/__init__.py")
    assert "proxsparse._C" in imported_names(ROOT / "proxsparse/ops/backends/cpp.py")
    assert "triton_kernels" in arrows(ROOT / "proxsparse/ops/backends/triton.py")
    found = [layer(name) for name in ("proxsparse.ops.backends.cpp", "proxsparse", "proxsparse.unknown")]
    assert found == ["ops", "public names", None]
    assert set(SEES) == set(LAYERS)


@each_file
def test_imports_only_point_down(path):
    own = layer(module_name(path))
    assert own, f"{module_name(path)} has no layer: give it one in LAYERS of {Path(__file__).name}"
    assert not {name.partition(".")[0] for name in imported_names(path)} & {"tests", "benchmarks", "conftest"}
    for target in arrows(path):
        assert target in MODULES, f"{path}: {target} does not exist"
        assert layer(target) in (own, *SEES[own]), f"{own} must not import {layer(target)}: {target}"


def test_imports_make_no_circle():
    graphlib.TopologicalSorter({name: arrows(path) for name, path in MODULES.items()}).prepare()


@each_file
def test_an_optional_package_has_one_owner_and_the_core_needs_torch_only(path):
    place = path.relative_to(ROOT).as_posix().removeprefix("proxsparse/")
    owned = {package for package, owners in OWNERS.items() if place.startswith(tuple(owners.split()))}
    names, own = imported_names(path), layer(module_name(path))
    for package in OWNERS.keys() - owned:
        assert not any(f"{name}.".startswith(f"{package}.") for name in names), f"{package}: {OWNERS[package]}"
    foreign = {name.partition(".")[0] for name in names} - OURS - set(sys.stdlib_module_names) - {"torch"}
    if own == "device code" or own in TORCH_ONLY:
        assert foreign <= ({"triton"} if own == "device code" else owned)


def test_import_proxsparse_loads_torch_and_nothing_else():
    program = (
        "import sys; sys.modules['numpy'] = None; import torch; before = set(sys.modules) - {'proxsparse_autoload'}; "
        "import proxsparse; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]  # torch warns that there is no NumPy
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["proxsparse", "proxsparse_autoload"]
    assert result.stderr == ""


@each_file
def test_a_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "path",
    FILES + sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h", ".cu", ".cuh")),
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
