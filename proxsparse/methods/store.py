"""What a run passes to a method in addition to its arguments, and what the method returns in addition to the masks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from proxsparse.runtime.signals import StopSignal


@dataclass
class Store:
    """Where a method saves its progress, so that a stopped run can be resumed.

    Attributes:
        directory: the run's directory; None: nothing is saved.
        run_id: the id of the run, written into its files.
        identity: JSON values that determine whether another run may resume this one; written into every checkpoint.
        pretrained: parameter name -> W0, the rows of this process; {}: the current weights of the model.
        checkpoint: the checkpoint to resume from; `state` is the content of its state.json.
        figures: entries that the method adds to result.json.
        trained: names of the parameters that the method has trained; they keep their values, all others become W0.
        scores: name of a model -> its held-out perplexity; a resumed run has those of the stopped run.
        evaluate: (model, name) -> its held-out perplexity.
        baselines: name -> masks whose perplexity is measured for comparison.
        stop: checked after each step by a method that can stop early.
        complete: False if the method was stopped early; the masks are then those learned so far.
    """

    directory: Path | None = None
    run_id: str = ""
    identity: dict = field(default_factory=dict)
    pretrained: dict[str, Tensor] = field(default_factory=dict)
    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)
    figures: dict = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    scores: dict = field(default_factory=dict)
    evaluate: Callable[[nn.Module, str], object] = lambda model, name: None
    baselines: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    stop: StopSignal = field(default_factory=StopSignal)
    complete: bool = True

    def score(self, name: str, model: nn.Module) -> None:
        """Measures the held-out perplexity of a model, unless the stopped run has measured it."""
        if name not in self.scores:
            self.scores[name] = self.evaluate(model, name)
