"""Rules for device code and its launches that no compiler checks, in the sources: file and line of each violation.

- Device code calls no function that nvcc drops without a warning.
- Launches, graph captures and timing go to the device of their tensors, also if another device is current. The guard is
  in Python: C++ launches on the stream that it is given, and the current device must be that of the stream.
"""

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
# All names of std in files with device code: types and constants, functions that only the host calls, and functions
# whose PTX was looked at (nvcc 13.0). Functions of libstdc++ may call builtins of GCC for which nvcc makes no code:
# std::countr_zero became the constant 32.
TYPES = "conditional_t is_arithmetic_v is_same_v is_void_v numeric_limits remove_const_t vector"
ON_HOST = "all_of begin end"
IN_PTX = "abs bit_cast copysign fma max min popcount size sqrt swap"
ALLOWED = {*TYPES.split(), *ON_HOST.split(), *IN_PTX.split()}

# Calls of torch.cuda that act on the current device, unless the call names a device.
ON_CURRENT_DEVICE = "current_stream Stream synchronize memory_allocated max_memory_allocated reset_peak_memory_stats"
NAME_NO_DEVICE = ("Event", "_sleep")  # whatever their arguments
GUARDS = ("torch.cuda.device", "torch.cuda.device_of")


def with_includes(file: Path) -> set[Path]:
    """The file and those of ours that it includes, directly or not."""
    files, new = set(), {file}
    while new:
        files |= new
        found = {path.parent / name for path in new for name in re.findall(r'#include "(\S+)"', path.read_text())}
        new = {path.resolve() for path in found if path.exists()} - files
    return files


def host_functions(text: str) -> list[str]:
    """ "line: name" of every use of a function that nvcc may drop."""
    lines = enumerate((line.partition("//")[0] for line in text.splitlines()), 1)
    uses = [(number, match) for number, line in lines for match in re.finditer(r"\bstd::(\w+)|\b__builtin_\w+", line)]
    return [f"{number}: {match[0]}" for number, match in uses if match[1] not in ALLOWED]


def test_device_code_calls_no_function_that_nvcc_drops():
    kernels = (CHECKOUT / "csrc").glob("*/*.cu")
    found = []
    for file in sorted(set().union(*map(with_includes, kernels))):
        found += [f"{file.relative_to(CHECKOUT)}:{use}" for use in host_functions(file.read_text())]
    assert not found, f"{found}: look at its PTX (nvcc -ptx), then add it to the list above, or use another function"


# ------------------------------------------------------------------------------------------ devices


def unguarded(tree: ast.AST, guarded: bool = False) -> list[str]:
    """ "line: call" of what acts on the current device outside of `with torch.cuda.device(...)`, and of captures."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inside = guarded and not isinstance(node, ast.FunctionDef | ast.Lambda)  # which may run later
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            inside |= any(ast.unparse(call.func) in GUARDS for call in calls)
        if captures_on_default_stream(node) or (not guarded and acts_on_current_device(node)):
            found.append(f"{node.lineno}: {ast.unparse(node).partition('(')[0]}")
        found += unguarded(node, inside)
    return found


def captures_on_default_stream(node: ast.AST) -> bool:
    """Whether it is a capture on torch's default stream, which is on the device of the first capture of the process."""
    is_capture = isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cuda.graph"
    return is_capture and all(keyword.arg != "stream" for keyword in node.keywords)


def acts_on_current_device(node: ast.AST) -> bool:
    """Whether it launches, or gets a stream for a launch, or times, on the current device."""
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Attribute) and node.attr == "cuda_stream"
    if isinstance(node.func, ast.Subscript):
        return ast.unparse(node.func.value).endswith("kernel")
    module, _, name = ast.unparse(node.func).rpartition(".")
    names_device = node.args or any(keyword.arg == "device" for keyword in node.keywords)
    acts = name in NAME_NO_DEVICE or (name in ON_CURRENT_DEVICE.split() and not names_device)
    return module == "torch.cuda" and acts


def launches_without_stream(text: str) -> list[str]:
    """ "line: launch" of every launch in C++ that is not on a stream of the caller."""
    found = []
    for launch in re.finditer(r"<<<|cudaLaunch\w+\(|\bgemm\.(run|initialize)\(", text):
        function = text[: launch.start()].rpartition("\n}\n")[2]
        if "config.stream = stream;" not in function and "stream" not in text[launch.end() :].partition(";")[0]:
            found.append(f"{text.count(chr(10), 0, launch.start()) + 1}: {launch[0]}")
    return found


def of_python(program: str) -> list[str]:
    return unguarded(ast.parse(program))


@pytest.mark.parametrize(
    ("check", "program", "found"),
    [
        (host_functions, "// std::rotl\nx = std::countr_zero(kept);", ["2: std::countr_zero"]),
        (host_functions, "__builtin_ctz(kept)", ["1: __builtin_ctz"]),
        (of_python, "kernel[grid](x)", ["1: kernel[grid]"]),
        (of_python, "with torch.cuda.device_of(x):\n kernel[grid](x)", []),
        (of_python, "with torch.cuda.device_of(x):\n f = lambda: kernel[grid](x)", ["2: kernel[grid]"]),
        (of_python, "f(torch.cuda.current_stream(device).cuda_stream)", ["1: torch.cuda.current_stream"]),
        (of_python, "with torch.cuda.device(d):\n with torch.cuda.graph(g):\n  f()", ["2: torch.cuda.graph"]),
        (of_python, "with torch.cuda.graph(g, stream=s):\n f()", []),
        (of_python, "torch.cuda._sleep(8)\ntorch.cuda.Event()", ["1: torch.cuda._sleep", "2: torch.cuda.Event"]),
        (launches_without_stream, "kernel<<<1, 1>>>(x);", ["1: <<<"]),
        (
            launches_without_stream,
            "void f() {\nconfig.stream = stream;\ncudaLaunchKernelEx(&config);\n}\nconfig.stream = 0;\ncudaLaunchX(c);",
            ["6: cudaLaunchX("],
        ),
    ],
)
def test_the_checks_find_what_they_look_for(check, program, found):
    assert check(program) == found


def test_launches_captures_and_timing_go_to_the_device_of_their_tensors():
    found = []
    for folder in ("proxsparse", "triton_kernels", "benchmarks"):
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [f"{file.relative_to(CHECKOUT)}:{use}" for use in unguarded(tree)]
    for file in sorted((CHECKOUT / "csrc").rglob("*.*")):
        found += [f"{file.relative_to(CHECKOUT)}:{use}" for use in launches_without_stream(file.read_text())]
    assert not found, f"{found}: use `with torch.cuda.device(...)`, name the device, or hand over the stream"
