"""Who is in the table of compare_methods.py: one-shot and learning methods, learned masks, saved checkpoints."""

import dataclasses
import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import common
import torch
from torch import Tensor, nn

from proxsparse import train
from proxsparse.allocations.registry import allocate, get_allocation
from proxsparse.data.calibration import calibration_batches
from proxsparse.data.sources import load_texts, read_limit
from proxsparse.errors import InputError
from proxsparse.evaluation.masks import apply_masks_
from proxsparse.io.atomic import atomic_directory, write_file
from proxsparse.io.mask_files import load_masks, masks_sha256, pack_mask, unpack_mask
from proxsparse.methods import get_method, prune_
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import load_model
from proxsparse.run.config import TrainConfig
from proxsparse.run.flags import convert
from proxsparse.run.parse import parse_config
from proxsparse.run.resume import NOT_SETTINGS
from proxsparse.runtime.device import autocast, choose_device, choose_precision

TRAINED = "proxsparse"  # in the table it stands beside the registered methods
SHARED_FLAGS = ("model", "data", "num_samples", "seq_len", "packing", "seed", "pattern", "precision", "device")
NOT_OPTIONS = (*SHARED_FLAGS, "eval_data")  # what the rows say elsewhere, or what they measure themselves


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    `prune_(model, tokenizer)` changes the fresh model in place and returns its masks, None where it has none to show.
    """

    name: str
    weights: str  # "frozen": W0 or 0; "updated": new values too; "as saved": what the checkpoint holds
    settings: dict
    prune_: Callable[[nn.Module, object], dict[str, Tensor] | None]
    source: str | None = None  # the model to load in the place of --model
    keep: bool = False  # whether pruning takes so long that its result is kept in --work_dir


# ---------------------------------------------------------------------------------------------- methods


def one_shot(text: str, args) -> Contender:
    """`dense`, or METHOD[:OPTION=VALUE,...][+ALLOCATION[:OPTION=VALUE,...]] such as sparsegpt:update_weights=false+owl.

    The options of `proxsparse` are the flags of proxsparse.train, see `trained`.

    Raises:
        InputError: an unknown method, allocation or option, listing the choices, or a value of another type.
    """
    if text == "dense":
        return Contender("dense", "frozen", {}, lambda model, tokenizer: None)
    if text.partition(":")[0] == TRAINED:
        return trained(text, args)
    first, plus, second = text.partition("+")
    chosen, options = with_options(first, get_method)
    shared, its_options = with_options(second, get_allocation) if plus else (None, {})
    if "seed" in chosen.options:  # one seed for the documents and the method, as in proxsparse.prune
        options = {"seed": args.seed} | options
    settings = {"pattern": args.pattern, "options": chosen.options | options}  # a default may change one day
    if shared:
        settings |= {"allocation": shared.name, "allocation_options": shared.options | its_options}
    needs_data = chosen.needs_data or (shared is not None and shared.needs_data)
    if needs_data:
        settings |= calibration_settings(args)

    def prune(model: nn.Module, tokenizer: object) -> dict[str, Tensor]:
        batches = calibration(args, tokenizer) if needs_data else ()
        pattern = args.pattern
        if shared:
            layers = prunable_layers(model, pattern)
            pattern = allocate(shared.name, model, layers, batches, pattern, progress=True, **its_options)
        return prune_(model, chosen.name, batches, pattern, progress=True, **options)

    # a method that can leave the weights alone has this option for it
    updated = chosen.updates_weights and options.get("update_weights", True)
    return Contender(text, "updated" if updated else "frozen", settings, prune, keep=needs_data or shared is not None)


def with_options(text: str, find: Callable) -> tuple[object, dict]:
    """NAME:OPTION=VALUE,... -> the table's entry (`find(name)`) and the options that are given."""
    name, _, rest = text.partition(":")
    chosen, options = find(name), {}
    for item in rest.split(",") if rest else ():
        option, equals, value = item.partition("=")
        if option not in chosen.options or not equals:
            known = ", ".join(f"{known}={default}" for known, default in chosen.options.items()) or "none"
            raise InputError(f"{text!r}: {item!r} is not an option of {name} with a value; its options: {known}")
        options[option] = convert(f"{text!r}: {option}", value, type(chosen.options[option]))
    return chosen, options


def trained(text: str, args) -> Contender:
    """proxsparse[:FLAG=VALUE,...]: proxsparse.train with these flags, on the table's model and calibration samples.

    Raises:
        InputError: a flag that proxsparse.train does not have, or a value that makes no sense.
    """
    items = [item.partition("=") for item in text.partition(":")[2].split(",") if item]
    options = {name: value for name, _, value in items}
    if of_all := [name for name in options if name in NOT_OPTIONS and name != "precision"]:
        raise InputError(f"{text!r}: {of_all[0]} is that of the whole table; give it as --{of_all[0]}, or leave it out")
    shared = {name: getattr(args, name) for name in SHARED_FLAGS} | {"eval_data": "none"}
    flags = [word for name, value in (shared | options).items() for word in (f"--{name}", str(value))]
    chosen = {name: value for name, value in settings_of(parse_config(flags)).items() if name not in NOT_OPTIONS}
    settings = {"pattern": args.pattern} | calibration_settings(args) | {"options": chosen}

    def learn(model: nn.Module, tokenizer: object) -> dict[str, Tensor]:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        # autocast is the run's own business: --precision bf16 has none
        with tempfile.TemporaryDirectory(dir=args.work_dir) as folder, torch.autocast(model.device.type, enabled=False):
            if train.main([*flags, "--output_dir", folder]) != 0:
                raise KeyboardInterrupt
            masks = load_masks(Path(folder) / "masks.safetensors")
        apply_masks_(model, masks)
        return masks

    return Contender(text, "frozen", settings, learn, keep=True)


