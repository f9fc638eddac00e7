"""CUTLASS's products of bfloat16: metadata, tiles, calls, refusals.

Without a GPU: the metadata against CUTLASS's headers, calls with a stand-in for its kernels, and one of its tiles as
nvcc compiles it (tests/ptx).
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pruned import assert_as_good_as_dense, pruned_linear, pruned_weight
from ptx.gpu import Extension, cutlass_flags, require_compilers
from torch import Tensor
from torch.nn.functional import linear, pad

from proxsparse import SparseLinear
from proxsparse.ops import pack_nm
from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.reference.pack import unpack_nm

CHECKOUT = Path(__file__).parents[2]
ANY_PLACES = 0x44  # places 0 and 1 of two blocks, for the padding of a tile


def metadata_sm80(indices: Tensor) -> Tensor:
    """uint8 indices [out_features, in_features / 8] -> the metadata of CUTLASS's kernels for sm_80, in bytes, flat.

    out_features and in_features are multiples of 32. For the byte 4 c + 2 k + b of the row 32 t + 16 r + 8 h + g, the
    order from the slowest to the fastest index is c, t, g, r, k, h, b. (In CUTLASS this is done in two steps,
    `reorder_meta` and the layout ColumnMajorInterleaved<2>, of 16-bit elements.)
    """
    c, t, g, r, k, h, b = 4, 0, 3, 1, 5, 2, 6
    return indices.view(-1, 2, 2, 8, indices.shape[1] // 4, 2, 2).permute(c, t, g, r, k, h, b).flatten()


def metadata_sm90(indices: Tensor) -> Tensor:
    """uint8 indices [out_features, in_features / 8] -> the metadata of CUTLASS's kernels for sm_90a, in bytes, flat.

    Padded to multiples of 64 rows and 128 columns. For the byte 16 c + 4 j + 2 k + b of the row 64 t + 16 r + 8 h + g,
    the order from the slowest to the fastest index is c, t, r, k, g, j, h, b. Tiles of 128 columns or more use it.
    """
    rows, columns = indices.shape
    padded = pad(indices, (0, -columns % 16, 0, -rows % 64), value=ANY_PLACES)
    t, r, h, g, c, j, k, b = range(8)
    return padded.view(-1, 4, 2, 8, padded.shape[1] // 16, 4, 2, 2).permute(c, t, r, k, g, j, h, b).flatten()


# architecture -> (equation of the metadata, shapes)
EQUATIONS = {
    80: (metadata_sm80, [(32, 64), (64, 192), (96, 320), (256, 1024)]),
    90: (metadata_sm90, [(64, 128), (128, 384), (8, 16), (72, 144), (200, 640), (200, 1600)]),
}
each_form = pytest.mark.parametrize(
    ("architecture", "shape"),
    [(architecture, shape) for architecture, (_, shapes) in EQUATIONS.items() for shape in shapes],
    ids=str,
)
BUILT = [path.stem.partition("_") for path in (CHECKOUT / "csrc" / "cutlass").glob("sm[89]0_*.cu")]
BUILT = {(int(architecture.removeprefix("sm")), tile) for architecture, _, tile in BUILT}
# Compute capability -> the most shared memory of a thread block, in bytes (CUDA programming guide; libcu++'s
# arch_traits.h).
SHARED_MEMORY = dict.fromkeys([(8, 0), (8, 7)], 163 << 10)
SHARED_MEMORY |= dict.fromkeys([(8, 6), (8, 8), (8, 9), (12, 0), (12, 1)], 99 << 10)
SHARED_MEMORY |= dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 227 << 10)
# In this namespace, a tile prints the size of its shared memory instead of registering itself.
SIZES = """
#include <cstdio>
namespace proxsparse::gemm::sizes {
template <typename Kind>
size_t tile(const char*) { return sizeof(typename Kind::Gemm::GemmKernel::SharedStorage); }
struct Registered {
  explicit Registered(size_t bytes) { std::printf("%zu\\n", bytes); }
};
}
int main() {}
"""
bf16 = torch.bfloat16


def kernel():
    return get_kernel("sparse_linear", "cutlass")


def random_indices(shape, device="cpu"):
    return torch.randint(0, 256, (shape[0], shape[1] // 8), dtype=torch.uint8, device=device)


@pytest.fixture
def gpu(monkeypatch):
    """gpu(major): from then on GPUs have this compute capability; all tiles of csrc/cutlass are built."""
    tiles = SimpleNamespace(tiles=lambda: BUILT)
    monkeypatch.setattr(cutlass, "_C", tiles)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    return lambda major: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))


# ------------------------------------------------------------------------------------------ metadata and tiles


def compiled(source: Path, program: Path, *flags: str) -> Path:
    """A program made from source and CUTLASS's headers."""
    require_compilers("nvcc")
    folders = [flag for flag in cutlass_flags() if flag.startswith("-I")]
    command = ["nvcc", *flags, "-O0", "-w", *folders, source, "-o", program]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return program


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A program that orders indices by the functions and layouts of CUTLASS's headers."""
    source, program = Path(__file__).with_name("cutlass_layouts.cu"), tmp_path_factory.mktemp("cutlass") / "layouts"
    return compiled(source, program, "-std=c++17", "-arch=sm_90")


