"""ProxOptimizer: one step of any torch optimizer, then the prox (paper, Algorithm 1)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsparse.optim import param_groups
from proxsparse.optim.schedules import Schedule
from proxsparse.patterns import PatternLike

HOOKS = [
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
]


def _of_base(name: str) -> property:
    """An attribute that lives in the base optimizer and is read, set and deleted there: there is only one."""
    return property(
        lambda self: getattr(self.base_optimizer, name),
        lambda self, value: setattr(self.base_optimizer, name, value),
        lambda self: delattr(self.base_optimizer, name),
    )


class ProxOptimizer(Optimizer):
    """W <- prox_{lambda_1 Reg_{N:M}}(base step of W) at every step (paper, Algorithm 1; equations 4 and 7).

    A drop-in for the optimizer it wraps: `param_groups`, `state` and `defaults` are the base's own, and schedulers,
    closures, hooks, GradScaler, checkpoints and FSDP2's `fully_shard` work as they do with the base.

    The prox acts on every parameter that has two or more dimensions (blocks lie along the last one) and a gradient.
    Biases and norms, being vectors, are left alone. Take embeddings and lm_head out with a group of their own:

        ProxOptimizer(AdamW([{"params": linears}, {"params": others, "reg_lambda": 0}], lr=1e-4), reg_lambda=0.2)

    A group may carry its own `reg_lambda`, `pattern`, `frozen_lambda` and `frozen_eps`; the arguments below fill in
    what is missing. `reg_lambda=0` takes a group out of all this class does. A step at lr = 0 moves no weight.

    Args:
        base_optimizer: any torch.optim.Optimizer.
        reg_lambda: lambda_1 >= 0, in units of 1 / |w|^(N-1). Not multiplied by the learning rate.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
        frozen_lambda: lambda_2 >= 0. The gradient lambda_2 * dReg_W0/dW is added to `.grad` before the base step and
            stays in it. W0, the parameter at its first step, is kept in `state[p]["pretrained"]`; 0 keeps no copy.
        frozen_eps: the epsilon > 0 of Reg_W0, in the unit of the weights.
        reg_schedule: step -> factor of reg_lambda; the step is the group's `prox_step`, from 0 (see `schedules`). Being
            code, it is not part of the state: resume with the same one.
    Raises:
        TypeError: base_optimizer is no torch optimizer, or a ProxOptimizer already.
        ValueError: a setting out of range; a parameter or shard without whole blocks; nothing to prune; a base that
            is wrapped already. The base is left as it was.
    """

    param_groups = _of_base("param_groups")
    state = _of_base("state")
    defaults = _of_base("defaults")
    # How GradScaler talks to a fused optimizer, which unscales by itself and skips its step where found_inf is nonzero.
    _step_supports_amp_scaling = _of_base("_step_supports_amp_scaling")
    grad_scale = _of_base("grad_scale")
    found_inf = _of_base("found_inf")

    def __init__(
        self,
        base_optimizer: Optimizer,
        reg_lambda: float,
        pattern: PatternLike = "2:4",
        frozen_lambda: float = 0.0,
        frozen_eps: float = 0.1,
        reg_schedule: Schedule | None = None,
    ):
        if not isinstance(base_optimizer, Optimizer) or isinstance(base_optimizer, ProxOptimizer):
            raise TypeError(f"base_optimizer is a {type(base_optimizer).__name__}: pass a plain torch.optim.Optimizer")
        if "prox_step" in base_optimizer.defaults:
            raise ValueError(
                f"this {type(base_optimizer).__name__} has a prox step of its own or is wrapped already; make a new "
                "one, or change its param_groups"
            )
        settings = param_groups.first_settings(reg_lambda, pattern, frozen_lambda, frozen_eps)
        completed = [settings | group for group in base_optimizer.param_groups]
        for group in [settings | {"params": []}, *completed]:
            param_groups.check_group(group)
        param_groups.check_something_to_prune(completed)
        self.__setstate__({"base_optimizer": base_optimizer, "reg_schedule": reg_schedule})
        self.defaults.update(settings)  # from here the base hands them to groups that are added later
        for group, whole in zip(self.param_groups, completed, strict=True):
            group.update(whole)

    def __getstate__(self) -> dict:
        return {"base_optimizer": self.base_optimizer, "reg_schedule": self.reg_schedule}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        for name in HOOKS:  # one set for both: a hook fires once, whichever of the two it was registered on
            setattr(self, name, getattr(self.base_optimizer, name))
        self.base_optimizer.register_load_state_dict_pre_hook(param_groups.complete_state)
        super().__setstate__({})

    def __repr__(self) -> str:
        lines = [f"ProxOptimizer({type(self.base_optimizer).__name__}, reg_schedule={self.reg_schedule}"]
        lines += [f"  group {i}: {param_groups.describe_group(group)}" for i, group in enumerate(self.param_groups)]
        return "\n".join(lines) + "\n)"

    def add_param_group(self, param_group: dict) -> None:
        """As the base's; a group that the prox cannot serve raises ValueError and is not added."""
        self.base_optimizer.add_param_group(param_group)
        try:
            param_groups.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base's."""
        self.base_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        """As the base's: its groups and state hold our settings, counters and W0 too."""
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """As the base's; settings that the state of a plain optimizer lacks stay as they are.

        Raises:
            ValueError: a setting out of range, or a state of other groups; nothing is loaded then.
        """
        # here as well as in the hook: some bases load without calling hooks
        self.base_optimizer.load_state_dict(param_groups.complete_state(self, state_dict))

    def set_scale(self, parameter: Tensor, scale: Tensor | None) -> None:
        """From now on the whole step of `parameter` acts on v = c * w: base step with g / c, prox, then w = v / c.

        Exact for any base optimizer; for AdamW it is the step with lr / c_j in column j, then the prox with scale c.
        The way to v and back rounds twice a step, except where c is a power of two (and zeros stay +0.0): keep such
        weights in float32. After the step `.grad` is that of w again, up to rounding. c is saved with the group.

        Args:
            scale: c, [in_features], floating point, one positive number per input feature; None means 1.
        Raises:
            ValueError: a wrong shape or dtype, values that are not positive and finite, a parameter that is not pruned.
        """
        param_groups.set_scale(self.param_groups, parameter, scale)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Frozen-weight gradient, base step, prox. Returns the loss, if there is a closure."""
        if getattr(self, "found_inf", None):
            return self._base_step(closure)
        learning = list(filter(param_groups.learns, self.param_groups))
        lambdas = [param_groups.reg_lambda_now(group, self.reg_schedule) for group in learning]
        first_values, entered = {}, []

        def before_base():
            for group in self.param_groups:
                if group["frozen_lambda"] > 0:
                    pretrained = self._pretrained(group, first_values)
                    param_groups.add_frozen_gradients(group, pretrained, getattr(self, "grad_scale", None))
                param_groups.enter_metric(group, entered)

        @torch.no_grad()
        def evaluate():
            param_groups.leave_metric(entered)  # the model sees w, the base v
            with torch.enable_grad():
                loss = closure()
            before_base()
            return loss

        try:
            if closure is None:
                before_base()
            loss = self._base_step(closure and evaluate)
            param_groups.prox_step(list(zip(learning, lambdas, strict=True)))
        finally:
            param_groups.leave_metric(entered)
        for parameter, value in first_values.items():  # only now: the base initialises a state that it finds empty
            self.state[parameter]["pretrained"] = value
        return loss

    def _pretrained(self, group: dict, first_values: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """W0 of every trained parameter of the group; one without takes its present value, noted in `first_values`."""
        pretrained = {}
        for parameter, _ in param_groups.trained_parameters(group):
            known = self.state.get(parameter, {}).get("pretrained")
            if known is None and parameter not in first_values:
                first_values[parameter] = parameter.detach().clone()
            pretrained[parameter] = first_values[parameter] if known is None else known
        return pretrained

    def _base_step(self, closure: Callable[[], float] | None) -> float | None:
        """The base's step without the hooks torch has put around it: those fire around ours, after the prox."""
        step = type(self.base_optimizer).step
        self.base_optimizer._opt_called = True  # what a scheduler made on the base, before it was wrapped, looks for
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.base_optimizer, closure)
