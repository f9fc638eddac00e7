"""The state of a training run, which its checkpoints save and from which it resumes bit for bit."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.atomic import require_space
from proxsparse.io.checkpoints import Checkpoints, step_of
from proxsparse.optim import ProxAdamW
from proxsparse.runtime import distributed, sharding
from proxsparse.runtime.device import free_memory
from proxsparse.runtime.distributed import all_gather, world_size
from proxsparse.runtime.signals import StopSignal
from proxsparse.training.best_weights import BestWeights
from proxsparse.training.learnable_layer import LearnableLayer, count_not_finite
from proxsparse.training.mask_monitor import MaskMonitor
from proxsparse.training.optimizer import weights_of
from proxsparse.training.options import LoopOptions

LOG_POINTS = 1000  # of a run
COUNTERS = ("step", "batches", "tokens", "seconds")
OF_A_GROUP = ("prox_step", "reg_lambda", "initial_lr")
UNSIZED = ("random.", "monitor.snapshots")  # tensors whose shape may differ in the run that wrote the checkpoint


@dataclass
class TrainState:
    """Learned weights, optimizer, counters, the observer of the training, and the signals that end it."""

    model: nn.Module
    layers: dict[str, LearnableLayer]
    options: LoopOptions
    steps: int
    optimizer: ProxAdamW
    observer: MaskMonitor | BestWeights
    stop: StopSignal = field(default_factory=StopSignal)  # a signal ends the training after the present step
    step: int = 0  # finished steps
    batches: int = 0  # batches used by all processes
    tokens: int = 0
    seconds: float = 0.0
    norms_not_read: float | Tensor = 0.0  # sum of the norms of the gradients since one was read from the device
    clock: float = field(default_factory=time.monotonic)  # time of the last update of `seconds`

    def __post_init__(self) -> None:
        self.optimizer.prepare_states()

    @property
    def complete(self) -> bool:
        """Whether there is no step left to do."""
        return self.step == self.steps

    @property
    def logged(self) -> bool:
        """Whether the present step is logged: about `LOG_POINTS` steps of a run, and those that the observer measures.

        Reading a number from a GPU makes the host wait for it, so the other steps read none.
        """
        step = self.step + 1
        return step % math.ceil(self.steps / LOG_POINTS) == 0 or step == self.steps or self.observer.measures(step)

    def count_(self, micro_batches: Iterable[dict[str, Tensor]]) -> None:
        """Updates the counters after a step."""
        (tokens,) = distributed.all_reduce_sum([sum(int(batch["attention_mask"].sum()) for batch in micro_batches)])
        now = time.monotonic()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        self.step, self.tokens = self.step + 1, self.tokens + int(tokens)
        self.batches += self.options.gradient_accumulation_steps * world_size()

    def masks(self) -> dict[str, Tensor]:
        """Layer name -> its mask, bool [local rows, in_features] on the CPU. Raises InputError if a weight diverged."""
        if count_not_finite(self.layers.values()):
            raise InputError("the weights became NaN or infinite during training; lower --learning_rate")
        return {name: layer.mask().cpu() for name, layer in self.layers.items()}

    # ------------------------------------------------------------------------------------------ checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """Name in a checkpoint -> tensor: scales, learned weights, moments, those of the observer."""
        found = {f"scale.{name}": layer.scale for name, layer in self.layers.items() if layer.scale is not None}
        for name, weight in weights_of(self.optimizer).items():
            found[f"weight.{name}"] = weight.detach()
            found |= {f"{key}.{name}": value for key, value in self.optimizer.state[weight].items() if key != "step"}
        return found | self.observer.tensors()

    def facts(self) -> dict:
        """The rest of the state as JSON."""
        weights = weights_of(self.optimizer)
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "groups": [{key: group[key] for key in OF_A_GROUP} for group in self.optimizer.param_groups],
            "parameter_steps": {name: int(self.optimizer.state[weight]["step"]) for name, weight in weights.items()},
            "observer": self.observer.facts(),
        }

    def save(self, checkpoints: Checkpoints) -> None:
        """Writes the checkpoint of this step; removes those beyond --save_total_limit. All processes must call it.

        With a model on a GPU a thread writes it if the host has room for a copy, see `Checkpoints.save`.
        """
        step, limit = self.step, self.options.save_total_limit

        def remove_others() -> None:  # also later steps, abandoned when the run was resumed from an earlier one
            older = [other for other in checkpoints.steps() if step_of(other) <= step]
            checkpoints.remove({*checkpoints.steps()} - {*older[-limit:]})

        checkpoints.wait()  # frees the copy of the last one
        generators = random_generators(self.model.device)  # their states: uint8 [world size, bytes]
        tensors = self.tensors() | {f"random.{kind}": all_gather(get()) for kind, (get, _) in generators.items()}
        in_thread = self.model.device.type != "cpu" and copy_fits(tensors)
        checkpoints.save(f"step-{step}", tensors, self.facts(), remove_others, in_thread=in_thread)

    def restore_(self, checkpoints: Checkpoints, name: str, facts: dict) -> None:
        """Restores the state from a checkpoint, given its facts. Raises InputError as `Checkpoints.load`."""
        into = {key: tensor for key, tensor in self.tensors().items() if not key.startswith(UNSIZED)}
        tensors = checkpoints.load(name, into, UNSIZED)
        for kind, (_, put) in random_generators(self.model.device).items():
            if (states := tensors.get(f"random.{kind}")) is not None:  # None if written on another type of device
                put(states[distributed.rank() if distributed.rank() < len(states) else 0].clone())  # must be aligned
        self.observer.restore_(tensors, facts["observer"])
        for key, weight in weights_of(self.optimizer).items():
            self.optimizer.state[weight]["step"].fill_(facts["parameter_steps"][key])
        for group, values in zip(self.optimizer.param_groups, facts["groups"], strict=True):
            group |= {key: values[key] for key in OF_A_GROUP}
        for key in COUNTERS:
            setattr(self, key, facts[key])
        for layer in self.layers.values():
            layer.remask_()

    def require_space(self, checkpoints: Checkpoints) -> None:
        """Raises InputError if the disk cannot hold --save_total_limit checkpoints and the one being written."""
        if self.options.save_minutes != 0:
            saved = sum(file.stat().st_size for file in checkpoints.folder.rglob("*.safetensors"))
            needed = (self.options.save_total_limit + 1) * sum(tensor.nbytes for tensor in self.tensors().values())
            what = "the checkpoints (--save_minutes 0 writes none) need"
            require_space(checkpoints.run_dir, needed - saved, what)


def random_generators(device: torch.device) -> dict[str, tuple]:
    """Device type -> (get state, set state) of the random number generators that a run on this device uses."""
    found = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if device.type == "cuda":
        found["cuda"] = partial(torch.cuda.get_rng_state, device), partial(torch.cuda.set_rng_state, device=device)
    return found


def copy_fits(tensors: dict[str, Tensor]) -> bool:
    """Whether the host of every process has room for copies of the tensors of all its processes, and half as much."""
    size = sum(sharding.local(tensor).nbytes for tensor in tensors.values()) * distributed.local_world_size()
    free = free_memory(torch.device("cpu")).get("host", 0)
    (fits,) = distributed.all_reduce_sum([1.5 * size <= free])
    return fits == world_size()
