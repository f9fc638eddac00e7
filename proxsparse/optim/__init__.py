"""Optimizers with a prox step."""

from proxsparse.optim.prox_adamw import ProxAdamW
from proxsparse.optim.prox_optimizer import ProxOptimizer

__all__ = ["ProxAdamW", "ProxOptimizer"]
