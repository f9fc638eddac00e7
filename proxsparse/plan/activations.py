"""The memory of a forward and a backward pass, counted and not guessed: the real code runs on tensors without data.

torch's fake tensors have a shape, a dtype and a lifetime, but no bytes. Every tensor that an operation makes counts
until it is freed. Two decoder blocks are enough: each further one keeps for the backward pass what the second keeps.
"""

import copy
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proxsparse.models.layers import decoder_blocks
from proxsparse.models.snap import cast_parameters_
from proxsparse.run.config import TrainConfig
from proxsparse.runtime.device import autocast
from proxsparse.training.distillation import KEPT_TOKENS, loss_of_logits
from proxsparse.training.loop import start_training

CPU = torch.device("cpu")
TRACED_BLOCKS = 2


class LiveBytes(TorchDispatchMode):
    """Within it, `now` is the bytes of all tensors that were made in it and still are; `peak` the most so far.

    A view, and what an operation changes in place, is nothing new.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Adds a storage that is new, until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.storages.add(key)
            self.now += size
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.now -= size

    def peak_since(self) -> int:
        """The peak since the last call."""
        peak, self.peak = self.peak, self.now
        return peak


@dataclass(frozen=True)
class StepBytes:
    """What a forward and a backward pass hold beside the weights, in bytes.

    kept: by a decoder block for its backward pass. The most at any time
    until_first: until the backward pass reaches the first of two blocks, with the gradients that it has made by then.
    from_first: from there to its end, without the gradients that are left at the end.
    """

    kept: int
    until_first: int
    from_first: int


def keep_two_blocks_(model: nn.Module) -> None:
    """What is left to count is the shape of a decoder block, in place; a model of one block stays."""
    blocks = decoder_blocks(model)
    del blocks[TRACED_BLOCKS:]
    model.config.get_text_config().num_hidden_layers = len(blocks)


def step_bytes(
    shallow: nn.Module,
    config: TrainConfig,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    learned: frozenset[str],
) -> StepBytes:
    """Of the passes of one step, over documents that fill their windows of --seq_len tokens.

    Args:
        shallow: the model with its first two decoder blocks, on the meta device.
        dtypes: of the weights, of autocast or None.
        learned: the names of the parameters that get a gradient.
    """
    live, model = LiveBytes(), cast_copy(shallow, dtypes[0])
    ends: list[int] = []  # live bytes at the end of each block's forward pass
    until_first: list[int] = []

    def ended(_block, _inputs, output) -> None:
        ends.append(live.now)
        if len(ends) == 1:
            tensor_of(output).register_hook(lambda _gradient: until_first.append(live.peak_since()))

    with FakeTensorMode(allow_non_fake_inputs=True), live:
        model.to_empty(device=CPU)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learned)
            if config.step_in_backward and name in learned:
                parameter.register_post_accumulate_grad_hook(forget_gradient)
        start_training(model, config.gradient_checkpointing)
        weights, before = live.now, 0
        for _ in range(min(config.gradient_accumulation_steps, 2)):  # the second pass adds to gradients that are there
            before = gradient_bytes(model)
            live.peak_since()
            ends.clear()
            hooks = [block.register_forward_hook(ended) for block in decoder_blocks(model)]
            with autocast(CPU, dtypes[1]):
                loss = fake_loss(model, config)
            for hook in hooks:
                hook.remove()  # gradient checkpointing calls the blocks again
            loss.backward()
            del loss
        from_first, after = live.peak_since(), gradient_bytes(model)
    kept = ends[-1] - ends[0]
    return StepBytes(kept, until_first[-1] - weights - before, from_first - weights - after)


def logits_bytes(
    shallow: nn.Module, dtypes: tuple[torch.dtype, torch.dtype | None], documents: int, seq_len: int
) -> int:
    """The most that a forward pass without gradients and its loss hold beside the weights, as the perplexity's."""
    live, model = LiveBytes(), cast_copy(shallow, dtypes[0]).eval()
    with FakeTensorMode(allow_non_fake_inputs=True), live, torch.no_grad():
        model.to_empty(device=CPU)
        weights = live.now
        live.peak_since()
        ids = torch.empty(documents, seq_len, dtype=torch.int64)
        with autocast(CPU, dtypes[1]):
            logits = model(input_ids=ids, use_cache=False).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        return live.peak_since() - weights


def cast_copy(model: nn.Module, weight_dtype: torch.dtype) -> nn.Module:
    """The same model again, its parameters in this dtype."""
    model = copy.deepcopy(model)
    cast_parameters_(model, weight_dtype)
    return model


def fake_loss(model: nn.Module, config: TrainConfig) -> Tensor:
    """`distillation.calibration_loss` of documents that fill their windows."""
    ids = torch.empty(config.per_device_train_batch_size, config.seq_len, dtype=torch.int64)
    labels = ids[:, 1:].flatten()
    dtypes = {"teacher_tokens": torch.int32, "teacher_probs": torch.bfloat16} if config.distill else {}
    teacher = {name: torch.empty(len(labels), KEPT_TOKENS, dtype=dtype) for name, dtype in dtypes.items()}
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    return loss_of_logits(logits, labels, teacher, config.distill)


def forget_gradient(parameter: Tensor) -> None:
    """What a step within the backward pass leaves of a gradient."""
    parameter.grad = None


def gradient_bytes(model: nn.Module) -> int:
    """Of the gradients that are there."""
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def tensor_of(output) -> Tensor:
    """The hidden states that a decoder block returns, by themselves or first of a tuple."""
    return output[0] if isinstance(output, tuple) else output
