"""The Triton kernels compiled ahead of time; test_triton_prox.py runs this file in a process of its own."""

import pytest
import triton.language as tl
from aot import compile_kernel

from proxsparse.triton_kernels import adamw_prox, prox

DTYPE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "fp64": tl.float64}

# Weight type, scale type, n.
PROX = [("fp32", None, 2), ("bf16", None, 2), ("fp16", None, 2), ("fp64", None, 2)]
MORE_PROX = [("fp32", "fp32", 2), ("bf16", "bf16", 2), ("fp64", "fp64", 2), ("bf16", None, 1), ("fp32", None, 1)]
# Weight type, moment type, what else is given, n (0: no prox).
STEP = [
    ("bf16", "fp32", ("seed",), 2),
    ("bf16", "bf16", ("pretrained", "scale", "seed"), 2),
    ("bf16", "fp32", ("master", "pretrained", "scale", "seed"), 2),
    ("fp32", "fp32", ("pretrained", "scale"), 2),
]
MORE_STEP = [("fp16", "fp32", ("master",), 2), ("fp32", "bf16", ("seed",), 1), ("bf16", "bf16", ("seed",), 0)]
NUMBERS = ["decay", "rate", "root_factor", "beta1", "beta2", "eps", "reg_lambda", "gain", "frozen_lambda", "frozen_eps"]


def compiled_prox(weight, scale, n, capability, folder):
    arguments = {"weight_ptr": f"*{weight}", "columns": "i32", "pieces": "i32", "reg_lambda": "fp64", "gain": "fp64"}
    constants = {"N": n, "BLOCKS": prox.BLOCKS_PER_PROGRAM // (2 if weight == "fp64" else 1)}
    if scale is None:
        constants["scale_ptr"] = None
    else:
        arguments["scale_ptr"] = f"*{scale}"
    return compile_kernel(prox.prox_n4_kernel, arguments, constants, capability, prox.NUM_WARPS, folder)


def compiled_list(weight, n, capability, folder):
    programs = prox.WEIGHTS_PER_ROW // (4 * prox.BLOCKS_PER_PROGRAM)
    constants = {"PROGRAMS": programs, "N": n, "BLOCKS": prox.BLOCKS_PER_PROGRAM, "dtype": DTYPE[weight]}
    return compile_kernel(prox.prox_list_kernel, {"table_ptr": "*i64"}, constants, capability, prox.NUM_WARPS, folder)


def compiled_step(weight, moment, given, n, capability, folder):
    arguments = dict.fromkeys(NUMBERS, "fp64") | {"columns": "i32", "pieces": "i32"}
    arguments |= {"weight_ptr": f"*{weight}", "grad_ptr": f"*{weight}"}
    arguments |= {"exp_avg_ptr": f"*{moment}", "exp_avg_sq_ptr": f"*{moment}"}
    options = {"master_ptr": "*fp32", "pretrained_ptr": f"*{weight}", "scale_ptr": "*fp32"}
    options |= {"seed_low": "i32", "seed_high": "i32"}
    arguments |= {name: type for name, type in options.items() if name.split("_")[0] in given}
    constants = {name: None for name in options if name not in arguments}
    constants |= {"N": n, "BLOCKS": adamw_prox.BLOCKS_PER_PROGRAM}
    kernel, warps = adamw_prox.adamw_prox_kernel, adamw_prox.NUM_WARPS
    return compile_kernel(kernel, arguments, constants, capability, warps, folder)


def assert_stays_in_registers(kernel):
    """No spills; and blocks are never passed on between lanes through shared memory."""
    assert kernel.instructions, "the disassembly was not understood"
    assert kernel.stack == 0
    assert not kernel.starting_with("LDL", "STL"), "registers spill"
    assert not kernel.starting_with("LDS", "STS", "BAR"), "a layout conversion"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", PROX, ids=lambda variant: variant[0])
def test_prox(variant, capability, tmp_path):
    kernel = compiled_prox(*variant, capability, tmp_path)
    assert_stays_in_registers(kernel)
    assert kernel.starting_with("LDG") == {"LDG.E.128"}
    assert kernel.starting_with("STG") == {"STG.E.128"}
    assert not kernel.starting_with("CALL") or variant[0] == "fp64", "a division or a root with a slow path"


@pytest.mark.parametrize("variant", MORE_PROX, ids=str)
def test_more_of_the_prox(variant, tmp_path):
    assert_stays_in_registers(compiled_prox(*variant, 90, tmp_path))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("weight", ["fp32", "bf16"])
def test_prox_of_a_list(weight, capability, tmp_path):
    kernel = compiled_list(weight, 2, capability, tmp_path)
    assert_stays_in_registers(kernel)
    assert "LDG.E.128" in kernel.instructions
    assert kernel.starting_with("STG") == {"STG.E.128"}


@pytest.mark.parametrize("weight", ["fp32", "bf16"])
def test_a_sweep_takes_17_instructions_a_block(weight, tmp_path):
    """The paper's weights take 2 to 5 sweeps; at the speed of memory an H200 has 110 instructions for a bf16 block."""
    loops = compiled_prox(weight, None, 2, 90, tmp_path).loops()
    sweeps = [loop for loop in loops if not any(name.startswith(("MUFU", "LDG", "BAR")) for name in loop)]
    blocks_a_lane = prox.BLOCKS_PER_PROGRAM // 32
    assert max(sweep.total() for sweep in sweeps) <= 17 * blocks_a_lane
    assert max(sweep["FFMA"] for sweep in sweeps) >= 10 * blocks_a_lane, "not the loop this test is about"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", STEP, ids=str)
def test_the_fused_step(variant, capability, tmp_path):
    kernel = compiled_step(*variant, capability, tmp_path)
    assert_stays_in_registers(kernel)
    assert kernel.starting_with("LDG") == {"LDG.E.128"}
    assert kernel.starting_with("STG") == {"STG.E.128"}
    assert kernel.registers <= 128


@pytest.mark.parametrize("variant", MORE_STEP, ids=str)
def test_more_of_the_fused_step(variant, tmp_path):
    assert_stays_in_registers(compiled_step(*variant, 90, tmp_path))
