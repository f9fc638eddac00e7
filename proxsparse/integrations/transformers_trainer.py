"""ProxSparse in `transformers.Trainer`: the mixin learns masks, `HoldMasksCallback` fine-tunes a pruned model.

    class MaskTrainer(ProxTrainerMixin, Trainer):
        '''Learns N:M masks.'''

    trainer = MaskTrainer(model, args, train_dataset=data, reg_lambda=0.25)
    trainer.train()  # writes masks.safetensors to args.output_dir

Supported are one process, DDP and FSDP2: `TrainingArguments(fsdp=True)` started by `accelerate launch` or `torchrun`,
or a model loaded with the `distributed_config` of transformers 5.18 or newer. Every process works on its own rows:
blocks of M weights lie along in_features, and FSDP2 splits out_features. Accelerate shards only on accelerators; on a
CPU it uses DDP.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from proxsparse.io.mask_files import is_mask_file, save_masks
from proxsparse.optim import ProxOptimizer, hold_masks_
from proxsparse.optim.param_groups import pruned_parameters
from proxsparse.patterns import NMPattern, PatternLike
from proxsparse.runtime.sharding import gather_masks, local
from proxsparse.training.learnable_layer import LearnableLayer, count_not_finite
from proxsparse.training.mask_monitor import feasible_share

WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")  # added to names by torch.compile and checkpointing


class ProxTrainerMixin:
    """A Trainer whose optimizer applies the prox after every step (paper, Algorithm 1).

    The optimizer of TrainingArguments is wrapped in a `ProxOptimizer` with `model=`: only the linear layers of the
    decoder blocks are pruned, except routers; of a model without `config`, all matrices. Frozen layers
    (`requires_grad_(False)`) stay dense. The other parameters are trained as without the mixin.

    `feasible_share`, the share of blocks that are N:M, is logged with the loss. At the end of `train` rank zero writes
    masks.safetensors to `args.output_dir`. The model of the Trainer has the learned weights: apply the masks to the
    pretrained model to get the pruned one. An optimizer of proxsparse that is passed to the Trainer keeps its settings.

    Args:
        reg_lambda: lambda_1 > 0, in units of 1 / |w|^(N-1); not multiplied by the learning rate. A callback may change
            that of a param group, also to 0; a group that starts with 0 gets no mask.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
    Attributes:
        masks: layer name -> bool [out_features, in_features], True = kept; on rank zero, after the training.
    Raises:
        ValueError: FSDP1 or DeepSpeed, which split blocks; there is nothing to prune; masks.safetensors in the output
            directory is another file; a learned weight is not finite.
    """

    def __init__(self, *args, reg_lambda: float, pattern: PatternLike = "2:4", **kwargs):
        self.reg_lambda, self.pattern = reg_lambda, NMPattern.parse(pattern)
        self.masks: dict[str, Tensor] = {}
        self.pruned_groups: list[int] = []  # numbers of the param groups whose reg_lambda is not 0 at the start
        super().__init__(*args, **kwargs)
        refuse_cut_blocks(self)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of Trainer, with the prox; with FSDP2, accelerate shards its parameters afterwards."""
        base, model = super().create_optimizer(model), model or self.model
        if "prox_step" not in base.defaults:  # else `train` is called a second time
            of_transformers = hasattr(getattr(model, "config", None), "get_text_config")
            model = model if of_transformers else None
            self.optimizer = ProxOptimizer(base, self.reg_lambda, self.pattern, model=model)
        if not self.pruned_groups:  # else `train` is called a second time
            groups = enumerate(self.optimizer.param_groups)
            self.pruned_groups = [number for number, group in groups if group["reg_lambda"] != 0]
        weights = [weight for weight, _ in self.pruned()]
        if not weights:
            raise ValueError("reg_lambda=0 in all param groups: no layer is pruned; start with reg_lambda > 0")
        for weight in weights:
            if weight.ndim != 2:
                raise ValueError(
                    f"parameter of shape {list(weight.shape)}: only masks of matrices are saved; freeze it "
                    "(requires_grad_(False)), or pass an optimizer that has it in a group with reg_lambda=0"
                )
        return self.optimizer

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Trainer.log, with the share of N:M blocks added to the loss."""
        if "loss" in logs and self.optimizer is not None:
            logs["feasible_share"] = feasible_share(self.learned().values())
        super().log(logs, *args, **kwargs)

    def train(self, *args, **kwargs):
        """Trainer.train, then writes the masks."""
        target = Path(self.args.output_dir) / "masks.safetensors"
        if os.path.lexists(target) and not is_mask_file(target):
            raise ValueError(f"{target} is not a mask file, and the masks would replace it; move the file")
        output = super().train(*args, **kwargs)
        learned = self.learned()
        if bad := count_not_finite(learned.values()):
            raise ValueError(f"{bad} weights became NaN or infinite during training; lower learning_rate")
        masks = {name: layer.mask().cpu() for name, layer in learned.items()}
        self.masks = gather_masks(masks, {name: layer.weight for name, layer in learned.items()})
        if self.is_world_process_zero():
            target.parent.mkdir(parents=True, exist_ok=True)
            base = getattr(getattr(self.model, "config", None), "name_or_path", "")
            save_masks(target, self.masks, {name: layer.pattern for name, layer in learned.items()}, base)
        return output

    def pruned(self) -> Iterator[tuple[Tensor, NMPattern]]:
        """Every pruned parameter and its pattern, also of groups whose reg_lambda has become 0."""
        for number in self.pruned_groups:
            group = self.optimizer.param_groups[number]
            for weight in pruned_parameters(group | {"reg_lambda": 1.0}):
                yield weight, NMPattern.parse(group["pattern"])

    def learned(self) -> dict[str, LearnableLayer]:
        """Layer name -> LearnableLayer, for every parameter that the optimizer has pruned."""
        reshard_(self.model)
        name_of = {parameter: WRAPPERS.sub("", name) for name, parameter in self.model.named_parameters()}
        return {
            name_of[weight].removesuffix(".weight"): LearnableLayer(None, weight, local(weight), None, pattern)
            for weight, pattern in self.pruned()
        }


class HoldMasksCallback(TrainerCallback):
    """Fine-tunes an N:M model with any Trainer: `hold_masks_` from the first step to the last.

        Trainer(model, args, train_dataset=data, callbacks=[HoldMasksCallback()]).train()

    The masks are those of the model, or of the checkpoint from which the training is resumed: the same ones, unless a
    kept weight has become exactly zero.

    Args:
        pattern: as in `hold_masks_`.
    Raises:
        TypeError, ValueError: at the start of the training, as in `hold_masks_`.
    """

    def __init__(self, pattern: PatternLike | None = None):
        self.pattern, self.held = None if pattern is None else NMPattern.parse(pattern), None

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
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    fsdp1 = getattr(plugin, "fsdp_version", 2) == 1
    if fsdp1 or trainer.is_deepspeed_enabled or getattr(trainer.args, "deepspeed", None):
        raise ValueError(
            f"{'FSDP1 (fsdp_version 1)' if fsdp1 else 'DeepSpeed ZeRO'} flattens the weights and splits N:M blocks "
            "between processes; shard with FSDP2: TrainingArguments(fsdp=True) with fsdp_config version 2, or "
            "accelerate's fsdp_version 2"
        )


def reshard_(model: nn.Module) -> None:
    """Frees the full weights that FSDP2 keeps after an evaluation, so that parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
