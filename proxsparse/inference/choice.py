"""Which backend multiplies: the `auto` of `SparseLinear`, by device, dtype, rows and shape."""

from torch import Tensor

from proxsparse.inference.backends import Backend, backend, backends

AUTOMATIC = {"cpu": ("cpp", "reference"), "cuda": ("gemv", "cutlass", "reference")}


def choose(x: Tensor, values: Tensor) -> Backend:
    """The backend for x [rows, in_features] and packed values [out_features, k]."""
    for name in AUTOMATIC.get(x.device.type, ()):
        if name in backends() and backend(name).supports(x, values) is None:
            return backend(name)
    return backend("reference")
