"""The Triton kernels and their launchers; imports torch and triton only."""

from .adamw_prox import adamw_prox_nm_
from .dial_prox import prox_wide_
from .masked_weight import masked_weight_nm_
from .prox import prox_list_n4_, prox_n4_

__all__ = ["adamw_prox_nm_", "masked_weight_nm_", "prox_list_n4_", "prox_n4_", "prox_wide_"]
