"""The operations, each with its schema, fake, reference and public function in one file."""

from proxsparse.ops.mask import nm_mask
from proxsparse.ops.prox import prox_nm, prox_nm_
from proxsparse.ops.registry import use_backend

from proxsparse.ops.backends import cpp, triton  # isort: skip  (fills the kernel tables of the ops above)

__all__ = ["cpp", "nm_mask", "prox_nm", "prox_nm_", "triton", "use_backend"]
