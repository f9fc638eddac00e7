"""The jobs of `proxsparse prune`, `train` and `finetune`: load, calibrate, prune, save, score."""

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from proxsparse.allocations.registry import allocate, get_allocation
from proxsparse.data.calibration import calibration_batches
from proxsparse.data.sources import check_source, load_texts, read_limit
from proxsparse.errors import InputError
from proxsparse.evaluation.perplexity import Perplexity
from proxsparse.io.checkpoints import Checkpoints, digest_of, saved_names
from proxsparse.io.mask_files import masks_sha256, recorded_masks
from proxsparse.io.output_folder import OutputFolder
from proxsparse.methods import get_method
from proxsparse.methods.finetune import train_kept_weights
from proxsparse.methods.pruned import Pruned
from proxsparse.models.checks import fit_window, refuse_not_finite
from proxsparse.models.layers import decoder_blocks, prunable_layers, pruned_layers, routers
from proxsparse.models.loading import base_identity, load_model
from proxsparse.models.snap import snap_
from proxsparse.patterns import NMPattern
from proxsparse.run import folder as run_folder
from proxsparse.run import hub, memory
from proxsparse.run import result as results
from proxsparse.run.config import FinetuneConfig, RunConfig
from proxsparse.run.teacher import add_teacher_, check_tokens
from proxsparse.runtime import distributed
from proxsparse.runtime.device import autocast, choose_device, choose_precision
from proxsparse.runtime.distributed import is_rank_zero, on_rank_zero, world_size
from proxsparse.runtime.progress import write_line
from proxsparse.runtime.sharding import gather_masks, gather_parameters, shard_and_move_
from proxsparse.training.held_layer import require_held
from proxsparse.training.options import FinetuneOptions


def prune(config: RunConfig) -> int:
    """Executes `proxsparse prune` or `train`. Returns the exit code."""
    method, count = get_method(config.method), distributed.launched_world_size()
    if count > 1 and "pretrained" not in method.takes:
        raise InputError(f"--method {method.name}: runs in one process, not in {count}; start it without torchrun")
    method.check(**options_of(config, method))
    return execute(config, prune_model)


def finetune(config: FinetuneConfig) -> int:
    """Executes `proxsparse finetune`. Returns the exit code."""
    return execute(config, finetune_model)


def execute(config: RunConfig, work: Callable[[RunConfig, OutputFolder, torch.device], int]) -> int:
    """Opens the output directory, does the work of a run, and uploads the result; or prints its --plan.

    Returns 0, or 128 + the number of the signal that stopped the run.
    """
    if getattr(config, "plan", False):
        print(memory.page(config))
        return 0
    device = choose_device(distributed.local_device(config.device))
    distributed.init_process_group(device)
    repo = on_rank_zero(lambda: hub.check_repository(config.push_to_hub))
    with run_folder.opened(config, getattr(config, "command", "prune")) as folder:
        distributed.require_shared_directory(folder.path)
        done = on_rank_zero(lambda: run_folder.nothing_left(folder))
        code = 0 if done else work(config, folder, device)
    if repo and not code and is_rank_zero():
        hub.upload(folder.path, repo)
    return code


def prune_model(config: RunConfig, folder: OutputFolder, device: torch.device) -> int:
    """One model, one method."""
    started, method, pattern = time.monotonic(), get_method(config.method), NMPattern.parse(config.pattern)
    options = options_of(config, method)
    needs_data = method.needs_data or get_allocation(config.allocation).needs_data
    check_sources(config, needs_data)

    model, tokenizer, layers = load(config, config.pattern)
    base, already = on_rank_zero(lambda: base_identity(config.model, model)), pruned_layers(layers, pattern)
    on_rank_zero(lambda: [write_line(line) for line in about_layers(model, layers, already, pattern, config)])
    updated = method.updates_weights and options.get("update_weights", True)
    data = calibrate(config, folder, model, tokenizer, needs_data)
    pretrained = place(config, folder, model, device, layers if updated else {})
    scores = {"dense": data.evaluate(model, "dense")}

    weight_dtype, compute_dtype = choose_precision(config.precision, device)
    arguments = {"checkpoints": data.checkpoints, "pretrained": pretrained}
    with autocast(device, compute_dtype):
        patterns = choose_patterns(config, data.checkpoints, model, layers, data.batches)
        given = {name: arguments[name] for name in method.takes}
        pruned = method.prune(model, layers, data.batches, patterns, **given, **options)
    if updated:
        pruned.trained = frozenset(f"{name}.weight" for name in pruned.masks)
    whole = save(config, folder, model, tokenizer, layers, pretrained, pruned, patterns, base)
    figures = {"paper": method.paper, "updated": updated, **({"already_pruned": len(already)} if already else {})}
    figures |= results.what_was_pruned(model, layers, patterns, pattern) | {"masks_sha256": masks_sha256(whole)}
    return report(config, folder, device, model, pretrained, data, pruned, scores, weight_dtype, started, figures)


