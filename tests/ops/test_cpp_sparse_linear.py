"""The packed linear layer on the CPU: as exact as torch's dense one, with every instruction set, in its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pruned import assert_as_good_as_dense, pruned_linear, pruned_weight, quantized

from proxsparse.ops import pack_nm
from proxsparse.ops.backends import cpp
from proxsparse.ops.registry import get_kernel

CASES = Path(__file__).with_name("packed_kernel_cases.py")
DTYPES = [torch.float32, torch.bfloat16]
kernel = get_kernel("sparse_linear", "cpp")


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512", "avx512_bf16"])
def test_exact_and_within_its_memory_with_every_instruction_set(capability, compiled):
    environment = os.environ | {"PROXSPARSE_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, CASES]
    process = subprocess.run(command, env=environment, cwd=CASES.parents[2], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr or process.returncode
    if process.stdout.strip() != capability:
        pytest.skip(f"this CPU has no {capability}; it ran {process.stdout.strip()}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_and_many_rows_of_any_strides(dtype, compiled):
    layer = pruned_linear(76, 133, dtype=dtype)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    form = pack_nm(weight)
    strided = [torch.stack([part, part], -1)[..., 0][1::2] for part in form]
    for rows in (0, 1, 2, 3, 7, 64):
        x = torch.randn(rows, 76).to(dtype)
        for b in (None, bias):
            assert_as_good_as_dense(kernel.run(x, *form, b, None), x, weight, b)
        x = torch.randn(76, rows).to(dtype).T
        assert_as_good_as_dense(kernel.run(x, *strided, bias[1::2], None), x, weight[1::2], bias[1::2])


@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"),
    [(53, 4612, 43), (53, 4612, 170), (13, 4108, 1090), (5, 65536, 70), (53, 2728, 64), (53, 5444, 64), (53, 5460, 64)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_long_rows_and_of_a_large_x(dtype, out_features, in_features, rows, compiled):
    weight, x = pruned_weight((out_features, in_features), dtype), torch.randn(rows, in_features).to(dtype)
    assert_as_good_as_dense(kernel.run(x, *pack_nm(weight), None, None), x, weight)


@pytest.mark.parametrize(("out_features", "in_features"), [(7, 4), (13, 60), (53, 76), (40, 132), (9, 4612), (26, 128)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_of_any_number_of_rows(dtype, bits, out_features, in_features, compiled):
    *packed, scales, weight = quantized(pruned_weight((out_features, in_features), dtype), bits)
    bias = torch.randn(out_features).to(dtype)
    for rows in (0, 1, 2, 3, 5, 33, 170):
        x = torch.randn(rows, in_features).to(dtype)
        for b in (None, bias):
            assert_as_good_as_dense(kernel.run(x, *packed, b, None, scales), x, weight, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_in_many_rows_stay_in_their_row(dtype, compiled):
    weight, x = pruned_weight((40, 64), dtype), torch.ones(50, 64, dtype=dtype)
    x[7, 3], x[49, 5] = torch.nan, torch.inf
    y = kernel.run(x, *pack_nm(weight), None, None)
    assert y[7].isnan().all()
    others = torch.arange(50) % 42 != 7
    assert_as_good_as_dense(y[others], x[others], weight)


@pytest.mark.parametrize("rows", [6, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype, rows, compiled):
    """Every output is computed by one thread, in one order."""
    weight, x = pruned_weight((301, 1024), dtype), torch.randn(rows, 1024).to(dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(kernel.run(x, *pack_nm(weight), None, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_as_good_as_dense(results[0], x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_meet_the_kept_weights_alone(dtype, compiled):
    weight = torch.tensor([1.0, 2.0, 0, 0, 0, 0, 3.0, 4.0], dtype=dtype).repeat(3, 1)
    weight[1, 0], weight[2, 0] = torch.nan, -torch.inf
    x = torch.ones(4, 8, dtype=dtype)
    x[1, 2], x[2, 7], x[3, 1] = torch.nan, torch.inf, torch.nan  # the first meets no weight
    y = kernel.run(x, *pack_nm(weight), None, None)
    expected = [[10, "nan", "-inf"], [10, "nan", "-inf"], ["inf", "nan", "nan"], ["nan", "nan", "nan"]]
    assert [[str(number).removesuffix(".0") for number in row] for row in y.tolist()] == [
        [str(number) for number in row] for row in expected
    ]


def test_no_inputs_and_no_outputs(compiled):
    x, bias = torch.ones(3, 0), torch.arange(5.0)
    indices = torch.zeros(5, 0, dtype=torch.uint8)
    for rows in (3, 64):
        y = kernel.run(x[:1].expand(rows, 0), torch.zeros(5, 0), indices, bias, None)
        assert torch.equal(y, bias.expand(rows, 5))
    assert kernel.run(x[:, :0], torch.zeros(0, 0), indices[:0], None, None).shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "values", "reason"),
    [
        (torch.zeros(1, 8, dtype=torch.float16), torch.zeros(2, 4, dtype=torch.float16), "not torch.float16 times"),
        (torch.zeros(1, 8), torch.zeros(2, 4, dtype=torch.bfloat16), "not torch.float32 times torch.bfloat16"),
        (torch.zeros(1, 8, device="meta"), torch.zeros(2, 4), "the tensor is on meta"),
        (torch.zeros(1, 8), torch.zeros(2, 4, device="meta"), "the tensor is on meta"),
        (torch.zeros(1, 8).half(), torch.zeros(2, 4, dtype=torch.int8), "not torch.float16 times torch.int8"),
    ],
)
def test_what_it_does_not_serve(x, values, reason, compiled, monkeypatch):
    assert reason in kernel.supports(x, values)
    assert kernel.supports(torch.zeros(1, 8), torch.zeros(2, 4)) is None
    monkeypatch.setattr(cpp, "_C", None)
    monkeypatch.setattr(cpp, "_missing", "the compiled extension is missing")
    assert kernel.supports(torch.zeros(1, 8), torch.zeros(2, 4)) == "the compiled extension is missing"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "x has dtype Double: .* supports float32 and bfloat16"),
        ({"x": torch.zeros(8)}, r"x of shape \[8\]"),
        ({"x": torch.zeros(2, 10)}, "in_features must be a multiple of 4"),
        ({"x": torch.zeros(2, 12)}, r"values of shape \[3, 4\].*of shape \[3, 6\]"),
        ({"x": torch.zeros(8, 2).T}, "x of shape .* must be a contiguous"),
        ({"values": torch.zeros(3, 4, dtype=torch.bfloat16)}, "values .* must be a contiguous Float"),
        ({"values": torch.zeros(3, 4, device="meta")}, "on meta"),
        ({"indices": torch.zeros(3, 2, dtype=torch.uint8)}, r"indices of shape \[3, 2\].*shape \[3, 1\]"),
        ({"indices": torch.zeros(3, 1, dtype=torch.int8)}, "indices .* contiguous Byte"),
        ({"bias": torch.zeros(2)}, r"bias of shape \[2\].*shape \[3\]"),
        ({"y": torch.zeros(2, 4)}, r"y of shape \[2, 4\].*shape \[2, 3\]"),
        ({"values": torch.zeros(3, 4, dtype=torch.int8)}, "values .* must be a contiguous Float"),
        ({"scales": torch.zeros(3, 1)}, "values .* must be a contiguous Byte"),
        ({"values": torch.zeros(3, 4, dtype=torch.int8), "scales": torch.zeros(3)}, r"scales of .* shape \[3, 1\]"),
        ({"values": torch.zeros(3, 2, dtype=torch.uint8), "scales": torch.zeros(3, 2)}, r"scales of .* shape \[3, 1\]"),
        (
            {"values": torch.zeros(3, 2).byte(), "scales": torch.zeros(3, 2).int()},
            r"scales of .* Int.* shape \[3, 1\]",
        ),
        ({"values": torch.zeros(3, 4).char(), "scales": torch.zeros(3, 1).int()}, "scales of .* contiguous Float"),
    ],
)
def test_the_kernel_refuses_what_does_not_fit(changed, message, compiled):
    good = {"x": torch.zeros(2, 8), "values": torch.zeros(3, 4), "bias": None, "y": torch.ones(2, 3), "scales": None}
    good["indices"] = torch.zeros(3, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        compiled.sparse_linear(**good | changed)
