"""The Triton kernels compiled ahead of time for an AMD GPU; test_triton_prox.py runs this file in a process of its own.

That torch is built for ROCm is decided when the kernels are imported. Nothing here has run on an AMD GPU.
"""

import re

import pytest
import torch

torch.version.hip = "6.4"

from aot import compile_for  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton_compiled_prox import list_call, mask_call, prox_call, step_call  # noqa: E402

from proxsparse.triton_kernels import formats  # noqa: E402

GFX942 = GPUTarget("hip", "gfx942", 64)  # MI300; warps of 64 lanes
CALLS = {
    "bf16": prox_call("bf16"),
    "fp16": prox_call("fp16"),
    "fp32": prox_call("fp32"),
    "fp64": prox_call("fp64"),
    "a list": list_call("bf16"),
    "step": step_call("bf16", "fp32", ("master", "scale", "seed")),
    "step, bf16 moments": step_call("bf16", "bf16", ("seed",)),
    "mask": mask_call("fp32", "bf16", "fp32"),
}


@pytest.mark.parametrize("case", CALLS)
def test_for_gfx942(case):
    """16 bytes a lane at once, no spills, nothing exchanged through shared memory, no inline assembly of NVIDIA's."""
    assert not formats.PTX.value
    compiled = compile_for(GFX942, *CALLS[case])
    assert "inline_asm" not in compiled.asm["ttir"]
    text = compiled.asm["amdgcn"]
    numbers = {name: int(number) for name, number in re.findall(r"\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    assert numbers["wavefront_size"] == 64
    assert numbers["vgpr_spill_count"] == numbers["private_segment_fixed_size"] == 0
    assert numbers["group_segment_fixed_size"] == 0
    assert re.search(r"_load_dwordx4", text)
    assert re.search(r"_store_dwordx4", text)
