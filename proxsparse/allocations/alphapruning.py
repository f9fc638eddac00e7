"""AlphaPruning: more weights for decoder blocks whose weight spectra have heavy tails."""

import math

import torch
from torch import Tensor, nn

from proxsparse.allocations.budget import Layers, check_choice, mean_over_weights, merge_layers, relative
from proxsparse.allocations.registry import register_allocation
from proxsparse.errors import InputError, require
from proxsparse.patterns import NMPattern
from proxsparse.runtime.progress import phase

HISTOGRAM_BINS = 100  # of log eigenvalues; as AlphaPruning's code, and WeightWatcher's before it
PEAK_WINDOW = (0.95, 1.5)  # where the tail may begin, in units of the peak; the same source
# Eigenvalues up to this share of the largest are rounding errors of a float32 decomposition. matrix_rank has a larger
# tolerance: it would take real ones off a square matrix, and with them move all bins of the histogram.
ROUNDING = (10 * torch.finfo(torch.float32).eps) ** 2


def check_alphapruning(epsilon: float) -> None:
    """Raises InputError for an option out of range."""
    require("epsilon", epsilon, 0 < epsilon < 1, "above 0 and below 1")


@register_allocation(
    "alphapruning",
    needs_data=False,
    paper="Lu et al. 2024, AlphaPruning: Using Heavy-Tailed Self Regularization Theory for Improved Layer-wise Pruning",
    check=check_alphapruning,
)
def wish_alphapruning(
    model: nn.Module, blocks: list[Layers], batches, pattern: NMPattern, *, epsilon: float = 0.3
) -> list[float]:
    """Decoder blocks with a heavy-tailed spectrum, which are trained well, keep more:

        alpha_b = mean of `alpha_peak` over the decoder block's layers
        q_b = 1 - epsilon + 2 epsilon (alpha_b - min alpha) / (max alpha - min alpha)
        w_b = m (1 - s q_b / mean(q)),   s = 1 - n/m, the mean over weights

    Args:
        epsilon: in (0, 1): pruned shares lie in s (1 +- epsilon) before mean(q) scales them. The authors' scripts for
            Llama-2-7B have 0.3 with Wanda, 0.5 with magnitude and 0.2 with SparseGPT.
    """
    check_choice(blocks, pattern)
    layers = merge_layers(blocks)
    with phase("alphapruning: spectra", len(layers), "layer") as current:
        alphas = {name: alpha_of_layer(name, layer) for name, layer in current.count(layers.items())}
    quotas = 1 - epsilon + 2 * epsilon * relative([sum(map(alphas.get, block)) / len(block) for block in blocks])
    pruned = (1 - pattern.density) * quotas / mean_over_weights(quotas, blocks)
    return (pattern.m * (1 - pruned)).tolist()


def alpha_of_layer(name: str, layer: nn.Linear) -> float:
    """`alpha_peak` of a layer's weight. Raises InputError, naming the layer, where there is none."""
    weight = layer.weight.detach().float()
    alpha = alpha_peak(torch.linalg.svdvals(weight).square()) if weight.isfinite().all() else math.nan
    if not math.isfinite(alpha):
        raise InputError(
            f"{name}: its spectrum has no finite exponent (a NaN, an infinity, or no two eigenvalues that differ); "
            "look for damaged weights, or exclude this layer with --exclude"
        )
    return alpha


def alpha_peak(eigenvalues: Tensor) -> float:
    """The exponent of the power law rho(x) ~ x^-alpha that the upper eigenvalues of W^T W follow, by Hill's estimator:

        alpha(x_i) = 1 + k / sum_{j >= i} ln(x_j / x_i),   k = how many j >= i

    The tail begins at the x_i that fits best among those within 0.95 to 1.5 times the peak of the spectrum, which is
    the lower edge of the fullest of 100 bins of equal width in log x; the fit is the Kolmogorov-Smirnov distance
    max_j |1 - (x_j / x_i)^(1 - alpha) - (j - i) / k|. The code of the paper has log10(0.95 peak) for the lower bound,
    and so depends on the scale of the weights; this does not.

    Args:
        eigenvalues: [min(out_features, in_features)], any order; those at the rounding level count as zero and are left
            out.
    Returns:
        NaN if fewer than two are left, infinity if they are all equal.
    """
    eigenvalues = eigenvalues.cpu().double().sort().values
    logs = eigenvalues[eigenvalues > ROUNDING * eigenvalues[-1]].log()
    if len(logs) < 2:
        return math.nan
    fullest = torch.histc(logs, HISTOGRAM_BINS).argmax()
    peak = logs[0] + fullest * (logs[-1] - logs[0]) / HISTOGRAM_BINS
    low, high = (peak + math.log(factor) for factor in PEAK_WINDOW)
    starts = ((low <= logs) & (logs <= high)).nonzero().flatten().tolist()
    return min(fit_tail(logs[start:] - logs[start]) for start in starts if start < len(logs) - 1)[1]


def fit_tail(logs: Tensor) -> tuple[float, float]:
    """ln(x_j / x_i) for j >= i, ascending -> (Kolmogorov-Smirnov distance, alpha)."""
    count = len(logs)
    decay = count / logs.sum()  # alpha - 1
    distance = (1 - (-decay * logs).exp() - torch.arange(count) / count).abs().max()
    return distance.item(), 1 + decay.item()
