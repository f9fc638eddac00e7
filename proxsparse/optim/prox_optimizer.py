"""ProxOptimizer: one step of any torch optimizer, then the prox (paper, Algorithm 1)."""

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from proxsparse.optim import param_groups
from proxsparse.patterns import PatternLike

HOOKS = [
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
]


def _of_base(name: str) -> property:
    """A property that reads, sets and deletes the attribute of the base optimizer."""
    return property(
        lambda self: getattr(self.base_optimizer, name),
        lambda self, value: setattr(self.base_optimizer, name, value),
        lambda self: delattr(self.base_optimizer, name),
    )


class ProxOptimizer(Optimizer):
    """W <- prox_{lambda_1 Reg_{N:M}}(base step of W) at every step (paper, Algorithm 1; equations 4 and 7).

    A drop-in replacement for the optimizer that it wraps: `param_groups`, `state` and `defaults` are those of the base
    optimizer, and schedulers, closures, hooks, GradScaler, checkpoints and FSDP2's `fully_shard` work as with the base.

    The prox is applied to every parameter with a gradient and two or more dimensions (blocks lie along the last one),
    so not to biases and norms. With `model` only the linear layers of its decoder blocks are pruned, except routers:

        ProxOptimizer(AdamW(model.parameters(), lr=1e-4), reg_lambda=0.2, model=model)

    Without `model`, give embeddings and lm_head a group with reg_lambda = 0. In a group without its own `reg_lambda`,
    parameters with "embed" or "lm_head" in their names are not pruned (an optimizer made from `named_parameters()`
    has names).

    A group may have its own `reg_lambda` and `pattern`; the arguments below are the defaults. Groups with
    `reg_lambda=0` take only the base step. A step with lr = 0 does not change the weights. `ProxAdamW` also has the
    frozen-weight term of the paper; with other optimizers add `reference.frozen_penalty` to the loss.

    Args:
        base_optimizer: any torch.optim.Optimizer.
        reg_lambda: lambda_1 >= 0, in units of 1 / |w|^(N-1). Not multiplied by the learning rate.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
        model: the causal language model of transformers that is trained; it also selects in groups that are
            added later, except to a copied or unpickled optimizer.
    Raises:
        TypeError: base_optimizer is not a torch optimizer, or is a ProxOptimizer.
        ValueError: a setting is out of range; a parameter or shard does not consist of whole blocks; there is nothing
            to prune; the base is already wrapped. The base is not modified.
    """

    _model = None  # a weak reference to `model`, for groups that are added later; not copied or pickled
    param_groups = _of_base("param_groups")
    state = _of_base("state")
    defaults = _of_base("defaults")
    # Set by GradScaler for fused optimizers, which unscale gradients themselves and skip the step if found_inf is
    # nonzero.
    _step_supports_amp_scaling = _of_base("_step_supports_amp_scaling")
    grad_scale = _of_base("grad_scale")
    found_inf = _of_base("found_inf")

    def __init__(
        self,
        base_optimizer: Optimizer,
        reg_lambda: float,
        pattern: PatternLike = "2:4",
        model: nn.Module | None = None,
    ):
        plain = isinstance(base_optimizer, Optimizer) and all(hasattr(base_optimizer, name) for name in HOOKS)
        if not plain or isinstance(base_optimizer, ProxOptimizer):
            raise TypeError(
                f"base_optimizer is a {type(base_optimizer).__name__}; pass a plain torch.optim.Optimizer "
                "(call accelerator.prepare and other wrappers afterwards)"
            )
        if "prox_step" in base_optimizer.defaults:
            raise ValueError(
                f"this {type(base_optimizer).__name__} already has a prox step or is already wrapped; create a new "
                "optimizer, or change the param_groups of this one"
            )
        settings = param_groups.first_settings(reg_lambda, pattern)
        completed = [settings | group for group in base_optimizer.param_groups]
        param_groups.skip_others(completed, ["reg_lambda" in group for group in base_optimizer.param_groups], model)
        for group in [settings | {"params": []}, *completed]:
            param_groups.check_group(group)
        param_groups.check_something_to_prune(completed)
        self.__setstate__({"base_optimizer": base_optimizer})
        self._model = None if model is None else weakref.ref(model)
        self.defaults.update(settings)  # the base uses them for groups that are added later
        for group, whole in zip(self.param_groups, completed, strict=True):
            group.update(whole)

    def __getstate__(self) -> dict:
        return {"base_optimizer": self.base_optimizer}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        for name in HOOKS:  # shared, so that a hook runs once, regardless of where it was registered
            setattr(self, name, getattr(self.base_optimizer, name))
        self.base_optimizer.register_load_state_dict_pre_hook(param_groups.complete_state)
        super().__setstate__({})

    def add_param_group(self, param_group: dict) -> None:
        """As in the base; raises ValueError for a group that the prox does not support, and does not add it."""
        own = "reg_lambda" in param_group
        self.base_optimizer.add_param_group(param_group)
        try:
            param_groups.skip_others(self.param_groups[-1:], [own], self._model and self._model())
            param_groups.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in the base."""
        self.base_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        """As in the base; also contains the settings of the prox and its counters."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """As in the base; settings that are missing in the state of a plain optimizer do not change.

        Raises:
            ValueError: a setting is out of range, or the state has other groups; nothing is loaded.
        """
        # also here, because some base optimizers do not call hooks
        self.base_optimizer.load_state_dict(param_groups.complete_state(self, state_dict))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """The base step, then the prox. Returns the loss of the closure, if given.

        Raises:
            RuntimeError: a CUDA graph is being captured; every replay would repeat this lambda and learning rate.
        """
        param_groups.check_not_capturing(self)
        if getattr(self, "found_inf", None):
            return self._base_step(closure)
        groups = [group for group in self.param_groups if param_groups.learns(group)]
        learning = [(group, param_groups.reg_lambda_now(group)) for group in groups]
        loss = self._base_step(closure)
        param_groups.prox_step(learning)
        return loss

    def _base_step(self, closure: Callable[[], float] | None) -> float | None:
        """The step of the base without the hooks that torch adds: they run around our step, after the prox."""
        step = type(self.base_optimizer).step
        if not torch.compiler.is_compiling():  # Dynamo of torch 2.11 cannot set it
            self.base_optimizer._opt_called = True  # read by schedulers that were created on the base before wrapping
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.base_optimizer, closure)