def finetune_model(config: FinetuneConfig, folder: OutputFolder, device: torch.device) -> int:
    """One pruned model, whose kept weights are trained."""
    started, pattern = time.monotonic(), NMPattern.parse(config.pattern)
    check_sources(config, True)

    recorded, base = on_rank_zero(lambda: recorded_masks(config.model))  # of the folder, if a run wrote it
    model, tokenizer, layers = load(config, recorded or config.pattern)
    base = base or on_rank_zero(lambda: base_identity(config.model, model))
    patterns = recorded or dict.fromkeys(layers, pattern)
    require_held(layers, patterns)
    if config.teacher:
        check_tokens(tokenizer, config.teacher)
    data = calibrate(config, folder, model, tokenizer, True)
    pretrained = place(config, folder, model, device, {})
    scores = {"pruned": data.evaluate(model, "pruned")}

    weight_dtype, compute_dtype = choose_precision(config.precision, device)
    with autocast(device, compute_dtype):
        if config.teacher:
            data.batches, scores["dense"] = add_teacher_(config.teacher, model, data.batches, data.evaluate)
        options = {field.name: getattr(config, field.name) for field in dataclasses.fields(FinetuneOptions)}
        pruned = train_kept_weights(model, layers, data.batches, patterns, data.checkpoints, **options)
    whole = save(config, folder, model, tokenizer, layers, pretrained, pruned, patterns, base)
    figures = {"paper": "fine-tuning under a fixed mask with distillation", "updated": True}
    figures |= {"base_model": base["base_model"], "masks_sha256": masks_sha256(whole)}
    figures |= results.what_was_pruned(model, layers, patterns, pattern)
    return report(config, folder, device, model, pretrained, data, pruned, scores, weight_dtype, started, figures)


# ---------------------------------------------------------------------------------------------- stages


def check_sources(config: RunConfig, needs_data: bool) -> None:
    """Raises InputError if a text cannot be read, before the model is loaded."""
    sources = [config.eval_data, *[config.data] * needs_data]
    on_rank_zero(lambda: [check_source(source) for source in sources])
    torch.manual_seed(config.seed)


def load(config: RunConfig, pattern: str | dict[str, NMPattern]) -> tuple[nn.Module, object, dict[str, nn.Linear]]:
    """The model on the CPU, its tokenizer, and the layers of the run."""
    model, tokenizer = load_model(config.model)
    refuse_not_finite(model)
    return model, tokenizer, prunable_layers(model, pattern, config.include, config.exclude)


@dataclass
class Data:
    """What a run reads in addition to the model; `evaluate(model, name)` measures the held-out perplexity."""

    batches: list[dict[str, Tensor]]
    seq_len: int | None
    evaluate: Callable[[nn.Module, str], Perplexity | None]
    checkpoints: Checkpoints

    @property
    def samples(self) -> int:
        return sum(len(batch["input_ids"]) for batch in self.batches)


def calibrate(config: RunConfig, folder: OutputFolder, model: nn.Module, tokenizer, needs_data: bool) -> Data:
    """Reads the calibration text and the held-out text."""
    batches, seq_len = [], None
    if needs_data:
        seq_len = on_rank_zero(
            lambda: fit_window(model, config.seq_len, getattr(config, "window", RunConfig.window), "seq_len")
        )
        texts = on_rank_zero(lambda: load_texts(config.data, "train", config.text_field, read_limit(config.data)))
        size = getattr(config, "per_device_train_batch_size", 1)
        batches = calibration_batches(texts, tokenizer, config.num_samples, seq_len, size, config.packing, config.seed)
    compute_dtype = choose_precision(config.precision, choose_device(distributed.local_device(config.device)))[1]
    evaluate = results.perplexity_of(config, model, tokenizer, compute_dtype)
    identity = {"run_id": folder.run_id, "digest": digest_of(model, batches)}
    if steps := getattr(config, "gradient_accumulation_steps", 0):
        identity["batches per step (--gradient_accumulation_steps times processes)"] = steps * world_size()
    return Data(batches, seq_len, evaluate, Checkpoints(folder.path, identity))


