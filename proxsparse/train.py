"""`python -m proxsparse.train`: learn the N:M mask of a pretrained language model (the paper's Algorithm 1).

Started by `torchrun` it runs on many processes: each learns its rows of every weight, on its share of the samples.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from proxsparse import plan
from proxsparse.data.calibration import calibration_batches
from proxsparse.data.sources import load_texts, read_limit
from proxsparse.errors import InputError, run_command
from proxsparse.io.mask_files import masks_sha256, refuse_other_base
from proxsparse.io.output_folder import OutputFolder
from proxsparse.models.checks import check_length
from proxsparse.models.layers import decoder_blocks, prunable_layers
from proxsparse.models.loading import base_identity, load_model
from proxsparse.models.snap import snap_
from proxsparse.ops import nm_mask
from proxsparse.optim import ProxAdamW
from proxsparse.patterns import NMPattern
from proxsparse.run import folder as run_folder
from proxsparse.run import result as run_result
from proxsparse.run.config import TrainConfig, parse_config
from proxsparse.run.log import RunLog
from proxsparse.run.report import write_report
from proxsparse.run.resume import AGAIN, digest_of, saying_what_is_kept
from proxsparse.runtime import distributed, sharding
from proxsparse.runtime.device import autocast, choose_device, choose_precision
from proxsparse.runtime.distributed import is_rank_zero, on_rank_zero
from proxsparse.training import checkpoint, loop
from proxsparse.training.distillation import teacher_targets
from proxsparse.training.initial_masks import Start, check_start, first_masks, parse_start
from proxsparse.training.learnable_layer import LearnableLayer, make_learnable_layers
from proxsparse.training.mask_monitor import agreement, feasible_share
from proxsparse.training.optimizer import lr_factor, reg_lambda_range, set_rates_
from proxsparse.training.scaling import activation_scaling


def main(arguments: list[str] | None = None) -> int:
    """Does what the flags ask for, unless it is done already. Returns 0, or 128 + the signal that ended it early."""
    config = parse_config(sys.argv[1:] if arguments is None else arguments)
    if config.plan:
        print(plan.text(config))
        return 0
    start = parse_start(config.start)
    device = choose_device(distributed.local_device(config.device))
    distributed.init_process_group(device)
    with run_folder.opened(config, "train", checkpoint.MAY_DIFFER) as folder:
        distributed.require_shared_directory(folder.path)
        if on_rank_zero(lambda: run_folder.nothing_left(folder)):
            return 0
        with saying_what_is_kept(folder.final, lambda: checkpoint.kept(folder.path)):
            return prune_model(config, start, folder, device)


def prune_model(config: TrainConfig, start: Start, folder: OutputFolder, device: torch.device) -> int:
    """Load, learn, snap, save, evaluate, report."""
    started = time.monotonic()
    run_dir, pattern = folder.path, NMPattern.parse(config.pattern)
    resumed, facts = on_rank_zero(lambda: checkpoint.find(folder, config))
    weight_dtype, compute_dtype = choose_precision(config.precision, device)
    torch.manual_seed(config.seed)

    model, tokenizer = load_model(config.model)
    layers = prunable_layers(model, pattern, config.include, config.exclude)
    base = base_identity(config.model, model)
    check_start(start, layers, pattern)
    if isinstance(start, dict) and not config.allow_other_base:
        refuse_other_base(config.start, base, "--start")
    check_length(model, config.seq_len, "seq_len")
    on_rank_zero(lambda: run_folder.require_space_for(model, run_dir))
    texts = on_rank_zero(lambda: load_texts(config.data, "train", config.text_field, read_limit(config.data)))
    size, packing = config.per_device_train_batch_size, config.packing
    batches = calibration_batches(texts, tokenizer, config.num_samples, config.seq_len, size, packing, config.seed)
    digest = digest_of(model, batches)
    if resumed and facts["digest"] != digest:
        raise InputError(f"{resumed}: the files of --model or --data have changed since it was written; {AGAIN}")
    evaluate = run_result.perplexity_of(config, model, tokenizer, compute_dtype)

    blocks, keep = decoder_blocks(model), config.pretrained_weights
    pretrained = sharding.shard_and_move_(model, blocks, device, weight_dtype, keep, config.shard_within_node)
    scores = facts["scores"] if resumed else {"dense": evaluate(model)}
    with autocast(device, compute_dtype):
        if config.distill:
            batches = teacher_targets(model, batches)
        if resumed:
            metric, begin_with = checkpoint.read_metric(resumed, layers, config), {}
        else:
            metric = (
                activation_scaling(model, layers, batches, config.metric_samples) if config.metric != "none" else {}
            )
            begin_with = first_masks(start, model, layers, batches, pattern)

    learned = make_learnable_layers(layers, pretrained, metric, pattern, config.forward == "masked", begin_with)
    state = loop.begin(model, learned, config, loop.step_count(len(batches), config))
    on_rank_zero(lambda: checkpoint.require_space_for(state, run_dir))
    if resumed:
        checkpoint.restore_(resumed, facts, state)
    on_rank_zero(lambda: run_folder.start_run(run_dir, config, resumed))

    def learn(optimizer: ProxAdamW, done: int) -> Iterator[dict[str, float]]:
        samples = loop.own_samples(batches, config.seed, state.batches)
        return learn_masks(model, learned, optimizer, samples, done, state.steps, compute_dtype, config)

    with loop.StopSignal() as stop:
        with RunLog(run_dir, state.step, state.all_steps, config.pattern, config.report_to) as log:
            for row in loop.averaged_runs(state, learn, stop):
                log.step(row | state.monitor.observe(row["step"]))
                stop.agree()
                if checkpoint.is_due(state, stop.number):
                    checkpoint.save(run_dir, state, scores, digest)
        masks = loop.current_masks(learned)
        magnitude_masks = {name: nm_mask(one.pretrained.abs(), pattern).cpu() for name, one in learned.items()}
        alike = agreement(masks, magnitude_masks, learned)
        decided = feasible_share([one.weight for one in learned.values()], pattern)
        snap_(model, pretrained, masks)
        whole = loop.whole_masks(masks, learned)
        on_rank_zero(
            lambda: run_folder.save_checkpoint(
                run_dir, run_folder.pruned(model, whole, config), tokenizer, whole, config.pattern, base
            )
        )
        stop.agree()

    complete = state.step == state.all_steps
    if not stop.number:
        contenders = {"proxsparse": masks, "magnitude": magnitude_masks}
        scores |= run_result.scores_under(contenders, model, pretrained, weight_dtype, evaluate)
    table = None if stop.number else run_result.perplexity_table(scores, config)
    if is_rank_zero():
        samples = sum(len(batch["input_ids"]) for batch in batches)
        figures = {
            "status": "complete" if complete else "interrupted",
            "run_id": folder.run_id,
            "samples": samples,
            "updated": False,
            **run_result.what_was_pruned(layers, dict.fromkeys(layers, pattern), pattern),
            "steps": state.step,
            "tokens": state.tokens,
            "seconds": time.monotonic() - started + facts.get("seconds", 0.0),
            "resumed": resumed is not None,
            "processes": distributed.world_size(),
            "reg_lambda": reg_lambda_range(state.optimizer),
            "feasible_share": decided,
            "magnitude_agreement": alike,
            "mask_similarity": state.monitor.similarity(),
            "masks_sha256": masks_sha256(whole),
            "perplexity": table,
            "warnings": run_result.warnings_for(table, decided, samples, config),
        }
        result = run_result.as_result(config, device, figures)
        run_result.save_result(run_dir, result)
        write_report(run_dir)
        if complete:
            run_folder.finish(folder)
        print(run_result.summary(result, folder.final if complete else run_dir))
    return 128 + stop.number if stop.number else 0


def learn_masks(
    model: nn.Module,
    learned: dict[str, LearnableLayer],
    optimizer: ProxAdamW,
    samples: Iterator[dict[str, Tensor]],
    done: int,
    steps: int,
    compute_dtype: torch.dtype | None,
    config: TrainConfig,
) -> Iterator[dict[str, float]]:
    """Algorithm 1 behind `done` steps: gradient of the calibration loss, base step, prox. Yields the figures of each.

    Raises:
        InputError: the loss or its gradient is not finite; the weights are those of the step before.
    """
    loop.start_training(model, config.gradient_checkpointing)
    in_backward = loop.stepping_in_backward(model, learned, optimizer) if config.step_in_backward else nullcontext()
    with in_backward as norm_of_stepped:
        for step in range(done + 1, steps + 1):
            batches = list(itertools.islice(samples, config.gradient_accumulation_steps))
            reg_factor = optimizer.reg_schedule(step - 1) if optimizer.reg_schedule else 1.0
            factor = lr_factor(step - 1, steps, config)
            set_rates_(optimizer, factor)
            loss = loop.backward(model, batches, compute_dtype, config.distill)
            step_all = norm_of_stepped or partial(loop.step_, learned, optimizer, config.max_grad_norm)
            grad_norm = step_all()  # the base step, then the prox
            (tokens,) = distributed.all_reduce_sum([sum(int(batch["attention_mask"].sum()) for batch in batches)])
            yield {
                "step": step,
                "loss": loss,
                "learning_rate": config.learning_rate * factor,
                "reg_lambda_factor": reg_factor,
                "grad_norm": grad_norm,
                "tokens": int(tokens),
            }


if __name__ == "__main__":
    sys.exit(run_command(main))
