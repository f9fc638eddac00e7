"""Signals that end a run early, at a moment when nothing is cut in two."""

import signal

from proxsparse.runtime.distributed import all_reduce_sum


class StopSignal:
    """Within the block SIGINT and SIGTERM interrupt nothing: they count at the next `agree`."""

    def __init__(self):
        self.number: int | None = None  # the signal that all processes have agreed on
        self.seen: int | None = None

    def __enter__(self) -> "StopSignal":
        self.previous = {number: signal.signal(number, self._see) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _see(self, number, _frame) -> None:
        self.seen = number

    def agree(self) -> None:
        """A signal that one process has received by now ends all processes."""
        seen = all_reduce_sum([self.seen == signal.SIGINT, self.seen == signal.SIGTERM])
        if any(seen):
            self.number = signal.SIGTERM if seen[1] else signal.SIGINT
