"""The GPU backends of `sparse_linear` without a GPU: what they support."""

import functools
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ops.on_each_backend import OnGPU

from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel

kernel = functools.partial(get_kernel, "sparse_linear")


@pytest.mark.parametrize("name", ["cutlass", "gemv"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_serves_gpus(device, name):
    x, values = (torch.empty(16, size, dtype=torch.bfloat16, device=device) for size in (128, 64))
    reason = f"supports only CUDA GPUs, but x is on {device} and the weight on {device}"
    assert kernel(name).supports(x, values) == reason


@pytest.fixture
def hopper(monkeypatch):
    """A GPU with everything that the backends need, but no compiled kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in (cuda, cutlass):
        monkeypatch.setattr(module, "_C", SimpleNamespace(tiles=lambda: [(90, "64x32")]))
        monkeypatch.setattr(module, "_missing", None)


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "rows", "in_features", "out_features", "dtype", "reason"),
    [
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
    monkeypatch.setattr(cuda, "_missing", "no compiler")
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
