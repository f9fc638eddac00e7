"""Compares the tensors in the files of a checkpoint with what `from_pretrained` needs, without reading weights."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.io.model_files import SAFETENSORS_FLOATS, Header, entries_of

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ROPE_FACTORS = ("rope_freqs.", "rope_factors_")  # tensors with the scaling of rotary positions


@dataclass(frozen=True)
class Match:
    """How the files of a checkpoint fit the model of its config.json."""

    names: dict[str, str]  # name in the files -> name in the model (the first one, if the tensor is split)
    merged: set[str]  # the names in the files of tensors that transformers does not only rename, but converts
    extra: list[str]  # names in the files that the model does not have
    missing: list[str]  # names in the model that no file has
    mismatched: list[str]  # for each tensor with another shape: its name in the model and both shapes


def model_names(
    found: Iterable[str], model: nn.Module, packed: Iterable[str] = ()
) -> tuple[dict[str, str], set[str], list[str]]:
    """`names`, `merged` and `extra` of `Match`. packed: names of the model that are not in its state_dict."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    steps = get_model_conversion_mapping(model)
    renamings, converters = (
        [step for step in steps if isinstance(step, kind)] for kind in (loading.WeightRenaming, loading.WeightConverter)
    )
    known, prefix = {**dict.fromkeys(packed, True), **model.state_dict()}, model.base_model_prefix
    names, merged, extra = {}, set(), []
    for name in found:
        renamed, converter = loading.rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, converter = loading.rename_source_key(name, [], [], prefix, known)
        if renamed not in known:
            extra.append(name)
            continue
        names[name] = renamed
        if converter is not None:
            merged.add(name)
    return names, merged, extra


def keep_from_merging_(model: nn.Module, tensors: Collection[str]) -> None:
    """Makes `save_pretrained` write these tensors as the model names them, and not merge, split or permute them."""
    from transformers import PreTrainedModel
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not isinstance(model, PreTrainedModel):
        return
    steps = getattr(model, "_weight_conversions", None)
    if steps is None:  # as `save_pretrained` does
        steps = get_model_conversion_mapping(model, add_legacy=False)
        steps = [step for step in steps if not isinstance(step, loading.PrefixChange)]
    converters = {step: step.reverse_transform() for step in steps if isinstance(step, loading.WeightConverter)}
    merged = {
        step
        for step, reverse in converters.items()
        if any(reverse.rename_source_key(name)[1] is not None for name in tensors)
    }
    if merged:
        model._weight_conversions = [step for step in steps if step not in merged]


