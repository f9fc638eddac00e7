"""The custom ops; one file per op contains its schema, fake implementation, reference and public function."""

from proxsparse.ops import backends
from proxsparse.ops.adamw_prox import adamw_prox_
from proxsparse.ops.mask import nm_mask
from proxsparse.ops.masked_weight import masked_weight_
from proxsparse.ops.pack import pack_nm, unpack_nm
from proxsparse.ops.prox import prox_nm, prox_nm_, prox_nm_list_
from proxsparse.ops.quantize import dequantize_nm, quantize_nm
from proxsparse.ops.registry import use_backend
from proxsparse.ops.sparse_linear import sparse_linear

__all__ = [
    "adamw_prox_",
    "backends",
    "dequantize_nm",
    "masked_weight_",
    "nm_mask",
    "pack_nm",
    "prox_nm",
    "prox_nm_",
    "prox_nm_list_",
    "quantize_nm",
    "sparse_linear",
    "unpack_nm",
    "use_backend",
]
