"""The job of `proxsparse train` and `proxsparse prune`: one model, one method, one output directory."""

import sys
import time
from functools import partial

import torch
from torch import nn

from proxsparse.allocations.registry import allocate, get_allocation
from proxsparse.data.calibration import calibration_batches
from proxsparse.data.sources import check_source, load_texts, read_limit
from proxsparse.errors import InputError
from proxsparse.io.mask_files import masks_sha256, recorded_masks
from proxsparse.io.output_folder import OutputFolder
from proxsparse.methods import Method, get_method
from proxsparse.methods.store import Store
from proxsparse.models.checks import fit_window, refuse_not_finite
from proxsparse.models.layers import decoder_blocks, prunable_layers, pruned_layers, routers
from proxsparse.models.loading import base_identity, load_model
from proxsparse.models.snap import snap_
from proxsparse.patterns import NMPattern
from proxsparse.run import folder as run_folder
from proxsparse.run import hub, memory
from proxsparse.run import result as results
from proxsparse.run.config import RunConfig
from proxsparse.run.resume import (
    MAY_DIFFER,
    check_digest,
    check_named,
    digest_of,
    find_checkpoint,
    how_to_resume,
    identity_of,
    load_start,
    naming_progress,
    progress_in,
    save_start,
)
from proxsparse.runtime import distributed
from proxsparse.runtime.device import autocast, choose_device, choose_precision
from proxsparse.runtime.distributed import is_rank_zero, on_rank_zero
from proxsparse.runtime.progress import write_line
from proxsparse.runtime.sharding import gather_masks, gather_parameters, shard_and_move_


def run(config: RunConfig, method: Method | None = None) -> int:
    """Executes a run, or prints its --plan. Returns 0, or 128 + the number of the signal that stopped it.

    `method`: the registered one of the config by default.
    """
    if getattr(config, "plan", False):
        print(memory.page(config))
        return 0
    method = method or get_method(config.method)
    if distributed.launched_world_size() > 1 and method.keeps != "checkpoints":
        raise InputError(
            f"--method {method.name}: runs in one process, not in {distributed.launched_world_size()}; start it "
            "without torchrun"
        )
    method.check(**method_options(config, method))
    check_named(config, method)
    device = choose_device(distributed.local_device(config.device))
    distributed.init_process_group(device)
    repo = on_rank_zero(lambda: hub.check_repository(config.push_to_hub))
    with run_folder.opened(config, getattr(config, "command", "prune"), MAY_DIFFER) as folder:
        distributed.require_shared_directory(folder.path)
        code = 0
        if not on_rank_zero(lambda: run_folder.nothing_left(folder)):
            with naming_progress(folder.final, lambda: progress_in(folder.path)):
                code = prune_model(config, method, folder, device)
        if repo and not code and is_rank_zero():
            hub.upload(folder.final, repo)
    return code


