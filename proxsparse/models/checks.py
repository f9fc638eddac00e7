"""Checks of a model and its outputs: context length, NaN and infinity."""

import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.runtime.progress import phase, write_line


def fit_window(
    model: nn.Module, asked: int | None, default: int, flag: str, text_tokens: float = math.inf, text: str = "the text"
) -> int:
    """The window in tokens: `asked`, or if it is None the default, at most the model's context and the text.

    Raises InputError, which names the `text`, if it has fewer than 2 tokens, or `asked` exceeds it or the context.
    """
    if text_tokens < 2:
        raise InputError(f"{text} has {text_tokens} tokens, at least 2 are needed; give more text")
    positions = context_length(model)
    if asked is not None:
        if asked > positions:
            raise InputError(f"--{flag} {asked}: above the model's context length of {positions}; lower --{flag}")
        if asked > text_tokens:
            raise InputError(f"--{flag} {asked}: {text} has {text_tokens} tokens; lower it, or give more text")
        return asked
    limits = {text_tokens: f"the length of {text}", positions: "the model's context length", default: ""}
    window = min(limits)
    if window < default:
        write_line(f"--{flag}: {window} tokens, {limits[window]} (default: {default})")
    return window


# Settings with the number of positions; MPT has the second one, Whisper the third.
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def context_length(model: nn.Module) -> float:
    """The number of positions of the model; infinite if it has no limit."""
    values = [getattr(model.config.get_text_config(), name, None) or 0 for name in POSITIONS]
    limit = next((value for value in values if value > 0), math.inf)  # some configs have -1: no limit
    for name, module in model.named_modules():  # in models like RoBERTa, position 0 has the row after the padding
        if "position" in name and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            after = 2 if model.config.model_type == "prophetnet" else 1  # it also reads the row of the next position
            limit = min(limit, module.num_embeddings - module.padding_idx - after)
    return limit


def refuse_other_tokens(model: nn.Module, ids, what: str) -> None:
    """Raises InputError if a token id, in a tensor or NumPy array, has no row in the embedding of the model."""
    try:
        vocabulary = model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):  # code of a model that is not in transformers
        return
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        remedy = "use the tokenizer of the model, and resize_token_embeddings if tokens were added to it"
        raise InputError(f"{what} from {ids.min()} to {ids.max()}, but the model has {vocabulary} tokens; {remedy}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode (no dropout) within the block, and restores the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def require_module(model: object) -> None:
    """Raises InputError unless the argument `model` is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model={reprlib.repr(model)}: not a model; load it with AutoModelForCausalLM")


def uncompiled(model: nn.Module, what: str = "model") -> nn.Module:
    """The model that torch.compile wraps. Raises InputError for compiled modules in it, which ignore later hooks."""
    model = getattr(model, "_orig_mod", model)
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any("_orig_mod" in module._modules or module._compiled_call_impl for module in modules):
        raise InputError(f"{what}: has modules that are compiled; call this function first, then compile them")
    return model


def refuse_wrapped(model: object, what: str = "model") -> None:
    """Raises InputError for a wrapper, in which the names of the layers are others."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"{what}: {type(model).__name__} wraps the model; give {what}.module")


def refuse_adapters(model: nn.Module, remedy: str = "give model.merge_and_unload()") -> None:
    """Raises InputError for a model in which adapters of peft wrap layers."""
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise InputError(f"model: has adapters of peft; {remedy}")


def require_changeable(model: nn.Module) -> None:
    """Raises InputError unless all weights are in memory, under the model's own names, and may be changed."""
    require_module(model)
    refuse_wrapped(model)
    refuse_adapters(model)
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError("model: has weights that are offloaded (on the meta device); load it on one device")
    if torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in model.parameters()):
        raise InputError("model: cannot be changed in torch.inference_mode(); load it, and call this, outside of it")


def refuse_not_finite(model: nn.Module) -> None:
    """Raises InputError, which names the tensor, if a weight is NaN or infinite."""
    with phase("checking the weights", unit="tensor") as current:
        for name, parameter in current.count([*model.named_parameters()]):
            if not parameter.detach().isfinite().all():
                raise InputError(f"{name}: has weights that are NaN or infinite; download the model again")


def check_finite(name: str, sums: Tensor) -> None:
    """Raises InputError unless the sums over the calibration inputs of layer `name` are finite."""
    if not sums.isfinite().all():
        remedy = "use --precision fp32, or pack without --calibrate, or check for damaged weights"
        raise InputError(f"{name}: its calibration inputs are NaN or overflow; {remedy}")
