"""The Triton kernels and their launchers; imports torch and triton only."""

from .adamw_prox import ADAMW_PROX_LAUNCHES, adamw_prox_n4_
from .masked_weight import masked_weight_n4_
from .prox import PROX_LAUNCHES, prox_list_n4_, prox_n4_

__all__ = ["ADAMW_PROX_LAUNCHES", "PROX_LAUNCHES", "adamw_prox_n4_", "masked_weight_n4_", "prox_list_n4_", "prox_n4_"]
