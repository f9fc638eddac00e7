"""Integrations with transformers: Trainer, and the loader of quantized checkpoints."""

import importlib
import warnings

from proxsparse.integrations.after_import import after_import


def register_quantizer() -> None:
    """Makes `from_pretrained` of transformers load packed checkpoints."""
    try:
        importlib.import_module("proxsparse.integrations.transformers_quantizer")
    except Exception as error:  # another version of transformers: importing it must not fail
        warnings.warn(f"cannot load packed checkpoints with this transformers ({error}); update it", stacklevel=2)


after_import("transformers.quantizers", register_quantizer)
