"""Wanda: magnitude times the norm of the input feature."""

import torch
from torch import Tensor, nn

from proxsparse.methods.registry import register_layer_method
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern


class FeatureNorms:
    """||X_j||_2 of every input feature j of a layer, over all calibration tokens."""

    def __init__(self, layer: nn.Linear):
        self.tokens = 0
        self.sums = layer.weight.new_zeros(
            layer.in_features, dtype=torch.promote_types(layer.weight.dtype, torch.float32)
        )

    def add(self, inputs: Tensor) -> None:
        """inputs: [tokens, in_features]"""
        self.tokens += len(inputs)
        self.sums += inputs.to(self.sums.dtype).square().sum(0)

    def norms(self) -> Tensor:
        """[in_features]"""
        return self.sums.sqrt()


@register_layer_method(
    "wanda",
    updates_weights=False,
    paper="Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models",
    statistics=FeatureNorms,
)
def prune_wanda(weight: Tensor, statistics: FeatureNorms, pattern: NMPattern) -> tuple[Tensor, None]:
    """score_ij = |W_ij| * ||X_j||_2; the n largest scores of every block are kept.

    Args:
        weight: [out_features, in_features].
        statistics: the norms of the layer's calibration inputs.
    Returns:
        mask, bool, the shape of `weight`; None: the weights are unchanged.
    """
    norms = statistics.norms()
    return nm_mask(weight.abs().to(norms.dtype) * norms, pattern), None
