"""Compiles Triton kernels for a GPU that need not be there, and reads what came out.

Only in a process without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """The machine code of a kernel: how often every instruction occurs, and its registers and stack bytes a thread.

    `code` is [(address, name, address it jumps to or None)] in order.
    """

    code: list[tuple[int, str, int | None]]
    registers: int
    stack: int

    @property
    def instructions(self) -> Counter:
        """How often every instruction occurs."""
        return Counter(name for _, name, _ in self.code)

    def loops(self) -> list[Counter]:
        """The instructions of one turn of every loop (of those inside it: one turn each), in the order they end."""
        jumps = [(start, end) for end, _, start in self.code if start is not None and start < end]
        return [Counter(name for address, name, _ in self.code if start <= address <= end) for start, end in jumps]

    def starting_with(self, *prefixes: str) -> set[str]:
        """The different instructions whose name starts with one of `prefixes`."""
        return {name for name in self.instructions if name.startswith(prefixes)}


def compile_for(target: GPUTarget, kernel, arguments: dict[str, str], constants: dict, options: dict):
    """Compile as a launch would with 16-byte aligned pointers and integers that are multiples of 16.

    Args:
        arguments: name -> Triton type, such as "*bf16", "i32" or "fp64", for all that are no constants.
        constants: name -> value, None for a pointer that is not given.
        options: of Triton's compiler, such as num_warps.
    """
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    specialized = [not parameter.do_not_specialize for parameter in kernel.params]
    divisible = [i for i, type in enumerate(signature.values()) if type.startswith(("*", "i")) and specialized[i]]
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def compile_kernel(kernel, arguments: dict[str, str], constants: dict, capability: int, options: dict, folder: Path):
    """`compile_for` an NVIDIA GPU of capability 80, 90 or 100; `folder` takes the cubin."""
    compiled = compile_for(GPUTarget("cuda", capability, 32), kernel, arguments, constants, options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return disassembled(cubin)


def disassembled(cubin: Path) -> Compiled:
    """What cuobjdump says about the one kernel in `cubin`."""
    command = [CUOBJDUMP, "-res-usage", "-sass", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);"
    code = []
    for address, name, operands in re.findall(line, text, re.MULTILINE):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
        code.append((int(address, 16), name, int(target[1], 16) if target else None))
    registers, stack = (int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("REG", "STACK"))
    return Compiled(code, registers, stack)
