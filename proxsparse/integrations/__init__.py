"""Integrations with transformers: Trainer, and the loader of packed checkpoints."""

from proxsparse_autoload import register

register()
