"""Evaluation of models: perplexity, zero-shot tasks, masks."""
