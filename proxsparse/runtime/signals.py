"""Signals that end a training loop between two steps."""

import signal
import threading

from proxsparse.runtime.distributed import all_reduce_sum, is_rank_zero

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """From `defer` to `restore`, SIGINT and SIGTERM do not interrupt; `agree` reports them."""

    def __init__(self):
        self.number: int | None = None  # set by `agree`, equal on all ranks
        self.seen: int | None = None
        self.previous: dict = {}  # signal -> its handler before `defer`

    def defer(self) -> None:
        """Does nothing in a thread other than the main one, where Python sets no handlers."""
        if threading.current_thread() is threading.main_thread():
            self.previous = {number: signal.signal(number, self._see) for number in SIGNALS}

    def restore(self) -> None:
        """Restores the handlers; does nothing if the signals are not deferred."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def _see(self, number, _frame) -> None:
        self.seen = number

    def agree(self, due: bool = False) -> bool:
        """Sets `number` on all ranks if one of them has received a signal. Returns the `due` of rank 0."""
        seen = [self.seen == signal.SIGINT, self.seen == signal.SIGTERM]
        interrupted, terminated, due_there = all_reduce_sum([*seen, due and is_rank_zero()])
        if interrupted or terminated:
            self.number = signal.SIGTERM if terminated else signal.SIGINT
        return bool(due_there)
