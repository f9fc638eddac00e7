"""A run of `train` or `prune`: flags, output folder, resuming, result and report."""
