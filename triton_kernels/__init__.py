"""The Triton kernels and their launchers; imports torch and triton only."""

from .prox import prox_n4_

__all__ = ["prox_n4_"]
