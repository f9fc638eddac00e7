"""The prox kernel compiled ahead of time; test_triton_prox.py runs this file in a process of its own."""

import pytest
from aot import compile_kernel

from proxsparse.triton_kernels.prox import BLOCKS_PER_PROGRAM, NUM_WARPS, prox_n4_kernel

# Weight type, scale type, numel type, n.
VARIANTS = [
    ("fp32", None, "i32", 2),
    ("bf16", None, "i32", 2),
    ("fp16", None, "i32", 2),
    ("fp64", None, "i32", 2),
]
MORE_VARIANTS = [
    ("bf16", None, "i64", 2),
    ("fp32", "fp32", "i32", 2),
    ("bf16", "bf16", "i32", 2),
    ("fp64", "fp64", "i32", 2),
    ("bf16", None, "i32", 1),
]


def compiled(weight, scale, numel, n, capability, folder):
    arguments = {"weight_ptr": f"*{weight}", "numel": numel, "in_features": "i32", "reg_lambda": "fp64", "gain": "fp64"}
    constants = {"N": n, "BLOCKS": BLOCKS_PER_PROGRAM}
    if scale is None:
        constants["scale_ptr"] = None
    else:
        arguments["scale_ptr"] = f"*{scale}"
    return compile_kernel(prox_n4_kernel, arguments, constants, capability, NUM_WARPS, folder)


def assert_stays_in_registers(kernel):
    assert kernel.instructions, "the disassembly was not understood"
    assert kernel.stack == 0
    assert not kernel.starting_with("LDL", "STL"), "registers spill"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0])
def test_16_byte_accesses_and_no_spills(variant, capability, tmp_path):
    kernel = compiled(*variant, capability, tmp_path)
    assert_stays_in_registers(kernel)
    assert kernel.starting_with("LDG") == {"LDG.E.128"}
    assert kernel.starting_with("STG") == {"STG.E.128"}


@pytest.mark.parametrize("variant", MORE_VARIANTS, ids=str)
def test_no_spills(variant, tmp_path):
    assert_stays_in_registers(compiled(*variant, 90, tmp_path))