@pytest.mark.slow
@each_form
def test_metadata_matches_the_headers(architecture, shape, layouts):
    indices = random_indices(shape)
    head = f"{architecture} {shape[0]} {shape[1]}\n".encode()
    process = subprocess.run([layouts], input=head + bytes(indices.flatten().tolist()), capture_output=True, check=True)
    metadata = EQUATIONS[architecture][0](indices)
    assert process.stdout == bytes(metadata.tolist())
    assert len(metadata) == cutlass.metadata_bytes(*shape, architecture)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@each_form
def test_the_kernel_orders_places_as_the_equation_and_writes_nothing_else(architecture, shape, device, request):
    if device == "cpu":
        request.getfixturevalue("cuda_on_cpu")
    elif reason := cuda.missing():
        pytest.skip(reason)
    indices = random_indices(shape, device)
    memory = torch.full((cutlass.metadata_bytes(*shape, architecture) + 512,), 0xA5, dtype=torch.uint8, device=device)
    cuda.cutlass_metadata_(indices, memory[256:-256], architecture)
    assert torch.equal(memory[256:-256], EQUATIONS[architecture][0](indices))
    assert (memory[:256] == 0xA5).all()
    assert (memory[-256:] == 0xA5).all()


@pytest.mark.parametrize("major", [8, 9])
def test_all_tiles_exist(major, gpu):
    gpu(major)
    assert {tile for _, tile in cutlass.TILES[10 * major]} <= set(cutlass.built_tiles(torch.device("cuda", 0)))


@pytest.mark.slow
def test_every_gpu_has_the_shared_memory_of_the_tiles_offered_to_it(tmp_path, monkeypatch):
    """The sizes of all tiles in one program without their kernels, which would take a minute each to compile."""
    files = sorted((CHECKOUT / "csrc" / "cutlass").glob("sm[89]0_*.cu"))
    text = SIZES
    for number, file in enumerate(files):
        tile = file.read_text().replace('#include "', f'#include "{file.parent}/')
        text += tile.replace("proxsparse::gemm {", f"proxsparse::gemm::sizes::n{number} {{")
    (tmp_path / "sizes.cu").write_text(text)
    program = compiled(tmp_path / "sizes.cu", tmp_path / "sizes", "-std=c++20", "-arch=sm_90a")
    output = subprocess.run([program], capture_output=True, check=True).stdout
    sizes = dict(zip((file.stem for file in files), map(int, output.split()), strict=True))
    too_large = []
    for capability, limit in SHARED_MEMORY.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        prefix = f"sm{cutlass.architecture_of(torch.device('cuda'))}_"
        too_large += [(capability, limit, x, y) for x, y in sizes.items() if x.startswith(prefix) and y > limit]
    assert not too_large


# ------------------------------------------------------------------------------------------ calls


class StandIn:
    """proxsparse._C_cutlass (csrc/cutlass/bindings.cpp): multiplies by what the metadata say."""

    def __init__(self) -> None:
        self.tiles, self.pointers = [], []

    def workspace_bytes(self, architecture, tile, values, x):
        return 0

    def gemm(self, architecture, tile, values, metadata, x, bias, y, workspace, stream):
        assert architecture == 90 or (bias is None and len(x) % 8 == 0)
        self.tiles.append(tile)
        self.pointers.append(x.data_ptr())
        size = len(values), values.shape[1] // 4
        place = EQUATIONS[architecture][0](torch.arange(size[0] * size[1], dtype=torch.int32).view(size) + 1000)
        real = place >= 1000  # the rest is padding
        indices = torch.empty(size, dtype=torch.uint8)
        indices.view(-1)[place[real].long() - 1000] = metadata[real]
        product = linear(x.double(), unpack_nm(values.double(), indices))
        product = product if bias is None else product + bias.double()
        y.copy_(product.t() if architecture == 80 else product)


