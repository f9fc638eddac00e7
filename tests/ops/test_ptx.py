"""The emulated GPU itself: what instructions do, what is refused, and that a fault in a kernel makes a case fail."""

import re

import pytest
import torch
from ops.test_cuda_gemv import check, layer
from ptx.gpu import GPU, Launch, require_compilers
from ptx.translate import translate

from proxsparse.ops.backends import cuda
from proxsparse.ops.registry import get_kernel
from proxsparse.reference import pack

HEAD = """.version 9.0
.target sm_90
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .pred %p<4>;
	.reg .b16 %h<4>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	.shared .align 16 .b8 memory[64];
	ld.param.u64 %rd1, [kernel_param_0];
	mov.u32 %r8, %tid.x;
"""
ONE, NAN = "0f3F800000", "0f7FC00001"
# Instruction with its result in %r1 -> its bits, from the PTX ISA.
RESULTS = {
    f"cvt.rn.bf16x2.f32 %r1, {NAN}, {ONE}": 0x7FFF3F80,
    "cvt.rn.bf16x2.f32 %r1, 0f3F808000, 0f3F818000": 0x3F803F82,  # half way: to even
    "cvt.rn.f16x2.f32 %r1, 0f477FF000, 0f33000000": 0x7C000000,  # overflows, underflows
    f"add.f32 %r1, {NAN}, {ONE}": 0x7FFFFFFF,
    f"max.f32 %r1, {NAN}, {ONE}": 0x3F800000,
    "min.f32 %r1, 0f00000000, 0f80000000": 0x80000000,
    "cvt.sat.f32.f32 %r1, 0f7FC00000": 0,
    "cvt.rzi.s32.f32 %r1, 0f4F000000": 0x7FFFFFFF,
    "rcp.approx.ftz.f32 %r1, 0f7F000000": 0,  # 2^-127
    "fma.rn.f32 %r1, 0f3F800001, 0f3F800001, 0fBF800002": 0x28800000,
    # 1 + 2^-10 squared, and 2^-30: the sum is above a tie of float16 that float64 would show exactly
    "fma.rn.f16x2 %r1, 0x3C013C01, 0x3C013C01, 0x00010000": 0x3C023C02,
    "copysign.f32 %r1, 0f80000000, 0f3F800000": 0xBF800000,
    "prmt.b32 %r1, 0x83828180, 0x47464544, 0x7698": 0x4746FFFF,
    "lop3.b32 %r1, 0xF0, 0xCC, 0xAA, 0xE8": 0xE8,
    "bfi.b32 %r1, 0xFF, 0, 4, 8": 0xFF0,
    "bfi.b32 %r1, 0x12345678, 0, 8, 32": 0x34567800,
    "bfe.s32 %r1, 0x80, 4, 4": 0xFFFFFFF8,
    "bfe.s32 %r1, 0x80000000, 40, 4": 0xFFFFFFFF,
    "bfe.u32 %r1, 0xABCD1234, 28, 9": 0xA,
    "shl.b32 %r1, 1, 32": 0,
    "shr.s32 %r1, 0x80000000, 40": 0xFFFFFFFF,
    "mul.lo.s32 %r1, 0x10001, 0x10001": 0x20001,
    "mul.wide.u16 %r1, 0xFFFF, 0xFFFF": 0xFFFE0001,
    "div.s32 %r1, -7, 2": 0xFFFFFFFD,
    "div.s32 %r1, 0x80000000, -1": 0x80000000,
    "div.u32 %r1, 0xFFFFFFFF, 0xFFFFFFFF": 1,
    "max.s32 %r1, -7, 2": 2,
    "cvt.s32.s8 %r1, 0x80": 0xFFFFFF80,
    f"setp.ne.f32 %p1, {NAN}, {ONE}; selp.u32 %r1, 1, 0, %p1": 0,
    f"setp.neu.f32 %p1, {NAN}, {ONE}; selp.u32 %r1, 1, 0, %p1": 1,
    "mov.b32 {%h1, %h2}, 0x12345678; mov.b32 %r1, {%h2, %h1}": 0x56781234,
    "shfl.sync.bfly.b32 %r1, %r8, 1, 31, -1": 1,
    "redux.sync.max.u32 %r1, %r8, -1": 31,
    "and.b32 %r2, %r8, 1; setp.eq.s32 %p1, %r2, 1; vote.sync.ballot.b32 %r1, %p1, -1": 0xAAAAAAAA,
}
# What no kernel may do -> the message.
REFUSED = {
    "add.s32 %r1, %r2": "not understood",
    "add.sat.s32 %r1, %r2, %r3": "'add.sat.s32 %r1, %r2, %r3': not understood",
    "ld.global.v2.u32 {%r1}, [%rd1]": "not understood",
    "mov.u32 %r1, %clock": "not understood",
    "ld.local.u32 %r1, [%rd1]": "not understood",
    "st.global.u32 [%rd1+4096], %r1": "beyond the tensors",
    "st.global.u32 [%rd1+2], %r1": "not aligned",
    "st.shared.u32 [memory+64], %r1": "beyond the shared memory",
    "ld.param.u64 %rd2, [kernel_param_0+8]": "beyond the parameters",
    "setp.eq.s32 %p1, %r8, 0; @%p1 bar.sync 0": "nothing can go on",
    "setp.lt.s32 %p1, %r8, 9; @%p1 bra A; bar.warp.sync -1; ret; A: vote.sync.ballot.b32 %r1, %p1, -1": "another lane",
    "A: bra A": "endless loop",
}


