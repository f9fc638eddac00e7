"""The parts of `methods/proxsparse.py`: learning a mask by proximal gradient descent."""
