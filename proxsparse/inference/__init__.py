"""Running 2:4 models: packed linear layers, packed checkpoints, generation."""
