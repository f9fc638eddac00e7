"""Layer allocations: which N:M pattern every decoder block gets, so that together they keep what one for all would.

An allocation gives a wish for every decoder block, a real number: how many of every m weights to keep in its layers.
`nearest_counts` turns the wishes into integers that meet the budget. A decoder block moves as a whole, and m is the
same everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from proxsparse.errors import InputError, require
from proxsparse.methods.base import Batches, layers_inside, options_of, refuse_foreign, walk
from proxsparse.methods.wanda import FeatureNorms
from proxsparse.models import decoder_blocks
from proxsparse.patterns import NMPattern, PatternLike

Layers = dict[str, nn.Linear]

UNIFORM = "uniform"
HISTOGRAM_BINS = 100  # of log eigenvalues; as AlphaPruning's code, and WeightWatcher's before it
PEAK_WINDOW = (0.95, 1.5)  # where the tail may begin, in units of the peak; the same source
# Eigenvalues up to this share of the largest are rounding errors of a float32 decomposition. matrix_rank has a larger
# tolerance: it would take real ones off a square matrix, and with them move all bins of the histogram.
ROUNDING = (10 * torch.finfo(torch.float32).eps) ** 2
MOST_SUMS = 10_000  # sums of kept weights that `nearest_counts` tells apart: some seconds where all sizes differ


@dataclass(frozen=True)
class Allocation:
    """One row of the table.

    `wish(model, blocks, batches, pattern, progress, **options)` gives one wish per item of `blocks`: the layers by name
    of each decoder block that has any. Without needs_data it does not look at the batches.
    """

    name: str
    needs_data: bool
    paper: str
    wish: Callable[..., list[float]]
    options: dict[str, bool | int | float | str]  # name -> default
    check: Callable[..., None] = lambda **options: None  # raises InputError for values of its options out of range


_allocations: dict[str, Allocation] = {}


def register_allocation(name: str, needs_data: bool, paper: str, check: Callable[..., None] = Allocation.check):
    """Decorator: add a function that wishes, see `Allocation`; keyword-only parameters are its options."""

    def add(wish: Callable) -> Callable:
        _allocations[name] = Allocation(name, needs_data, paper, wish, options_of(wish), check)
        return wish

    return add


def allocations() -> list[str]:
    """The names of all registered allocations."""
    return sorted(_allocations)


def allocation(name: str) -> Allocation:
    """The allocation of that name. Raises InputError, listing the choices, if there is none."""
    if name not in _allocations:
        raise InputError(f"allocation {name!r}: there is no such allocation; choose from {', '.join(allocations())}")
    return _allocations[name]


def allocate(
    name: str,
    model: nn.Module,
    layers: Layers,
    batches: Batches,
    pattern: PatternLike,
    progress: bool = False,
    **options,
) -> dict[str, NMPattern]:
    """Layer name -> its pattern n_b:m, b the layer's decoder block; the model stays as it is.

    Args:
        name: one of `allocations()`.
        layers: the layers to prune, from `models.prunable_layers(model, pattern)`.
        batches: calibration samples as in `prune_`; ignored unless the allocation needs data.
        pattern: the budget: as many weights are kept as if all layers had this one, see `nearest_counts`.
        options: of the allocation; `allocation(name).options` has their names and defaults.
    Raises:
        InputError: an unknown allocation or option, an option out of range, or nothing to share out; by name.
    """
    chosen, pattern = allocation(name), NMPattern.parse(pattern)
    refuse_foreign(options, chosen.options, f"allocation {name!r}")
    chosen.check(**chosen.options | options)
    blocks = by_decoder_block(model, layers)
    try:
        wishes = chosen.wish(model, blocks, batches, pattern, progress, **options)
    except InputError as error:
        raise InputError(f"allocation {name!r}: {error}") from error
    counts = nearest_counts(wishes, [numel(block) for block in blocks], pattern)
    if len(set(wishes)) > 1 and len(set(counts)) == 1:
        raise InputError(
            f"allocation {name!r}: within the budget of {pattern} no decoder block gets another pattern; change "
            f"{' or '.join(chosen.options)}, or choose uniform"
        )
    count_of = {name: n for n, block in zip(counts, blocks, strict=True) for name in block}
    return {name: NMPattern(count_of[name], pattern.m) for name in layers}


def budget(layers: Layers, patterns: dict[str, NMPattern]) -> float:
    """The share of the layers' weights that the patterns keep: sum of numel * n / m over sum of numel."""
    return sum(layer.weight.numel() * patterns[name].density for name, layer in layers.items()) / numel(layers)


def numel(layers: Layers) -> int:
    """How many weights the layers have in all."""
    return sum(layer.weight.numel() for layer in layers.values())


def by_decoder_block(model: nn.Module, layers: Layers) -> list[Layers]:
    """The layers of each decoder block, in model order, without decoder blocks that have none of them."""
    blocks = [layers_inside(block, layers) for block in decoder_blocks(model)]
    return [block for block in blocks if block]


