"""The weights with the smallest loss on samples that are not trained on."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


class BestWeights:
    """Measures the held-out loss at the start and `count` times after it, and keeps a copy of the best weights.

    Args:
        measure: the held-out loss of the current weights; None: no samples are held out, nothing is measured.
        weights: name -> the weights that are trained.
        count: measurements after the start, at equal distances, at most one a step; the last step is measured.
        last: the last step.
    """

    def __init__(self, measure: Callable[[], float] | None, weights: dict[str, Tensor], count: int, last: int):
        self.measure, self.count, self.last = measure, count, last
        self.weights = weights if measure else {}
        self.best = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.losses: list[list[float]] = []  # [step, held-out loss]

    def measures(self, step: int) -> bool:
        """Whether `observe` measures after this step."""
        return self.measure is not None and step * self.count // self.last > (step - 1) * self.count // self.last

    def observe(self, step: int) -> dict[str, float]:
        """{"held_out_loss": loss} after a step that is measured, else {}; step 0 is the start."""
        if not self.measures(step):
            return {}
        loss = self.measure()
        if loss < self.smallest()[1]:
            self._copy(self.weights, self.best)
        self.losses.append([step, loss])
        return {"held_out_loss": loss}

    def smallest(self) -> tuple[int | None, float]:
        """Step and value of the smallest held-out loss so far; (None, inf) before the first one."""
        return tuple(min(self.losses, key=lambda point: point[1], default=(None, math.inf)))

    def take_best_(self) -> None:
        """Replaces the weights by the best ones, if any were measured."""
        if self.losses:
            self._copy(self.best, self.weights)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
        for name, weight in source.items():
            target[name].copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """Name in the checkpoint -> tensor, which loading fills in place."""
        return {f"best.{name}": weight for name, weight in self.best.items()}

    def facts(self) -> dict:
        """The rest as JSON."""
        return {"losses": self.losses}

    def restore_(self, _tensors: dict[str, Tensor], facts: dict) -> None:
        """Takes over what a checkpoint has saved; the tensors have been loaded in place."""
        self.losses = facts["losses"]
