"""Models without torch.compile: its wrappers change the names of layers, and compiled code depends on earlier calls."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model that torch.compile wraps; its modules run eagerly, with their own names, within the block.

    After the block the wrappers and the compiled code are there again.
    """
    if not isinstance(model, nn.Module):  # refused later
        yield model
        return
    model = unwrapped(model)
    wrapped = [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and unwrapped(child) is not child
    ]
    # of `module.compile()`
    calls = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    try:
        for modules, name, child in wrapped:
            modules[name] = unwrapped(child)
        for module in calls:
            module._compiled_call_impl = None
        yield model
    finally:
        for modules, name, child in wrapped:
            if modules[name] is unwrapped(child):  # not replaced within the block
                modules[name] = child
        for module, call in calls.items():
            module._compiled_call_impl = call


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` wraps, or the module itself."""
    while "_orig_mod" in module._modules:
        module = module._modules["_orig_mod"]
    return module