@pytest.fixture
def stand_in(cuda_on_cpu, gpu, monkeypatch):
    """The stand-in for CUTLASS's kernels; the kernel of the metadata is the compiled one."""
    monkeypatch.setattr(cutlass, "_C", StandIn())
    return cutlass._C


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("major", "shape", "tiles"),  # those for 17, 40, 200 and 600 rows of x: they grow
    [
        (9, (72, 144), ["64x32", "64x64", "128x128", "128x256"]),
        (8, (96, 320), ["64x64", "64x64", "128x128", "128x128"]),
        (10, (32, 64), ["64x64", "64x64", "128x128", "128x128"]),
    ],
    ids=str,
)
def test_a_call_matches_the_dense_product(major, shape, tiles, with_bias, stand_in, gpu):
    """With the tiles of the GPU; x is copied only to add rows."""
    gpu(major)
    weight, bias = pruned_weight(shape, bf16), torch.randn(shape[0]).bfloat16() if with_bias else None
    for rows in (17, 40, 200, 600):
        x = torch.randn(rows, shape[1]).bfloat16()
        y = kernel().run(x, *pack_nm(weight), bias, None)
        expected = linear(x.double(), weight.double(), bias.double() if with_bias else None)
        assert (stand_in.pointers[-1] == x.data_ptr()) == (rows % 8 == 0 or major == 9)
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=8e-3, atol=3e-2)
    assert stand_in.tiles == tiles


@pytest.mark.parametrize("major", [8, 9])
def test_the_metadata_can_be_prepared_once(major, stand_in, gpu, cuda_on_cpu):
    """Also of indices that begin anywhere, which are copied before."""
    gpu(major)
    values, indices = pack_nm(pruned_weight((96, 320), bf16))
    anywhere = torch.cat([indices.new_zeros(1), indices.flatten()])[1:].view(indices.shape)
    prepared = kernel().prepare(values, indices)
    assert torch.equal(prepared, EQUATIONS[10 * major][0](indices))
    assert torch.equal(prepared, kernel().prepare(values, anywhere))
    x, count = torch.randn(17, 320).bfloat16(), len(cuda_on_cpu.launches)
    y = kernel().run(x, values, indices, None, prepared)
    assert len(cuda_on_cpu.launches) == count
    assert torch.equal(y, kernel().run(x, values, indices, None, None))
    assert len(cuda_on_cpu.launches) == count + 1


@pytest.mark.slow
def test_a_compiled_tile(cuda_on_cpu, gpu, monkeypatch):
    """For sm_80, as nvcc compiles it."""
    flags = cutlass_flags()
    gpu(8)
    load = lambda *_: cuda_on_cpu.library("cutlass/sm80_64x64.cu", flags, 80)  # noqa: E731
    monkeypatch.setattr(cutlass, "_C", Extension(cuda_on_cpu, "cutlass/bindings.cpp", load))
    weight, bias = pruned_weight((96, 320), bf16), torch.randn(96).bfloat16()
    for rows in (1, 17, 72):
        x = torch.randn(rows, 320).bfloat16()
        assert_as_good_as_dense(kernel().run(x, *pack_nm(weight), None, None), x, weight)
        y, expected = kernel().run(x, *pack_nm(weight), bias, None), linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(y.double(), expected, rtol=8e-3, atol=3e-2)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("sizes", "reason"),  # rows, out_features, in_features / 2, architecture
    [
        ((1, 4096, 2048, 90), None),
        ((100, 96, 96, 80), None),
        ((1, 100, 2048, 90), "out_features=100 must be a multiple of 8"),
        ((1, 4104, 2048, 80), "out_features=4104 must be a multiple of 32"),
        ((1, 4096, 2050, 90), "in_features=4100 must be a multiple of 16"),
        ((1, 4096, 24, 80), "in_features=48 must be a multiple of 64"),
        ((0, 4096, 2048, 90), "x has no rows"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_its_number(sizes, reason):
    assert cutlass.shape_reason(*sizes) == reason


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def layer_on_gpu():
    """layer_on_gpu(out_features, in_features) -> a packed layer of backend "cutlass"."""

    def build(out_features: int, in_features: int) -> SparseLinear:
        dense = pruned_linear(in_features, out_features, dtype=bf16).cuda()
        layer = SparseLinear.from_linear(dense, "cutlass")
        if reason := kernel().supports(dense.weight[:8], layer.values):
            pytest.skip(reason)
        return layer

    return build


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(72, 144), (96, 8192), (4096, 4096)], ids=str)
@torch.no_grad()
def test_every_tile_multiplies_and_twice_the_same(shape, layer_on_gpu, monkeypatch):
    layer = layer_on_gpu(*shape)
    for tile in cutlass.built_tiles(layer.values.device):
        monkeypatch.setattr(cutlass, "tile_for", lambda device, rows, tile=tile: tile)
        for rows in (1, 17, 65, 200):
            x = torch.randn(rows, shape[1], device="cuda").bfloat16()
            y = layer(x)
            assert_as_good_as_dense(y, x, layer.dense_weight(), layer.bias)
            assert torch.equal(layer(x), y)


@pytest.mark.gpu
@torch.no_grad()
def test_a_capture_derives_the_metadata_in_every_replay(layer_on_gpu):
    layer, other = layer_on_gpu(256, 512), layer_on_gpu(256, 512)
    x = torch.randn(64, 512, device="cuda").bfloat16()
    other(x)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    assert layer.prepared is None
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, layer(x))
    assert layer.prepared is not None
