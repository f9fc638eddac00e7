"""Errors of the command line: one line with the cause and the remedy, no traceback."""

import errno
import os
import re
import reprlib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta

from proxsparse._start import quit_at_once
from proxsparse.runtime import progress

FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than allowed (ulimit -f)",
}
BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 1, 130, 141, 143  # exit codes


class InputError(ValueError):
    """A flag, file or argument is invalid; the message says what is wrong and what to do."""


def require(name: str, value: float, holds: bool, words: str) -> None:
    """Raises InputError "--name value: must be `words`" unless the value is finite and `holds`."""
    if not (holds and abs(value) <= sys.float_info.max):
        raise InputError(f"--{name} {value}: must be {words}")


def require_path(name: str, value: object) -> None:
    """Raises InputError unless the value of the argument is a path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name}={reprlib.repr(value)}: not a path; give a str or a pathlib.Path")


def different_flags(before: dict, now: dict, free: Iterable[str] = ()) -> str:
    """The flags of `now` that have another value in `before`, with both values, except `free`; "" if there are none."""
    names = [name for name, value in now.items() if name not in free and before.get(name) != value]
    shown = [["not set" if flags.get(name) is None else flags[name] for flags in (before, now)] for name in names]
    return ", ".join(f"--{name} {old} (now {new})" for name, (old, new) in zip(names, shown, strict=True))


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a batch system sends to a job before it kills the job."""


def run_command(main: Callable[[], int | None]) -> int:
    """Calls `main` and returns the exit code. Shows progress; prints an error or a warning as one line on stderr.

    SIGTERM ends the command as Ctrl-C does. With PROXSPARSE_DEBUG=1 errors and warnings include their location.
    """
    debug = bool(os.environ.get("PROXSPARSE_DEBUG"))
    if signal.getsignal(signal.SIGINT) is quit_at_once:  # the imports are done
        signal.signal(signal.SIGINT, signal.default_int_handler)
    previous, hook = signal.signal(signal.SIGTERM, _terminate), sys.unraisablehook
    sys.unraisablehook = lambda lost: _again(lost.exc_type) or hook(lost)
    try:
        with progress.shown(), warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _show_warning
            code = main() or 0
            sys.stdout.flush()  # while a broken pipe can still be caught
            return code
    except Terminated as stop:
        print(f"\n{with_notes('stopped by SIGTERM', stop)}", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt as stop:
        print(f"\n{with_notes('interrupted', stop)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has exited (`| head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that its flush succeeds
        return BROKEN_PIPE
    except Exception as error:  # of any type: the user gets one line
        if debug:
            raise
        text = f"error: {with_notes(describe_error(error), error)}"
        if is_first_process(text):
            print(text, file=sys.stderr)
        return BAD_INPUT if isinstance(error, ValueError | OSError) or full_disk(error) else FAILED
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
        sys.unraisablehook = hook


def is_first_process(text: str) -> bool:
    """Whether no other process of this machine has called this with the text; True also where that is unknown."""
    start = os.environ
    if start.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # there is no store that outlives the processes
        return True
    from torch.distributed import TCPStore

    try:
        address = start["MASTER_ADDR"], int(start["MASTER_PORT"])
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=2))
        return store.add(f"{start.get('GROUP_RANK')} {start.get('TORCHELASTIC_RESTART_COUNT')} {text}", 1) == 1
    except (LookupError, ValueError, RuntimeError):  # of torch: no connection
        return True


def _show_warning(message, *_where, **_more) -> None:
    """Prints a warning as one line, without file and line number."""
    progress.write_line(f"warning: {' '.join(str(message).split())}")


def _terminate(_number, _frame) -> None:
    raise Terminated


def _again(error: type[BaseException]) -> bool:
    """Repeats a signal whose exception Python has discarded because it was raised in a __del__."""
    number = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(error)
    if number is not None:  # by a timer: an exception raised here would be discarded as well
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
    return number is not None


def with_notes(text: str, error: BaseException) -> str:
    """The text and the notes of the error (`add_note`), in one line."""
    return " ".join("; ".join([text, *getattr(error, "__notes__", [])]).split())


def full_disk(error: BaseException) -> str:
    """Why nothing more can be written, else ""; the error class of safetensors has the errno only in its text."""
    found = re.search(r"os error (\d+)", str(error))
    return FULL.get(getattr(error, "errno", None) or (int(found[1]) if found else 0), "")


def is_lost_process(error: BaseException) -> bool:
    """Whether another process of torchrun has ended; gloo raises a RuntimeError that says it only in its text."""
    return type(error) is RuntimeError and bool(re.search("gloo/transport.*(by peer|Broken pipe)", str(error), re.S))


def describe_error(error: Exception) -> str:
    """The error in one line, with a remedy."""
    text = " ".join(str(error).split())
    if reason := full_disk(error):
        file = getattr(error, "filename2", None) or getattr(error, "filename", None)  # of a copy, the second one
        return f"{reason}{f' while writing {file}' if file else ''}; free some space or write to another disk"
    if is_lost_process(error):
        return "another process of this run has ended"
    if isinstance(error, ValueError | OSError):
        return text or type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":  # of torch
        remedy = "lower --seq_len, or use --precision bf16, in training --gradient_checkpointing"
        return f"{text.removesuffix('.')}; {remedy}"
    return f"{type(error).__name__}: {text}; set PROXSPARSE_DEBUG=1 for a traceback"
