"""The Triton kernels compiled ahead of time; test_triton_prox.py runs this file in a process of its own."""

import pytest
import torch
import triton
from aot import compile_kernel

from proxsparse.triton_kernels import adamw_prox, launch, masked_weight, prox, wide_prox
from proxsparse.triton_kernels.wide_block import places

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
NUMBERS = ["beta1", "beta2", "eps"]


def launch_of(weight):
    """(constants, compiler options) of the launcher for this type."""
    weight = torch.empty(0, dtype=DTYPE[weight])
    blocks = prox.blocks_per_program(weight, 0)
    options = prox.compiler_options(prox.registers_for(weight)) | {"num_warps": prox.NUM_WARPS}
    return {"BLOCKS": blocks, "PARTS": prox.parts_of_piece(blocks)}, options


def prox_call(weight):
    """(kernel, arguments, constants, compiler options) of a launch of the prox."""
    arguments = {"weight_ptr": f"*{weight}", "size": "i32", "total": "i32", "reg_lambda": "fp64"}
    return prox.prox_24_kernel, arguments, *launch_of(weight)


def list_call(weight):
    """The same of a list."""
    constants, options = launch_of(weight)
    constants |= {"PIECES": triton.cdiv(prox.WEIGHTS_PER_ROW, 4 * constants["BLOCKS"])}
    constants |= {"dtype": prox.TRITON_DTYPE[DTYPE[weight]]}
    return prox.prox_list_kernel, {"table_ptr": "*i64", "total": "i32"}, constants, options


def step_call(weight, moment, given, gradient=None, masked=None):
    """The same of a fused step; `given`: what else is given; masked: the dtype of W0 under the mask."""
    arguments = dict.fromkeys(NUMBERS, "fp64") | {"table_ptr": "*i64", "row_pieces": "i32"}
    types = {"dtype": weight, "grad_dtype": gradient or weight, "moment": moment, "out_dtype": masked}
    constants = {name: type and prox.TRITON_DTYPE[DTYPE[type]] for name, type in types.items()}
    constants |= {"MASTER": "master" in given, "SCALED": "scale" in given}
    constants |= {"STOCHASTIC": "seed" in given, "ALIGNED": True, "PROX": True, "M": 4}
    constants |= {"BLOCKS": adamw_prox.BLOCKS_PER_PROGRAM}
    return adamw_prox.adamw_prox_kernel, arguments, constants, {"num_warps": adamw_prox.NUM_WARPS}


def mask_call(weight, pretrained, scale):
    """The same of W0 under a mask."""
    arguments = {"out_ptr": f"*{pretrained}", "weight_ptr": f"*{weight}", "pretrained_ptr": f"*{pretrained}"}
    arguments |= {"columns": "i32", "pieces": "i32"} | ({"scale_ptr": f"*{scale}"} if scale else {})
    constants = {"BLOCKS": masked_weight.BLOCKS_PER_PROGRAM, "M": 4} | ({} if scale else {"scale_ptr": None})
    return masked_weight.masked_weight_kernel, arguments, constants, {"num_warps": masked_weight.NUM_WARPS}


def on_each_gpu(calls: dict) -> list:
    """(name, call, capability)."""
    return [
        pytest.param(name, call, capability, id=f"{name}-{capability}")
        for name, call in calls.items()
        for capability in (80, 90, 100)
    ]


