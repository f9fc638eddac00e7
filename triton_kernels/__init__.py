"""The Triton kernels and their launchers; imports torch and triton only."""

from .adamw_prox import adamw_prox_n4_
from .masked_weight import masked_weight_n4_
from .prox import prox_list_n4_, prox_n4_

__all__ = ["adamw_prox_n4_", "masked_weight_n4_", "prox_list_n4_", "prox_n4_"]
