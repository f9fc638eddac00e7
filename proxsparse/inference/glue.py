"""Compiled glue: torch.compile for the small operations between the matrix products of a decode step.

In eager mode a Llama block of transformers in bfloat16 runs 43 kernels, 36 of them on a few kilobytes: 2 x 8 for
RMSNorm, 10 for the rotary embedding, 2 for act(gate) * up, 3 for the mask, which SDPA converts from bool in each block,
and the rest for residuals, cache and attention. Compiled, the first three need 2, 2 and 1 kernels, and the mask is
converted once per step. Whole blocks differ in layer_idx, so each of them would be compiled; the functions compiled
here are shared by all blocks.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping

import torch
from torch import Tensor, nn

MASKS, SDPA = "transformers.masking_utils", "sdpa"
ROTARY = "apply_rotary_pos_emb"  # its name in each modeling file of transformers


def with_compiled_glue(
    model: nn.Module, faster: Callable[[Callable], Callable] | None = None, backend: str | Callable = "inductor"
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The argument `faster` of GreedyDecoder that compiles the glue, then applies another `faster` to the step.

    With `capture_graph`, the compiled kernels are part of the CUDA graph, and the model is restored after the capture.
    Without `faster`, the model is changed only during each step.

    Args:
        model: a model of transformers; modules that are not recognized stay eager.
        backend: the backend of torch.compile.
    """

    def apply(step: Callable[[], None]) -> Callable[[], None]:
        glue = CompiledGlue(model, backend)
        if faster is None:
            return glue.around(step)
        with glue.in_place():
            return faster(step)

    return apply


class CompiledGlue:
    """The compiled functions for a model, and the functions that they replace.

    * RMSNorm: the forward of every module whose class name ends in RMSNorm, one compiled function per class
    * rotary embedding: `apply_rotary_pos_emb` in the file of the attention class
    * act(gate) * up: in every module whose forward has the same instructions as a gated MLP of transformers
    * mask of SDPA: created in the dtype of the model, so that SDPA does not convert it; not compiled

    A function is compiled at its first call, and again for each new shape, stride and dtype (dynamic=False).
    """

    def __init__(self, model: nn.Module, backend: str | Callable = "inductor"):
        self.compile = functools.partial(torch.compile, dynamic=False, backend=backend)
        self.forwards: list[tuple[nn.Module, Callable]] = []  # a module and its forward within `in_place`
        self.globals: list[tuple[MutableMapping, str, Callable]] = []  # a dict, a key in it and the new function
        if masks := getattr(sys.modules.get(MASKS), "ALL_MASK_ATTENTION_FUNCTIONS", None):
            self.globals.append((masks, SDPA, functools.partial(additive_mask, masks[SDPA])))
        product = self.compile(activated_product)
        compiled: dict[object, Callable] = {}
        for module in model.modules():
            kind = type(module)
            if "forward" in vars(module):  # replaced by another library, such as accelerate
                continue
            forward = inspect.unwrap(kind.forward)
            if kind.__name__.endswith("RMSNorm") and kind is not nn.RMSNorm:  # nn.RMSNorm is already one kernel
                if kind not in compiled:
                    compiled[kind] = self.compile(kind.forward)
                self.forwards.append((module, functools.partial(compiled[kind], module)))
            elif is_gated_mlp(forward):
                self.forwards.append((module, functools.partial(gated_mlp, module, product)))
            elif ROTARY in forward.__code__.co_names and id(forward.__globals__) not in compiled:
                rotary = compiled[id(forward.__globals__)] = self.compile(forward.__globals__[ROTARY])
                self.globals.append((forward.__globals__, ROTARY, rotary))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model uses these functions; rotary and mask functions also affect other models."""
        before = [(table, name, table[name]) for table, name, _ in self.globals]
        try:
            for module, forward in self.forwards:
                module.forward = forward
            for table, name, function in self.globals:
                table[name] = function
            yield
        finally:
            for module, _ in self.forwards:
                vars(module).pop("forward", None)
            for table, name, function in before:
                table[name] = function

    def around(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, run within `in_place`."""

        def run() -> None:
            with self.in_place():
                step()

        return run


def activated_product(act_fn: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up."""
    return act_fn(gate) * up


def additive_mask(make_mask: Callable, *args, dtype: torch.dtype | None = None, **kwargs) -> Tensor | None:
    """The bool mask of `make_mask` as an additive mask in `dtype`: 0 where it is True, else -inf."""
    mask = make_mask(*args, dtype=dtype, **kwargs)
    if mask is None or mask.dtype != torch.bool or dtype is None:
        return mask
    return torch.zeros((), dtype=dtype, device=mask.device).where(mask, float("-inf"))


def gated_mlp(mlp: nn.Module, product: Callable, x: Tensor) -> Tensor:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)), the activation and the product in one function."""
    return mlp.down_proj(product(mlp.act_fn, mlp.gate_proj(x), mlp.up_proj(x)))


def is_gated_mlp(forward: Callable) -> bool:
    """Whether a forward has the same instructions as one of the two gated MLPs in transformers."""
    return any(instructions(forward) == instructions(known) for known in (_gated_mlp_named, _gated_mlp_returned))


def instructions(function: Callable) -> tuple | None:
    """The bytecode of a function, without the names of its variables; None if it is not written in Python."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    constants = [constant for constant in code.co_consts if constant != function.__doc__]
    return code.co_code, code.co_names, code.co_argcount, constants


def _gated_mlp_named(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _gated_mlp_returned(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