def place(
    config: RunConfig, folder: OutputFolder, model: nn.Module, device: torch.device, updated: dict[str, nn.Linear]
) -> dict[str, Tensor]:
    """Begins the output, and moves the model to its device. Returns parameter name -> W0, the rows of this process.

    Args:
        updated: layers whose new weights are saved in checkpoints.
    """
    weight_dtype, _ = choose_precision(config.precision, device)
    on_rank_zero(lambda: run_folder.require_space_for(model, folder.path, updated, weight_dtype))
    on_rank_zero(lambda: run_folder.start(folder, config))
    keep, within_node = getattr(config, "pretrained_weights", "cpu"), getattr(config, "shard_within_node", False)
    return shard_and_move_(model, decoder_blocks(model), device, weight_dtype, keep, within_node)


def save(
    config: RunConfig,
    folder: OutputFolder,
    model: nn.Module,
    tokenizer,
    layers: dict[str, nn.Linear],
    pretrained: dict[str, Tensor],
    pruned: Pruned,
    patterns: dict[str, NMPattern],
    base: dict[str, str],
) -> dict[str, Tensor]:
    """Writes the model under its masks, and the masks. Returns all their rows on rank zero, {} on other ranks."""
    snap_(model, pretrained, pruned.masks, pruned.trained)
    whole = gather_masks(pruned.masks, {name: layer.weight for name, layer in layers.items()})
    values = gather_parameters(model, pruned.trained)
    saved = partial(run_folder.whole_model, model, config.model, whole, values)
    on_rank_zero(lambda: run_folder.save_pruned(folder.path, saved(), tokenizer, whole, patterns, base))
    pruned.stop.agree()
    pruned.stop.restore()
    return whole


def report(
    config: RunConfig,
    folder: OutputFolder,
    device: torch.device,
    model: nn.Module,
    pretrained: dict[str, Tensor],
    data: Data,
    pruned: Pruned,
    scores: dict[str, Perplexity | None],
    weight_dtype: torch.dtype,
    started: float,
    figures: dict,
) -> int:
    """Scores the masks, writes result.json and prints the summary. Returns the exit code."""
    table, signal = None, pruned.stop.number
    if not signal:
        contenders = {config.method: pruned.masks} | pruned.baselines
        scores |= results.scores_under(contenders, model, pretrained, weight_dtype, data.evaluate, pruned.trained)
        table = results.perplexity_table(scores, config)
    if not is_rank_zero():
        return 128 + signal if signal else 0
    warnings = results.warnings_for(table, pruned.figures, data.samples if data.batches else None, config)
    figures = {
        "status": "complete" if pruned.complete else "interrupted",
        "run_id": folder.run_id,
        "samples": data.samples,
        "seq_len": data.seq_len,
        **figures,
        "seconds": time.monotonic() - started + pruned.seconds_before,
        "resumed": folder.resumed,
        "world_size": world_size(),
        **pruned.figures,
        "perplexity": table,
        "warnings": [*model.source.notes, *warnings],
    }
    result = results.as_result(config, device, figures)
    run_folder.finish(folder, result)
    print(results.summary(result, folder.path))
    if not pruned.complete:
        saved = run_folder.progress_text(saved_names(folder.path))
        print(f"{saved} saved; {run_folder.how_to_resume(folder.path)}", file=sys.stderr)
    elif table is None and config.eval_data != "none":
        todo = f"the perplexity was not measured; to measure it, run proxsparse evaluate {folder.path}"
        print(f"the model is complete, but {todo}", file=sys.stderr)
    return 128 + signal if signal else 0


# ---------------------------------------------------------------------------------------------- of prune_model


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


def options_of(config: RunConfig, row) -> dict:
    """The values of the options of a method or an allocation."""
    return {name: getattr(config, name) for name in row.options}


def choose_patterns(
    config: RunConfig,
    checkpoints: Checkpoints,
    model: nn.Module,
    layers: dict[str, nn.Linear],
    batches: list[dict],
) -> dict[str, NMPattern]:
    """Layer name -> pattern: those of the stopped run if it is resumed, else those of --allocation."""
    if saved := checkpoints.facts("patterns"):
        return {name: NMPattern.parse(saved["patterns"][name]) for name in layers}
    allocation = get_allocation(config.allocation)
    options = options_of(config, allocation)
    patterns = allocate(allocation.name, model, layers, batches, config.pattern, **options)
    if allocation.needs_data:  # which takes time
        checkpoints.save("patterns", {}, {"patterns": {name: str(pattern) for name, pattern in patterns.items()}})
    return patterns
