"""Rules for device code, which a compiler does not check: host functions that nvcc drops without a warning."""

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


@pytest.mark.parametrize("line", ["x = std::countr_zero(kept);", "__builtin_ctz(kept)", "using std::rotl;"])
def test_the_check_finds_host_functions(line):
    assert host_functions(f"// std::rotl\n{line}")[0].startswith("2: ")


def test_device_code_calls_no_function_that_nvcc_drops():
    kernels = (CHECKOUT / "csrc").glob("*/*.cu")
    found = []
    for file in sorted(set().union(*map(with_includes, kernels))):
        found += [f"{file.relative_to(CHECKOUT)}:{use}" for use in host_functions(file.read_text())]
    assert not found, f"{found}: look at its PTX (nvcc -ptx), then add it to the list above, or use another function"
