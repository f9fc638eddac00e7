"""torch.compile in training ("regional compilation"): one graph serves all decoder blocks of a model, another the loss.

A GPU then runs about 40 kernels for a decoder block and its gradient instead of about 120
(`benchmarks/step_operations.py`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks


@contextmanager
def compiled_blocks(*models: nn.Module) -> Iterator[None]:
    """Within the block, the decoder blocks of the models are compiled, at their first forward pass.

    An error of the compilers is an InputError.
    """
    from torch._dynamo.exc import ShortenTraceback  # of errors of the compilers

    with ExitStack() as undo:
        for block in (block for model in models for block in decoder_blocks(model)):
            undo.callback(setattr, block, "_compiled_call_impl", block._compiled_call_impl)  # torch cannot undo it
            block.compile()
        try:
            yield
        except ShortenTraceback as error:
            cause = getattr(error, "inner_exception", error)
            lines = str(getattr(cause, "output", cause)).strip().splitlines() or [type(cause).__name__]
            reason = next((line for line in lines if "error" in line.lower()), lines[0])  # of the output of a compiler
            raise InputError(f"--compile: {reason}; install what is missing, or set --compile false") from error


compiled = cache(torch.compile)  # of a function: compiled once, at its first call
