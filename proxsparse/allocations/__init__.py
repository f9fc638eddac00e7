"""Choose the pattern of every layer: uniform, or by sensitivity."""
