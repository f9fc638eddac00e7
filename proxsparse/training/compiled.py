"""torch.compile in training ("regional compilation"): one graph serves all decoder blocks of a model, another the loss.

A GPU then runs a few fused kernels for each block, where it would run about 130 small ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks


@contextmanager
def compiled_blocks(*models: nn.Module) -> Iterator[None]:
    """Within the block, the decoder blocks of the models are compiled, at their first forward pass.

    Raises:
        InputError: within the block, if they cannot be compiled.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    blocks = [block for model in models for block in decoder_blocks(model)]
    for block in blocks:
        block.compile()
    try:
        yield
    except BackendCompilerFailed as error:
        reason = str(error.inner_exception).strip().partition("\n")[0]
        raise InputError(f"--compile: {reason}; install what is missing, or leave --compile out") from error
    finally:
        for block in blocks:
            block._compiled_call_impl = None  # torch has no function that undoes `compile`


@cache
def compiled(function: Callable) -> Callable:
    """The function, compiled at its first call."""
    return torch.compile(function)
