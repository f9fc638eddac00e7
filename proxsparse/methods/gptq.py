"""GPTQ under a mask: rounds the kept weights to codes column by column, and lets later columns compensate the error.

Not a pruning method: `proxsparse pack --calibrate` calls it for a model that is pruned already.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxsparse.errors import InputError
from proxsparse.methods.sparsegpt import InputGram, compensate_, inverse_factor
from proxsparse.methods.walk import Batches, walk
from proxsparse.ops import pack_nm, quantize_nm, unpack_nm
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.reference import quantize
from proxsparse.reference.pack import PATTERN, unpack_places
from proxsparse.reference.windows import expand
from proxsparse.runtime.device import full_precision

DAMPING = 0.01
Codes = tuple[Tensor, Tensor, Tensor]  # codes, scales, indices


@torch.no_grad()
def quantize_layers_(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: Batches,
    bits: int,
    dtypes: dict[str, torch.dtype],
    patterns: dict[str, NMPattern],
) -> dict[str, Codes]:
    """Rounds the layers of every decoder block in order; the weights become those that the codes stand for.

    Args:
        dtypes: layer name -> dtype of the weight in the packed checkpoint, which may be narrower than here.
    Returns:
        Layer name -> codes, scales and indices, on the CPU; scales as `quantize_nm` gives them for that dtype.
    Raises:
        InputError: the Hessian of a layer's inputs is not positive definite, or a weight overflows its dtype as it
            compensates the rounding of others; names the layer.
    """
    found = {}

    def visit(collected: dict) -> None:
        for name, statistics in collected.items():
            layer, pattern = layers[name], patterns[name]
            try:
                with full_precision(layer.weight):
                    codes, scales, indices = quantize_weight(layer.weight, statistics, bits, dtypes[name], pattern)
            except ValueError as error:
                raise InputError(f"{name}: {error}") from error
            values = torch.ops.proxsparse.dequantize_nm(codes, scales)
            layer.weight.copy_(unpack_nm(values, indices, pattern, layer.in_features))
            found[name] = codes.cpu(), scales.cpu(), indices.cpu()

    walk(model, layers, batches, InputGram, visit, f"rounding to {bits} bits")
    return found


def quantize_weight(
    weight: Tensor, statistics: InputGram, bits: int, dtype: torch.dtype, pattern: PatternLike = "2:4"
) -> Codes:
    """For every column j in order, with U^T U = H^-1 (U upper triangular), code_j = round(w_j / s), and 0 if pruned:

        e = (w_j - code_j s) / U_jj;   w_k <- w_k - e U_jk for all k > j

    The scale s of 8 bits is that of the row; that of 4 bits is selected when its first column is reached, for its kept
    weights as updated so far (`reference.quantize`). Source: Frantar et al. 2022, GPTQ; the mask is ours.

    Args:
        weight: [out_features, in_features], with the pattern.
        statistics: of the layer's inputs.
        bits: 8 or 4.
        dtype: of the packed weight, which decides about the dtype of its scales.
        pattern: 2:4, 4:6, 6:8, ...
    Returns:
        codes [out_features, k] of 8 bits or half as many bytes of 4 bits, their scales, the indices, as of `pack_nm`.
    Raises:
        InputError: the Hessian is not positive definite.
        ValueError: the weight does not have the pattern, or a weight has no code, see `quantize_nm`.
    """
    m, in_features = NMPattern.parse_windowed(pattern).m, weight.shape[1]
    values, indices = pack_nm(weight.to(dtype), pattern)
    scales = quantize_nm(values, bits)[1]
    packed = expand(torch.arange(1, in_features + 1, device=weight.device), m) - 1  # -1: a column of zeros
    windows = torch.arange(values.shape[-1], device=weight.device) // PATTERN.n
    column = packed[unpack_places(indices, values.shape[-1]).long() + PATTERN.m * windows]  # [out_features, k]
    if m > PATTERN.m:  # the column of a 0 may have its weight in the next window
        column = torch.where(values != 0, column, -1)
    column = torch.where(column < 0, in_features, column)  # the last of one column more, for values without a weight
    hessian = statistics.hessian()
    hessian.diagonal()[hessian.diagonal() == 0] = 1  # features that are 0 in every token
    updated, factor = weight.to(hessian.dtype, copy=True), inverse_factor(hessian, DAMPING, "raise --num_samples")
    codes = updated.new_zeros(len(updated), in_features + 1)
    kept = torch.zeros_like(codes, dtype=torch.bool).scatter_(1, column, True)
    scale = torch.zeros_like(codes) + (scales.to(codes.dtype) if bits == 8 else 0)
    smallest, largest = (-quantize.LARGEST, quantize.LARGEST) if bits == 8 else (-8, 7)
    groups = dict(zip(packed[:: 2 * quantize.GROUP].tolist(), column.split(quantize.GROUP, 1), strict=True))

    def rounded(j: int) -> Tensor:
        if bits == 4 and j in groups:
            of_group = functional.pad(updated, (0, 1)).gather(1, groups[j])
            new = quantize_nm(of_group.to(values.dtype), bits)[1]
            scales[:, list(groups).index(j)] = new[:, 0]
            scale.scatter_(1, groups[j], new.to(scale.dtype).expand_as(groups[j]))
        code = quantize.rounded(updated[:, j], scale[:, j], smallest, largest)
        codes[:, j] = torch.where(kept[:, j], code, 0)
        return codes[:, j] * scale[:, j]

    compensate_(updated, factor, rounded)
    codes = codes.gather(1, column)
    return codes.to(torch.int8) if bits == 8 else quantize.pack_codes(codes), scales, indices
