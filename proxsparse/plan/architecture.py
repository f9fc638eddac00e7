"""The shape of a model from its config alone: no weight is read, and no network asked for what is known without."""

from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import nn

from proxsparse.errors import InputError
from proxsparse.models.loading import locate, reason_of
from proxsparse.models.unfold_linears import unfold_linears_

KNOWN = Path(__file__).parent / "architectures.yaml"
# An attention that transformers makes no mask for, as it makes none for a text without padding.
CAUSAL = "causal_without_mask"


@dataclass(frozen=True)
class Architecture:
    """A model on the meta device, the dtype of its files, whether they can be mapped, and where its config is from."""

    model: nn.Module
    file_dtype: torch.dtype
    mapped: bool
    source: str


def architecture(name: str) -> Architecture:
    """The causal language model of this name, as `load_model` would give it, without its weights.

    A GGUF file's dtype is float32, what its weights are unpacked to. The configs of some models that are only given out
    after asking are in architectures.yaml; they serve where the Hub's cache on this machine has none.

    Raises:
        InputError: there is no such model, or its config cannot be had.
    """
    import transformers

    source, gguf_file = locate(name)
    config, origin = read_config(name, source, gguf_file)
    try:
        transformers.AttentionInterface.register(CAUSAL, transformers.AttentionInterface()["sdpa"])
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as in load_model: many errors, one message
        raise InputError(f"--plan: no model can be made of {origin}: {reason_of(error)}") from error
    file_dtype = torch.float32 if gguf_file else getattr(config, "dtype", None) or torch.float32
    return Architecture(unfold_linears_(model), file_dtype, gguf_file is None, origin)


def read_config(name: str, source: str, gguf_file: str | None):
    """transformers' config of a model, and where it is from; the nearest place that has it."""
    import transformers

    known = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    on_disk = gguf_file is not None or Path(source).is_dir()
    keywords = {"gguf_file": gguf_file} if gguf_file else {}
    places = [{"local_files_only": True}]
    if not on_disk and name not in known:
        places.append({})  # the network, which takes half a minute to say that it is not there
    for place in places:
        try:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **keywords, **place)
            return config, f"{gguf_file or 'config.json'} of {source}"
        except Exception as error:  # as in load_model: many errors, one message
            failure = error
    if name in known:
        facts = known[name]
        dtype = getattr(torch, facts.pop("dtype"))
        return transformers.AutoConfig.for_model(**facts, dtype=dtype), "proxsparse's own table of architectures"
    raise InputError(
        f"--plan: the config of model {name!r} cannot be had ({reason_of(failure)}); give a folder with its config.json"
    ) from failure


def causal_without_mask_(model: nn.Module) -> None:
    """From now on the model makes no attention mask, in place: what it does by itself where nothing is padded."""
    model.config._attn_implementation = CAUSAL
