"""Checks of packed 2:4 weights: pack_nm and unpack_nm bit for bit, y = x W^T + b of the inference backends in float64.

An inference backend that has kernels of its own is checked where those kernels belong: gemv, cutlass and cusparselt
under "cuda" (so that compute-sanitizer sees them), cpp under "cpp".
"""

import functools
import itertools

import torch
from checking import PATTERNS, Place, Skipped, check, guarded, needs, same_bits
from random_models import random_model
from torch import Tensor

from proxsparse.inference.generate import generate
from proxsparse.inference.linear import SparseLinear
from proxsparse.ops import pack_nm, unpack_nm, use_backend
from proxsparse.ops.backends import cuda, cutlass
from proxsparse.ops.registry import get_kernel
from proxsparse.ops.tuning import use_launch_parameters
from proxsparse.reference import pack

# (out_features, in_features): whole tiles, odd numbers of rows, columns that no 16-byte access fits, one block; the
# layers of a 7B model.
SHAPES = [(1, 4), (7, 12), (33, 260), (65, 320), (129, 1088), (96, 576), (512, 1024), (1000, 4096)]
LARGE = [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (11008, 4096)]
FEW_ROWS, MANY_ROWS = (1, 2, 4, 5, 8, 9, 16), (1, 17, 40, 100, 300, 1000)
DTYPES = (torch.bfloat16, torch.float16)
kernel = functools.partial(get_kernel, "sparse_linear")
MAY_DIFFER = ("cusparselt",)  # NVIDIA's kernels may add the parts of a sum in another order in each call


def shapes_of(place: Place) -> list[tuple[int, int]]:
    """What is tried of weights."""
    on_gpu = place.device.type == "cuda"
    if place.small:
        return SHAPES[:6] + LARGE[:1] * (on_gpu and place.judge)
    return SHAPES + LARGE * on_gpu


