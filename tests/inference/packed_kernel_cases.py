"""The compiled CPU kernels of the packed form between fences; test_cpp_linear.py runs this file once for each CPU.

Every tensor ends, or begins, where memory must not be touched: an access beyond it ends the process. Prints the
instruction set.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from ops.on_cpu import fenced

from proxsparse import _C, nm_mask, packed

IN_FEATURES = [*range(4, 140, 4), 252, 256, 260, 508, 512, 516, 576, 1028]
OUT_AND_ROWS = [(1, 1), (4, 1), (9, 1), (5, 2), (3, 3), (8, 4), (7, 5), (2, 17)]


def random_weight(shape, dtype):
    weight = torch.randn(shape)
    return torch.where(nm_mask(weight.abs()), weight, 0.0).to(dtype)


def check_pack(dtype, in_features, at_end):
    """There and back, equal to the reference."""
    weight = random_weight((3, in_features), dtype)
    values, indices = packed.pack_nm(weight)
    result = fenced(torch.zeros_like(values), at_end), fenced(torch.zeros_like(indices), at_end)
    assert _C.pack_n4(fenced(weight, at_end), 2, *result)
    assert torch.equal(result[0], values)
    assert torch.equal(result[1], indices)
    back = fenced(torch.full_like(weight, torch.nan), at_end)
    _C.unpack_n4(*result, 2, back)
    assert torch.equal(back, weight)


def check_linear(dtype, in_features, out_features, rows, at_end):
    """Within twice the error of torch's dense layer, an ulp of the largest output and one of the largest fp32 sum."""
    weight, bias = random_weight((out_features, in_features), dtype), torch.randn(out_features).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    dense = torch.nn.functional.linear(x, weight, bias)
    y = fenced(torch.full_like(dense, torch.nan), at_end)
    arguments = [fenced(tensor, at_end) for tensor in (x, *packed.pack_nm(weight), bias)]
    _C.packed_linear(*arguments, y)
    largest_sum = torch.nn.functional.linear(x.abs().double(), weight.abs().double()).max()
    allowed = 2 * (dense.double() - exact).abs().max() + torch.finfo(torch.float32).eps * largest_sum
    allowed += torch.finfo(dtype).eps * exact.abs().max()
    assert bool(((y.double() - exact).abs() <= allowed).all()), (dtype, in_features, out_features, rows)


def main():
    torch.manual_seed(0)
    for at_end in (True, False):
        for in_features in IN_FEATURES:
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                check_pack(dtype, in_features, at_end)
            for number, (out_features, rows) in enumerate(OUT_AND_ROWS):
                if number % 4 == in_features // 4 % 4 or in_features > 500:  # each pair meets every remainder of 16
                    check_linear(torch.float32, in_features, out_features, rows, at_end)
                    check_linear(torch.bfloat16, in_features, out_features, rows, at_end)
    print(_C.cpu_capability())


if __name__ == "__main__":
    main()
