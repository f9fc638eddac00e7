"""ProxAdamW: AdamW and the prox in one pass over the weights (paper, Algorithm 1 with AdamW as the base step)."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxsparse.ops.adamw_prox import arithmetic_of, check_numbers
from proxsparse.ops.adamw_prox_list import Masked, adamw_prox_list_
from proxsparse.ops.prox import in_range
from proxsparse.optim import param_groups
from proxsparse.patterns import NMPattern, PatternLike, check_dtype
from proxsparse.reference import frozen_penalty_grad
from proxsparse.runtime.sharding import local

# The other keys in the groups of torch's AdamW, so that each optimizer can load the state of the other. VARIANTS select
# other algorithms; other values than these are refused. EXECUTION selects an implementation; it is reset to these
# values.
VARIANTS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
EXECUTION = {"foreach": None, "capturable": False, "fused": None}
# Attributes of the optimizer that are not part of the state.
SETUP = ("moment_dtype", "master_weights", "stochastic_rounding")


@dataclass(frozen=True)
class Uncast:
    """Protects the state of a parameter from the cast in `load_state_dict` of torch.

    torch casts tensors to the dtype of the parameter, so float32 moments of bfloat16 weights would lose precision.
    """

    state: dict


class ProxAdamW(Optimizer):
    """W <- prox_{lambda_1 Reg_{N:M}}(AdamW step of W) in one pass over weight, gradient and moments.

    Equivalent to `ProxOptimizer(AdamW(...))` (paper, Algorithm 1; equations 4 and 7), but reads and writes the weights
    once. The equations are in `reference.adamw_prox`; grad includes the gradient of the frozen-weight term, in the
    dtype of the weight (`reference.frozen_penalty_grad`). Groups and lr = 0 work as described in ProxOptimizer; `.grad`
    is not modified. Parameters with fewer than two dimensions and groups with reg_lambda = 0 take the plain AdamW step.
    Any pattern is supported; 2:4, 4:6, 6:8 and 8:10 have fused kernels.

    `state_dict()` has the format of torch.optim.AdamW and ProxOptimizer(AdamW) with additional keys, and each of the
    three can load the state of the others, which ignore W0 and a scaling. Loading keeps the dtypes given here.
    Resuming is bit-identical, also with stochastic rounding.

    A group may have a scaling `prox_scale`, c: one positive number per input feature of its parameters. The step is
    then that of v = c * w: AdamW with lr / c_j in column j, and the prox of c * w.

    The attribute `masked`, not part of the state, may have (out, W0) for a parameter: after each of its steps, `out`
    becomes W0 under the mask of the new parameter (`ops.masked_weight_`, with the pattern and scaling of the prox).

    Memory per weight, in addition to the weight and its gradient: moments take 8 bytes in float32 or 4 in bfloat16; a
    master takes 4 bytes; frozen_lambda > 0 adds W0, and another gradient during the step. With the lambda of the paper,
    a prox step is 1 to 3 units in the last place of a bfloat16 weight, and much of it is lost when rounding to nearest.
    Use master weights, or stochastic rounding, which is unbiased and needs no memory.

    Args:
        params: as in any torch optimizer; groups may have their own values of lr to frozen_eps and seed.
        lr, betas, eps: as in torch.optim.AdamW. Reading an lr that is on a GPU synchronizes at every step.
        weight_decay: as in torch.optim.AdamW, but the default is 0, not 0.01.
        reg_lambda: lambda_1 >= 0, in units of 1 / |w|^(N-1). Not multiplied by the learning rate.
        pattern: "N:M" or an NMPattern; N of every M weights are kept.
        frozen_lambda: lambda_2 >= 0 of the frozen-weight term. W0, the parameter at its first step, is kept in
            `state[p]["pretrained"]`; 0 keeps no copy.
        frozen_eps: the epsilon > 0 of Reg_W0, in the unit of the weights.
            This and the next three arguments are not part of the state: pass the same values when resuming.
        moment_dtype: None for float32, or torch.bfloat16 (float64 weights: always float64). bfloat16 moments are
            rounded stochastically, because averages that change by 1/1000 would not change if rounded to nearest.
        master_weights: keep a float32 copy of bfloat16 and float16 weights in `state[p]["master"]`, which the step
            updates. After changing such a weight yourself, delete its master.
        stochastic_rounding: round bfloat16 weights stochastically.
        seed: seed of all stochastic rounding; saved with the groups. Use the same seed in all processes, so that
            replicas stay equal.
        model: the causal language model of transformers that is trained; selects what is pruned, as in ProxOptimizer.
    Raises:
        TypeError: params is a model.
        ValueError: a setting is out of range; a parameter or shard does not consist of whole blocks; there is nothing
            to prune; a kind of rounding does not fit the dtype of a parameter.
    """

    _model = None  # a weak reference to `model`, for groups that are added later; not copied or pickled

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        reg_lambda: float,
        pattern: PatternLike = "2:4",
        frozen_lambda: float = 0.0,
        frozen_eps: float = 0.1,
        moment_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        model: nn.Module | None = None,
    ):
        if isinstance(params, nn.Module):
            raise TypeError(
                f"params is a {type(params).__name__}: pass its parameters() (Trainer takes the key model of "
                "optimizer_cls_and_kwargs for them; give it optimizers=(ProxAdamW(...), None) instead)"
            )
        if moment_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"moment_dtype={moment_dtype} must be torch.bfloat16, or None for float32 (float64 for float64 weights)"
            )
        if stochastic_rounding and master_weights:
            raise ValueError(
                "stochastic_rounding=True and master_weights=True: weights with a master need no stochastic "
                "rounding; choose one of the two"
            )
        self.moment_dtype = moment_dtype
        self.master_weights = master_weights
        self.stochastic_rounding = stochastic_rounding
        self.masked: dict[Tensor, tuple[Tensor, Tensor]] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        defaults |= VARIANTS | EXECUTION | param_groups.first_settings(reg_lambda, pattern)
        defaults |= {"frozen_lambda": frozen_lambda, "frozen_eps": frozen_eps, "prox_scale": None}
        self._check_group(defaults | {"params": []})
        self._model = None if model is None else weakref.ref(model)
        super().__init__(params, defaults)
        param_groups.check_something_to_prune(self.param_groups)
        held = {parameter.dtype for group in self.param_groups for parameter in group["params"]}
        if stochastic_rounding and torch.bfloat16 not in held:
            raise ValueError("stochastic_rounding=True is for bfloat16 weights, and there are none; remove it")

    def __getstate__(self) -> dict:
        return super().__getstate__() | {name: getattr(self, name) for name in SETUP}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("masked", {})
        for parameter, entries in self.state.items():
            if isinstance(entries, Uncast):  # entries of other keys are passed on
                state = entries.state
                self.state[parameter] = self._loaded_state(parameter, state) if isinstance(parameter, Tensor) else state

    def add_param_group(self, param_group: dict) -> None:
        """As in any optimizer; raises ValueError for a group that is not supported, and does not add it."""
        own = "reg_lambda" in param_group
        super().add_param_group(param_group)
        try:
            param_groups.skip_others(self.param_groups[-1:], [own], self._model and self._model())
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads the state of a ProxAdamW, torch AdamW or ProxOptimizer(AdamW); keeps the dtypes of this optimizer.

        Raises:
            ValueError: a setting is out of range, or the state has other groups; nothing is loaded.
        """

        def prepare(_optimizer, state_dict: dict) -> dict:
            completed = param_groups.complete_state(self, state_dict, self.defaults, self._check_group)
            return completed | {"state": {number: Uncast(state) for number, state in completed["state"].items()}}

        with self.register_load_state_dict_pre_hook(prepare):  # the last one: hooks of the user see plain tensors
            super().load_state_dict(state_dict)

    @torch._disable_dynamo  # as in torch's optimizers: a compiled step has no guard on the state of other parameters
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """AdamW with the frozen-weight gradient, then the prox. Returns the loss of the closure, if given.

        Raises:
            RuntimeError: a CUDA graph is being captured; every replay would repeat this step number and learning rate.
            ValueError: a gradient is sparse, or has another dtype or sharding than its parameter.
        """
        param_groups.check_not_capturing(self)
        settings, loss, steps = [lr_and_lambda(group) for group in self.param_groups], None, {}
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                check_gradient(parameter)
        number = 0
        for group, (lr, reg_lambda) in zip(self.param_groups, settings, strict=True):
            steps |= self._steps_of_group(group, number, lr, reg_lambda)
            number += len(group["params"])
        if steps:  # in few launches on a GPU
            adamw_prox_list_(*zip(*steps.values(), strict=True))
            torch._foreach_add_([self.state[parameter]["step"] for parameter in steps], 1)
        for group, (lr, _) in zip(self.param_groups, settings, strict=True):
            group["prox_step"] += 1 if lr else 0
        return loss

    def prepare_states(self) -> None:
        """Adds the entries of the first step to all states, so that a checkpoint can be loaded into them."""
        for group in self.param_groups:
            frozen = set(param_groups.pruned_parameters(group)) if group["frozen_lambda"] > 0 else ()
            for parameter in group["params"]:
                self._prepared_state(parameter, parameter in frozen)

    def _prepared_state(self, parameter: Tensor, frozen: bool) -> dict:
        """The state of the parameter, with missing entries added; `frozen`: whether W0 is one of them."""
        state = self.state[parameter]
        if "exp_avg" not in state:
            # on the CPU, as in torch: reading it does not synchronize
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, dtype=self._state_dtype(parameter, key))
        if self._has_master(parameter) and "master" not in state:
            state["master"] = parameter.detach().float()
        if frozen and "pretrained" not in state:
            state["pretrained"] = parameter.detach().clone()
        return state

    def _steps_of_group(
        self, group: dict, first: int, lr: float, reg_lambda: float
    ) -> dict[Tensor, tuple[dict, Masked | None]]:
        """Every parameter with a gradient -> its fused step, of the rows in this process, and what it masks.

        `first` is the number of the first parameter, over all groups.
        """
        pruned, scale, steps = set(param_groups.pruned_parameters(group)), group["prox_scale"], {}
        stochastic = self.stochastic_rounding or self.moment_dtype is not None
        settings = {key: group[key] for key in ("betas", "eps", "weight_decay")} | {"lr": lr}
        settings |= {"pattern": NMPattern.parse(group["pattern"])}
        for number, parameter in enumerate(group["params"], first):
            if parameter.grad is None:
                continue
            has_prox = parameter in pruned
            frozen = has_prox and group["frozen_lambda"] > 0
            state = self._prepared_state(parameter, frozen)
            count = int(state["step"]) + 1
            step = {key: local(state[key]) for key in ("exp_avg", "exp_avg_sq", "master") if key in state}
            step |= settings | {"weight": local(parameter), "grad": local(parameter.grad), "step": count}
            if frozen:
                step["grad"] = with_frozen_term(step, local(state["pretrained"]), group)
            scale = None if scale is None else scale.to(parameter.device)
            step |= {"reg_lambda": reg_lambda, "scale": scale} if has_prox else {"reg_lambda": 0.0}
            step["seed"] = call_seed(group["seed"], number, count) if stochastic else None
            out = self.masked.get(parameter)
            steps[parameter] = step, out and Masked(*map(local, out), scale)
        return steps

    def _has_master(self, parameter: Tensor) -> bool:
        return self.master_weights and parameter.dtype in (torch.bfloat16, torch.float16)

    def _state_dtype(self, parameter: Tensor, key: str) -> torch.dtype:
        """The dtype of an entry of the state."""
        if key in ("exp_avg", "exp_avg_sq"):
            return torch.float64 if parameter.dtype == torch.float64 else self.moment_dtype or torch.float32
        return torch.float32 if key in ("step", "master") else parameter.dtype

    def _loaded_state(self, parameter: Tensor, saved: dict) -> dict:
        """A saved state in the dtypes and on the device of this optimizer."""
        state = {}
        for key, value in saved.items():
            dtype = self._state_dtype(parameter, key)
            if key == "step":
                state[key] = torch.tensor(float(value), dtype=dtype)
            elif key == "master" and (value.dtype != dtype or not self._has_master(parameter)):
                continue  # another optimizer has cast it
            else:
                state[key] = value.to(parameter.device, dtype) if isinstance(value, Tensor) else value
        return state

    def _check_group(self, group: dict) -> None:
        """Normalizes the group; raises ValueError for unsupported settings."""
        param_groups.check_group(group)
        check_numbers(1, group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if not in_range(group["frozen_lambda"], 0):
            raise ValueError(f"frozen_lambda={group['frozen_lambda']!r} must be a finite number >= 0 (0 turns it off)")
        if not in_range(group["frozen_eps"], 0) or group["frozen_eps"] == 0:
            raise ValueError(f"frozen_eps={group['frozen_eps']!r} must be a finite number > 0, such as 0.1")
        for key, value in VARIANTS.items():
            if group[key] != value:
                raise ValueError(f"{key}={group[key]}: ProxAdamW computes plain AdamW only ({key}={value})")
        group |= EXECUTION
        if not isinstance(group["seed"], Integral) or isinstance(group["seed"], bool):
            raise ValueError(f"seed={group['seed']!r} must be an integer")
        group["seed"] = int(group["seed"])  # torch.load refuses numbers of NumPy in a state_dict
        for parameter in group["params"]:
            self._check_rounding(parameter)
        if group["prox_scale"] is not None:
            for parameter in param_groups.pruned_parameters(group):
                check_scale(local(parameter), group["prox_scale"])

    def _check_rounding(self, parameter: Tensor) -> None:
        """Raises ValueError unless the settings define how the parameter is rounded."""
        shape, dtype = list(parameter.shape), parameter.dtype
        check_dtype(parameter, f"parameter of shape {shape}")
        if self.stochastic_rounding and dtype == torch.float16:
            raise ValueError(
                f"stochastic_rounding=True rounds to bfloat16, but the parameter of shape {shape} is {dtype}; "
                "convert it, or use master_weights=True"
            )
        if self.moment_dtype and dtype == torch.bfloat16 and not (self.stochastic_rounding or self.master_weights):
            raise ValueError(
                f"moment_dtype=torch.bfloat16 with a bfloat16 parameter of shape {shape}: also set "
                "stochastic_rounding=True or master_weights=True"
            )


def lr_and_lambda(group: dict) -> tuple[float, float]:
    """The learning rate of the group and its lambda_1, which is 0 at lr = 0."""
    lr = float(group["lr"])
    return lr, param_groups.reg_lambda_now(group) if lr else 0.0


def check_scale(weight: Tensor, scale: Tensor) -> None:
    """Raises ValueError unless the scale has one positive finite number for each input feature in this process."""
    if scale.shape != weight.shape[-1:] or not scale.is_floating_point():
        raise ValueError(
            f"scale of shape {list(scale.shape)} and dtype {scale.dtype}: must be floating point of shape "
            f"{list(weight.shape[-1:])}, one number for each input feature"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ValueError(
            f"scale with values from {scale.min().item()} to {scale.max().item()}: every value must be finite and > 0; "
            "use a small positive number for input features that are never active"
        )


def check_gradient(parameter: Tensor) -> None:
    """Raises ValueError for a gradient that is sparse, or of another sharding than its parameter."""
    grad, what = parameter.grad, f"parameter of shape {list(parameter.shape)}"
    if grad is None:
        return
    if grad.layout != torch.strided:
        raise ValueError(
            f"{what} has a sparse gradient, which AdamW does not support; create its layer with sparse=False, or use "
            "another optimizer for it"
        )
    placements, others = (getattr(tensor, "placements", None) for tensor in (parameter, grad))
    if placements != others:
        raise ValueError(
            f"{what} has placements {placements}, but its gradient {others}; redistribute the gradient before the step"
        )


WORD = 2**64 - 1  # 64 bits


def call_seed(seed: int, parameter_number: int, step: int) -> int:
    """A hash of the three numbers, in [0, 2^64): the seed of one parameter in one step."""
    state = 0
    for word in (seed, parameter_number, step):
        state = mix(state ^ (word & WORD))
    return state


def mix(x: int) -> int:
    """A bijection of 64-bit words: the output function of SplitMix64. Every output bit depends on all input bits."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def with_frozen_term(step: dict, pretrained: Tensor, group: dict) -> Tensor:
    """grad + lambda_2 dReg_W0/dW at the master or the weight, in the dtype of the weight."""
    weight, arithmetic = step["weight"], arithmetic_of(step["weight"])
    w = step.get("master", weight).to(arithmetic)
    penalty = frozen_penalty_grad(w, pretrained.to(arithmetic), group["frozen_eps"])
    return penalty.mul_(group["frozen_lambda"]).add_(step["grad"]).to(weight.dtype)
