"""Magnitude pruning: keeps the largest weights of every block."""

from torch import Tensor

from proxsparse.methods.registry import register_layer_method
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern


@register_layer_method(
    "magnitude", updates_weights=False, paper="Han et al. 2015, Learning both Weights and Connections"
)
def prune_magnitude(weight: Tensor, statistics: None, pattern: NMPattern) -> tuple[Tensor, None]:
    """score_ij = |W_ij|; the n largest scores of every block are kept."""
    return nm_mask(weight.abs(), pattern), None