def match(headers: dict[str, Header], model: nn.Module) -> Match:
    """Renames, splits and merges the tensors of the files on the meta device, as `from_pretrained` does.

    `model` is the dense model of their config.json on the meta device; its parameters are replaced.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    names, merged, extra = model_names(headers, model)
    owners = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].add(name)
    files = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}
    config = LoadStateDictConfig(
        device_map={"": torch.device("meta")}, weight_mapping=get_model_conversion_mapping(model)
    )
    logging.disable_progress_bar()
    info, _ = loading.convert_and_load_state_dict_in_model(model, files, config)
    missing = set(info.missing_keys)
    model._adjust_missing_and_unexpected_keys(info)
    tied = {name for group in owners.values() if group - missing for name in group}
    mismatched = [
        f"{name} has shape {list(there)}, but config.json requires {list(needed)}"
        for name, there, needed in sorted(info.mismatched_keys)
    ]
    return Match(names, merged, extra, sorted(set(info.missing_keys) - tied), mismatched)


def refuse_incomplete(name: str, matched: Match, kind: str) -> None:
    """Raises InputError if tensors that the class `kind` needs are missing in the files, or have another shape."""
    if matched.mismatched:
        raise InputError(f"model {name!r}: {matched.mismatched[0]}; download the checkpoint again")
    if matched.missing:
        missing = f"{kind} needs {len(matched.missing)} tensors that are missing, the first is {matched.missing[0]}"
        remedy = "download the complete checkpoint, or save the causal language model"
        raise InputError(f"model {name!r}: {missing}; {remedy}")


def refuse_codes(headers: dict[str, Header], model: nn.Module, block: Iterable[int] | None = None) -> None:
    """Raises InputError for codes in the files that transformers would take as weights, or scale wrongly.

    block: (rows, columns), the weight_block_size of an FP8 checkpoint; None: nothing is scaled. transformers takes
    size // (number of scales) for the size of a block, which is wrong if there is a remainder.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    codes = sorted(name for name, header in headers.items() if header.dtype not in SAFETENSORS_FLOATS)
    needed, sources = model.state_dict(), [step.source_patterns for step in get_model_conversion_mapping(model)]
    scaled = [patterns[0] for patterns in sources if any("scale" in each for each in patterns[1:])]  # by its conversion
    for name, inside in model_names(codes, model)[0].items():
        header, stem = headers[name], name.removesuffix(".weight")
        if any(re.search(each, name) for each in scaled) or not needed[inside].is_floating_point():
            continue
        scales = headers.keys() & {f"{name}_scale_inv", f"{stem}.scale", f"{stem}.qscale_weight"}
        if block is None or not scales:
            what = "not a dense float" + (", and has no scale that transformers reads" if block else "")
            raise InputError(f"{header.file}: {name} is {header.dtype}, {what}; give the dense checkpoint")
        for size, count, length in zip(header.shape[-2:], headers[min(scales)].shape[-2:], block, strict=False):
            if count != 1 and (not count or size % count or (size % length and count == -(-size // length))):
                what = f"{name} has size {size}, not a multiple of the fp8 block ({length})"
                raise InputError(f"{header.file}: {what}; give the dense checkpoint")


def check_saved(
    headers: dict[str, Header], skeleton: nn.Module, model: nn.Module | None = None, extra: Iterable[str] = ()
) -> None:
    """Raises InputError unless `from_pretrained` restores the model from the saved files, whose headers are given.

    No tensor may be missing, have another shape or dtype, or be unknown to the model, except `extra`. `skeleton`: the
    model of their config.json on the meta device. `model`: the model in memory, for the dtypes.
    """
    result, known = match(headers, skeleton), set(extra)
    wrong = [f"{name} is missing" for name in result.missing] + result.mismatched
    wrong += [f"{name} is not a tensor of {type(skeleton).__name__}" for name in result.extra if name not in known]
    if model is not None:
        dtypes = {name: DTYPE_NAMES.get(tensor.dtype) for name, tensor in model.state_dict().items()}
        wrong += [
            f"{name} is {headers[name].dtype}, in the model {dtypes[inside]}"
            for name, inside in result.names.items()
            if dtypes[inside] not in (None, headers[name].dtype)
        ]
    if wrong:
        what = f"the written files differ from the model in {len(wrong)} tensors ({wrong[0]})"
        raise InputError(f"{what}, so the model is not saved; please report this with the name of the model")


def rounding_notes(stored: dict[str, str], model: nn.Module) -> list[str]:
    """The note about tensors that were rounded while loading. `stored`: name in the model -> dtype in the files."""
    types, loaded = {name: dtype for dtype, name in DTYPE_NAMES.items()}, model.state_dict()
    both = {name: (types[kind], loaded[name].dtype) for name, kind in stored.items() if kind in types}
    rounded = [name for name, pair in both.items() if torch.promote_types(*pair) != pair[1]]
    if not rounded:
        return []
    widest = reduce(torch.promote_types, (before for before, _ in both.values()))
    before, after, widest = (str(dtype).removeprefix("torch.") for dtype in (*both[rounded[0]], widest))
    what = f"{len(rounded)} tensors were rounded while loading, the first, {rounded[0]}, from {before} to {after}"
    return [f"{what}; to keep them, set dtype in config.json to {widest}"]


def gguf_notes(path: Path, model: nn.Module) -> list[str]:
    """The note about the scaling of rotary positions, if transformers has not read it from a .gguf file.

    Reads the header only, with the reader of transformers: 0.02 s for 50,000 tokens, where GGUFReader takes 4 s.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    entries, tensors = read_gguf_metadata(str(path))
    scaling = [name for name in tensors if name.startswith(ROPE_FACTORS)]
    scaling += [key for key, value in entries.items() if key.endswith(".rope.scaling.type") and value != "none"]
    types = {value for key, value in entries_of(model.config.to_dict()) if key == "rope_type"}
    if not scaling or types - {"default"}:
        return []
    return [
        f"transformers does not read the scaling of rotary positions ({scaling[0]}) from this file, so the model "
        "differs from the original, most in long texts; give the safetensors checkpoint"
    ]
