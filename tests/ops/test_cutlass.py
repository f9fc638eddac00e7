"""The backend `cutlass` without a GPU: its metadata against CUTLASS's own layouts, and what it refuses."""

import contextlib
import importlib.util
import itertools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.on_each_backend import OnGPU
from pruned import assert_as_good_as_dense, pruned_linear, pruned_weight, quantized

from proxsparse import SparseLinear
from proxsparse.ops import tuning
from proxsparse.ops.backends import cuda, cutlass, cutlass_int8
from proxsparse.ops.registry import get_kernel
from proxsparse.reference.pack import unpack_nm

CHECKOUT = Path(__file__).parents[2]
PROGRAM = CHECKOUT / "tests" / "ops" / "cuda_on_cpu" / "cutlass_layouts.cu"
EQUATIONS = {80: cutlass.metadata_sm80, 90: cutlass.metadata_sm90}
INT8 = 8  # of architectures: codes of 8 bits on sm_80
SHAPES = {
    INT8: [(32, 128), (96, 384)],
    80: [(32, 64), (96, 320), (256, 1024)],
    90: [(64, 128), (128, 384), (8, 16), (72, 144), (200, 1600)],
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A program that orders indices by the functions and layouts of CUTLASS's headers."""
    if not shutil.which("nvcc") or not (package := importlib.util.find_spec("cutlass_library")):
        pytest.skip("nvcc or nvidia-cutlass is not installed")
    source = Path(package.origin).parent / "source"
    program = tmp_path_factory.mktemp("cutlass") / "layouts"
    folders = [f"-I{source / folder}" for folder in ("include", "tools/util/include")]
    command = ["nvcc", "-std=c++17", "-O0", "-w", "-arch=sm_90", *folders, PROGRAM, "-o", program]
    subprocess.run(command, check=True, capture_output=True)
    return program


@pytest.mark.parametrize(("architecture", "shape"), [(a, shape) for a in SHAPES for shape in SHAPES[a]], ids=str)
def test_metadata_is_that_of_the_headers(architecture, shape, layouts):
    out_features, in_features = shape
    indices = torch.randint(0, 256, (out_features, in_features // 8), dtype=torch.uint8)
    head = f"{architecture} {out_features} {in_features}\n".encode()
    process = subprocess.run([layouts], input=head + bytes(indices.flatten().tolist()), capture_output=True, check=True)
    metadata = (cutlass_int8.metadata_int8 if architecture == INT8 else EQUATIONS[architecture])(indices)
    assert process.stdout == bytes(metadata.tolist())
    if architecture != INT8:
        assert len(metadata) == cutlass.metadata_bytes(out_features, in_features, architecture)


def test_padding_is_places_that_exist():
    indices = torch.zeros(8, 2, dtype=torch.uint8)
    metadata = cutlass.metadata_sm90(indices)
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


def test_what_begins_anywhere_is_copied():
    tensor = torch.arange(32, dtype=torch.bfloat16)
    assert cutlass.aligned(tensor) is tensor
    copy = cutlass.aligned(tensor[1:])
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, tensor[1:])


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """cuda:8 is of compute capability 8.0, cuda:9 of 9.0; all tiles of csrc/cutlass are built, none was measured."""
    built = [path.stem.partition("_") for path in (CHECKOUT / "csrc" / "cutlass").glob("sm*_*.cu")]
    tiles = [(int(architecture.removeprefix("sm")), name) for architecture, _, name in built]
    monkeypatch.setattr(cutlass, "_C", SimpleNamespace(tiles=lambda: tiles))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (device.index, 0))
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "absent.json")
    tuning.forget()
    yield
    tuning.forget()
    tuning.device_kind.cache_clear()


def tiles_for(index: int, *all_rows: int, shape: tuple[int, int] = (4096, 4096)) -> list[str]:
    return [cutlass.tile_for(torch.device("cuda", index), *shape, rows) for rows in all_rows]