def pruned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh random 2:4 weights with 0, 1 and 2 nonzeros in a block, at any places; zeros are +0.0 and -0.0."""
    blocks = torch.randn(*shape[:-1], shape[-1] // 4, 4, device=device)
    count = torch.randint(0, 3, (*blocks.shape[:-1], 1), device=device)
    kept = torch.rand(blocks.shape, device=device).argsort(-1) < count
    zeros = torch.where(torch.rand(blocks.shape, device=device) < 0.1, -0.0, 0.0)
    return torch.where(kept, blocks, zeros).flatten(-2).to(dtype)


# ---------------------------------------------------------------------------------------------- packing


@check("pack_nm")
def round_trip(place: Place) -> str:
    """Packed and unpacked, a weight has its bits: every pattern of 0, -0, a number and NaN; every shape and dtype."""
    numbers = [0.0, -0.0, 1.5, float("nan")]
    every = [block for block in itertools.product(numbers, repeat=4) if sum(w != 0 for w in block) <= 2]
    weights = [torch.tensor(every, dtype=dtype, device=place.device) for dtype in (*DTYPES, torch.float32)]
    weights += [pruned(shape, dtype, place.device) for shape in shapes_of(place) for dtype in (*DTYPES, torch.float32)]
    weights += [pruned((2, 3, 12), torch.float32, place.device), torch.zeros(0, 8, device=place.device)]
    for weight in weights:
        needs(place, "pack_nm", weight, 2, 4)
        with use_backend(place.backend):
            values, indices = pack_nm(weight)
            back = unpack_nm(values, indices)
        expected = pack.pack_nm(weight.nan_to_num(3.0))[1]
        what = f"{weight.dtype} {list(weight.shape)}"
        assert torch.equal(indices, expected), f"{what}: other places than the reference"
        integer = PATTERNS[weight.dtype.itemsize][0]
        kept = weight != 0
        assert torch.equal(back.view(integer)[kept], weight.view(integer)[kept]), f"{what}: a nonzero has changed"
        assert (back[~kept] == 0).all(), f"{what}: a zero has changed"
        assert same_bits(unpack_nm(*pack_nm(back)), back), f"{what}: unpacked, it is not what it was"
    return f"{len(weights)} weights"


@check("pack_nm")
def refuses(place: Place) -> None:
    """Three nonzeros in the last block are an error that names it."""
    for dtype in (*DTYPES, torch.float32):
        weight = pruned((33, 1028), dtype, place.device)
        weight[-1, -3:] = 1
        needs(place, "pack_nm", weight, 2, 4)
        said = None
        try:
            with use_backend(place.backend):
                pack_nm(weight)
        except ValueError as error:
            said = str(error)
        assert said, f"{dtype}: a weight that is not 2:4 was packed"
        assert "block 256 of row" in said, said


@check("sparse_linear", backends=("cuda",))
def cutlass_metadata(place: Place) -> str:
    """The kernel that orders places for CUTLASS writes what the equations say, and nothing beside it."""
    if reason := cuda.missing():
        raise Skipped(reason)
    count = 0
    equations = {80: (cutlass.metadata_sm80, 32, 64), 90: (cutlass.metadata_sm90, 8, 16)}
    for architecture, (equation, rows, columns) in equations.items():
        for m, k in itertools.product((1, 3, 8, 17), (1, 2, 5, 16, 41)):
            indices = torch.randint(0, 256, (m * rows, k * columns // 8), dtype=torch.uint8, device=place.device)
            size = cutlass.metadata_bytes(m * rows, k * columns, architecture)
            memory = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device=place.device)
            cuda.cutlass_metadata_(indices, memory[256 : 256 + size], architecture)
            what = f"sm_{architecture} {m * rows}x{k * columns}"
            assert torch.equal(memory[256 : 256 + size], equation(indices)), f"{what}: other places"
            assert (memory[:256] == 0xA5).all(), f"{what}: wrote before it"
            assert (memory[256 + size :] == 0xA5).all(), f"{what}: wrote behind it"
            count += 1
    return f"{count} shapes"


# ---------------------------------------------------------------------------------------------- multiplying


def check_linear(place: Place, name: str, all_rows: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    """Every shape and number of rows that the backend serves, with and without bias, inputs between NaN.

    Two equal calls must have the same result; for a backend in MAY_DIFFER the number of differences is reported.
    """
    count, differ, reasons = 0, 0, set()
    for shape, dtype in itertools.product(shapes_of(place), dtypes):
        weight = pruned(shape, dtype, place.device)
        values, indices = pack.pack_nm(weight)
        values = guarded(values).tensor
        for rows, with_bias in itertools.product(all_rows, (False, True)):
            x = guarded(torch.randn(rows, shape[1], device=place.device).to(dtype)).tensor
            bias = guarded(torch.randn(shape[0], device=place.device).to(dtype)).tensor if with_bias else None
            if reason := kernel(name).supports(x, values):
                reasons.add(reason)
                continue
            prepared = kernel(name).prepare(values, indices) if kernel(name).prepare else None
            y = kernel(name).run(x, values, indices, bias, prepared)
            what = f"{name} {dtype} {rows}x{shape[1]}x{shape[0]} bias={with_bias}"
            if place.judge:
                judge_linear(y, x, weight, bias, what)
                again = kernel(name).run(x, values, indices, bias, prepared)
                differ += not same_bits(y, again)
                assert not differ or name in MAY_DIFFER, f"{what}: two calls differ"
            count += 1
    if count == 0:
        raise Skipped(next(iter(reasons)))
    return f"{count} products" + f", {differ} of which differ in a second call" * (differ > 0)


def judge_linear(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, what: str) -> None:
    """Raises AssertionError unless y is x W^T + b with sums in fp32, rounded once, with a bias at most twice."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    rounded = exact.abs() if bias is None else exact.abs() + (exact + bias.double()).abs()
    exact = exact if bias is None else exact + bias.double()
    allowed = torch.finfo(y.dtype).eps / 2 * rounded + 1e-5 * magnitude + 1e-6
    error = (y.double() - exact).abs()
    wrong = ~(error <= allowed)
    assert not wrong.any(), (
        f"{what}: {wrong.sum()} of {wrong.numel()} numbers are off, the first at {wrong.nonzero()[0].tolist()}: "
        f"{y[wrong][0]} instead of {exact[wrong][0]}"
    )


