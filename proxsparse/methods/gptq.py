"""GPTQ under a mask: rounds the kept weights to codes column by column, and lets later columns compensate the error.

Not a pruning method: `proxsparse pack --calibrate` calls it for a model that is 2:4 already.
"""

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.methods.sparsegpt import InputGram, inverse_factor
from proxsparse.methods.walk import Batches, full_precision, walk
from proxsparse.ops import pack_nm, quantize_nm
from proxsparse.ops.sparse_linear import PATTERN
from proxsparse.reference import quantize
from proxsparse.reference.pack import unpack_places

DAMPING = 0.01
CHUNK = 128  # columns after which the rest of the matrix is updated; affects only the speed
Codes = tuple[Tensor, Tensor, Tensor]  # codes, scales, indices


@torch.no_grad()
def quantize_layers_(
    model: nn.Module, layers: dict[str, nn.Linear], batches: Batches, bits: int, dtypes: dict[str, torch.dtype]
) -> dict[str, Codes]:
    """Rounds the layers of every decoder block in order; the weights become those that the codes stand for.

    Args:
        layers: 2:4 layers by name, in the decoder blocks.
        batches: calibration text.
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
            layer = layers[name]
            try:
                with full_precision(layer.weight):
                    codes, scales, indices = quantize_weight(layer.weight, statistics, bits, dtypes[name])
            except ValueError as error:
                raise InputError(f"{name}: {error}") from error
            values = torch.ops.proxsparse.dequantize_nm(codes, scales)
            layer.weight.copy_(torch.ops.proxsparse.unpack_nm(values, indices, PATTERN.n, PATTERN.m))
            found[name] = codes.cpu(), scales.cpu(), indices.cpu()

    walk(model, layers, batches, InputGram, visit, f"rounding to {bits} bits")
    return found


def quantize_weight(weight: Tensor, statistics: InputGram, bits: int, dtype: torch.dtype) -> Codes:
    """For every column j in order, with U^T U = H^-1 (U upper triangular), code_j = round(w_j / s), and 0 if pruned:

        e = (w_j - code_j s) / U_jj;   w_k <- w_k - e U_jk for all k > j

    The scale s of 8 bits is that of the row; that of 4 bits is selected when its first column is reached, for the kept
    weights as updated so far (`reference.quantize`). Source: Frantar et al. 2022, GPTQ; the mask is ours.

    Args:
        weight: [out_features, in_features], 2:4.
        statistics: of the layer's inputs.
        bits: 8 or 4.
        dtype: of the packed weight, which decides about the dtype of its scales.
    Returns:
        codes [out_features, in_features / 2] of 8 bits or half as many bytes of 4 bits, their scales, the indices.
    Raises:
        InputError: the Hessian is not positive definite.
        ValueError: the weight is not 2:4, or a weight has no code, see `quantize_nm`.
    """
    values, indices = pack_nm(weight.to(dtype))
    scales = quantize_nm(values, bits)[1]
    places = unpack_places(indices, values.shape[-1]).long().unflatten(-1, (-1, PATTERN.n))
    kept = (
        torch.zeros_like(weight, dtype=torch.bool).unflatten(-1, (-1, PATTERN.m)).scatter_(-1, places, True).flatten(-2)
    )
    hessian = statistics.hessian()
    hessian.diagonal()[hessian.diagonal() == 0] = 1  # features that are 0 in every token
    updated, factor = weight.to(hessian.dtype, copy=True), inverse_factor(hessian, DAMPING, "raise --num_samples")
    codes, scale = torch.zeros_like(updated), scales.to(updated.dtype)
    group, smallest = (weight.shape[1], -quantize.LARGEST) if bits == 8 else (2 * quantize.GROUP, -8)
    for start in range(0, weight.shape[1], CHUNK):
        stop = min(start + CHUNK, weight.shape[1])
        errors = updated.new_zeros(len(updated), stop - start)
        for j in range(start, stop):
            if bits == 4 and j % group == 0:
                columns = slice(j, j + group)
                here = updated[:, columns][kept[:, columns]].view(len(updated), -1)
                scales[:, j // group] = quantize_nm(here.to(values.dtype), bits)[1][:, 0]
                scale = scales[:, j // group, None].to(updated.dtype)
            column = updated[:, j, None]
            code = quantize.rounded(column, scale, smallest, -smallest if bits == 8 else 7)
            codes[:, j] = torch.where(kept[:, j, None], code, 0)[:, 0]
            error = (updated[:, j] - codes[:, j] * scale[:, 0]) / factor[j, j]
            errors[:, j - start] = error
            updated[:, j + 1 : stop] -= torch.outer(error, factor[j, j + 1 : stop])
        updated[:, stop:] -= errors @ factor[start:stop, stop:]
    of_kept = codes.unflatten(-1, (-1, PATTERN.m)).gather(-1, places).flatten(-2)
    return of_kept.to(torch.int8) if bits == 8 else quantize.pack_codes(of_kept), scales, indices