def test_tiles_grow_with_the_rows_and_all_of_them_exist(gpus):
    assert tiles_for(9, 1, 33, 512, 513) == ["64x32", "64x64", "128x128", "128x256"]
    assert tiles_for(8, 17, 129) == ["64x64", "128x128"]
    for architecture, tiles in cutlass.TILES.items():
        device = torch.device("cuda", architecture // 10)
        assert {tile for _, tile in tiles} <= set(cutlass.built_tiles(device))
    assert cutlass.built_tiles(torch.device("cuda", 8)) == ["128x128", "64x64"]


def test_the_tile_that_was_measured_is_taken_if_it_was_built(gpus, tuned):
    sizes = {"4096x4096x64": "128x64_streamk", "4096x4096x512": "128x128", "14336x4096x64": "of another version"}
    tuned("cutlass bfloat16", {size: {"tile": tile} for size, tile in sizes.items()}, "sm_90")
    assert tiles_for(9, 17, 100, 300) == ["128x64_streamk", "128x64_streamk", "128x128"]
    assert tiles_for(9, 64, shape=(14336, 4096)) == ["64x64"]
    assert tiles_for(8, 64) == ["64x64"]
    with tuning.use_launch_parameters("cutlass", tile="64x32"):
        assert tiles_for(9, 100, 5000) == ["64x32", "64x32"]


# ------------------------------------------------------------------------------------------ codes of 8 bits


def exact_int8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """With x rounded to codes, in float64."""
    codes, scales = cutlass_int8.quantize_rows(x)
    return torch.nn.functional.linear(codes.double() * scales.double()[:, None], weight, bias)


def test_rows_are_rounded_to_the_nearest_code():
    x = torch.cat([torch.randn(5, 64), torch.zeros(1, 64)]).bfloat16()
    codes, scales = cutlass_int8.quantize_rows(x)
    assert codes.abs().amax(-1).tolist() == [127] * 5 + [0]
    assert ((codes * scales[:, None] - x.float()).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_what_int8_hands_to_the_kernel(with_bias, monkeypatch):
    """Rows are padded to 8, and y^T is turned; the metadata are those of the indices."""
    codes, indices, scales, weight = quantized(pruned_weight((96, 384), torch.bfloat16), 8)
    tiles = []

    def gemm_int8(tile, values, metadata, w_scales, x, x_scales, bias, y, stream):
        tiles.append((tile, len(x)))
        assert torch.equal(metadata, cutlass_int8.metadata_int8(indices))
        product = (x.double() @ unpack_nm(values.double(), indices).T) * x_scales[:, None] * w_scales.double().T
        y.copy_((product if bias is None else product + bias).T)

    monkeypatch.setattr(cutlass, "_C", SimpleNamespace(gemm_int8=gemm_int8))
    monkeypatch.setattr(cutlass_int8, "missing", lambda x, values: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    bias = torch.randn(96).bfloat16() if with_bias else None
    for rows in (1, 13, 200):
        x = torch.randn(rows, 384).bfloat16()
        y = cutlass_int8.sparse_linear_int8(x, codes, indices, scales, bias)
        exact = exact_int8(x, weight, None if bias is None else bias.double())
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), exact, rtol=4e-3, atol=1e-4)
    assert tiles == [("64x64", 8), ("64x64", 16), ("128x128", 200)]


def test_what_int8_does_not_support_is_named(monkeypatch):
    monkeypatch.setattr(cutlass, "missing", lambda: None)
    monkeypatch.setattr(cutlass, "_C", SimpleNamespace())
    assert "another version" in cutlass_int8.missing(OnGPU(17, 384), OnGPU(96, 192, torch.int8))
    monkeypatch.setattr(cutlass, "_C", SimpleNamespace(gemm_int8=None))
    serves = lambda x, codes: cutlass_int8.missing(OnGPU(*x), OnGPU(*codes))  # noqa: E731
    assert serves((17, 384), (96, 192, torch.int8)) is None
    assert "codes of torch.int8" in serves((17, 384), (96, 192, torch.bfloat16))
    for x, out_features in (((17, 320), 96), ((17, 384), 100), ((0, 384), 96)):
        assert "multiples of 32 output features and 128" in serves(x, (out_features, x[1] // 2, torch.int8))
    with pytest.raises(RuntimeError, match="supports only CUDA GPUs"):
        cutlass_int8.sparse_linear_int8(torch.ones(1, 128), torch.ones(32, 64), None, None)


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(96, 384), (160, 1152), (4096, 4096)], ids=str)
def test_products_of_codes_of_8_bits(shape):
    """Sums of codes are exact, so the error is that of scales in fp32 and of one rounding."""
    codes, indices, scales, weight = (part.cuda() for part in quantized(pruned_weight(shape, torch.bfloat16), 8))
    bias = torch.randn(shape[0], device="cuda").bfloat16()
    for rows in (1, 17, 100, 129, 600):
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        if reason := cutlass_int8.missing(x, codes):
            pytest.skip(reason)
        for added in (None, bias):
            y = cutlass_int8.sparse_linear_int8(x, codes, indices, scales, added)
            exact = exact_int8(x, weight, None if added is None else added.double())
            torch.testing.assert_close(y.double(), exact, rtol=4e-3, atol=1e-4)


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
def test_every_tile_multiplies_and_twice_the_same(shape, layer_on_gpu):
    """In the second and third shape stream-K splits in_features."""
    layer = layer_on_gpu(*shape)
    for tile in cutlass.built_tiles(layer.values.device):
        with tuning.use_launch_parameters("cutlass", tile=tile):
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
