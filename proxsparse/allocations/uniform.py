"""One pattern for all layers."""

from torch import nn

from proxsparse.allocations.budget import Layers
from proxsparse.allocations.registry import register_allocation
from proxsparse.patterns import NMPattern

UNIFORM = "uniform"


@register_allocation(UNIFORM, needs_data=False, paper="none: one pattern for all layers")
def uniform_targets(model: nn.Module, blocks: list[Layers], batches, pattern: NMPattern) -> list[float]:
    """target_b = n."""
    return [float(pattern.n)] * len(blocks)
