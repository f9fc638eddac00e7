"""How good a model still is."""
