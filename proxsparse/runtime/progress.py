"""Progress on stderr: the current phase of a command with the time left, and one line when the phase has ended.

    with phase("perplexity", len(windows), "window") as current:
        for window in windows:
            ...
            current.step()
        current.result = f"{value:.2f}"

A terminal shows a bar. A file or a pipe gets a line every half minute, without "\\r". Commands turn progress on with
`shown`; a library call prints nothing. Only rank zero prints.
"""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
TERMINAL_INTERVAL_S, FILE_INTERVAL_S = 0.2, 30.0
_shown: ContextVar[bool] = ContextVar("proxsparse_progress", default=False)


@contextmanager
def shown(on: bool = True) -> Iterator[None]:
    """Within the block phases print. `on=False` changes nothing: an outer block may have turned progress on."""
    token = _shown.set(on or _shown.get())
    try:
        yield
    finally:
        _shown.reset(token)


class Phase:
    """One phase. `step` counts; `note` is shown next to the bar, `result` in the line at the end."""

    def __init__(self, name: str, total: int | None, unit: str, done: int):
        self.name, self.unit, self.note, self.result = name, unit, "", ""
        self.started = time.monotonic()
        self.begin(total, done)

    def begin(self, total: int | None, done: int = 0) -> None:
        """Restarts the count at `done`; `total` is the number of steps, if known. A resumed phase has done > 0."""
        self.first, self.done, self.total, self.counted_from = done, done, total, time.monotonic()

    def step(self, count: int = 1) -> None:
        """Counts, at most to the total. Another thread prints, so a call is cheap."""
        self.done = min(self.done + count, self.total or math.inf)

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items and counts each after its use; the total is their number, if known."""
        if hasattr(items, "__len__"):
            self.begin(len(items))
        for item in items:
            yield item
            self.step()

    @contextmanager
    def instead_of_tqdm(self, *modules: ModuleType) -> Iterator[None]:
        """Within the block `tqdm` bars in these modules of other libraries count in this phase instead."""

        def bar(items: Iterable | None = None, total: int | None = None, **_settings):
            self.begin(total)
            return self if items is None else self.count(items)

        before = [(module, getattr(module, "tqdm", None)) for module in modules]
        try:
            for module in modules:
                module.tqdm = bar
            yield
        finally:
            for module, tqdm in before:
                module.tqdm = tqdm

    update = step  # of tqdm

    def close(self) -> None:
        """Does nothing: the bar of a library ends, and the phase continues."""

    def bar(self, columns: int) -> str:
        """The state as a line of tqdm, `columns` wide; 0 gives the text without the bar."""
        from tqdm import tqdm

        elapsed = time.monotonic() - self.counted_from
        if not self.total and not self.done:
            return f"{self.name}: {tqdm.format_interval(elapsed)}"[: columns or None]
        more = {"unit": self.unit, "initial": self.first, "postfix": self.note}
        return tqdm.format_meter(self.done, self.total, elapsed, columns, self.name, **more)

    def summary(self) -> str:
        """The line at the end: name, result, steps and time."""
        seconds = time.monotonic() - self.started
        how_long = f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
        if self.total or self.done:
            of_total = "" if self.total in (None, self.done) else f" of {self.total:,}"
            how_long = f"{self.done:,}{of_total} {self.unit}{'s' * ((self.total or self.done) != 1)}, {how_long}"
        return f"{self.name}: {self.result or 'done'} ({how_long})"


@contextmanager
def phase(name: str, total: int | None = None, unit: str = "step", done: int = 0) -> Iterator[Phase]:
    """Shows a phase of a command while the block runs; `total` is None if the number of steps is unknown."""
    current = Phase(name, total, unit, done)
    if not _shown.get() or os.environ.get("RANK", "0") != "0":
        yield current
        return
    ended = threading.Event()
    painter = threading.Thread(target=_paint, args=(current, ended), daemon=True)
    painter.start()
    try:
        yield current
    finally:
        ended.set()
        painter.join()
    write_line(current.summary())


def importing(package: str) -> AbstractContextManager:
    """The phase of importing a package, which may take seconds; nothing if it is already imported."""
    return nullcontext() if package in sys.modules else phase(f"importing {package}")


def _paint(current: Phase, ended: threading.Event) -> None:
    """Prints the phase repeatedly until it has ended, in a thread of its own."""
    if not sys.stderr.isatty():
        while not ended.wait(FILE_INTERVAL_S):
            write_line(current.bar(0))
        return
    while True:
        columns = shutil.get_terminal_size().columns - 1
        _write("\r" + current.bar(columns).ljust(columns))
        if ended.wait(TERMINAL_INTERVAL_S):
            break
    _write("\r" + " " * columns + "\r")


def write_line(text: str) -> None:
    """Prints a line on stderr; overwrites the bar if there is one."""
    columns = shutil.get_terminal_size().columns - 1 if sys.stderr.isatty() else 0
    _write(f"\r{' ' * columns}\r{text}\n" if columns else f"{text}\n")


def _write(text: str) -> None:
    with suppress(OSError):  # the terminal or the reader of the pipe is closed: the work continues
        sys.stderr.write(text)
        sys.stderr.flush()