def prune_model(config: RunConfig, method: Method, folder: OutputFolder, device: torch.device) -> int:
    """The stages of a run: load, calibrate, prune, snap, save, score, report."""
    started, run_dir, options = time.monotonic(), folder.path, method_options(config, method)
    weight_dtype, compute_dtype = choose_precision(config.precision, device)
    checkpoint, state = on_rank_zero(lambda: find_checkpoint(folder, config, method))
    torch.manual_seed(config.seed)
    needs_data = method.needs_data or get_allocation(config.allocation).needs_data
    sources = [config.eval_data, *[config.data] * needs_data]
    on_rank_zero(lambda: [check_source(source) for source in sources])

    model, tokenizer = load_model(config.model)
    refuse_not_finite(model)
    pattern, base = NMPattern.parse(config.pattern), on_rank_zero(lambda: base_identity(config.model, model))
    found = {}
    if method.starts_as == "pruned":  # the masks of the folder, if it is one of ours
        found, recorded = on_rank_zero(lambda: recorded_masks(config.model))
        base = recorded or base
    layers = prunable_layers(model, found or config.pattern, config.include, config.exclude)
    already = pruned_layers(layers, pattern) if method.starts_as == "dense" else []
    on_rank_zero(lambda: [write_line(line) for line in about_layers(model, layers, already, pattern, config)])
    method.check_model(layers, found or dict.fromkeys(layers, pattern), base, tokenizer, **options)
    updated = method.updates_weights and options.get("update_weights", True)
    on_rank_zero(lambda: run_folder.require_space_for(model, run_dir, layers if updated else {}, weight_dtype))
    batches, seq_len = [], None
    if needs_data:
        window = getattr(config, "window", RunConfig.window)
        seq_len = on_rank_zero(lambda: fit_window(model, config.seq_len, window, "seq_len"))
        batches = read_calibration(config, tokenizer, seq_len)
    digest = digest_of(model, batches)
    if checkpoint:
        check_digest(checkpoint, state["digest"], digest)
    evaluate, eval_digest = results.perplexity_of(config, model, tokenizer, compute_dtype)

    keep, within_node = getattr(config, "pretrained_weights", "cpu"), getattr(config, "shard_within_node", False)
    pretrained = shard_and_move_(model, decoder_blocks(model), device, weight_dtype, keep, within_node)
    on_rank_zero(lambda: run_folder.start_run(run_dir, config, checkpoint))
    store = Store(run_dir, folder.run_id, identity_of(config, digest, eval_digest), pretrained, checkpoint, state)
    store.scores = state["scores"] if state.get("eval_digest") == eval_digest else {}
    store.evaluate = evaluate
    store.score(method.starts_as, model)
    with store.stop:  # until the training begins, a signal ends the run at once
        with autocast(device, compute_dtype):
            patterns = found or choose_patterns(config, method, store, model, layers, batches, digest)
            progress = {"store": store} if method.keeps else {}
            masks = method.prune(model, layers, batches, patterns, **options, **progress)
        trained = store.trained or ({f"{name}.weight" for name in masks} if updated else set())
        snap_(model, pretrained, masks, trained)
        whole = gather_masks(masks, {name: layer.weight for name, layer in layers.items()})
        values = gather_parameters(model, trained)
        saved = partial(run_folder.whole_model, model, config.model, whole, values)
        on_rank_zero(lambda: run_folder.save_checkpoint(run_dir, saved(), tokenizer, whole, patterns, base))
        store.stop.agree()

    signal, table = store.stop.number, None
    if not signal:
        contenders = {method.name: masks} | store.baselines
        measured = results.scores_under(contenders, model, pretrained, weight_dtype, evaluate, trained)
        table = results.perplexity_table(store.scores | measured, config)
    if is_rank_zero():
        samples = sum(len(batch["input_ids"]) for batch in batches)
        figures = {
            "status": "complete" if store.complete else "interrupted",
            "run_id": folder.run_id,
            "samples": samples,
            "seq_len": seq_len,
            "paper": method.paper,
            "updated": updated,
            **({"base_model": base["base_model"]} if method.starts_as == "pruned" else {}),
            **results.what_was_pruned(model, layers, patterns, pattern),
            "seconds": time.monotonic() - started + state.get("seconds", 0.0),
            **({"already_pruned": len(already)} if already else {}),
            "resumed": bool(checkpoint) if method.keeps == "checkpoints" else folder.begun,
            "world_size": distributed.world_size(),
            **store.figures,
            "masks_sha256": masks_sha256(whole),
            "perplexity": table,
            "warnings": [
                *model.source.notes,
                *results.warnings_for(table, store.figures, samples if batches else None, config),
            ],
        }
        result = results.as_result(config, device, figures)
        run_folder.save_result(run_dir, result)
        if store.complete:
            run_folder.finish(folder)
        print(results.summary(result, folder.final if store.complete else run_dir))
        if not store.complete:
            print(f"{progress_in(run_dir)} saved; {how_to_resume(folder.final)}", file=sys.stderr)
        elif table is None and config.eval_data != "none":
            todo = f"the perplexity was not measured; to measure it, run proxsparse evaluate {folder.final}"
            print(f"the model is complete, but {todo}", file=sys.stderr)
    return 128 + signal if signal else 0


def about_layers(
    model: nn.Module, layers: dict[str, nn.Linear], already: list[str], pattern: NMPattern, config: RunConfig
) -> list[str]:
    """Lines on routers that stay dense, and on layers that are N:M before the run."""
    lines, dense = [], [name for name in routers(model) if name not in layers]
    if dense and not config.exclude:
        lines += [
            f"{len(dense)} router layers stay dense, such as {dense[0]}; to prune them too: --include router gate ."
        ]
    if already:
        lines += [
            f"already {pattern}: {len(already)} of {len(layers)} layers, such as {already[0]}; this run starts from a "
            "pruned model"
        ]
    return lines


def method_options(config: RunConfig, method: Method) -> dict:
    """The values of the method's options."""
    return {name: getattr(config, name) for name in method.options}


def read_calibration(config: RunConfig, tokenizer, seq_len: int) -> list[dict]:
    """The calibration batches."""
    size = getattr(config, "per_device_train_batch_size", 1)
    texts = on_rank_zero(lambda: load_texts(config.data, "train", config.text_field, read_limit(config.data)))
    return calibration_batches(texts, tokenizer, config.num_samples, seq_len, size, config.packing, config.seed)


def choose_patterns(
    config: RunConfig,
    method: Method,
    store: Store,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: list[dict],
    digest: str,
) -> dict[str, NMPattern]:
    """Layer name -> pattern: those of the stopped run if it is resumed, else those of --allocation."""
    patterns = load_start(store, layers, digest) if method.keeps == "blocks" else None
    if patterns is None:
        allocation = get_allocation(config.allocation)
        options = {name: getattr(config, name) for name in allocation.options}
        patterns = allocate(allocation.name, model, layers, batches, config.pattern, **options)
        if method.keeps == "blocks":
            save_start(store, patterns, digest)
    return patterns
