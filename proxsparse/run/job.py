"""The jobs of `proxsparse prune`, `train` and `finetune`: load, calibrate, prune, save, score."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from proxsparse.allocations.registry import allocate, get_allocation
from proxsparse.data.batches import read_batches
from proxsparse.data.calibration import TokenBatches
from proxsparse.data.sources import check_source
from proxsparse.errors import InputError
from proxsparse.io.checkpoints import CHECKPOINTS, TOKENS, Checkpoints
from proxsparse.io.output_folder import MASKS
from proxsparse.methods import get_method
from proxsparse.methods.finetune import split, train_kept_weights
from proxsparse.methods.pruned import Pruned
from proxsparse.models.checks import refuse_not_finite
from proxsparse.models.layers import prunable_layers, refuse_packed, routers
from proxsparse.models.loading import load_model
from proxsparse.patterns import NMPattern
from proxsparse.run import folder as run_folder
from proxsparse.run import memory
from proxsparse.run import result as results
from proxsparse.run.args import DataArgs, RunArgs
from proxsparse.run.folder import Run
from proxsparse.run.given import given_masks
from proxsparse.run.sections import counted
from proxsparse.run.teacher import load_teacher
from proxsparse.runtime import distributed
from proxsparse.runtime.device import autocast, choose_device
from proxsparse.runtime.distributed import local_world_size, on_rank_zero, world_size
from proxsparse.runtime.progress import write_line
from proxsparse.training.held_layer import recorded_rows, require_held
from proxsparse.training.loop import step_count
from proxsparse.training.options import FinetuneOptions

TEXT_FLAGS = ("data", "num_samples", "seq_len", "packing")  # only of the calibration text


def prune(args: RunArgs) -> int:
    """Executes `proxsparse prune` or `train`. Returns the exit code."""
    if "pretrained" not in get_method(args.method).takes:
        distributed.require_one_process(f"--method {args.method}")
    return execute(args, prune_model)


def execute(args: RunArgs, work: Callable[[Run], int]) -> int:
    """Opens the output directory and does the work of a run; or prints its --plan. Returns the exit code."""
    if args.output.plan:
        print(memory.page(args))
        return 0
    device = choose_device(distributed.local_device(args.hardware.device))
    distributed.init_process_group(device)
    with run_folder.opened(args) as folder:
        distributed.require_shared_directory(folder.path)
        if on_rank_zero(lambda: run_folder.nothing_left(folder)):
            return 0
        if args.training:
            on_rank_zero(lambda: memory.require_memory(args, device, folder.path, world_size(), local_world_size()))
        return work(Run(args, folder, device))


def prune_model(run: Run) -> int:
    """One pretrained model, one method."""
    args, method, pattern = run.args, get_method(run.args.method), NMPattern.parse(run.args.model.pattern)
    options, allocation = args.options_of(method), get_allocation(args.allocation)
    updated = method.updates_weights and options.get("update_weights", True)
    needs_data = method.needs_data or allocation.needs_data or args.finetune is not None

    load(run, needs_data)
    run.layers = prunable_layers(run.model, pattern, args.model.include, args.model.exclude)
    run.given = given_masks(args.model.model, run.model)
    if args.finetune and args.finetune.distill and run.given.patterns:
        remedy = "leave --finetune out, then run proxsparse finetune --teacher; or add --distill 0"
        raise InputError(f"--finetune: its teacher would be {args.model.model}, which is pruned; {remedy}")
    on_rank_zero(lambda: describe_layers(run))

    batches, seq_len = calibrate(run, needs_data)
    checkpoints = run.checkpoints(batches)
    run.begin(run.layers if updated else {})
    first = "given" if run.given.patterns else "dense"
    run.scores[first] = run.evaluate(run.model, first)

    with autocast(run.device, run.compute_dtype):
        more = args.options_of(allocation)
        run.patterns = allocate(allocation.name, run.model, run.layers, batches, pattern, checkpoints, **more)
        run.layers = {name: run.layers[name] for name in run.patterns}
        given = {name: {"checkpoints": checkpoints, "pretrained": run.pretrained}[name] for name in method.takes}
        pruned = method.prune(run.model, run.layers, batches, run.patterns, **given, **options)
        if updated:
            pruned.trained = frozenset(f"{name}.weight" for name in pruned.masks)
        if args.finetune:
            updated_weights, teacher = pruned.trained, args.model.model if args.finetune.distill else None
            pruned = fine_tuned(run, method.name, batches, checkpoints, teacher, {}, pruned.masks)
            pruned.trained |= updated_weights

    figures = {"seq_len": seq_len, "paper": method.paper} | run.save(pruned)
    return run.finish(pruned, batches.samples if needs_data else None, figures)


def finetune_model(run: Run) -> int:
    """One pruned model, whose kept weights are trained."""
    args, pattern = run.args, run.args.model.pattern

    load(run, True)
    run.given = given_masks(args.model.model, run.model)
    teacher, base = args.model.teacher, {}
    if not teacher:
        teacher, base = run.given.recorded.get("base_model"), run.given.base
    if not args.options.distill:
        teacher = None
    elif not teacher:
        reason = f"{args.model.model} has no masks.safetensors that names the dense model"
        raise InputError(f"--teacher is missing: {reason}; give it, or train without a teacher: --distill 0")
    recorded = run.given.patterns if run.given.recorded else {}
    names = sorted({*map(str, recorded.values())})
    if pattern and names not in ([], [pattern]):
        what = f"the masks of {args.model.model} are {', '.join(names)}"
        raise InputError(f"--pattern {pattern}: {what}; leave --pattern out")
    run.layers = prunable_layers(run.model, recorded or pattern or "2:4", args.model.include, args.model.exclude)
    run.patterns = {name: NMPattern.parse(pattern or run.given.patterns.get(name, "2:4")) for name in run.layers}
    require_held(run.layers, run.patterns)
    on_rank_zero(lambda: describe_layers(run))
    for name in run.layers:  # read again below, by each process its rows
        run.given.masks.pop(name, None)

    batches, seq_len = calibrate(run, True)
    checkpoints = run.checkpoints(batches)
    run.begin({})

    with autocast(run.device, run.compute_dtype):
        masks = recorded_rows(Path(args.model.model) / MASKS, run.layers) if recorded else None
        pruned = fine_tuned(run, "pruned", batches, checkpoints, teacher, base, masks)

    figures = {"seq_len": seq_len, "paper": "fine-tuning under a fixed mask with distillation", "teacher": teacher}
    figures |= run.save(pruned)
    return run.finish(pruned, batches.samples, figures)


# ---------------------------------------------------------------------------------------------- stages


def load(run: Run, needs_data: bool) -> None:
    """Loads the model, on the CPU, and its tokenizer; the texts are checked first."""
    args = run.args
    sources = [args.evaluate.eval_data, *[args.data.data] * needs_data]
    on_rank_zero(lambda: [check_source(source) for source in sources])
    torch.manual_seed(args.hardware.seed)
    run.model, run.tokenizer = load_model(args.model.model)
    refuse_packed(run.model)
    refuse_not_finite(run.model)


def fine_tuned(
    run: Run,
    name: str,
    batches: TokenBatches,
    checkpoints: Checkpoints,
    teacher: str | None,
    base: dict,
    masks: dict[str, Tensor] | None,
) -> Pruned:
    """Trains the kept weights.

    Args:
        name: of the score before the training.
        teacher: name of the dense model; None: none.
        base: what masks.safetensors records of the teacher, see `load_teacher`.
        masks: see `train_kept_weights`.
    """
    dense = None
    if teacher:
        within_node = run.args.hardware.shard_within_node
        dense, identity = load_teacher(teacher, run.model, run.tokenizer, base, within_node)
        checkpoints = replace(checkpoints, identity=checkpoints.identity | identity)
    run.scores[name] = run.evaluate(run.model, name)  # after the teacher has been checked
    if dense is not None and not run.scores.keys() & {"dense", "given"}:  # `prune --finetune` has measured it
        run.scores["dense"] = run.evaluate(dense, "dense")
    data = run.model, run.layers, batches, run.patterns, checkpoints
    return train_kept_weights(*data, dense, masks, **vars(run.args.training))


def describe_layers(run: Run) -> None:
    """Prints lines on routers that stay dense, and on layers that are pruned before the run."""
    before, prunes = run.given.patterns, run.args.command != "finetune"
    dense = [name for name in routers(run.model) if name not in {**run.layers, **before}]
    if prunes and dense and not run.args.model.exclude:
        write_line(f"{len(dense)} routers stay dense, such as {dense[0]}; to prune them too: --include router gate .")
    if prunes and before:
        write_line(f"this run starts from a pruned model: {counted(before)}, such as {next(iter(before))}")
    if others := [name for name in before if name not in run.layers]:
        write_line(f"{len(others)} pruned layers are not selected, such as {others[0]}: they keep weights and masks")


def calibrate(run: Run, needs_data: bool) -> tuple[TokenBatches | list, int | None]:
    """The calibration samples, and their length in tokens; reads the held-out text too."""
    data, batches, seq_len = run.args.data, [], None
    if needs_data:
        training, seed = run.args.training, run.args.hardware.seed
        size = training.per_device_train_batch_size if training else 1
        folder = run.folder.path / CHECKPOINTS / TOKENS
        flags = {"window": data.window, "batch_size": size, "seed": seed, "folder": folder} | vars(data)
        batches, seq_len = read_batches(flags.pop("data"), run.model, run.tokenizer, **flags)
        if isinstance(training, FinetuneOptions):  # so that `prune --finetune` does not fail after the pruning
            step_count(len(split(batches, training)[0]), training)
    elif ignored := [f"--{name}" for name in TEXT_FLAGS if getattr(data, name) != getattr(DataArgs, name)]:
        write_line(f"--method {run.args.method} uses no text and ignores {', '.join(ignored)}")
    if run.args.evaluate.eval_data != "none":
        measured = run.model, run.tokenizer, run.compute_dtype
        run.evaluate = results.perplexity_of(run.args.evaluate, data.text_field, *measured)
    return batches, seq_len
