"""Magnitude pruning: the largest weights of a block stay."""

from torch import Tensor

from proxsparse.methods.registry import register_layer_method
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern


@register_layer_method(
    "magnitude", updates_weights=False, paper="Han et al. 2015, Learning both Weights and Connections"
)
def prune_magnitude(weight: Tensor, statistics: None, pattern: NMPattern) -> tuple[Tensor, None]:
    """score_ij = |W_ij|; the n largest of every block stay.

    Args:
        weight: [out_features, in_features].
    Returns:
        mask, bool, the shape of `weight`; None: the weights stay.
    """
    return nm_mask(weight.abs(), pattern), None
