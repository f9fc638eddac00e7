"""The compiled CPU kernels between fences; test_cpp_build.py runs this file with each instruction set.

Every tensor ends, or begins, where memory must not be touched: an access beyond it ends the process. Prints the
instruction set.
"""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from ops.blocks import random_blocks
from pruned import assert_as_good_as_dense, pruned_weight, quantized
from reference.ground_truth import GAP, assert_optimal, relative_gap
from torch import Tensor

from proxsparse import _C, nm_mask, prox_nm_, reference, use_backend
from proxsparse.ops import dequantize_nm, masked_weight_, pack_nm, quantize_nm, unpack_nm
from proxsparse.reference import pack

IN_FEATURES = [*range(4, 140, 4), 252, 256, 260, 508, 512, 516, 576, 1028]
OUT_AND_ROWS = [(1, 1), (4, 1), (9, 1), (5, 2), (3, 3), (8, 4), (7, 5), (2, 17)]
MANY_ROWS = [(1, 29), (13, 33), (50, 32), (12, 61)]  # unpacked: parts of groups and panels, and rows after them


def fenced(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy at the end (else at the start) of memory between two pages that must not be touched."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    inner = -(-size // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    offset = page + (inner - size if at_end else 0)
    copy = whole[offset : offset + size].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for fence in (whole.data_ptr(), whole.data_ptr() + page + inner):
        assert protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0, os.strerror(ctypes.get_errno())
    return copy


def check_prox_and_mask(dtype):
    """As exact as the ground truth; the mask of the reference."""
    weight = random_blocks(20_003, 0.7, seed=30).to(dtype)
    with use_backend("cpp"):
        result = prox_nm_(fenced(weight, True), 0.7)
        assert torch.equal(nm_mask(fenced(weight, True)), reference.nm_mask(weight))
    assert_optimal(result, weight, 0.7)


def check_two_dropped(dtype, m, at_end):
    """Masks of the reference and an objective as good as its, in rows that end in a remainder."""
    pattern = f"{m - 2}:{m}"
    weight = random_blocks(1000, 0.7, m, m - 2, seed=30).to(dtype).view(5, -1)[:, :-2].contiguous()
    with use_backend("cpp"):
        result = prox_nm_(fenced(weight, at_end), 0.7, pattern)
        assert torch.equal(nm_mask(fenced(weight, at_end), pattern), reference.nm_mask(weight, pattern))
        out = masked_weight_(fenced(torch.zeros_like(weight), at_end), fenced(weight, at_end), weight, None, pattern)
    assert torch.equal(out, reference.masked_weight(weight, weight, None, pattern))
    whole = weight.shape[1] // m * m
    assert torch.equal(result[:, whole:], weight[:, whole:])
    blocks, found = weight[:, :whole].reshape(-1, m), result[:, :whole].reshape(-1, m)
    best = reference.prox_nm(blocks.double(), 0.7, pattern)
    assert relative_gap(found, best, blocks, 0.7, m - 2).abs().max() <= GAP[dtype] * m / 4


def check_pack(dtype, in_features, at_end):
    """There and back, equal to the reference."""
    weight = pruned_weight((3, in_features), dtype)
    values, indices = pack.pack_nm(weight)
    result = fenced(torch.zeros_like(values), at_end), fenced(torch.zeros_like(indices), at_end)
    assert _C.pack_24(fenced(weight, at_end), *result)
    assert torch.equal(result[0], values)
    assert torch.equal(result[1], indices)
    back = fenced(torch.full_like(weight, torch.nan), at_end)
    _C.unpack_24(*result, back)
    assert torch.equal(back, weight)


def check_linear(dtype, in_features, out_features, rows, at_end):
    """As exact as torch's dense layer."""
    weight, bias = pruned_weight((out_features, in_features), dtype), torch.randn(out_features).to(dtype)
    x = torch.randn(rows, in_features).to(dtype)
    forms = [(*pack.pack_nm(weight), None, weight), *(quantized(weight, bits) for bits in (8, 4))]
    for values, indices, scales, multiplied in forms:
        y = fenced(torch.full((rows, out_features), torch.nan, dtype=dtype), at_end)
        x, values, indices, bias = (fenced(tensor, at_end) for tensor in (x, values, indices, bias))
        _C.sparse_linear(x, values, indices, None if scales is None else fenced(scales, at_end), bias, y, 4)
        assert_as_good_as_dense(y, x, multiplied, bias)


def check_windows(m, in_features, out_features, rows, at_end):
    """A weight with two of m dropped, which many rows of bfloat16 multiply in dense form on a CPU with amx.

    Some kept weights are 0, so that a column may be kept, as 0, in a window that does not have its weight.
    """
    weight = torch.randn(out_features, in_features).bfloat16() * (torch.rand(out_features, in_features) < 0.7)
    whole = in_features // m * m
    weight[:, :whole] *= reference.nm_mask(weight[:, :whole], f"{m - 2}:{m}")
    values, indices = pack_nm(weight, f"{m - 2}:{m}")
    forms = [(values, None), *(quantize_nm(values, bits) for bits in (8, 4))]
    for stored, scales in forms:
        exact = stored.double() if scales is None else dequantize_nm(stored, scales.double())
        x, y = torch.randn(rows, in_features).bfloat16(), torch.full((rows, out_features), torch.nan).bfloat16()
        x, y, stored, kept = (fenced(tensor, at_end) for tensor in (x, y, stored, indices))
        _C.sparse_linear(x, stored, kept, None if scales is None else fenced(scales, at_end), None, y, m)
        assert_as_good_as_dense(y, x, unpack_nm(exact, indices, f"{m - 2}:{m}", in_features))


def main():
    torch.manual_seed(0)
    for dtype in GAP:
        check_prox_and_mask(dtype)
    for at_end in (True, False):
        for dtype in GAP:
            for m in (6, 8, 10):
                check_two_dropped(dtype, m, at_end)
        for m in (4, 6, 8, 10, 26):
            for in_features in (26, 66, 130, 1026, 12_398):
                check_windows(m, in_features, 5, 3, at_end)
                check_windows(m, in_features, 5, 40, at_end)
        for in_features in IN_FEATURES:
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                check_pack(dtype, in_features, at_end)
            for number, (out_features, rows) in enumerate(OUT_AND_ROWS + MANY_ROWS):
                if number % 4 == in_features // 16 % 4 or in_features > 500:  # each pair meets every remainder of 16
                    check_linear(torch.float32, in_features, out_features, rows, at_end)
                    check_linear(torch.bfloat16, in_features, out_features, rows, at_end)
    print(_C.cpu_capability())


if __name__ == "__main__":
    main()
