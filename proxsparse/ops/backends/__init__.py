"""One file per backend: what it supports and how it is called. Importing a file registers its kernels."""
