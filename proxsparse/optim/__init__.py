"""Optimizers with a prox step."""

from proxsparse.optim.hold_masks import hold_masks_
from proxsparse.optim.prox_adamw import ProxAdamW
from proxsparse.optim.prox_optimizer import ProxOptimizer

__all__ = ["ProxAdamW", "ProxOptimizer", "hold_masks_"]
