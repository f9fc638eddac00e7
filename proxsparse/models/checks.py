"""Checks of a model and its outputs: context length, NaN and infinity."""

import inspect
import math
import re
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

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


DECODER_ONLY = "give a decoder-only language model"
# Settings of a config with which the attention of a model is bidirectional.
BIDIRECTIONAL = {"attn_type": "bi", "use_bidirectional_attention": True}
BIDIRECTIONAL |= dict.fromkeys(("is_decoder", "causal", "is_causal"), False)


def refuse_not_causal(model: nn.Module, source: str) -> None:
    """Raises InputError for a model that sees the tokens that it predicts, or that cannot run on text alone."""
    kinds, name = type(model).__mro__, type(model).__name__
    masked = any(kind.__name__.endswith("ForMaskedLM") for kind in kinds)
    if masked or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{source}: {name} is not a causal decoder; {DECODER_ONLY}")
    for each in inspect.signature(kinds[0].forward).parameters.values():
        required = each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        if required and each.name not in ("self", "input_ids"):
            raise InputError(f"{source}: {name} cannot run on text alone (it needs {each.name}); give a language model")
    code = "".join(map(source_of, {kind.__module__ for kind in kinds}))
    for config in (model.config, model.config.get_text_config()):
        for setting, value in BIDIRECTIONAL.items():
            # the code must read the setting: that of GPT-NeoX, for example, only mentions is_decoder
            if getattr(config, setting, None) == value and re.search(rf"\.{setting}\b(?!\s*=[^=])", code):
                what = f"{config.model_type} is not a causal decoder ({setting} is {str(value).lower()})"
                raise InputError(f"{source}: {what}: it sees the tokens that it predicts; {DECODER_ONLY}")


def source_of(module: str) -> str:
    """The code of a module that defines models; "" for others, and for a notebook, which has no file."""
    shared = module.startswith("transformers.") and not module.startswith("transformers.models.")
    try:
        return "" if shared or module.startswith("torch.") else inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return ""


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


def require_changeable(model: nn.Module) -> None:
    """Raises InputError unless all weights are in memory, under the model's own names, and may be changed."""
    require_module(model)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"model: {type(model).__name__} wraps the model; give model.module")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise InputError("model: has adapters of peft; give model.merge_and_unload()")
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


@torch.no_grad()
def first_not_finite(model: nn.Module, input_ids: Tensor) -> str:
    """For error messages: ", and the first output that is not finite is that of LAYER", or "" if all are finite.

    The forward pass is repeated on input_ids, int64 [B, T].
    """
    names = {module: name for name, module in model.named_modules() if not any(module.children())}
    found = []

    def look(module: nn.Module, _inputs: object, output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if module in names and not all(part.isfinite().all() for part in outputs if isinstance(part, Tensor)):
            found.append(names[module])

    with evaluating(model), register_module_forward_hook(look):
        model(input_ids=input_ids.to(model.device), use_cache=False)
    return f", and the first output that is not finite is that of {found[0]}" if found else ""
