"""The GPU backends of `sparse_linear` without a GPU: what they serve, and what torch's library is called with."""

import functools
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ops.on_each_backend import OnGPU
from pruned import pruned_weight
from torch import Tensor

from proxsparse.ops.backends import cuda, cusparselt, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.reference import pack

kernel = functools.partial(get_kernel, "sparse_linear")


class Library:
    """The functions of torch that call cuSPARSELt, by their signatures; the compressed form is the dense weight.

    `mm_search` has the signature that torch 2.11.0+cu130 prints: six positional arguments, four numbers.
    """

    def __init__(self) -> None:
        self.searched, self.algorithms, self.pointers = [], [], []

    def compress(self, weight: Tensor) -> Tensor:
        return weight.clone()

    def search(self, compressed, columns, bias=None, alpha=None, out_dtype=None, transpose_result=False) -> int:
        self.searched.append((tuple(columns.shape), bias is not None))
        return 40 + len(self.searched)

    def mm_search(self, compressed, columns, bias, alpha, out_dtype, transpose_result, /):
        assert (alpha, out_dtype, transpose_result) == (None, None, True)
        number = self.search(compressed, columns, bias)
        return number, number - 38, 2, 99

    def multiply(
        self, compressed, columns, bias=None, alpha=None, out_dtype=None, transpose_result=False, alg_id=0, split_k=1,
        split_k_mode=-1,
    ):  # fmt: skip
        assert columns.shape[1] % cusparselt.ROW_STEP == 0
        assert transpose_result
        self.algorithms.append((alg_id, split_k, split_k_mode))
        self.pointers.append(columns.data_ptr())
        return columns.t() @ compressed.t() + (0 if bias is None else bias)


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    functions = {"compress": fake.compress, "sparse_mm_search": fake.search, "sparse_mm": fake.multiply}
    for name, function in functions.items():
        monkeypatch.setattr(torch, f"_cslt_{name}", function)
    monkeypatch.setattr(torch._C, "_cusparselt", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cusparselt, "_algorithms", {})
    return fake


def layer(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = pruned_weight((32, 48))
    return torch.randn(rows, 48), weight, *pack.pack_nm(weight)


def run(rows: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight, and what cusparselt makes of them."""
    x, weight, values, indices = layer(rows)
    prepared = kernel("cusparselt").prepare(values, indices)
    assert torch.equal(prepared, weight)
    return x, weight, kernel("cusparselt").run(x, values, indices, bias, prepared)


def test_rows_are_padded_and_the_bias_goes_along(library):
    """x is copied only to add rows."""
    for rows in (1, 8, 13, 16):
        for bias in (None, torch.randn(32)):
            x, weight, y = run(rows, bias)
            torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
            assert (library.pointers[-1] == x.data_ptr()) == (rows % 8 == 0)


def test_each_shape_is_searched_once_and_never_in_a_capture(library, monkeypatch):
    for rows in (1, 5, 8, 9, 16, 1):
        for bias in (None, torch.zeros(32)):
            run(rows, bias)
    assert library.searched == [((48, 8), False), ((48, 8), True), ((48, 16), False), ((48, 16), True)]
    first, second, third, fourth = ((number, number - 38, 2) for number in (41, 42, 43, 44))
    assert library.algorithms == [first, second] * 3 + [third, fourth] * 2 + [first, second]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(24)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run(24)
    assert library.algorithms[-2:] == [(0, 1, -1), (45, 7, 2)]


def test_a_torch_without_mm_search_gives_the_algorithm_alone(library, monkeypatch):
    monkeypatch.delattr(torch._C, "_cusparselt")
    run(8)
    assert library.algorithms == [(41, 1, -1)]


@pytest.mark.parametrize("name", ["cusparselt", "cutlass", "gemv"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_serves_gpus(device, name):
    x, values = (torch.empty(16, size, dtype=torch.bfloat16, device=device) for size in (128, 64))
    reason = f"supports only CUDA GPUs, but x is on {device} and the weight on {device}"
    assert kernel(name).supports(x, values) == reason


@pytest.fixture
def hopper(monkeypatch):
    """A GPU with everything that the backends need, but no compiled kernel."""
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (cuda, cutlass):
        monkeypatch.setattr(module, "_C", SimpleNamespace(tiles=lambda: [(90, "64x32")]))
        monkeypatch.setattr(module, "_missing", None)


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "rows", "in_features", "out_features", "dtype", "reason"),
    [
        ("cusparselt", 3, 128, 48, BF16, "None"),
        ("cusparselt", 3, 128, 48, F32, "supports bfloat16.*"),
        ("cusparselt", 3, 128, 40, BF16, "out_features=40 must be a multiple of 16"),
        ("cusparselt", 3, 120, 48, BF16, "in_features=120 must be a multiple of 16"),
        ("cusparselt", 0, 128, 48, BF16, "x has no rows"),
        ("gemv", 16, 12, 7, BF16, "None"),
        ("gemv", 17, 12, 7, BF16, "supports 1 to 16 rows, not 17"),
        ("gemv", 0, 12, 7, BF16, "supports 1 to 16 rows, not 0"),
        ("gemv", 1, 12, 7, F32, "supports bfloat16.*"),
        ("cutlass", 20, 128, 48, BF16, "None"),
        ("cutlass", 40, 128, 48, BF16, "its tile 64x64 was not built for this GPU; remedy: .*"),
    ],
)
def test_the_limits(name, rows, in_features, out_features, dtype, reason, hopper):
    found = kernel(name).supports(OnGPU(rows, in_features, dtype), OnGPU(out_features, in_features // 2, dtype))
    assert re.fullmatch(reason, str(found))


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
def test_gemv_serves_codes(codes, hopper):
    values = OnGPU(7, 12 * 2 // (4 if codes == torch.uint8 else 2), codes)
    assert kernel("gemv").supports(OnGPU(16, 24), values) is None
    assert "supports 1 to 16 rows" in kernel("gemv").supports(OnGPU(17, 24), values)
    assert "with a weight of torch.int16" in kernel("gemv").supports(OnGPU(1, 24), OnGPU(7, 12, torch.int16))


def test_what_is_missing_is_named(hopper, monkeypatch):
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "_missing", "no compiler")
    assert "has no cuSPARSELt" in kernel("cusparselt").supports(OnGPU(3, 128), OnGPU(48, 64))
    assert kernel("gemv").supports(OnGPU(1, 12), OnGPU(7, 6)) == "no compiler"


@pytest.mark.parametrize("arguments", [None, 6, 8, 11])
def test_a_compiled_extension_of_another_commit_does_not_serve(arguments, monkeypatch):
    """A call with other arguments than the binding has would be a TypeError."""
    source = (Path(__file__).parents[2] / "csrc" / "cuda" / "bindings.cpp").read_text()
    assert source.partition("\nvoid gemv(")[2].partition(")")[0].count(",") + 1 == cuda.GEMV_ARGUMENTS
    module = ModuleType("compiled")
    if arguments:
        signature = ", ".join(f"arg{number}: torch.Tensor" for number in range(arguments))
        module.gemv, module.masked_weight_n4_ = SimpleNamespace(__doc__=f"gemv({signature}) -> None\n"), None
    monkeypatch.setitem(sys.modules, "compiled", module)
    if arguments == cuda.GEMV_ARGUMENTS:
        assert cuda.loaded("compiled") == (module, None)
    else:
        assert cuda.loaded("compiled")[0] is None
        assert "another version" in cuda.loaded("compiled")[1]
