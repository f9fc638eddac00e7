"""`python -m proxsparse.prune --method NAME`: prune a pretrained language model by any of the methods.

--list prints them with their options. What a run leaves behind is what proxsparse.train leaves: the pruned model as a
Hugging Face checkpoint with its tokenizer, masks.safetensors, config.yaml with every flag, and result.json. What a run
that was stopped leaves is its finished decoder blocks, see `methods.finished`. The same command line with
--resume_from_checkpoint last continues after them, starts where there are none, and leaves a complete run as it is.
"""

import argparse
import sys
import time

import torch

from proxsparse import train
from proxsparse.allocations.registry import allocate, get_allocation
from proxsparse.allocations.uniform import UNIFORM
from proxsparse.data.calibration import calibration_batches
from proxsparse.data.sources import load_texts, read_limit
from proxsparse.errors import InputError, run_command
from proxsparse.io.mask_files import masks_sha256
from proxsparse.io.output_folder import FINISHED_BLOCKS, OutputFolder
from proxsparse.methods import finished_blocks, get_method, list_methods, prune_
from proxsparse.models.checks import check_length, refuse_not_finite
from proxsparse.models.layers import prunable_layers
from proxsparse.models.loading import base_identity, load_model
from proxsparse.models.snap import cast_parameters_, copy_weights, snap_
from proxsparse.patterns import NMPattern
from proxsparse.run import folder as run_folder
from proxsparse.run import result as run_result
from proxsparse.run.config import Parser
from proxsparse.run.flags import PROXSPARSE, parse_flags, tables
from proxsparse.run.model_card import write_card
from proxsparse.run.resume import MAY_DIFFER, digest_of, saying_what_is_kept
from proxsparse.runtime import distributed
from proxsparse.runtime.device import autocast, choose_device, choose_precision


def main(arguments: list[str] | None = None) -> int:
    """Does what the flags ask for, unless it is done already. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--list" in arguments:
        print(tables())
        return 0
    asked, others = split_method(arguments)
    if asked.method == PROXSPARSE.name:
        if asked.allocation != UNIFORM:
            raise InputError(
                f"--allocation {asked.allocation}: {PROXSPARSE.name} learns one --pattern for all layers; leave it "
                f"out, or choose another of {', '.join(list_methods())}"
            )
        return train.main(others)
    config = parse_flags(arguments)
    if distributed.launched_world_size() > 1:
        raise InputError(
            f"{distributed.launched_world_size()} processes: proxsparse.prune runs in one; start it without torchrun"
        )
    finished_blocks.check_named(config)
    with run_folder.opened(config, "prune", MAY_DIFFER) as folder:
        if run_folder.nothing_left(folder):
            return 0
        if folder.begun:
            print(
                f"resuming in {folder.path}: {finished_blocks.kept(folder.path) or 'no finished blocks'}",
                file=sys.stderr,
            )
        with saying_what_is_kept(folder.final, lambda: finished_blocks.kept(folder.path)):
            result = prune_model(config, folder)
        print(run_result.summary(result, folder.final))
    return 0


def prune_model(config: argparse.Namespace, folder: OutputFolder) -> dict:
    """Load, calibrate, allocate, prune, save, evaluate; returns what result.json holds."""
    started, run_dir = time.monotonic(), folder.path
    chosen, sharing = get_method(config.method), get_allocation(config.allocation)
    options = {name: getattr(config, name) for name in chosen.options}
    updated = chosen.updates_weights and options.get("update_weights", True)
    pattern = NMPattern.parse(config.pattern)
    device = choose_device(config.device)
    weight_dtype, compute_dtype = choose_precision(config.precision, device)
    torch.manual_seed(config.seed)

    model, tokenizer = load_model(config.model)
    refuse_not_finite(model)
    base = base_identity(config.model, model)
    layers = prunable_layers(model, pattern, config.include, config.exclude)
    blocks_bytes = sum(layer.weight.numel() for layer in layers.values()) * weight_dtype.itemsize if updated else 0
    run_folder.require_space_for(model, run_dir, blocks_bytes)  # finished blocks hold the new weights until the end
    batches = []
    if chosen.needs_data or sharing.needs_data:
        check_length(model, config.seq_len, "seq_len")
        texts = load_texts(config.data, "train", config.text_field, read_limit(config.data))
        batches = calibration_batches(
            texts, tokenizer, config.num_samples, config.seq_len, packing=config.packing, seed=config.seed
        )
    digest = digest_of(model, batches)
    evaluate = run_result.perplexity_of(config, model, tokenizer, compute_dtype)
    pretrained = copy_weights(model)

    cast_parameters_(model.to(device), weight_dtype)
    scores = {"dense": evaluate(model)}
    blocks = run_dir / FINISHED_BLOCKS
    run_folder.start_run(run_dir, config)
    with autocast(device, compute_dtype):
        patterns = finished_blocks.load_start(blocks, layers, digest)
        if patterns is None:
            sharing_options = {name: getattr(config, name) for name in sharing.options}
            patterns = allocate(config.allocation, model, layers, batches, pattern, progress=True, **sharing_options)
            finished_blocks.save_start(blocks, patterns, digest)
        kept = {"finished_blocks": blocks, "run_id": folder.run_id}
        masks = prune_(model, config.method, batches, patterns, progress=True, **kept, **options)
    snap_(model, pretrained, masks, updated)
    run_folder.save_checkpoint(run_dir, model, tokenizer, masks, patterns, base)
    scores |= run_result.scores_under({config.method: masks}, model, pretrained, weight_dtype, evaluate, updated)
    samples = sum(len(batch["input_ids"]) for batch in batches)
    figures = {
        "status": "complete",
        "run_id": folder.run_id,
        "samples": samples,
        "paper": chosen.paper,
        "updated": updated,
        **run_result.what_was_pruned(layers, patterns, pattern),
        "seconds": time.monotonic() - started,
        "resumed": folder.begun,
        "masks_sha256": masks_sha256(masks),
        "perplexity": run_result.perplexity_table(scores, config),
        "warnings": run_result.few_samples(samples, config) if batches else [],
    }
    result = run_result.as_result(config, device, figures)
    write_card(run_dir, result)
    run_result.save_result(run_dir, result)
    run_folder.finish(folder)
    return result


def split_method(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What --method and --allocation name, and the command line without them."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method")
    parser.add_argument("--allocation", default=UNIFORM)
    return parser.parse_known_args(arguments)


if __name__ == "__main__":
    sys.exit(run_command(main))
