"""proxsparse: learn N:M sparsity masks of pretrained language models by proximal gradient descent.

`import proxsparse` requires only torch. `from_pretrained` of transformers loads packed checkpoints.
The command line is `proxsparse COMMAND`, or `python -m proxsparse.COMMAND`.
"""

import importlib
import os

from proxsparse import _start, integrations  # noqa: F401 _start must be imported first
from proxsparse._version import __version__

# Python front door: exported lazily, because `import proxsparse` requires only torch
_LAZY = {
    **dict.fromkeys(("finetune_", "perplexity", "prune_"), "proxsparse.pruning"),
    **dict.fromkeys(("load_masks", "save_masks"), "proxsparse.io.mask_files"),
    "apply_masks_": "proxsparse.models.snap",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


if _start.needs_torch:
    from proxsparse.inference.convert import sparsify_
    from proxsparse.inference.linear import SparseLinear
    from proxsparse.ops import nm_mask, pack_nm, prox_nm, prox_nm_, unpack_nm, use_backend
    from proxsparse.optim import ProxAdamW, ProxOptimizer, hold_masks_
    from proxsparse.patterns import NMPattern
    from proxsparse.reference import reg_nm

# triton_kernels is installed as a subpackage of proxsparse because another project uses the bare name. In a source
# checkout it is next to this folder: adding the parent to __path__ makes `proxsparse.triton_kernels` work there too.
_checkout = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if os.path.isdir(f"{_checkout}/triton_kernels") and os.path.isfile(f"{_checkout}/setup.py"):
    __path__.append(_checkout)

__all__ = [
    "NMPattern",
    "ProxAdamW",
    "ProxOptimizer",
    "SparseLinear",
    "__version__",
    "apply_masks_",
    "finetune_",
    "hold_masks_",
    "load_masks",
    "nm_mask",
    "pack_nm",
    "perplexity",
    "prox_nm",
    "prox_nm_",
    "prune_",
    "reg_nm",
    "save_masks",
    "sparsify_",
    "unpack_nm",
    "use_backend",
]
