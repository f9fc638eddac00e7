"""What a run hands to a method beside its arguments, and what the method hands back beside the masks."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from proxsparse.runtime.signals import StopSignal


@dataclass
class Store:
    """Where a method keeps its progress, so that a stopped run can continue.

    Attributes:
        directory: where the run works; None: nothing is kept.
        run_id: the id of the run, written into what belongs to it.
        identity: JSON values that tell whether another run may continue this one; written into every checkpoint.
        pretrained: parameter name -> W0, the rows of this process; {}: the weights of the model as they are now.
        checkpoint: the checkpoint to continue from, and `state`, the content of its state.json.
        figures: what the method adds to result.json.
        baselines: name -> masks whose perplexity is measured for comparison.
        stop: what a method that can end early asks after each step.
        complete: whether the method has ended by itself; if not, its masks are those learned so far.
    """

    directory: Path | None = None
    run_id: str = ""
    identity: dict = field(default_factory=dict)
    pretrained: dict[str, Tensor] = field(default_factory=dict)
    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)
    figures: dict = field(default_factory=dict)
    baselines: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    stop: StopSignal = field(default_factory=StopSignal)
    complete: bool = True
