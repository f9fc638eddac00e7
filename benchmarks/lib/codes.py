"""Layers with 8 and 4 bits: our packed codes, and on a CPU their peers, torch's dense kernels; NVIDIA's 2:4 product.

A contender is named by its maker and bits or pattern, such as "cpp:8", "gemv:8", "torch:4" or "cpp:6:8". Each
multiplies by its own weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lib.measure import LinearWeights
from torch import Tensor, nn

from proxsparse.inference.linear import SparseLinear
from proxsparse.ops import dequantize_nm, nm_mask, pack_nm, quantize_nm, sparse_linear, unpack_nm
from proxsparse.ops.registry import find_kernel
from proxsparse.ops.sparse_linear import pad_rows
from proxsparse.patterns import WINDOWED
from proxsparse.reference.quantize import CODES

BACKENDS = {"cpu": "cpp", "cuda": "gemv"}  # of our codes
GROUP = 64  # columns with a common scale of torch's 4-bit weights, as in ours


@dataclass
class Contender:
    """Equal copies of a weight in one form, how x is multiplied by it, and the weight that it stands for."""

    copies: list[tuple]
    multiply: Callable[..., Tensor]  # multiply(x, *copy)
    weight: Tensor  # float64, [out_features, in_features]
    serves: Callable[[Tensor], bool] = lambda x: True  # whether it multiplies this x

    @property
    def nbytes(self) -> int:
        """Of one copy."""
        return sum(part.nbytes for part in self.copies[0] if isinstance(part, Tensor))

    def call(self, x: Tensor) -> Callable[[int], Tensor]:
        """place -> x W^T by that copy."""
        return lambda place: self.multiply(x, *self.copies[place])


def contenders(weights: LinearWeights, bits: list[int]) -> dict[str, Contender]:
    """Name -> contender; torch has kernels for the CPU, bfloat16 and sizes that are multiples of 64."""
    found, (values, indices), count = {}, weights.packed[0], len(weights.packed)
    backend = BACKENDS[values.device.type]

    def multiply(x: Tensor, codes: Tensor, indices: Tensor, scales: Tensor) -> Tensor:
        return sparse_linear(x, codes, indices, backend=backend, scales=scales)

    def serves(values: Tensor) -> Callable[[Tensor], bool]:
        kernel = find_kernel("sparse_linear", backend)
        return lambda x: kernel is not None and kernel.supports(x, values) is None

    for pattern in WINDOWED[1:] if 16 in bits else ():
        sigma = weights.dense[0].float().std() / 2  # outputs no larger than those whose rounding is the tolerance
        weight = (torch.randn(weights.shape, device=values.device) * sigma).to(values.dtype)
        weight = torch.where(nm_mask(weight.abs(), pattern), weight, 0.0)
        form = copies(pack_nm(weight, pattern), count)
        of_pattern = partial(sparse_linear, backend=backend, pattern=pattern)
        found[f"{backend}:{pattern}"] = Contender(form, of_pattern, weight.double(), serves(form[0][0]))
    for number in (number for number in bits if number in CODES):
        codes, scales = quantize_nm(values, number)
        exact = unpack_nm(dequantize_nm(codes, scales.double()), indices)
        form = copies((codes, indices, scales), count)
        found[f"{backend}:{number}"] = Contender(form, multiply, exact, serves(codes))
        fits = values.dtype == torch.bfloat16 and all(size % 64 == 0 for size in weights.shape)
        if fits and values.device.type == "cpu":
            form, torch_multiply, exact = PEERS[number](weights.dense[0])
            found[f"torch:{number}"] = Contender(copies(form, count), torch_multiply, exact)
    return found


def copies(form: tuple, count: int) -> list[tuple]:
    """The form and clones of it."""
    return [tuple(part.clone() for part in form) for _ in range(count)]


def dense_8(weight: Tensor) -> tuple:
    """int8 with a scale per row: torch._weight_int8pack_mm."""
    scales = (weight.abs().amax(-1) / 127).to(weight.dtype)
    codes = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return (codes, scales), torch._weight_int8pack_mm, codes.double() * scales.double()[:, None]


def dense_4(weight: Tensor) -> tuple:
    """int4 with a scale per GROUP columns: torch._weight_int4pack_mm_for_cpu."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).to(weight.dtype)
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    exact = (codes.double() * scales.double()[..., None]).flatten(-2)
    packed = torch._convert_weight_to_int4pack_for_cpu((codes + 8).to(torch.int32).flatten(-2), 1)
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()

    def multiply(x: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales_and_zeros)

    return (packed, scales_and_zeros), multiply, exact


def cusparselt(weights: LinearWeights) -> dict[str, Contender]:
    """cuSPARSELt as part of torch, "cusparselt:16"; {} if it cannot multiply by these weights.

    A layer with it would hold the weight in a second format. torch creates the descriptors and the plan of a
    multiplication on the host in every call (ATen, cuSPARSELtOps.cpp), so only a captured CUDA graph shows the speed of
    the kernels. The first call for each number of rows runs all algorithms to find the fastest, which is not possible
    in a capture: call it once before. Sizes are those of torch.sparse.SparseSemiStructuredTensorCUSPARSELT.
    """
    dense = weights.dense[0]
    fits = dense.dtype in (torch.bfloat16, torch.float16) and all(size % 16 == 0 for size in dense.shape)
    fits &= dense.is_cuda and torch.cuda.get_device_capability(dense.device) >= (8, 0)
    if not (fits and torch.backends.cusparselt.is_available()):
        return {}
    algorithms = {}  # rows of x -> arguments of torch._cslt_sparse_mm

    def multiply(x: Tensor, compressed: Tensor) -> Tensor:
        columns = pad_rows(x).t()
        if len(x) not in algorithms:  # torch._cslt_sparse_mm_search does not return the split of in_features
            found = torch._C._cusparselt.mm_search(compressed, columns, None, None, None, True)
            algorithms[len(x)] = dict(zip(("alg_id", "split_k", "split_k_mode"), found, strict=False))
        return torch._cslt_sparse_mm(compressed, columns, transpose_result=True, **algorithms[len(x)])[: len(x)]

    compressed = [(torch._cslt_compress(weight),) for weight in weights.dense]
    return {"cusparselt:16": Contender(compressed, multiply, dense.double())}


def quantize_(model: nn.Module, bits: int) -> nn.Module:
    """Rounds the packed layers of a model to codes, in place."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, SparseLinear):
            model.set_submodule(name, layer.quantized(bits))
    return model


PEERS = {8: dense_8, 4: dense_4}