def wide_call(call, m):
    """The same for blocks of m = 6, 8 or 10, of which m - 2 weights are kept."""
    kernel, arguments, constants, options = call
    return kernel, arguments, constants | {"M": m, "BLOCKS": constants["BLOCKS"] * 4 // places(m)}, options


def wide_prox_call(weight, m):
    """The same of the prox of such blocks."""
    arguments = {"weight_ptr": f"*{weight}", "unit": "fp64", "columns": "i32", "pieces": "i32"}
    constants = {"M": m, "BLOCKS": prox.BLOCKS_PER_PART * 4 // places(m)}
    return wide_prox.prox_wide_kernel, arguments, constants, {"num_warps": prox.NUM_WARPS}


EVERYTHING = ("master", "scale", "seed")
CALLS = {f"prox {weight}": prox_call(weight) for weight in DTYPE}
LISTS = {f"list {weight}": list_call(weight) for weight in ("fp32", "bf16")}
STEPS = {
    "step bf16": step_call("bf16", "fp32", ("seed",)),
    "step bf16, bf16 moments": step_call("bf16", "bf16", EVERYTHING[1:]),
    "step bf16, master": step_call("bf16", "fp32", EVERYTHING),
    "step fp32": step_call("fp32", "fp32", ("scale",)),
    "step fp32, masked": step_call("fp32", "fp32", ("scale",), "bf16", "bf16"),
}
MASKS = {
    "mask fp32": mask_call("fp32", "bf16", "fp32"),
    "mask bf16": mask_call("bf16", "bf16", None),
    "mask fp64": mask_call("fp64", "fp64", "fp64"),
}


SIZES = (8, 6, 10)
WIDE = {f"{name}, blocks of {m}": wide_call(call, m) for name, call in (STEPS | MASKS).items() for m in SIZES}
WIDE["step fp32, bf16 gradient"] = step_call("fp32", "fp32", ("scale",), gradient="bf16")  # 130 registers
WIDE |= {f"prox {dtype}, blocks of {m}": wide_prox_call(dtype, m) for dtype in DTYPE for m in SIZES}


@pytest.mark.parametrize(
    ("name", "call", "capability"), [x for calls in (CALLS, LISTS, STEPS, MASKS, WIDE) for x in on_each_gpu(calls)]
)
def test_in_registers_and_16_bytes_at_once(name, call, capability, tmp_path):
    """As a launch on aligned tensors compiles them; layouts of wide blocks are converted through shared memory."""
    kernel = compile_kernel(call, capability, tmp_path)
    assert kernel.instructions, "the disassembly was not understood"
    assert kernel.stack == 0
    assert not kernel.starting_with("LDL", "STL"), "registers spill"
    if name in WIDE:
        return
    assert not kernel.starting_with("LDS", "STS", "BAR"), "a layout conversion"
    assert kernel.starting_with("STG") == {"STG.E.128"}
    of_table = [load for load in kernel.instructions if load in ("LDG.E", "LDG.E.64") and name.startswith("step")]
    assert len(of_table) <= adamw_prox.ENTRIES.value
    if name.startswith(("prox", "step")):
        assert kernel.starting_with("LDG") - set(of_table) == {"LDG.E.128"}
    if not name.startswith("mask"):
        assert "LDG.E.128" in kernel.instructions
        most = 168 if "masked" in name else 128  # fewer warps run at once than the grid of the prox is made for
        assert "fp64" in name or kernel.registers <= most
    if name.startswith("prox") and "fp64" not in name:
        assert not kernel.starting_with("RET"), "a division or a root with a slow path"


@pytest.mark.parametrize(
    ("name", "call", "capability"),
    on_each_gpu({name: (CALLS | LISTS)[name] for name in ("prox bf16", "prox fp32", "list bf16")}),
)
def test_the_next_piece_is_loaded_before_this_one_is_solved(name, call, capability, tmp_path):
    """In each turn of the outer loop: 2 KB a warp, 16 bytes a lane at once, are on their way when the solver starts."""
    turn = max(compile_kernel(call, capability, tmp_path).loops(), key=len)
    before = turn[: next(i for i, instruction in enumerate(turn) if "REDUX" in instruction)]  # the largest weight
    assert before.count("LDG.E.128") == 4, name


def test_a_launch_makes_as_many_programs_as_run_at_once(monkeypatch):
    """On a GPU of 132 multiprocessors of 65,536 registers, 32 lanes a warp; no more than there are pieces."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    gpu = torch.device("cuda")
    assert launch.programs_for(gpu, 10**6, registers=128) == 132 * 16
    assert launch.programs_for(gpu, 10**6, registers=255) == 132 * 8
    assert launch.programs_for(gpu, 100, registers=128) == 100
