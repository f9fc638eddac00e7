"""The Triton kernels and their launchers; imports torch and triton only.

Launchers do not check their arguments: `proxsparse.ops` does.
"""

from .adamw_prox import Step, adamw_prox_list_
from .masked_weight import masked_weight_nm_
from .prox import prox_24_, prox_list_24_
from .wide_prox import prox_wide_

__all__ = ["Step", "adamw_prox_list_", "masked_weight_nm_", "prox_24_", "prox_list_24_", "prox_wide_"]
