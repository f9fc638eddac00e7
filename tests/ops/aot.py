"""Compiles Triton kernels for a GPU that need not be there, and reads the machine code of any compiled kernel.

Triton's only in a process without TRITON_INTERPRET: interpreted functions cannot be compiled.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """The machine code of a kernel: [(address, instruction, operands)] in order; `head` has its name and its GPU."""

    head: str
    code: list[tuple[int, str, str]]
    registers: int
    stack: int

    @property
    def instructions(self) -> list[str]:
        """The names of the instructions in order."""
        return [name for _, name, _ in self.code]

    def loops(self) -> list[list[str]]:
        """The instructions of one turn of every loop (of those inside it: one turn each), in the order they end."""
        jumps = [
            (int(target[1], 16), end)
            for end, name, operands in self.code
            if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)\s*$", operands))
        ]
        return [
            [name for address, name, _ in self.code if start <= address <= end] for start, end in jumps if start < end
        ]

    def starting_with(self, *prefixes: str) -> set[str]:
        """The different instructions whose name starts with one of `prefixes`."""
        return {name for name in self.instructions if name.startswith(prefixes)}


def compile_for(target: GPUTarget, kernel, arguments: dict[str, str], constants: dict, options: dict):
    """Compile as a launch would with 16-byte aligned pointers and integers that are multiples of 16.

    Args:
        arguments: name -> Triton type, such as "*bf16", "i32" or "fp64", for all that are not constants.
        constants: name -> value, None for a pointer that is not given.
        options: of Triton's compiler, such as num_warps.
    """
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    specialized = [not parameter.do_not_specialize for parameter in kernel.params]
    divisible = [i for i, type in enumerate(signature.values()) if type.startswith(("*", "i")) and specialized[i]]
    attributes = {(i,): [["tt.divisibility", 16]] for i in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def compile_kernel(call: tuple, capability: int, folder: Path) -> Compiled:
    """`compile_for` an NVIDIA GPU of capability 80, 90 or 100; `folder` takes the cubin."""
    compiled = compile_for(GPUTarget("cuda", capability, 32), *call)
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    return disassembled(folder / "kernel.cubin")[0]


def disassembled(file: Path) -> list[Compiled]:
    """What cuobjdump says about every kernel in a cubin or fatbin."""
    command = [CUOBJDUMP, "-res-usage", "-sass", file]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {
        name: (int(registers), int(stack))
        for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", text)
    }
    kernels = []
    for function in re.split(r"\n\s+Function : ", text)[1:]:
        code = [(int(address, 16), name, operands) for address, name, operands in INSTRUCTION.findall(function)]
        kernels.append(Compiled(function[:400], code, *usage[function.split()[0]]))
    return kernels