def run(body: str) -> torch.Tensor:
    """A kernel of 32 threads with a tensor of 4 KB."""
    require_compilers("g++")
    gpu, result = GPU(), torch.zeros(1024, dtype=torch.int32)
    launch = Launch((1, 1, 1), (32, 1, 1), (1, 1, 1))
    with gpu.memory(result):
        gpu.run(f"{HEAD}{body}\n}}\n", "kernel", launch, lambda i, size: result.data_ptr().to_bytes(size, "little"))
    return result


def test_instructions():
    stores = (f"setp.eq.u32 %p3, %r8, 0;\n@%p3 st.global.u32 [%rd1+{4 * i}], %r1;" for i in range(len(RESULTS)))
    result = run("\n".join(f"{text};\n{store}" for text, store in zip(RESULTS, stores, strict=True)))
    found = {text: int(bits) % 2**32 for text, bits in zip(RESULTS, result, strict=False)}
    assert found == RESULTS


QUICK = ("add.sat.s32 %r1, %r2, %r3", "st.global.u32 [%rd1+4096], %r1", "setp.eq.s32 %p1, %r8, 0; @%p1 bar.sync 0")


@pytest.mark.parametrize("body", [pytest.param(b, marks=[pytest.mark.slow] * (b not in QUICK)) for b in REFUSED])
def test_what_is_refused(body):
    with pytest.raises((ValueError, RuntimeError), match=re.escape(REFUSED[body])):
        run(f"{body};")


# ------------------------------------------------------------------------------------------ faults in kernels

FAULTS = {  # what is replaced in the PTX, by what
    "no wait for cp.async": (r"cp\.async\.wait_all;", ""),
    "no named barrier": (r"bar\.sync %r\d+, \d+;", ""),
    "no __syncthreads": (r"bar\.sync\s+0;", ""),
    "no cluster barrier before the sums": (r"barrier\.cluster\.(arrive\.release|wait\.acquire);", ""),
    "no cluster barrier at the end": (r"barrier\.cluster\.(arrive\.relaxed|wait);", ""),
    "another selector": (r"(mma\.sp.*), 0;", r"\1, 1;"),
}


def fails(gpu, pattern: str, replacement: str, case) -> bool:
    """Whether the case fails with at least one order of threads, and passes without the fault."""
    case()
    gpu.edit = lambda ptx: re.sub(pattern, replacement, ptx)
    for _ in range(4):
        try:
            case()
        except (RuntimeError, AssertionError):
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_gemv_fails(fault, cuda_on_cpu):
    """Two steps and a part of one for each of 8 thread blocks; two warps share x."""
    x, values, indices, _, weight = layer(16, 6, 40, 17 * 256 + 64)
    assert fails(cuda_on_cpu, *FAULTS[fault], lambda: check(cuda.gemv(x, values, indices, None), x, weight))


@pytest.mark.slow
def test_a_missing_bound_fails(cuda_on_cpu):
    """unpack_kernel with the check for the last byte always false."""
    weight = torch.randn(3, 12).mul_(torch.tensor([1.0, 0, 1, 0] * 3)).bfloat16()
    run = lambda: get_kernel("unpack_nm", "cuda").run(*pack.pack_nm(weight))  # noqa: E731
    assert fails(cuda_on_cpu, r"setp\.ge\.s64\s+(%p\d+), (\S+), \S+;", r"setp.ne.s64 \1, \2, \2;", run)


def test_parameters_and_shared_memory_of_an_entry():
    entry = translate(f"{HEAD}ret;\n}}\n", "kernel")
    assert (entry.parameters, entry.shared) == ([(0, 8)], 0)
