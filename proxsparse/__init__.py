"""proxsparse: learn N:M sparsity masks of pretrained language models by proximal gradient descent.

`import proxsparse` needs torch only; transformers, once imported too, loads packed checkpoints. The command line is
`proxsparse COMMAND`, or `python -m proxsparse.COMMAND`.
"""

import os

from proxsparse import _start, integrations  # noqa: F401 _start before anything else is imported
from proxsparse._version import __version__

if _start.needs_torch:
    from proxsparse.inference.convert import sparsify_
    from proxsparse.inference.linear import SparseLinear
    from proxsparse.ops import nm_mask, pack_nm, prox_nm, prox_nm_, unpack_nm, use_backend
    from proxsparse.optim import ProxAdamW, ProxOptimizer
    from proxsparse.patterns import NMPattern
    from proxsparse.reference import reg_nm

# Installed, triton_kernels is a subpackage of ours (the bare name belongs to another project). In a source checkout it
# stands beside this folder: adding that parent to the search path makes `proxsparse.triton_kernels` import both ways.
_checkout = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if os.path.isdir(f"{_checkout}/triton_kernels") and os.path.isfile(f"{_checkout}/setup.py"):
    __path__.append(_checkout)

__all__ = [
    "NMPattern",
    "ProxAdamW",
    "ProxOptimizer",
    "SparseLinear",
    "__version__",
    "nm_mask",
    "pack_nm",
    "prox_nm",
    "prox_nm_",
    "reg_nm",
    "sparsify_",
    "unpack_nm",
    "use_backend",
]
