"""Language models: loading, checks, prunable layers, restoring the pretrained weights."""
