"""GPTQ under a mask: the error of a layer's output is smaller than with rounding to nearest, and zeros stay zeros."""

import pytest
import torch
from layer_cases import correlated_inputs
from pruned import pruned_linear
from torch.nn.functional import linear

from proxsparse.errors import InputError
from proxsparse.methods.gptq import quantize_weight
from proxsparse.methods.sparsegpt import InputGram
from proxsparse.ops import dequantize_nm, pack_nm, quantize_nm, unpack_nm

BITS = pytest.mark.parametrize("bits", [8, 4])


@BITS
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8", "8:10"])
@pytest.mark.parametrize("in_features", [64, 142, 264])
def test_a_smaller_error_of_the_output_than_to_nearest(bits, in_features, pattern):
    layer, inputs = pruned_linear(in_features, 32, pattern=pattern), correlated_inputs(600, in_features, torch.float32)
    statistics = InputGram(layer)
    statistics.add(inputs)
    weight = layer.weight.detach()
    codes, scales, indices = quantize_weight(weight, statistics, bits, weight.dtype, pattern)
    values, expected_indices = pack_nm(weight, pattern)
    assert torch.equal(indices, expected_indices)
    rounded, nearest = (
        unpack_nm(dequantize_nm(*found), indices, pattern, in_features)
        for found in ((codes, scales), quantize_nm(values, bits))
    )
    assert (rounded[weight == 0] == 0).all()
    error, of_nearest = (linear(inputs, weight - other).square().sum() for other in (rounded, nearest))
    assert error < 0.8 * of_nearest


@BITS
def test_features_without_input_and_unfinished_groups(bits):
    """With the identity as the Hessian nothing is compensated: the result is that of rounding to nearest."""
    layer = pruned_linear(36, 5)
    statistics = InputGram(layer)
    statistics.add(torch.eye(36))
    found = quantize_weight(layer.weight.detach(), statistics, bits, layer.weight.dtype)
    values, indices = pack_nm(layer.weight.detach())
    for tensor, expected in zip(found, (*quantize_nm(values, bits), indices), strict=True):
        assert torch.equal(tensor, expected)


def test_the_remedy_for_an_indefinite_hessian_is_a_flag_of_pack():
    layer = pruned_linear(64, 8)
    statistics = InputGram(layer)
    statistics.tokens, statistics.sums = 1, -torch.eye(64)
    with pytest.raises(InputError, match=r"positive definite .*; raise --num_samples"):
        quantize_weight(layer.weight.detach(), statistics, 8, layer.weight.dtype)
