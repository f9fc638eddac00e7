"""The memory of forward and backward passes, counted by running the real model and loss on fake tensors.

A fake tensor has a shape, a dtype and a lifetime, but no data. Two decoder blocks are enough: every further block keeps
as much for the backward pass as the second one.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proxsparse.errors import InputError
from proxsparse.models.layers import decoder_blocks
from proxsparse.models.snap import cast_parameters_
from proxsparse.plan.architecture import CAUSAL, Shape
from proxsparse.run.config import TrainConfig
from proxsparse.runtime.device import autocast
from proxsparse.training.distillation import KEPT_TOKENS, loss_of_logits
from proxsparse.training.loop import start_training

CPU = torch.device("cpu")
Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the weights; of autocast, or None


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were created within the context and still exist: `now` and `peak`.

    Views and tensors that are changed in place do not count again.
    """

    def __init__(self):
        super().__init__()
        self.sizes: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self.peak = 0

    @property
    def now(self) -> int:
        return sum(self.sizes.values())

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        inputs = {storage._cdata for storage in storages(arguments)}
        self.sizes.update({new: new.nbytes() for new in storages(result) if new._cdata not in inputs})
        self.peak = max(self.peak, self.now)
        return result


def storages(tree: object) -> Iterable[torch.UntypedStorage]:
    """The storages of all tensors in a nested structure."""
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class Passes(NamedTuple):
    """Bytes of the passes of a step, in addition to the weights and to the gradients that are left at the end."""

    kept: int  # by one decoder block for its backward pass
    loss: int  # peak with two blocks until the backward pass reaches the first one; includes new gradients
    first_block: int  # peak from there to the end
    perplexity: int  # peak of the largest forward pass without gradients


def count_passes(shape: Shape, config: TrainConfig, dtypes: Dtypes) -> Passes:
    """Counts the passes of one step on documents that fill their windows.

    Raises:
        InputError: the model's computation depends on its data, as in a mixture of experts.
    """
    ends: list[int] = []  # live bytes after the forward pass of each block
    losses: list[int] = []

    def block_done(_block, _inputs, output) -> None:
        ends.append(live.now)
        if len(ends) == 1:
            (output[0] if isinstance(output, tuple) else output).register_hook(first_reached)

    def first_reached(_gradient) -> None:
        losses.append(live.peak)
        live.peak = live.now

    window = max(1, config.seq_len * (config.distill > 0), (config.eval_seq_len or 0) * (config.eval_data != "none"))
    try:
        with fake(shape, dtypes, config.per_device_train_batch_size, config.seq_len) as (model, ids, live):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(config.update == "all" or name in shape.prunable_names)
                if parameter.requires_grad and config.step_in_backward:
                    parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
                elif parameter.requires_grad and config.gradient_accumulation_steps > 1:
                    parameter.grad = torch.empty_like(parameter)
            start_training(model, config.gradient_checkpointing)
            for block in decoder_blocks(model):
                block.register_forward_hook(block_done)
            before = live.now
            loss = loss_of(model, ids, dtypes[1], config.distill)
            kept = ends[-1] - ends[0]
            loss.backward()
            del loss
            first_block = live.peak - live.now
        with fake(shape, dtypes, 1, window) as (model, ids, live), torch.no_grad():
            weights = live.now
            loss_of(model.eval(), ids, dtypes[1], 0.0)
        return Passes(kept, losses[0] - before, first_block, live.peak - weights)
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
        raise InputError(
            f"--plan: the computation of {type(shape.two_blocks).__name__} depends on its data ({error.func}), so its "
            "activations cannot be counted in advance; run without --plan"
        ) from error


@contextmanager
def fake(shape: Shape, dtypes: Dtypes, documents: int, tokens: int) -> Iterator[tuple[nn.Module, Tensor, LiveBytes]]:
    """Within the context tensors are fake. Yields the model, token ids [documents, tokens], and the counter."""
    model = copy.deepcopy(shape.two_blocks)
    cast_parameters_(model, dtypes[0])
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if documents == 1 and (window is None or tokens < window):  # one document is never padded
        model.config._attn_implementation = CAUSAL
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        model.to_empty(device=CPU).tie_weights()  # to_empty unties them
        live.peak = live.now
        yield model, torch.empty(documents, tokens, dtype=torch.int64), live


def loss_of(model: nn.Module, ids: Tensor, compute_dtype: torch.dtype | None, distill: float) -> Tensor:
    """`distillation.calibration_loss` of documents that fill their windows."""
    labels = ids[:, 1:].flatten()
    dtypes = {"teacher_tokens": torch.int32, "teacher_probs": torch.bfloat16} if distill else {}
    teacher = {name: torch.empty(len(labels), KEPT_TOKENS, dtype=dtype) for name, dtype in dtypes.items()}
    with autocast(CPU, compute_dtype):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        return loss_of_logits(logits, labels, teacher, distill)
