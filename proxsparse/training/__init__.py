"""What `methods/proxsparse.py` is made of: learning a mask by proximal gradient descent."""
