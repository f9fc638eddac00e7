"""The packed form of n:4 weights on every backend of this machine: bit for bit there and back, and what is refused."""

import itertools

import pytest
import torch

from proxsparse.ops import pack_nm, registry, unpack_nm
from proxsparse.patterns import NMPattern
from proxsparse.reference import pack

OP = "pack_nm"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
PATTERNS = ["1:4", "2:4", "3:4"]
NAN = float("nan")
every_weight = [pytest.param(dtype, pattern, id=f"{dtype} {pattern}") for dtype in DTYPES for pattern in PATTERNS]


def bits(tensor):
    """The numbers as integers, so that -0.0 differs from +0.0 and a NaN equals itself."""
    return tensor.cpu().view(BITS[tensor.element_size()])


def random_weight(shape, pattern="2:4", dtype=torch.float32, seed=0):
    """n:4 with anything from no nonzero to n in a block, a tenth of the weights -0.0, some NaN."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight[torch.rand(shape, generator=generator) < 0.3] = 0.0
    weight[torch.rand(shape, generator=generator) < 0.02] = NAN
    places = torch.rand((*shape[:-1], shape[-1] // 4, 4), generator=generator).argsort(-1).flatten(-2)
    weight = torch.where(places < NMPattern.parse(pattern).n, weight, 0.0)
    weight[(weight == 0) & (torch.rand(shape, generator=generator) < 0.1)] = -0.0
    return weight.to(dtype)


def any_bits(shape, pattern, dtype, seed=0):
    """Any bits in n places of each block, also subnormal numbers and every NaN; +0.0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    places = torch.rand((*shape[:-1], shape[-1] // 4, 4), generator=generator).argsort(-1).flatten(-2)
    return torch.where(places < NMPattern.parse(pattern).n, raw.view(dtype).squeeze(-1), torch.zeros((), dtype=dtype))


def kept_places(block, n):
    """The rule, for one block of numbers: nonzero or NaN first, then -0.0, then +0.0; then the lower place."""

    def rank(place):
        number = block[place]
        return 0 if number != 0 else 1 if str(float(number)) == "-0.0" else 2, place

    return sorted(sorted(range(4), key=rank)[:n])


@pytest.mark.parametrize(("dtype", "pattern"), every_weight)
def test_every_block_of_zeros_numbers_and_nan(dtype, pattern, device, require):
    n = NMPattern.parse(pattern).n
    blocks = torch.tensor(list(itertools.product([0.0, -0.0, -1.5, NAN], repeat=4)), dtype=dtype)
    feasible = (blocks != 0).sum(-1) <= n
    require("pack_nm", blocks.to(device), n, 4)
    for block in blocks[~feasible]:
        with pytest.raises(ValueError, match=rf"1 of 1 blocks have more than {n} nonzeros, the first is block 0"):
            pack_nm(block.to(device, copy=True), pattern)
    blocks = blocks[feasible]
    values, indices = pack_nm(blocks.to(device), pattern)
    dense = unpack_nm(values, indices, pattern)
    for block, of_block, byte, back in zip(blocks, values, indices.tolist(), dense, strict=True):
        places = kept_places(block.tolist(), n)
        expected = torch.zeros(4, dtype=dtype)
        expected[places] = block[places]
        assert byte == [sum(place << 2 * j for j, place in enumerate(places))]
        assert torch.equal(bits(of_block), bits(block[places]))
        assert torch.equal(bits(back), bits(expected))


@pytest.mark.parametrize(("dtype", "pattern"), every_weight)
def test_equals_the_reference_there_and_back(dtype, pattern, device, require):
    require("pack_nm", torch.zeros(1, 4, dtype=dtype, device=device), NMPattern.parse(pattern).n, 4)
    for in_features in [*range(4, 140, 4), 260, 508, 512, 516, 1000, 1028]:
        raw = any_bits((3, in_features), pattern, dtype, in_features)
        for weight in (raw, random_weight((5, in_features), pattern, dtype, in_features)):
            values, indices = pack.pack_nm(weight, pattern)
            result = pack_nm(weight.to(device), pattern)
            assert torch.equal(bits(result[0]), bits(values)), in_features
            assert torch.equal(result[1].cpu(), indices), in_features
            back = unpack_nm(*result, pattern)
            assert torch.equal(bits(back), bits(pack.unpack_nm(values, indices, pattern))), in_features
            assert weight is not raw or torch.equal(bits(back), bits(raw)), in_features


@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows(threads, device):
    weight = random_weight((999, 264), dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values, indices = pack_nm(weight.to(device))
        back = unpack_nm(values, indices)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(values), bits(pack.pack_nm(weight)[0]))
    assert torch.equal(indices.cpu(), pack.pack_nm(weight)[1])
    assert torch.equal(bits(back), bits(pack.unpack_nm(*pack.pack_nm(weight))))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 4)])
