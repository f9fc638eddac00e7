"""OWL: more weights for decoder blocks with many outliers."""

import torch
from torch import Tensor, nn

from proxsparse.allocations.budget import Layers, check_choice, mean_over_weights, merge_layers, relative
from proxsparse.allocations.registry import register_allocation
from proxsparse.errors import require
from proxsparse.methods.walk import Batches, walk
from proxsparse.methods.wanda import FeatureNorms
from proxsparse.patterns import NMPattern


def check_owl(outlier_factor: float, spread: float) -> None:
    """Raises InputError for an option out of range."""
    require("outlier_factor", outlier_factor, outlier_factor > 0, "a finite number > 0")
    require("spread", spread, spread > 0, "a finite number > 0")


@register_allocation(
    "owl",
    needs_data=True,
    paper="Yin et al. 2024, Outlier Weighed Layerwise Sparsity (OWL): A Missing Secret Sauce for Pruning LLMs",
    check=check_owl,
)
def wish_owl(
    model: nn.Module,
    blocks: list[Layers],
    batches: Batches,
    pattern: NMPattern,
    *,
    outlier_factor: float = 6.0,
    spread: float = 2.0,
) -> list[float]:
    """Decoder blocks with many outliers keep more (N:M as in the authors' code):

        LOD_b = share of the decoder block's weights with A_ij > outlier_factor * mean(A),   A_ij = |W_ij| * ||X_j||_2
        r_b = spread * (LOD_b - min LOD) / (max LOD - min LOD);   w_b = n + r_b - mean(r)

    The dense model's inputs X; the means are over weights: mean(A) within the decoder block, mean(r) over all of them.

    Args:
        outlier_factor: the paper's M; 6 in the authors' N:M example, 5 in most of their unstructured ones.
        spread: the largest wish minus the smallest, in weights of a block of m (the code's Lamda). Its default of 0.08
            is a share of all weights, for unstructured sparsity: here every wish would round to n. With 2, as in its
            N:M example, at least one wish is 1 or more away from n.
    """
    check_choice(blocks, pattern)
    layers, shares = merge_layers(blocks), []

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
