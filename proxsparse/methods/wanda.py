"""Wanda: magnitude times the norm of the input feature."""

from torch import Tensor

from proxsparse.methods.registry import register_layer_method
from proxsparse.models.feature_norms import FeatureNorms
from proxsparse.ops.mask import nm_mask
from proxsparse.patterns import NMPattern


@register_layer_method(
    "wanda",
    updates_weights=False,
    paper="Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models",
    statistics=FeatureNorms,
)
def prune_wanda(weight: Tensor, statistics: FeatureNorms, pattern: NMPattern) -> tuple[Tensor, None]:
    """score_ij = |W_ij| * ||X_j||_2; the n largest scores of every block are kept."""
    norms = statistics.norms()
    return nm_mask(weight.abs().to(norms.dtype) * norms, pattern), None
