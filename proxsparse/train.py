"""`python -m proxsparse.train`: learn the N:M mask of a pretrained language model (the paper's Algorithm 1)."""

import itertools
import math
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from proxsparse import learning, plan, run
from proxsparse.checkpoint import masks_sha256
from proxsparse.config import TrainConfig, parse_config
from proxsparse.data import calibration_batches, load_texts, read_limit, sample_stream
from proxsparse.device import autocast, choose_device, choose_precision
from proxsparse.distillation import teacher_targets
from proxsparse.errors import InputError, run_command
from proxsparse.log import RunLog
from proxsparse.masked import end_learning_under_masks_, learn_under_masks_, learned_weight
from proxsparse.metric import activation_metric
from proxsparse.models import cast_parameters_, check_length, copy_weights, load_model, prunable_layers, snap_
from proxsparse.monitor import MaskMonitor, agreement, feasible_share
from proxsparse.ops import nm_mask
from proxsparse.patterns import NMPattern
from proxsparse.report import write_report


def main(arguments: list[str] | None = None) -> int:
    """Load, learn, snap, save, evaluate, report. Returns 0, or 128 + the signal that ended the learning early."""
    started = time.monotonic()
    config = parse_config(sys.argv[1:] if arguments is None else arguments)
    pattern = NMPattern.parse(config.pattern)
    start = learning.start_of(config.start)
    if config.plan:
        print(plan.text(config))
        return 0
    run_dir = run.open_run_dir(config)
    device = choose_device(config.device)
    weight_dtype, compute_dtype = choose_precision(config.precision, device)
    torch.manual_seed(config.seed)

    model, tokenizer = load_model(config.model)
    layers = prunable_layers(model, pattern, config.include, config.exclude)
    learning.check_start(start, layers, pattern)
    check_length(model, config.seq_len, "seq_len")
    run.require_space_for(model, run_dir)
    texts = load_texts(config.data, "train", config.text_field, read_limit(config.data))
    size, packing = config.per_device_train_batch_size, config.packing
    batches = calibration_batches(texts, tokenizer, config.num_samples, config.seq_len, size, packing, config.seed)
    evaluate = run.perplexity_of(config, model, tokenizer, compute_dtype)
    pretrained = copy_weights(model)
    magnitude_masks = {name: nm_mask(layer.weight.abs(), pattern) for name, layer in layers.items()}

    cast_parameters_(model.to(device), weight_dtype)
    scores = {"dense": evaluate(model)}
    metric = {}
    with autocast(device, compute_dtype):
        if config.metric == "activation":
            metric = activation_metric(model, layers, batches, config.metric_samples)
        if config.distill:
            batches = teacher_targets(model, batches)
        first_masks = learning.first_masks(start, model, layers, batches, pattern)

    run.start_run(run_dir, config)
    steps = learning.step_count(len(batches), config)
    if config.forward == "masked":
        learn_under_masks_(layers, first_masks, metric, pattern)
    all_steps = config.average_runs * steps
    monitor = MaskMonitor(layers, pattern, metric, all_steps, signed=config.forward == "masked")
    lambdas = [learning.layer_lambda(learned_weight(layer), config) for layer in layers.values()]
    samples = sample_stream(batches, config.seed)

    def one_run() -> Iterator[dict[str, float]]:
        optimizer = learning.prox_adamw(model, layers, metric, config, steps)
        return learn_masks(model, optimizer, samples, steps, compute_dtype, config)

    with learning.StopSignal() as stop:
        with RunLog(run_dir, all_steps, config.pattern, config.report_to) as log:
            for row in learning.averaged_runs(model, config.average_runs, steps, one_run, stop):
                log.step(row | monitor.observe(row["step"]))
        masks = learning.current_masks(layers, metric, config)
        decided = feasible_share(layers, pattern)
        end_learning_under_masks_(layers)
        snap_(model, pretrained, masks)
        run.save_checkpoint(run_dir, model, tokenizer, masks, config)

    if not stop.number:
        contenders = {"proxsparse": masks, "magnitude": magnitude_masks}
        scores |= run.scores_under(contenders, model, pretrained, weight_dtype, evaluate)
    table = None if stop.number else run.perplexity_table(scores, config)
    figures = {
        "status": "interrupted" if stop.number else "complete",
        "layers": len(layers),
        "weights": sum(layer.weight.numel() for layer in layers.values()),
        "steps": row["step"],
        "tokens": row["tokens"],
        "seconds": time.monotonic() - started,
        "reg_lambda": {"min": min(lambdas), "max": max(lambdas)},
        "feasible_share": decided,
        "magnitude_agreement": agreement(masks, magnitude_masks),
        "mask_similarity": monitor.similarity(),
        "masks_sha256": masks_sha256(masks),
        "perplexity": table,
        "warnings": run.warnings_for(table, decided, sum(len(b["input_ids"]) for b in batches), config),
    }
    result = run.save_result(run_dir, config, device, figures)
    write_report(run_dir)
    print(run.summary(result, run_dir))
    return 128 + stop.number if stop.number else 0


def learn_masks(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Iterator[dict[str, Tensor]],
    steps: int,
    compute_dtype: torch.dtype | None,
    config: TrainConfig,
) -> Iterator[dict[str, float]]:
    """Algorithm 1: gradient of the calibration loss, base step, prox. Yields the figures of every step, its tokens.

    Raises:
        InputError: the loss or its gradient is not finite; the weights are those of the step before.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning.lr_factor(step, steps, config))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    learning.start_training(model, config.gradient_checkpointing)
    for step in range(1, steps + 1):
        batches = list(itertools.islice(samples, config.gradient_accumulation_steps))
        loss = learning.backward(model, batches, compute_dtype, config.distill)
        grad_norm = nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or math.inf).item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise InputError(
                f"step {step}: the loss is {loss}, the gradient's norm {grad_norm}; lower --learning_rate, or raise "
                "--precision if it is not fp32"
            )
        factor = optimizer.reg_schedule(step - 1) if optimizer.reg_schedule else 1.0
        optimizer.step()  # the base step, then the prox
        schedule.step()
        optimizer.zero_grad()
        yield {
            "step": step,
            "loss": loss,
            "learning_rate": config.learning_rate * learning.lr_factor(step - 1, steps, config),
            "reg_lambda_factor": factor,
            "grad_norm": grad_norm,
            "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        }


if __name__ == "__main__":
    sys.exit(run_command(main))
