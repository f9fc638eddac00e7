"""AlphaPruning: decoder blocks whose weight spectra have heavy tails keep more weights."""

import math

import torch
from torch import Tensor, nn

from proxsparse.allocations.budget import Layers, mean_over_weights, relative
from proxsparse.errors import InputError, require
from proxsparse.patterns import NMPattern
from proxsparse.runtime.progress import phase

HISTOGRAM_BINS = 100  # of log eigenvalues; as in AlphaPruning's code and in WeightWatcher
PEAK_WINDOW = (0.95, 1.5)  # where the tail may begin, in units of the peak; from the same code
# Eigenvalues up to this share of the largest are rounding errors of a float32 decomposition. The larger tolerance of
# matrix_rank would remove valid eigenvalues of a square matrix, and shift all bins of the histogram.
ROUNDING = (10 * torch.finfo(torch.float32).eps) ** 2


def check_alphapruning(epsilon: float) -> None:
    """Raises InputError for an option out of range."""
    require("epsilon", epsilon, 0 < epsilon < 1, "above 0 and below 1")


def alphapruning_targets(
    model: nn.Module, blocks: list[Layers], batches, pattern: NMPattern, *, epsilon: float = 0.3
) -> list[float]:
    """Decoder blocks with a heavy-tailed spectrum are considered well trained and keep more weights:

        alpha_b = mean of `alpha_peak` over the layers of decoder block b
        q_b = 1 - epsilon + 2 epsilon (alpha_b - min alpha) / (max alpha - min alpha)
        target_b = m (1 - s q_b / mean(q)),   s = 1 - n/m;   the mean is over weights

    Args:
        epsilon: in (0, 1): the pruned shares are within s (1 +- epsilon) before the division by mean(q). The authors'
            scripts for Llama-2-7B use 0.3 with Wanda, 0.5 with magnitude and 0.2 with SparseGPT.
    """
    with phase("alphapruning: spectra", len(blocks), "decoder block") as current:
        alphas = [sum(map(alpha_of_layer, block, block.values())) / len(block) for block in current.count(blocks)]
    quotas = 1 - epsilon + 2 * epsilon * relative(alphas)
    pruned = (1 - pattern.density) * quotas / mean_over_weights(quotas, blocks)
    return (pattern.m * (1 - pruned)).tolist()


def alpha_of_layer(name: str, layer: nn.Linear) -> float:
    """`alpha_peak` of a layer's weight. Raises InputError, which names the layer, if it is not finite."""
    weight = layer.weight.detach().float()
    alpha = alpha_peak(torch.linalg.svdvals(weight).square()) if weight.isfinite().all() else math.nan
    if not math.isfinite(alpha):
        raise InputError(
            f"{name}: its spectrum has no finite exponent (NaN, infinity, or all eigenvalues equal); check for damaged "
            "weights, or exclude this layer with --exclude"
        )
    return alpha


def alpha_peak(eigenvalues: Tensor) -> float:
    """The exponent of the power law rho(x) ~ x^-alpha of the largest eigenvalues of W^T W, by Hill's estimator:

        alpha(x_i) = 1 + k / sum_{j >= i} ln(x_j / x_i),   k = number of j >= i

    The tail begins at the x_i with the smallest Kolmogorov-Smirnov distance
    max_j |1 - (x_j / x_i)^(1 - alpha) - (j - i) / k|, among those within 0.95 to 1.5 times the peak of the spectrum.
    The peak is the lower edge of the fullest of 100 bins of equal width in log x. The paper's code uses
    log10(0.95 peak) as the lower bound, which depends on the scale of the weights; this function does not.

    Args:
        eigenvalues: [min(out_features, in_features)], any order; values at the rounding level are ignored.
    Returns:
        alpha; NaN if fewer than two eigenvalues remain, infinity if they are all equal.
    """
    eigenvalues = eigenvalues.cpu().double().sort().values
    logs = eigenvalues[eigenvalues > ROUNDING * eigenvalues[-1]].log()
    if len(logs) < 2:
        return math.nan
    fullest = torch.histc(logs, HISTOGRAM_BINS).argmax()
    peak = logs[0] + fullest * (logs[-1] - logs[0]) / HISTOGRAM_BINS
    low, high = (peak + math.log(factor) for factor in PEAK_WINDOW)
    starts = ((low <= logs) & (logs <= high)).nonzero().flatten().tolist()
    fits = []
    for start in starts:
        tail = logs[start:] - logs[start]  # ln(x_j / x_i), ascending
        count = len(tail)
        if count > 1:
            decay = count / tail.sum()  # alpha - 1
            distance = (1 - (-decay * tail).exp() - torch.arange(count) / count).abs().max()
            fits.append((distance.item(), 1 + decay.item()))
    return min(fits)[1]
