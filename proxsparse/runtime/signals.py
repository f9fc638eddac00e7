"""Signals that end a run between two steps."""

import signal
import threading

from proxsparse.runtime.distributed import all_reduce_sum


class StopSignal:
    """Within the block, after `defer`, SIGINT and SIGTERM do not interrupt; `agree` reports them."""

    def __init__(self):
        self.number: int | None = None  # set by `agree`, equal on all ranks
        self.seen: int | None = None
        self.previous: dict | None = None  # the deferred signals with their handlers; None: outside the block

    def __enter__(self) -> "StopSignal":
        self.previous = {}
        return self

    def defer(self) -> None:
        """From now on to the end of the block signals do not interrupt.

        It does nothing outside a block, and in a thread other than the main one, where Python sets no handlers.
        """
        if self.previous == {} and threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._see) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = None

    def _see(self, number, _frame) -> None:
        self.seen = number

    def agree(self) -> None:
        """Sets `number` on all ranks if one of them has received a signal."""
        seen = all_reduce_sum([self.seen == signal.SIGINT, self.seen == signal.SIGTERM])
        if any(seen):
            self.number = signal.SIGTERM if seen[1] else signal.SIGINT
