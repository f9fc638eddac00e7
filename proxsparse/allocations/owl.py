"""OWL: decoder blocks with many outliers keep more weights."""

import torch
from torch import Tensor, nn

from proxsparse.allocations.budget import Layers, mean_over_weights, relative
from proxsparse.errors import require
from proxsparse.methods.walk import Batches, walk
from proxsparse.models.feature_norms import FeatureNorms
from proxsparse.patterns import NMPattern


def check_owl(outlier_factor: float, spread: float) -> None:
    """Raises InputError for an option out of range."""
    require("outlier_factor", outlier_factor, outlier_factor > 0, "a finite number > 0")
    require("spread", spread, spread > 0, "a finite number > 0")


def owl_targets(
    model: nn.Module,
    blocks: list[Layers],
    batches: Batches,
    pattern: NMPattern,
    *,
    outlier_factor: float = 6.0,
    spread: float = 2.0,
) -> list[float]:
    """Decoder blocks with many outliers keep more weights (N:M as in the authors' code):

        LOD_b = share of the decoder block's weights with A_ij > outlier_factor * mean(A),   A_ij = |W_ij| * ||X_j||_2
        r_b = spread * (LOD_b - min LOD) / (max LOD - min LOD);   target_b = n + r_b - mean(r)

    X are the inputs in the dense model. The means are over weights: mean(A) of one decoder block, mean(r) of all.

    Args:
        outlier_factor: an outlier is larger than this multiple of the mean (M of the paper). It is 6 in the authors'
            N:M example and 5 in most of their unstructured examples.
        spread: the largest target minus the smallest, in weights per block of m (Lamda in the authors' code). Their
            default 0.08 is for unstructured sparsity; here all targets would round to n. With 2, as in their N:M
            example, at least one target differs from n by 1 or more.
    """
    layers, shares = {name: layer for block in blocks for name, layer in block.items()}, []

    def visit(statistics: dict[str, FeatureNorms]) -> None:
        scores = [(layers[name].weight.abs() * norms.norms()).float() for name, norms in statistics.items()]
        shares.append(outlier_share(scores, outlier_factor))

    walk(model, layers, batches, FeatureNorms, visit, "owl")
    extra = spread * relative(shares)
    return (pattern.n + extra - mean_over_weights(extra, blocks)).tolist()


def outlier_share(scores: list[Tensor], factor: float) -> float:
    """The share of all scores that exceed `factor` times their mean."""
    count = sum(score.numel() for score in scores)
    mean = sum(score.sum(dtype=torch.float64) for score in scores) / count
    return sum((score > factor * mean).sum().item() for score in scores) / count
