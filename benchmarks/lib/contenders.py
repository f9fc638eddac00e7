"""The lines of compare_methods.py: pruning methods, learned masks, saved checkpoints."""

import hashlib
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lib.runs import digest, label, result_of, run_once, settings_of
from torch import nn

from proxsparse.allocations.registry import get_allocation
from proxsparse.errors import InputError
from proxsparse.io.mask_files import load_masks, masks_sha256
from proxsparse.methods import get_method
from proxsparse.models.loading import load_model
from proxsparse.models.snap import apply_masks_
from proxsparse.run.parse import parse_prune

LEARNED = "proxsparse"  # its options are the flags of `proxsparse train`
SHARED_FLAGS = ("model", "data", "num_samples", "seq_len", "packing", "seed", "pattern", "precision", "device")


@dataclass(frozen=True)
class Contender:
    """One line of the table. `load(identity, dtype)` returns the pruned model, its tokenizer, and figures."""

    name: str
    weights: str  # "frozen": W0 or 0; "updated": also new values; "as saved": those of the checkpoint
    settings: dict
    load: Callable[[dict, torch.dtype], tuple[nn.Module, object, dict]]


def dense(args: Namespace) -> Contender:
    """The pretrained model."""
    return Contender("dense", "frozen", {}, lambda _, dtype: (*load_model(args.model, dtype), {"seconds": 0.0}))


def method(text: str, args: Namespace) -> Contender:
    """METHOD[:OPTION=VALUE,...][+ALLOCATION[:OPTION=VALUE,...]], such as sparsegpt:update_weights=false+sensitivity.

    It is pruned by a run of `proxsparse prune` in --work_dir.

    Raises:
        InputError: an unknown method, allocation or option, or a bad value.
    """
    first, _, second = text.partition("+")
    options = {}
    for kind, part in (("method", first), ("allocation", second)):
        name, _, rest = part.partition(":")
        options |= ({kind: name} if name else {}) | dict(item.partition("=")[::2] for item in rest.split(",") if item)
    for name in options.keys() & {*SHARED_FLAGS, "eval_data"} - {"precision", "pattern"}:
        raise InputError(f"{text!r}: {name} is the same for the whole table; give it as --{name}")
    shared = {name: getattr(args, name) for name in SHARED_FLAGS} | {"eval_data": "none"}
    flags = [word for name, value in (shared | options).items() for word in (f"--{name}", str(value))]
    try:
        run = parse_prune(flags)
    except InputError as error:
        raise InputError(f"{text!r}: {error}") from error
    chosen, allocation = get_method(run.method), get_allocation(run.allocation)
    own = run.options_of(chosen)  # with the defaults: they may change
    if run.method == LEARNED:
        own = {k: v for k, v in settings_of(run).items() if k not in (*SHARED_FLAGS, "eval_data")}
    settings = {"pattern": run.model.pattern, "options": own}
    if second:
        settings |= {"allocation": allocation.name, "allocation_options": run.options_of(allocation)}
    if chosen.needs_data or allocation.needs_data:
        settings |= {"calibration": label(args.data), "num_samples": args.num_samples, "seq_len": args.seq_len}
        settings |= {"packing": args.packing, "seed": args.seed}
    updated = chosen.updates_weights and own.get("update_weights", True)

    def load(identity: dict, dtype: torch.dtype) -> tuple[nn.Module, object, dict]:
        folder = args.work_dir / "-".join([re.sub(r"[^\w.=+-]", "_", text), digest(identity)])
        provenance, result = run_once(run, folder, args.again)
        model, tokenizer = load_model(str(folder) if updated else args.model, dtype)
        if not updated:
            apply_masks_(model, load_masks(folder / "masks.safetensors"))
        figures = {"seconds": round(result["seconds"], 1)}
        figures |= {name: result[name] for name in ("masks_sha256", "kept", "arithmetic")}
        return model, tokenizer, figures | {"pruned_at": provenance["commit"]}

    return Contender(text, "updated" if updated else "frozen", settings, load)


def saved(text: str, args: Namespace) -> Contender:
    """NAME=FILE: masks, applied to the pretrained weights; NAME=FOLDER: a checkpoint of `proxsparse prune`."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"--masks {text!r}: must be NAME=FILE, such as a=runs/a/masks.safetensors, or NAME=FOLDER")
    if Path(path).is_dir():
        settings = {"checkpoint_sha256": checkpoint_sha256(Path(path))}
        result = result_of(Path(path))
        weights = "as saved" if result is None else "updated" if result.get("updated") else "frozen"
        return Contender(name, weights, settings, lambda _, dtype: (*load_model(path, dtype), {"seconds": 0.0}))
    masks = load_masks(path)
    settings = {"masks_sha256": masks_sha256(masks)}

    def load_masked(identity: dict, dtype: torch.dtype) -> tuple[nn.Module, object, dict]:
        model, tokenizer = load_model(args.model, dtype)
        apply_masks_(model, masks)
        return model, tokenizer, {"seconds": 0.0} | settings

    return Contender(name, "frozen", settings, load_masked)


def checkpoint_sha256(folder: Path) -> str:
    """Digest of the files of weights in the order of their names."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(f"--masks: folder {str(folder)!r} has no model*.safetensors; name a masks.safetensors file")
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()
