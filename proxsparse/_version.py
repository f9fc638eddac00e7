"""The version, in a file that the build reads without importing torch."""

__version__ = "0.1.0"
