"""Evaluation of models: perplexity and zero-shot tasks."""
