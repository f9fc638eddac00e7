"""ProxSparse in `transformers.Trainer`: the mixin creates the optimizer, the callback logs, snaps and saves the masks.

`HoldMasksCallback` fine-tunes a pruned model.

    class MaskTrainer(ProxTrainerMixin, Trainer):
        '''Learns N:M masks.'''

    trainer = MaskTrainer(model, args, train_dataset=data, reg_lambda_rel=0.2, callbacks=[ProxCallback()])
    trainer.train()
    trainer.save_model()

Supported are one process, DDP and FSDP2: `TrainingArguments(fsdp=True)` started by `accelerate launch` or `torchrun`,
or a model loaded with the `distributed_config` of transformers 5.18 or newer. Every process works on its own rows:
blocks of M weights lie along in_features, and FSDP2 splits out_features. Accelerate shards only on accelerators; on a
CPU it uses DDP.
"""

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from proxsparse.io.atomic import atomic_directory
from proxsparse.io.mask_files import is_mask_file, save_masks
from proxsparse.models.layers import is_selected, prunable_layers
from proxsparse.models.loading import base_identity
from proxsparse.models.snap import snap_
from proxsparse.optim import ProxOptimizer, hold_masks_
from proxsparse.optim.param_groups import pruned_parameters
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.runtime.distributed import on_rank_zero
from proxsparse.runtime.sharding import gather_masks, local
from proxsparse.training.learnable_layer import LearnableLayer, count_not_finite
from proxsparse.training.mask_monitor import MaskMonitor
from proxsparse.training.optimizer import mean_size

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # added to names by torch.compile and checkpointing


