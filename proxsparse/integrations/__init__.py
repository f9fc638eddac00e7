"""Other libraries: transformers' Trainer and its loader of quantized checkpoints."""

import importlib
import warnings

from proxsparse.integrations.after_import import after_import


def register_quantizer() -> None:
    """Makes `from_pretrained` of transformers read packed checkpoints."""
    try:
        importlib.import_module("proxsparse.integrations.transformers_quantizer")
    except Exception as error:  # of another version, whatever it is: nobody's `import transformers` may fail for that
        warnings.warn(f"packed checkpoints cannot be loaded with this transformers: {error}", stacklevel=2)


after_import("transformers.quantizers", register_quantizer)