def test_empty(shape, pattern, device, require):
    n = NMPattern.parse(pattern).n
    require("pack_nm", torch.zeros(shape, device=device), n, 4)
    values, indices = pack_nm(torch.zeros(shape, device=device), pattern)
    k = shape[-1] // 4 * n
    assert values.shape == (*shape[:-1], k)
    assert indices.shape == (*shape[:-1], -(-k // 4))
    assert unpack_nm(values, indices, pattern).shape == shape


@pytest.mark.parametrize(
    "layout",
    [
        lambda base: base[5:6],
        lambda base: base[3],
        lambda base: base[::3],
        lambda base: base[:, 4:20],
        lambda base: base.view(4, 6, 24),
        lambda base: base.view(4, 6, 24).permute(1, 0, 2),
        lambda base: base[:1, :4].expand(5, 4),
    ],
)
def test_layouts(layout, device):
    weight = layout(random_weight((24, 24)).to(device))
    values, indices = pack_nm(weight)
    assert torch.equal(bits(values), bits(pack.pack_nm(weight.cpu().contiguous())[0]))
    expected = bits(pack.unpack_nm(values.cpu(), indices.cpu()))
    assert torch.equal(bits(unpack_nm(values, indices)), expected)
    strided = torch.stack([values, values], -1)[..., 0], torch.stack([indices, indices], -1)[..., 0]
    assert torch.equal(bits(unpack_nm(*strided)), expected)


def test_an_infeasible_weight_is_refused_in_the_words_of_the_reference(device):
    weight = random_weight((40, 1024))
    weight[7, 8:12] = 1.0
    weight[9, 1020:] = 1.0
    message = "2 of 10240 blocks have more than 2 nonzeros, the first is block 2 of row 7; prune it to 2:4 first"
    with pytest.raises(ValueError) as error:  # noqa: PT011
        pack_nm(weight.to(device))
    assert str(error.value) == f"weight of shape [40, 1024]: {message}"


@pytest.mark.parametrize(
    ("weight", "pattern", "message"),
    [
        (torch.zeros(3, 130), "2:4", r"shape \[3, 130\].*multiple of 4"),
        (torch.zeros(8, dtype=torch.int8), "2:4", "torch.int8.*convert it first"),
        (torch.zeros(()), "2:4", r"shape \[\]"),
        (torch.zeros(8), "2:8", "2:8: only blocks of 4 are packed"),
    ],
)
def test_what_cannot_be_packed_is_refused(weight, pattern, message):
    with pytest.raises(ValueError, match=message):
        pack_nm(weight, pattern)


def damaged(place=None, byte=None, **replaced):
    """values and indices of a good [2, 12] weight, with one byte or a whole tensor replaced."""
    tensors = dict(zip(("values", "indices"), pack.pack_nm(random_weight((2, 12))), strict=True)) | replaced
    if place is not None:
        tensors["indices"][place] = byte
    return tensors.values()


@pytest.mark.parametrize(
    ("values", "indices", "message"),
    [
        (*damaged((1, 0), 0x45), r"block 0 of row 1 has the places \[1, 1\]"),
        (*damaged((0, 0), 0x14), r"block 1 of row 0 has the places \[1, 0\]"),
        (*damaged((1, 1), 0x14), "bits after the last place"),
        (*damaged(values=torch.zeros(2, 7)), r"values of shape \[2, 7\]: the last dimension must be a multiple of 2"),
        (*damaged(values=torch.zeros(2, 8)), r"need torch.uint8 \[2, 2\]|out of order|after"),
        (*damaged(values=torch.zeros(3, 6)), r"need torch.uint8 \[3, 2\]"),
        (*damaged(values=torch.zeros(())), r"values of shape \[\]"),
        (*damaged(values=torch.zeros(2, 6, dtype=torch.int32)), "values has dtype torch.int32"),
        (*damaged(indices=torch.zeros(2, 3, dtype=torch.uint8)), r"indices are torch.uint8 \[2, 3\]"),
        (*damaged(indices=torch.zeros(2, 2, dtype=torch.int8)), "indices are torch.int8"),
        (*damaged(indices=torch.zeros(2, 2, dtype=torch.uint8, device="meta")), "on meta"),
    ],
)
def test_a_damaged_file_is_refused(values, indices, message):
    with pytest.raises(ValueError, match=message):
        unpack_nm(values, indices)


# ------------------------------------------------------------------------------------------ the compiled kernels


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": 4}, "n=4: only 1:4, 2:4 and 3:4 weights can be packed"),
        ({"weight": torch.zeros(3, 10)}, r"shape \[3, 10\]: in_features must be a multiple of 4"),
        ({"values": torch.zeros(3, 5)}, r"values of shape \[3, 5\].*must be .* of shape \[3, 6\]"),
        ({"values": torch.zeros(3, 6, dtype=torch.float64)}, "dtype Double"),
        ({"values": torch.zeros(6, 3).T}, "values .* must be a contiguous Float tensor .* on cpu"),
        ({"indices": torch.zeros(3, 1, dtype=torch.uint8)}, r"indices .* contiguous Byte tensor of shape \[3, 2\]"),
        ({"indices": torch.zeros(3, 2)}, "indices of shape .* and dtype Float"),
    ],
)
def test_the_kernels_refuse_what_does_not_fit(compiled, changed, message):
    good = {"weight": torch.zeros(3, 12), "n": 2, "values": torch.zeros(3, 6)}
    good["indices"] = torch.zeros(3, 2, dtype=torch.uint8)
    for kernel in (compiled.pack_n4, compiled.unpack_n4):
        with pytest.raises(ValueError, match=message):
            kernel(**good | changed)


def test_without_the_compiled_extension_the_reference_serves_aloud(monkeypatch):
    from proxsparse.ops.backends import cpp

    monkeypatch.setattr(cpp, "_C", None)
    monkeypatch.setattr(cpp, "_missing", "the compiled extension is missing")
    monkeypatch.setattr(registry, "_announced", set())
    monkeypatch.delenv("PROXSPARSE_BACKEND", raising=False)
    weight = random_weight((3, 12)).nan_to_num()
    with pytest.warns(UserWarning, match=r"pack_nm: not on the cpp backend.*the compiled extension is missing"):
        values, indices = pack_nm(weight)
    assert torch.equal(unpack_nm(values, indices), weight)
