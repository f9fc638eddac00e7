"""What a method returns."""

from dataclasses import dataclass, field

from torch import Tensor

from proxsparse.runtime.signals import StopSignal


@dataclass
class Pruned:
    """The masks of a method, and what a run reports about them.

    Attributes:
        masks: layer name -> bool [out_features, in_features] on the CPU, True = kept.
        figures: more entries of result.json.
        trained: names of the parameters that keep their trained values; all others become W0.
        baselines: name -> masks whose perplexity is measured for comparison.
        seconds_before: seconds of the training in processes before this one, if it was resumed.
        complete: False if a signal has ended the training early; the masks are then those learned so far.
        stop: the signals of a training, which are still deferred: call `stop.restore()` when the masks are saved.
    """

    masks: dict[str, Tensor]
    figures: dict = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    baselines: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    seconds_before: float = 0.0
    complete: bool = True
    stop: StopSignal = field(default_factory=StopSignal)