def settings_of(config: TrainConfig) -> dict:
    """Every flag of proxsparse.train that changes the masks and is not at its default, or whose default varies."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    values = dataclasses.asdict(config).items()
    return {name: value for name, value in values if value != defaults[name] and name not in NOT_SETTINGS}


def calibration_settings(args) -> dict:
    """What makes two sets of calibration samples the same."""
    settings = {"calibration": label(args.data), "num_samples": args.num_samples, "seq_len": args.seq_len}
    return settings | {"packing": args.packing, "seed": args.seed}


def calibration(args, tokenizer: object) -> list[dict[str, Tensor]]:
    """The samples that proxsparse.train takes for the same flags."""
    texts = load_texts(args.data, "train", limit=read_limit(args.data))
    return calibration_batches(texts, tokenizer, args.num_samples, args.seq_len, packing=args.packing, seed=args.seed)


# ---------------------------------------------------------------------------------------------- saved results


def saved(text: str) -> Contender:
    """NAME=FILE: masks, applied to the pretrained weights; NAME=FOLDER: a checkpoint, as proxsparse.prune saves it."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(
            f"--masks {text!r}: must be NAME=FILE, such as proxsparse=runs/a/masks.safetensors, or NAME=FOLDER"
        )
    if Path(path).is_dir():
        settings = {"checkpoint_sha256": checkpoint_sha256(Path(path))}
        return Contender(name, weights_of(Path(path)), settings, lambda model, tokenizer: None, source=path)
    masks = load_masks(path)

    def apply(model: nn.Module, tokenizer: object) -> dict[str, Tensor]:
        apply_masks_(model, masks)
        return masks

    return Contender(name, "frozen", {"masks_sha256": masks_sha256(masks)}, apply)


def weights_of(folder: Path) -> str:
    """What result.json says of the weights; older runs of proxsparse.train, whose weights are frozen, say nothing."""
    if not (folder / "result.json").exists():
        return "as saved"
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return "updated" if result.get("updated") else "frozen"


def checkpoint_sha256(folder: Path) -> str:
    """Digest of the files of weights in the order of their names."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(f"--masks: folder {str(folder)!r} holds no model*.safetensors; name a masks.safetensors file")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- pruning, once


def pruned_model(contender: Contender, args, identity: dict) -> tuple[nn.Module, object, dict]:
    """The contender's model and tokenizer on the device, and what its rows say of the pruning.

    Whatever took long is kept in --work_dir, and found there by a later call with the same settings. What code with
    uncommitted changes has pruned is found only while the commit is still the same.
    """
    device = choose_device(args.device)
    weight_dtype, compute_dtype = choose_precision(args.precision, device)
    model, tokenizer = load_model(contender.source or args.model, weight_dtype)
    model.to(device)
    folder = args.work_dir / "-".join([re.sub(r"[^\w.=+-]", "_", contender.name), digest(identity)])
    commit = common.commit()
    if contender.keep and not args.again and (folder / "pruned.json").exists():
        figures = json.loads((folder / "pruned.json").read_text(encoding="utf-8"))
        if figures["pruned_at"] == commit or is_committed(figures["pruned_at"]):
            print(f"{contender.name}: pruned already, {folder}; --again prunes anew", file=sys.stderr)
            restore_(model, folder / "layers.safetensors")
            return model, tokenizer, figures
    start = time.perf_counter()
    with autocast(device, compute_dtype):
        masks = contender.prune_(model, tokenizer)
    figures = {"seconds": round(time.perf_counter() - start, 1)}
    if masks is not None:
        figures |= {"masks_sha256": masks_sha256(masks)}
    if contender.keep:
        figures |= {"pruned_at": commit}
        store(model, masks, contender, folder, figures)
    return model, tokenizer, figures


def store(model: nn.Module, masks: dict[str, Tensor], contender: Contender, folder: Path, figures: dict) -> None:
    """Writes the packed masks (uint8), or the layers' new weights, and last the figures that make them count."""
    from safetensors.torch import save_file

    updated = contender.weights == "updated"
    weights = dict(model.named_parameters())
    kept = {name: weights[f"{name}.weight"] if updated else pack_mask(mask) for name, mask in masks.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pruned.json").unlink(missing_ok=True)
    with atomic_directory(folder) as scratch:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in kept.items()}, scratch / "layers.safetensors"
        )
    write_file(folder / "pruned.json", json.dumps(figures).encode())


@torch.no_grad()
def restore_(model: nn.Module, file: Path) -> None:
    """Puts into the fresh model what `store` wrote."""
    from safetensors.torch import load_file

    weights = dict(model.named_parameters())
    for name, kept in load_file(file).items():
        weight = weights[f"{name}.weight"]
        if kept.dtype == torch.uint8:
            mask = unpack_mask(kept, weight.shape[-1]).to(weight.device)
            kept = torch.where(mask, weight, 0.0)
        weight.copy_(kept)


def digest(identity: dict) -> str:
    """Ten digits that differ where the settings do."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


# ---------------------------------------------------------------------------------------------- names


def label(source: str) -> str:
    """A local path's last part, so that rows say nothing about the machine; any other name as it is."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


def is_committed(commit: str) -> bool:
    """Whether the commit names the code exactly, so that its rows can stand for a new measurement."""
    return commit != "unknown" and not commit.endswith("-dirty")
