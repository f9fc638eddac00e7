"""What a method returns."""

from dataclasses import dataclass, field

from torch import Tensor

from proxsparse.runtime.signals import StopSignal


@dataclass
class Pruned:
    """The masks of a method, and what a run reports about them."""

    masks: dict[str, Tensor]  # layer name -> bool [out_features, in_features] on the CPU, True = kept
    figures: dict = field(default_factory=dict)  # more entries of result.json
    trained: frozenset[str] = frozenset()  # names of the parameters that keep their trained values; others become W0
    baselines: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # name -> masks that are measured too
    seconds_before: float = 0.0  # of the training in processes before this one, if it was resumed
    complete: bool = True  # False if a signal has ended the training early; the masks are then those learned so far
    # of a training, whose signals are still deferred: call `stop.restore()` when the masks are saved
    stop: StopSignal = field(default_factory=StopSignal)
