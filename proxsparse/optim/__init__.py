"""Optimizers with a prox step."""

from proxsparse.optim.prox_optimizer import ProxOptimizer

__all__ = ["ProxOptimizer"]