class ProxTrainerMixin:
    """A Trainer whose optimizer applies the prox to the `prunable_layers` after every step (paper, Algorithm 1).

    The optimizer of TrainingArguments is wrapped in a `ProxOptimizer`. Parameters that are not pruned are trained as
    without the mixin; freeze them (`requires_grad_(False)`) to learn only the masks.

    Args:
        reg_lambda: lambda_1, in units of 1 / |w|^(N-1); not multiplied by the learning rate.
        reg_lambda_rel: R: every layer gets lambda_1 = R / mean|w|. Give exactly one of reg_lambda and reg_lambda_rel.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
        include, exclude: regular expressions searched in the names of the layers, as in `prunable_layers`.
        frozen_lambda: lambda_2 of the frozen-weight term.
    Raises:
        ValueError: none or both lambdas are given; FSDP1 or DeepSpeed, which split blocks; there is nothing to prune.
    """

    def __init__(
        self,
        *args,
        reg_lambda: float | None = None,
        reg_lambda_rel: float | None = None,
        pattern: PatternLike = "2:4",
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        frozen_lambda: float = 0.0,
        **kwargs,
    ):
        if (reg_lambda is None) == (reg_lambda_rel is None):
            raise ValueError(f"reg_lambda={reg_lambda}, reg_lambda_rel={reg_lambda_rel}: give one of the two")
        self.reg_lambda, self.reg_lambda_rel = reg_lambda, reg_lambda_rel
        self.pattern, self.include, self.exclude = NMPattern.parse(pattern), include, exclude
        self.frozen_lambda = frozen_lambda
        super().__init__(*args, **kwargs)
        refuse_cut_blocks(self)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of Trainer, with the prox; with FSDP2, accelerate shards its parameters afterwards."""
        refuse_cut_blocks(self)
        base = super().create_optimizer(model)
        if "prox_step" in base.defaults:  # `train` is called a second time
            return base
        layers = layers_to_prune(model or self.model, self.pattern, self.include, self.exclude)
        weights = [layer.weight for layer in layers.values() if layer.weight.requires_grad]
        if not weights:
            raise ValueError(
                f"the weights of all {len(layers)} layers to prune are frozen (requires_grad=False, as with adapters "
                "such as LoRA); train the layers themselves"
            )
        if self.reg_lambda is None:
            means = [mean_size(weight) for weight in weights]
            means = on_rank_zero(lambda: means)  # FSDP's cpu_ram_efficient_loading reads weights on rank zero only
            lambdas = [self.reg_lambda_rel / mean if mean > 0 else 0.0 for mean in means]
            split_groups_(base, [([weight], value) for weight, value in zip(weights, lambdas, strict=True)])
        else:
            split_groups_(base, [(weights, self.reg_lambda)])
        self.optimizer = ProxOptimizer(base, 0.0, self.pattern, self.frozen_lambda)
        return self.optimizer

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Trainer.log, with the figures of a `ProxCallback` added to the loss."""
        for callback in self.callback_handler.callbacks if "loss" in logs else ():
            logs |= callback.figures if isinstance(callback, ProxCallback) else {}
        super().log(logs, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Keeps the weights of the model as W0 before the learned weights of a checkpoint are loaded."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ProxCallback):
                callback.keep_pretrained(model or self.model)
        super()._load_from_checkpoint(resume_from_checkpoint, model)


class ProxCallback(TrainerCallback):
    """Measures the masks during training; at the end saves them and snaps the weights to W0.

    Works with any Trainer whose optimizer is a ProxOptimizer or ProxAdamW. Each time the loss is logged, and before the
    snap, `figures` are measured on a sample of blocks (`training.mask_monitor.MaskMonitor`): `feasible_share`, the
    share of blocks that are N:M; `mask_change`, the share of mask bits that changed since the last measurement;
    `norm_gap`, ||W - W0|| / ||W0|| of the kept weights. `ProxTrainerMixin` logs them.

    At the end every trained weight is set to W0, or to +0.0 where the mask prunes it, and rank zero writes
    masks.safetensors to `args.output_dir`. `trainer.save_model()` then saves the pruned model to the same folder. Each
    process keeps its own rows of W0 in CPU memory. A second call of `train` snaps to the same W0.

    Attributes:
        figures: name -> value of the last measurement.
        masks: layer name -> bool [out_features, in_features], True = kept; on rank zero, after the training.
    """

    def __init__(self):
        self.figures: dict[str, float] = {}
        self.base: dict[str, str] = {}
        self.masks: dict[str, Tensor] = {}
        self.pretrained: dict[str, Tensor] = {}
        self.learned: dict[str, LearnableLayer] = {}
        self.monitor: MaskMonitor | None = None

    def keep_pretrained(self, model: nn.Module) -> None:
        """Copies the trained parameters, the rows of this process, as W0 unless a copy exists."""
        reshard_(model)
        if not self.pretrained:
            sharded = any(local(parameter) is not parameter for parameter in model.parameters())
            # no digest: no process has all weights
            known = {"base_model": getattr(getattr(model, "config", None), "name_or_path", "")}
            self.base = known if sharded else base_identity(known["base_model"], model)
        self.pretrained = self.pretrained or {
            name: local(parameter).detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        """Keeps W0. In a resumed run `ProxTrainerMixin` has kept it before the checkpoint was loaded."""
        if state.global_step and not self.pretrained:
            raise ValueError(
                f"resumed at step {state.global_step}: the model no longer has the pretrained weights, which "
                "ProxCallback needs; derive the Trainer from ProxTrainerMixin"
            )
        target = Path(args.output_dir) / "masks.safetensors"
        if os.path.lexists(target) and not is_mask_file(target):
            raise ValueError(f"{target} is not a mask file, and the masks would replace it; move the file")
        self.keep_pretrained(model)
        self.learned = learned_by(optimizer, model, self.pretrained)
        self.monitor = MaskMonitor(self.learned.values(), state.max_steps)

    def on_step_end(self, args, state, control, **_):
        """Measures the figures if this step is going to be logged."""
        if control.should_log:
            self.figures = self.monitor.observe(state.global_step)

    on_epoch_end = on_step_end  # for logging_strategy="epoch"

    def on_train_end(self, args, state, control, model=None, **_):
        """Computes the masks, snaps the weights to W0 and writes masks.safetensors.

        Raises:
            ValueError: a learned weight is not finite; no weight is changed in this case.
        """
        reshard_(model)
        if bad := count_not_finite(self.learned.values()):
            raise ValueError(f"{bad} weights became NaN or infinite during training; lower learning_rate")
        self.figures = self.monitor.observe(state.global_step)
        masks = {name: layer.mask().cpu() for name, layer in self.learned.items()}
        snap_(model, self.pretrained, masks)
        gathered = gather_masks(masks, {name: layer.weight for name, layer in self.learned.items()})
        self.masks = {plain_name(name): mask for name, mask in gathered.items()}
        patterns = {plain_name(name): layer.pattern for name, layer in self.learned.items()}
        if state.is_world_process_zero:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            with atomic_directory(Path(args.output_dir)) as scratch:
                save_masks(scratch / "masks.safetensors", self.masks, patterns, **self.base)


class HoldMasksCallback(TrainerCallback):
    """Fine-tunes an N:M model with any Trainer: `hold_masks_` from the first step to the last.

        Trainer(model, args, train_dataset=data, callbacks=[HoldMasksCallback()]).train()

    The masks are those of the model, or of the checkpoint from which the training is resumed: the same ones, unless a
    kept weight has become exactly zero.

    Args:
        pattern: "N:M" or an NMPattern.
    Raises:
        TypeError, ValueError: at the start of the training, as in `hold_masks_`.
    """

    def __init__(self, pattern: PatternLike = "2:4"):
        self.pattern, self.held = NMPattern.parse(pattern), None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        """Holds the masks of the optimizer that Trainer has prepared; a checkpoint has been loaded by now."""
        reshard_(model)
        self.on_train_end(args, state, control)  # an earlier training may have ended with an error
        self.held = hold_masks_(optimizer, self.pattern)

    def on_train_end(self, args, state, control, **_):
        """Removes the hooks."""
        if self.held:
            self.held.remove()


def refuse_cut_blocks(trainer) -> None:
    """Raises ValueError for FSDP1 and DeepSpeed, which flatten parameters and split blocks."""
    remedy = "shard with FSDP2: TrainingArguments(fsdp=True) with fsdp_config version 2, or accelerate's fsdp_version 2"
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "fsdp_version", 2) == 1:
        raise ValueError(
            f"FSDP1 (fsdp_version 1) flattens the weights of a module and splits N:M blocks between processes; {remedy}"
        )
    partitioned = trainer.model is not None and any(hasattr(p, "ds_id") for p in trainer.model.parameters())
    if partitioned or trainer.is_deepspeed_enabled or getattr(trainer.args, "deepspeed", None):
        raise ValueError(
            "DeepSpeed ZeRO flattens the weights, splits N:M blocks between processes, and uses its own optimizer, "
            f"without the prox; {remedy}"
        )


def layers_to_prune(
    model: nn.Module, pattern: NMPattern, include: list[str] | None, exclude: list[str] | None
) -> dict[str, nn.Linear]:
    """`prunable_layers`; of a model without `config`, which names no decoder blocks, the selected nn.Linear layers.

    Raises:
        ValueError: no layer is left, or a layer cannot be split into blocks.
    """
    if hasattr(getattr(model, "config", None), "get_text_config"):
        return prunable_layers(model, pattern, include, exclude)
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layers = {name: layer for name, layer in linears.items() if is_selected(name, include, exclude)}
    if not layers:
        raise ValueError(f"no layer to prune: include={include} and exclude={exclude} select none of {list(linears)}")
    for name, layer in layers.items():
        pattern.check_blocks(layer.weight.shape, f"{name}:")
    return layers


def split_groups_(optimizer: torch.optim.Optimizer, pruned: list[tuple[list[Tensor], float]]) -> None:
    """Moves each (weights, lambda_1) to new groups; the rest of every group gets reg_lambda 0."""
    part_of = {weight: index for index, (weights, _) in enumerate(pruned) for weight in weights}
    for group in list(optimizer.param_groups):
        parts: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter in part_of:
                parts.setdefault(part_of[parameter], []).append(parameter)
        group |= {"params": [p for p in group["params"] if p not in part_of], "reg_lambda": 0.0}
        for index, weights in parts.items():
            optimizer.add_param_group({**group, "params": weights, "reg_lambda": pruned[index][1]})


def learned_by(
    optimizer: torch.optim.Optimizer, model: nn.Module, pretrained: dict[str, Tensor]
) -> dict[str, LearnableLayer]:
    """Layer name -> LearnableLayer, for every parameter that the optimizer prunes."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    learned = {}
    for group in optimizer.param_groups:
        pattern = NMPattern.parse(group["pattern"])
        for weight, scale in pruned_parameters(group):
            name = name_of[weight]
            learned[name.removesuffix(".weight")] = LearnableLayer(None, weight, pretrained[name], scale, pattern)
    return learned


def reshard_(model: nn.Module) -> None:
    """Frees the full weights that FSDP2 keeps after an evaluation, so that parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def plain_name(layer_name: str) -> str:
    """The name of the layer without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        layer_name = layer_name.replace(wrapper, "")
    return layer_name
