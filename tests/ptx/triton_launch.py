"""Triton kernels on the emulated GPU: launches with tensors of the CPU compile them for sm_90."""

import functools
import struct

import torch
import triton
from ptx.gpu import GPU, Launch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES |= {torch.int64: "*i64"}
FORMATS = {"fp64": "d", "fp32": "f", "i32": "i", "i64": "q"}  # of struct


class Kernel:
    """A Triton kernel, started as kernel[grid](...); specialized for 1 and multiples of 16, as triton.jit does it."""

    def __init__(self, gpu: GPU, kernel):
        self.gpu, self.kernel = gpu, kernel

    def __getitem__(self, grid: tuple[int, ...]):
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *positional, **named) -> None:
        values = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
        signature, constants, attributes, data = {}, {}, {}, []
        for i, parameter in enumerate(self.kernel.params):
            value, special = values.pop(parameter.name), not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            if isinstance(value, float):
                type_of = parameter.annotation_type or "fp32"
            else:
                type_of = (
                    TYPES[value.dtype] if isinstance(value, Tensor) else "i32" if -(2**31) <= value < 2**31 else "i64"
                )
                value = value.data_ptr() if isinstance(value, Tensor) else value
                attributes |= {(i,): [["tt.divisibility", 16]]} if special and value % 16 == 0 else {}
            signature[parameter.name] = type_of
            data.append(struct.pack(FORMATS.get(type_of, "q"), value))
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=values)
        launch = Launch((*grid, 1, 1)[:3], (32 * values["num_warps"], 1, 1), (1, 1, 1), compiled.metadata.shared)
        data += [bytes(8), bytes(8)]  # scratch memory, of which these kernels have none
        with self.gpu.memory(positional, named):
            self.gpu.run(compiled.asm["ptx"], compiled.metadata.name, launch, lambda i, size: data[i])
