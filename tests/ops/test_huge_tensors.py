"""Tensors of more than 2^31 bytes and 2^32 elements on a GPU: positions need 64 bits."""

import pytest
import torch
from ops.on_each_backend import assert_alike, backends_of
from ops.test_adamw_prox import EXACT

from proxsparse import prox_nm, prox_nm_, reference
from proxsparse.ops import adamw_prox_, masked_weight_

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("huge")]
SEED = 0x9E3779B97F4A7C15


def gpu_kernels(op: str) -> list:
    return [param for param in backends_of(op) if param.values[0] in (("triton", "cuda"), ("cuda", "cuda"))]


def require_memory(gigabytes: float) -> None:
    """Skips the test if the GPU has not so much free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if gigabytes > 0.95 * free:
        pytest.skip(f"needs {gigabytes:.0f} GB, {free:.0f} are free")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("dtype", "elements"), [(torch.float32, 2**29 + 2**14), (torch.bfloat16, 2**31 + 2**14)])
@pytest.mark.parametrize("place", gpu_kernels("prox_nm_"))
def test_the_prox_of_each_chunk_is_that_of_the_chunk_alone(place, dtype, elements, scaled, serve):
    device = serve("prox_nm_", place)
    require_memory(2.5 * elements * dtype.itemsize / 1e9)
    scale = 0.5 + torch.rand(4096, device=device) if scaled else None
    weight = torch.empty(elements // 4096, 4096, dtype=dtype, device=device).normal_(0, 0.02)
    before = weight.clone()
    prox_nm_(weight, 25.0, scale=scale)
    for rows in range(0, len(weight), 2**13):
        chunk = slice(rows, rows + 2**13)
        assert_alike(weight[chunk], prox_nm(before[chunk], 25.0, scale=scale))
    half, c = len(weight) // 2, 1.0 if scale is None else scale.double()
    for chunk in (slice(0, 64), slice(half - 32, half + 32), slice(-64, None)):
        assert_alike(weight[chunk].double(), reference.prox_nm(before[chunk].double() * c, 25.0) / c, dtype)


@pytest.mark.parametrize("place", gpu_kernels("masked_weight_"))
def test_the_masked_weight_beyond_32_bits(place, serve):
    """Repeated rows, so that every part has the result of the first."""
    device = serve("masked_weight_", place)
    rows, columns, period = 2**20 + 64, 4096, 64
    require_memory(3 * 2 * rows * columns / 1e9 + 2)
    weight, pretrained = (torch.randn(period, columns, device=device).bfloat16() for _ in range(2))
    scale = 0.5 + torch.rand(columns, device=device)
    expected = reference.masked_weight(weight, pretrained, scale)
    many = [tensor.repeat(rows // period, 1) for tensor in (weight, pretrained)]
    out = masked_weight_(torch.empty_like(many[0]), *many, scale)
    for start in range(0, rows, period):
        assert torch.equal(out[start : start + period], expected), start


@pytest.mark.parametrize("place", gpu_kernels("adamw_prox_"))
def test_the_step_and_its_stochastic_rounding_beyond_32_bits(place, serve):
    """Each part is stepped as if alone, and rounded by the hash of its 64-bit position."""
    device = serve("adamw_prox_", place)
    rows, columns = 2**20 + 4, 4096
    require_memory(4 * 2 * rows * columns / 1e9 + 4)
    sizes = (1.0, 0.1, 0.1, 0.1)  # weight, gradient, moments
    window = [size * torch.randn(64, columns, device=device).bfloat16() for size in sizes]
    window[3] = window[3].square()
    tensors = [torch.zeros(rows, columns, dtype=torch.bfloat16, device=device) for _ in range(4)]
    starts = [start // columns // 16 * 16 for start in (0, 2**31 - 32 * columns, 2**32 - 32 * columns)]
    parts = [slice(start, start + 64) for start in starts]
    for part in parts:
        for tensor, values in zip(tensors, window, strict=True):
            tensor[part].copy_(values[: len(tensor[part])])
    settings = {"step": 3, "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "reg_lambda": 25.0}
    adamw_prox_(*tensors, **settings)
    adamw_prox_(*window, **settings)
    for part in parts:
        for tensor, values in zip(tensors, window, strict=True):
            assert torch.equal(tensor[part], values[: len(tensor[part])])
    assert not tensors[0][64 : starts[1]].any()

    weight = tensors[0].fill_(1.0)
    for tensor in tensors[1:]:
        tensor.zero_()
    adamw_prox_(*tensors, seed=SEED, **EXACT)
    for part in parts:
        count = weight[part].numel()
        index = torch.arange(part.start * columns, part.start * columns + count, device=device)
        low, high = SEED & 0xFFFFFFFF, SEED >> 32
        first = reference.mix(reference.mix((index & 0xFFFFFFFF) ^ low) ^ (index >> 32) ^ high)
        value = torch.full((count,), 1 - 2.0**-10, device=device)
        expected = reference.stochastic_round(value, (first >> 16).to(torch.int32))
        assert torch.equal(weight[part].flatten(), expected), "another hash"
