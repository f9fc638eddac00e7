"""The equations in plain torch for any float dtype. All kernels are compared with these slow implementations.

"Paper" means ProxSparse (ICML 2025). The exact 2:4 solver and the general solver are not from the paper, whose solvers
are in benchmarks/lib/paper_solvers.py.
"""

from proxsparse.reference.adamw_prox import adamw_prox, mix, random_bits, stochastic_round
from proxsparse.reference.mask import mask_score, masked_weight, nm_mask
from proxsparse.reference.prox import objective, prox_nm
from proxsparse.reference.regularizers import (
    elementary_symmetric,
    frozen_denominator,
    frozen_penalty,
    frozen_penalty_grad,
    reg_nm,
)

__all__ = [
    "adamw_prox",
    "elementary_symmetric",
    "frozen_denominator",
    "frozen_penalty",
    "frozen_penalty_grad",
    "mask_score",
    "masked_weight",
    "mix",
    "nm_mask",
    "objective",
    "prox_nm",
    "random_bits",
    "reg_nm",
    "stochastic_round",
]
