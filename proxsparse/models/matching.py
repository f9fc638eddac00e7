"""Compares the tensors in the files of a checkpoint with what `from_pretrained` needs, without reading weights."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from proxsparse.errors import InputError
from proxsparse.io.model_files import Header, headers, weight_files

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Match:
    """How the files of a checkpoint fit the model of its config.json."""

    names: dict[str, str]  # name in the files -> name in the model (the first one, if the tensor is split)
    merged: set[str]  # the names in the files of tensors that transformers does not only rename, but converts
    extra: list[str]  # names in the files that the model does not have
    missing: list[str]  # names in the model that no file has
    mismatched: list[str]  # names in the model whose tensor has another shape in the files


def match(found: dict[str, Header], model: nn.Module) -> Match:
    """Renames, splits and merges the tensors of the files on the meta device, as `from_pretrained` does.

    Args:
        found: the headers of the files.
        model: the dense model of their config.json on the meta device; its parameters are replaced.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, loading.WeightRenaming)]
    converters = [step for step in steps if isinstance(step, loading.WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    names, merged, extra = {}, set(), []
    for name in found:
        renamed, converter = loading.rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, converter = loading.rename_source_key(name, [], [], prefix, state)
        if renamed not in state:
            extra.append(name)
            continue
        names[name] = renamed
        if converter is not None:
            merged.add(name)
    owners = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)].add(name)
    files = {name: torch.empty(header.shape, device="meta") for name, header in found.items()}
    config = LoadStateDictConfig(device_map={"": torch.device("meta")}, weight_mapping=steps)
    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # the message of this function is enough
    logging.disable_progress_bar()
    try:
        info, _ = loading.convert_and_load_state_dict_in_model(model, files, config)
        missing = set(info.missing_keys)
        model._adjust_missing_and_unexpected_keys(info)
    finally:
        logging.set_verbosity(shown)
    tied = {name for group in owners.values() if group - missing for name in group}
    mismatched = sorted({key[0] if isinstance(key, tuple) else str(key) for key in info.mismatched_keys})
    return Match(names, merged, extra, sorted(set(info.missing_keys) - tied), mismatched)


def refuse_incomplete(name: str, found: Match) -> None:
    """Raises InputError if tensors of the model are missing in the files, or have another shape."""
    if incomplete := sorted({*found.missing, *found.mismatched}):
        raise InputError(
            f"model {name!r}: {len(incomplete)} tensors are missing or have a wrong shape, the first is "
            f"{incomplete[0]}; download the complete checkpoint"
        )


def check_saved(
    folder: Path, skeleton: nn.Module, model: nn.Module | None = None, extra: set[str] = frozenset()
) -> None:
    """Reads the headers of a saved checkpoint, and raises InputError unless `from_pretrained` restores the model.

    No tensor may be missing, have another shape or dtype, or be unknown to the model.

    Args:
        skeleton: the model of the folder's config.json on the meta device.
        model: the model in memory, for the dtypes.
        extra: names of tensors that are in the files although the model does not have them.
    """
    found = headers(weight_files(folder))
    result = match(found, skeleton)
    wrong = [f"{name} is missing" for name in result.missing]
    wrong += [f"{name} has another shape" for name in result.mismatched]
    wrong += [f"{name} is not a tensor of {type(skeleton).__name__}" for name in result.extra if name not in extra]
    wrong += [] if model is None else wrong_dtypes(found, result, model)
    if wrong:
        raise InputError(
            f"the written files differ from the model in {len(wrong)} tensors ({wrong[0]}), so the model is not saved; "
            "please report this with the name of the model"
        )


def wrong_dtypes(found: dict[str, Header], result: Match, model: nn.Module) -> list[str]:
    """The tensors in the files that have another dtype than in the model."""
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name in list(dtypes):  # fused experts: the tensor of all has the dtype of the first
        parent = name
        while parent := parent.rpartition(".")[0]:
            dtypes.setdefault(parent, dtypes[name])
    wrong = []
    for name, inside in result.names.items():
        dtype = dtypes.get(inside) or dtypes.get(inside.rpartition(".")[0])
        if dtype in DTYPE_NAMES and DTYPE_NAMES[dtype] != found[name].dtype:
            wrong.append(f"{name} is {found[name].dtype}, in the model {DTYPE_NAMES[dtype]}")
    return wrong
