"""The backend `cutlass` without a GPU: its metadata and that of codes against CUTLASS's layouts, its tiles."""

import importlib.util
import itertools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pruned import assert_as_good_as_dense, pruned_linear

from proxsparse import SparseLinear
from proxsparse.ops.backends import cuda, cutlass, cutlass_codes
from proxsparse.ops.registry import get_kernel

CHECKOUT = Path(__file__).parents[2]
PROGRAM = CHECKOUT / "tests" / "ops" / "cutlass_layouts.cu"
EQUATIONS = {80: cutlass.metadata_sm80, 90: cutlass.metadata_sm90}
OF_CODES = {80: cutlass_codes.metadata_sm80, 90: cutlass_codes.metadata_sm90}
# bits of a weight and architecture -> shapes
SHAPES = {
    (16, 80): [(32, 64), (96, 320), (256, 1024)],
    (16, 90): [(64, 128), (128, 384), (8, 16), (72, 144), (200, 1600)],
    (8, 80): [(32, 128), (96, 384)],
    (8, 90): [(64, 128), (128, 384), (8, 32), (72, 160), (200, 1600)],
}
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


def compiled(source: Path, program: Path, *flags: str) -> Path:
    """A program made from source and CUTLASS's headers."""
    if not shutil.which("nvcc") or not (package := importlib.util.find_spec("cutlass_library")):
        pytest.skip("nvcc or nvidia-cutlass is not installed")
    headers = Path(package.origin).parent / "source"
    folders = [f"-I{headers / folder}" for folder in ("include", "tools/util/include")]
    command = ["nvcc", *flags, "-O0", "-w", *folders, source, "-o", program]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return program


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A program that orders indices by the functions and layouts of CUTLASS's headers."""
    return compiled(PROGRAM, tmp_path_factory.mktemp("cutlass") / "layouts", "-std=c++17", "-arch=sm_90")


@pytest.mark.parametrize(("form", "shape"), [(form, shape) for form in SHAPES for shape in SHAPES[form]], ids=str)
def test_metadata_is_that_of_the_headers(form, shape, layouts):
    (bits, architecture), (out_features, in_features) = form, shape
    indices = torch.randint(0, 256, (out_features, in_features // 8), dtype=torch.uint8)
    head = f"{bits} {architecture} {out_features} {in_features}\n".encode()
    process = subprocess.run([layouts], input=head + bytes(indices.flatten().tolist()), capture_output=True, check=True)
    metadata = (OF_CODES if bits == 8 else EQUATIONS)[architecture](indices)
    assert process.stdout == bytes(metadata.tolist())
    assert len(metadata) == cutlass.metadata_bytes(out_features, in_features, architecture)


@pytest.mark.parametrize("equation", [cutlass.metadata_sm90, cutlass_codes.metadata_sm90], ids=["16", "8"])
def test_padding_is_places_that_exist(equation):
    indices = torch.zeros(8, 4, dtype=torch.uint8)
    metadata = equation(indices)
    assert metadata.bincount().nonzero().flatten().tolist() == [0, cutlass.ANY_PLACES]
    assert (metadata == 0).sum() == indices.numel()


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
def test_what_does_not_fit_is_refused_by_its_number(sizes, reason):
    assert cutlass.shape_reason(*sizes) == reason


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
    rows, fits = [], True
    for capability, limit in SHARED_MEMORY.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        prefix = f"sm{cutlass.architecture_of(torch.device('cuda'))}_"
        for name, size in sizes.items():
            if name.startswith(prefix):
                rows.append(f"{capability}: {limit:,} bytes, {name}: {size:,}{' TOO LARGE' * (size > limit)}")
                fits &= size <= limit
    assert fits, "\n".join(rows)


def test_what_begins_anywhere_is_copied():
    tensor = torch.arange(32, dtype=torch.bfloat16)
    assert cutlass.aligned(tensor) is tensor
    copy = cutlass.aligned(tensor[1:])
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, tensor[1:])


@pytest.fixture
def gpus(monkeypatch):
    """cuda:8 is of compute capability 8.0, cuda:9 of 9.0; all tiles of csrc/cutlass are built."""
    built = [path.stem.partition("_") for path in (CHECKOUT / "csrc" / "cutlass").glob("sm[89]0_[0-9]*.cu")]
    tiles = [(int(architecture.removeprefix("sm")), name) for architecture, _, name in built]
    monkeypatch.setattr(cutlass, "_C", SimpleNamespace(tiles=lambda: tiles))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (device.index, 0))


def tiles_for(index: int, *all_rows: int) -> list[str]:
    return [cutlass.tile_for(torch.device("cuda", index), rows) for rows in all_rows]


def test_tiles_grow_with_the_rows_and_all_of_them_exist(gpus):
    assert tiles_for(9, 1, 33, 512, 513) == ["64x32", "64x64", "128x128", "128x256"]
    assert tiles_for(8, 17, 129) == ["64x64", "128x128"]
    for architecture, tiles in cutlass.TILES.items():
        device = torch.device("cuda", architecture // 10)
        assert {tile for _, tile in tiles} <= set(cutlass.built_tiles(device))
    assert cutlass.built_tiles(torch.device("cuda", 8)) == ["128x128", "64x64"]


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def layer_on_gpu():
    """layer_on_gpu(out_features, in_features) -> a packed layer of backend "cutlass"."""

    def build(out_features: int, in_features: int) -> SparseLinear:
        linear = pruned_linear(in_features, out_features, dtype=torch.bfloat16).cuda()
        layer = SparseLinear.from_linear(linear, "cutlass")
        if reason := get_kernel("sparse_linear", "cutlass").supports(linear.weight[:8], layer.values):
            pytest.skip(reason)
        return layer

    return build


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", EQUATIONS)
def test_the_kernel_orders_places_as_the_equation_and_writes_nothing_else(architecture):
    if reason := cuda.missing():
        pytest.skip(reason)
    rows, columns = {80: (32, 64), 90: (8, 16)}[architecture]
    for m, k in itertools.product((1, 3, 8, 17), (1, 2, 5, 16, 41)):
        indices = torch.randint(0, 256, (m * rows, k * columns // 8), dtype=torch.uint8, device="cuda")
        size = cutlass.metadata_bytes(m * rows, k * columns, architecture)
        memory = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device="cuda")
        cuda.cutlass_metadata_(indices, memory[256:-256], architecture)
        assert torch.equal(memory[256:-256], EQUATIONS[architecture](indices)), (m, k)
        assert (memory[:256] == 0xA5).all()
        assert (memory[-256:] == 0xA5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(72, 144), (96, 8192), (4096, 4096)], ids=str)
@torch.no_grad()
def test_every_tile_multiplies_and_twice_the_same(shape, layer_on_gpu, monkeypatch):
    """In the second and third shape stream-K splits in_features."""
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