def check_graph(place: Place, name: str, rows: int) -> None:
    """A replay of a captured call computes with the present values of its inputs. Left out without `judge`.

    Under a sanitizer memory comes straight from the driver, which a capture does not allow.
    """
    if not place.judge:
        return
    shape, dtype = (512, 1024), torch.bfloat16
    values, indices = pack.pack_nm(pruned(shape, dtype, place.device))
    x, bias = torch.randn(rows, shape[1], device=place.device).to(dtype), torch.randn(shape[0], device=place.device)
    bias = bias.to(dtype)
    if reason := kernel(name).supports(x, values):
        raise Skipped(reason)
    prepared = kernel(name).prepare(values, indices) if kernel(name).prepare else None
    kernel(name).run(x, values, indices, bias, prepared)  # what happens once happens here
    torch.cuda.synchronize(place.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(name).run(x, values, indices, bias, prepared)
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected = kernel(name).run(x, values, indices, bias, prepared)
        if name in MAY_DIFFER:
            judge_linear(y, x, unpack_nm(values, indices), bias, f"{name}: a replay")
        else:
            assert same_bits(y, expected), f"{name}: a replay differs"


@check("sparse_linear", backends=("cpp",))
def cpp(place: Place) -> str:
    """Few rows and many, in float32 and bfloat16."""
    return check_linear(place, "cpp", (1, 5, 100), (torch.float32, torch.bfloat16))


@check("sparse_linear", backends=("cuda",))
def gemv(place: Place) -> str:
    """1 to 16 rows."""
    said = check_linear(place, "gemv", (1, 5, 9, 16) if place.small else FEW_ROWS, DTYPES)
    for rows in (1,) if place.small else FEW_ROWS:
        check_graph(place, "gemv", rows)
    return said


@check("sparse_linear", backends=("cuda",))
def gemv_dependent(place: Place) -> None:
    """Each call of a chain launched before the one before it has ended, also in a CUDA graph: the same bits."""
    if not place.judge:
        raise Skipped("a capture is not for sanitizers")
    size, calls = 1024, 8
    values, indices = pack.pack_nm(pruned((size, size), torch.bfloat16, place.device) / 16)
    for rows in (1, 16):
        x = torch.randn(rows, size, device=place.device).bfloat16()
        if reason := kernel("gemv").supports(x, values):
            raise Skipped(reason)

        def chain(y: Tensor = x) -> Tensor:
            for _ in range(calls):
                y = kernel("gemv").run(y, values, indices, None, None)
            return y

        expected = chain()
        torch.cuda.synchronize(place.device)  # nothing may still write the weights
        with cuda.dependent_launch():
            assert same_bits(chain(), expected), f"{rows} rows: dependent launch changes the result"
            torch.cuda.synchronize(place.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = chain()
        for _ in range(20):
            x.normal_()
            graph.replay()
            assert same_bits(y, chain()), f"{rows} rows: a replay of dependent launches differs"


@check("sparse_linear", backends=("cuda",))
def gemv_compiled(place: Place) -> None:
    """`SparseLinear` under torch.compile, without a graph break, and under its CUDA graphs."""
    if place.small:
        raise Skipped("to compile takes its time: without --small")
    linear = torch.nn.Linear(1024, 512, device=place.device, dtype=torch.bfloat16)
    linear.weight.data = pruned((512, 1024), torch.bfloat16, place.device)
    x = torch.randn(2, 3, 1024, device=place.device, dtype=torch.bfloat16)
    layer = SparseLinear.from_linear(linear, "gemv")
    if reason := kernel("gemv").supports(x.view(6, 1024), layer.values):
        raise Skipped(reason)
    with torch.no_grad():
        for mode in (None, "reduce-overhead"):
            compiled = torch.compile(layer, fullgraph=True, mode=mode)
            for _ in range(3):
                assert same_bits(compiled(x), layer(x)), f"mode={mode}: compiled, it differs"


@check("sparse_linear", backends=("cuda",))
def cutlass_tiles(place: Place) -> str:
    """Every tile that was built for this GPU, and the one that is chosen by default."""
    counts, reasons = [], set()
    for tile in (None, *tiles(place.device)):
        with use_launch_parameters("cutlass", **({"tile": tile} if tile else {})):
            try:
                counts.append(f"{tile or 'chosen'}: {check_linear(place, 'cutlass', rows_of_tiles(place), DTYPES)}")
            except Skipped as reason:
                reasons.add(str(reason))
    if not counts:
        raise Skipped(next(iter(reasons)))
    for rows in (40,) if place.small else MANY_ROWS:
        check_graph(place, "cutlass", rows)
    return "; ".join(counts)


def tiles(device: torch.device) -> list[str]:
    """The names of CUTLASS's tiles for this GPU."""
    return cutlass.built_tiles(device) if device.type == "cuda" else []


def rows_of_tiles(place: Place) -> tuple[int, ...]:
    """Less than a tile, several tiles, and numbers that no tile divides."""
    return (1, 40, 300) if place.small else MANY_ROWS


@check("sparse_linear", backends=("cuda",))
def cusparselt(place: Place) -> str:
    """torch's own."""
    if not place.judge:
        raise Skipped("sanitizers check only the kernels of this project")
    said = check_linear(place, "cusparselt", (17,) if place.small else (1, 17, 300), DTYPES)
    check_graph(place, "cusparselt", 64)
    return said


@check("sparse_linear", backends=("cuda",))
def decode_graph(place: Place) -> str:
    """A tiny model of packed layers: decoding with a CUDA graph gives the tokens of eager decoding."""
    if not place.judge:
        raise Skipped("a capture cannot run under a sanitizer")
    prompts = torch.randint(256, (2, 8), device=place.device)
    model = random_model("tiny", None, torch.bfloat16, place.device, sparse=True)
    eager, graph = (generate(model, prompts, 8, cuda_graph=cuda_graph) for cuda_graph in (False, True))
    assert torch.equal(eager, graph), f"eager {eager[:, 8:].tolist()}, graph {graph[:, 8:].tolist()}"
    return "8 tokens of 2 prompts"
