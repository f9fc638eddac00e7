"""Language models: loading, prunable layers, checks, restoring pretrained weights."""
