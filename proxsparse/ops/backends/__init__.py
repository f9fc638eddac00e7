"""One file per backend: what it supports and how it is called. Importing them fills the kernel tables of the ops."""

from proxsparse.ops.backends import cpp, cuda, triton

__all__ = ["cpp", "cuda", "triton"]
