"""Every mask of 2:4, 4:6, 6:8, 8:10 can be dealt to 2:4 windows, and the product stays the same."""

from itertools import combinations

import pytest
import torch

from proxsparse import NMPattern
from proxsparse.reference.windows import deal, expand, expanded_features, fold


@pytest.mark.parametrize("m", [4, 6, 8, 10, 12])
def test_every_mask_can_be_dealt_and_folded_back(m):
    masks = [[i in kept for i in range(m)] for n in range(m - 1) for kept in combinations(range(m), n)]
    weight = torch.where(torch.tensor(masks), torch.randn(len(masks), m), 0.0)
    dealt = deal(weight, m)
    assert NMPattern(2, 4).is_feasible(dealt)
    assert torch.equal(fold(dealt, m, m), weight)


# sizes of SmolLM2, Qwen2.5-0.5B, Llama-7B and Mistral; most are no multiple of 6 or 10
@pytest.mark.parametrize("in_features", [22, 130, 576, 896, 4096, 5632, 11008, 14336])
@pytest.mark.parametrize("m", [4, 6, 8, 10])
def test_the_product_is_the_same_with_a_dense_remainder(m, in_features):
    weight, x = torch.randn(3, in_features, dtype=torch.float64), torch.randn(2, 2, in_features, dtype=torch.float64)
    blocks = NMPattern(m - 2, m).blocks(weight)
    blocks.scatter_(-1, blocks.abs().topk(2, largest=False).indices, 0.0)
    dealt = deal(weight, m)
    width = expanded_features(in_features, m)
    assert dealt.shape[-1] == expand(x, m).shape[-1] == width
    assert width <= (in_features * (2 - 4 / m) + 2 * (m - 2)) * 33 / 32
    assert NMPattern(2, 4).is_feasible(dealt)
    torch.testing.assert_close(expand(x, m) @ dealt.T, x @ weight.T)
    assert torch.equal(fold(dealt.bfloat16(), in_features, m), weight.bfloat16())


@pytest.mark.parametrize(("m", "in_features"), [(4, 64), (6, 96), (8, 128), (10, 160)])
def test_parts_of_whole_blocks_without_padding_are_packed_as_in_the_whole_row(m, in_features):
    """So tensor-parallel processes take slices of the packed columns."""
    weight = torch.randn(3, 2 * in_features)
    blocks = NMPattern(m - 2, m).blocks(weight)
    blocks.scatter_(-1, blocks.abs().topk(2, largest=False).indices, 0.0)
    assert expanded_features(in_features, m) == in_features // m * (2 * m - 4)
    assert torch.equal(torch.cat([deal(part, m) for part in weight.split(in_features, 1)], 1), deal(weight, m))


def test_a_block_with_too_many_weights_is_named():
    weight = torch.zeros(2, 16)
    weight[1, 8:15] = 1
    with pytest.raises(ValueError, match=r"1 of 4 blocks have more than 6 .*row 1"):
        deal(weight, 8)