def joined(blocks: list[Layers]) -> Layers:
    """The layers of all decoder blocks in one."""
    return {name: layer for block in blocks for name, layer in block.items()}


def nearest_counts(wishes: list[float], sizes: list[int], pattern: NMPattern) -> list[int]:
    """The n_b nearest to the wishes w_b among those nearest to the budget:

        min sum_b (n_b - w_b)^2   over all n_b in 1 .. m-1 with the least |sum_b size_b n_b - n sum_b size_b|

    Where all decoder blocks have one size the budget is met exactly, and this is: round and clamp the wishes, then move
    those nearest to a rounding boundary until the sum is right. With other sizes it can take moves that partly cancel
    (a decoder block of size 3 up, one of size 2 down), so all sums that can be reached are looked at, decoder block by
    decoder block, and each keeps its best way. Of equally good ways the one that keeps more in early ones is taken.

    Args:
        sizes: weights of each decoder block. They are counted in their common divisor, or, where that would give more
            than MOST_SUMS sums, rounded to a coarser unit.
    """
    unit = max(math.gcd(*sizes), sum(sizes) * (pattern.m - 1) // MOST_SUMS)
    sizes = [round(size / unit) for size in sizes]
    ways = {0: (0.0, None)}  # sum of size_b n_b so far -> (squared distance from the wishes, (last n, (n before, ...)))
    for wish, size in zip(wishes, sizes, strict=True):
        longer = {}
        for kept, (distance, before) in ways.items():
            for n in range(1, pattern.m):
                way = (distance + (n - wish) ** 2, (n, before))
                longer[kept + size * n] = min(way, longer.get(kept + size * n, way))
        ways = longer
    target = pattern.n * sum(sizes)
    best = min(ways, key=lambda kept: (abs(kept - target), ways[kept]))
    counts, link = [], ways[best][1]
    while link:
        n, link = link
        counts.append(n)
    return counts[::-1]


@register_allocation(UNIFORM, needs_data=False, paper="none: one pattern for all layers")
def wish_uniform(model: nn.Module, blocks: list[Layers], batches, pattern: NMPattern, progress: bool) -> list[float]:
    """w_b = n."""
    return [float(pattern.n)] * len(blocks)


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
    progress: bool,
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
    layers, shares = joined(blocks), []

    def visit(statistics: dict[str, FeatureNorms]) -> None:
        scores = [(layers[name].weight.abs() * norms.norms()).float() for name, norms in statistics.items()]
        shares.append(outlier_share(scores, outlier_factor))

    walk(model, layers, batches, FeatureNorms, visit, progress)
    extra = spread * relative(shares)
    return (pattern.n + extra - mean_over_weights(extra, blocks)).tolist()


def outlier_share(scores: list[Tensor], factor: float) -> float:
    """The share of all scores that exceed `factor` times their mean."""
    count = sum(score.numel() for score in scores)
    mean = sum(score.sum(dtype=torch.float64) for score in scores) / count
    return sum((score > factor * mean).sum().item() for score in scores) / count


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
    model: nn.Module, blocks: list[Layers], batches, pattern: NMPattern, progress: bool, *, epsilon: float = 0.3
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
    layers = tqdm(joined(blocks).items(), desc="spectra", unit="layer", disable=not progress)
    alphas = {name: alpha_of_layer(name, layer) for name, layer in layers}
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


def relative(scores: list[float]) -> Tensor:
    """[decoder blocks], float64: 0 for the lowest score, 1 for the highest, linear between."""
    scores = torch.tensor(scores, dtype=torch.float64)
    low, high = scores.min(), scores.max()
    if not low < high:
        raise InputError(
            f"all {len(scores)} decoder blocks score {low:.4g}, so none can keep more than another; choose uniform, or "
            "change what they are ranked by (with owl: a lower outlier_factor)"
        )
    return (scores - low) / (high - low)


def mean_over_weights(values: Tensor, blocks: list[Layers]) -> Tensor:
    """The mean of a value per decoder block, each as often as it has weights: wishes so centred meet the budget."""
    weights = torch.tensor([numel(block) for block in blocks], dtype=torch.float64)
    return (values * weights).sum() / weights.sum()


def check_choice(blocks: list[Layers], pattern: NMPattern) -> None:
    """Raises InputError if no decoder block could get another pattern than the given one."""
    if not 1 < pattern.n < pattern.m - 1:
        raise InputError(
            f"{pattern} leaves no choice: a decoder block keeps at least 1 and at most m - 1 of every m, and what one "
            "gains another must lose; take a pattern with 1 < n < m - 1, such as 2:4, or uniform"
        )
    if len(blocks) < 2:
        raise InputError(
            f"{len(blocks)} decoder block with layers to prune, and a budget is shared out between several; choose "
            "uniform, or exclude fewer layers"
        )
