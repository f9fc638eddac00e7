"""Bad input at the command line: one message that names the thing and the remedy, never a traceback."""

import errno
import math
import os
import re
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable

from proxsparse._start import quit_at_once
from proxsparse.runtime import progress

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 1, 130, 141, 143  # exit codes


class InputError(ValueError):
    """What the user gave cannot be used; the message says what is wrong and what to do."""


def require(name: str, value: float, holds: bool, words: str) -> None:
    """Raises InputError, with the value of a flag and what it must be, unless the value is finite and `holds`."""
    if not (math.isfinite(value) and holds):
        raise InputError(f"--{name} {value}: must be {words}")


class Terminated(KeyboardInterrupt):
    """SIGTERM, with which a batch system ends a job before it kills it."""


def run_command(main: Callable[[], int | None]) -> int:
    """Calls `main` and returns the exit code. Progress is shown; an error or a warning is one line on stderr.

    SIGTERM ends the command as Ctrl-C does. With PROXSPARSE_DEBUG=1 errors and warnings say where they come from.
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
            check_encoding()
            code = main() or 0
            sys.stdout.flush()  # while a broken pipe can still be caught
            return code
    except Terminated as stop:
        print(f"\n{with_notes('stopped by SIGTERM', stop)}", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt as stop:
        print(f"\n{with_notes('interrupted', stop)}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # the last resort of a command line: whatever it is, the user gets one line
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            return BROKEN_PIPE
        if debug:
            raise
        print(f"error: {with_notes(describe_error(error), error)}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, ValueError | OSError) or is_full_disk(error) else FAILED
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
        sys.unraisablehook = hook


def check_encoding() -> None:
    """Raises InputError for an argument, or a current folder, that is not text in the encoding of the locale.

    Python reads such bytes as half surrogate pairs, which tokenizers and safetensors refuse in the middle of a run.
    """
    encoding = sys.getfilesystemencoding()
    remedy = "rename it" if encoding == "utf-8" else "set PYTHONUTF8=1"
    for text in (*sys.argv, os.getcwd()):
        if any("\udc80" <= character <= "\udcff" for character in text):
            shown = os.fsencode(text).decode(errors="replace")
            raise InputError(f"{shown!a}: not text in the encoding {encoding} of this locale; {remedy}")


def _show_warning(message, *_where, **_more) -> None:
    """A warning in one line, without the file and line of whoever raised it."""
    progress.write_line(f"warning: {' '.join(str(message).split())}")


def _reader_has_left() -> bool:
    """Whether nobody reads stdout any more (`| head -1`). If so, Python does not try to flush it at its exit."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)  # an error is reported whatever is asked for
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _terminate(_number, _frame) -> None:
    raise Terminated


def _again(error: type[BaseException]) -> bool:
    """Repeats a signal whose exception Python has dropped because it came during garbage collection, in a __del__."""
    number = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(error)
    if number is not None:  # not here, where it would be dropped as well
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
    return number is not None


def with_notes(text: str, error: BaseException) -> str:
    """The text, and what was added to the error on its way up (`add_note`), in one line."""
    return " ".join("; ".join([text, *getattr(error, "__notes__", [])]).split())


def is_full_disk(error: Exception) -> bool:
    """Whether the disk is full; safetensors says so in an error class of its own, with the number in its text."""
    return getattr(error, "errno", None) == errno.ENOSPC or bool(re.search(rf"os error {errno.ENOSPC}\b", str(error)))


def describe_error(error: Exception) -> str:
    """The error in one line, with the remedy where the system's own text has none."""
    text = " ".join(str(error).split())
    if is_full_disk(error):
        where = f" while writing {error.filename}" if getattr(error, "filename", None) else ""
        return f"the disk is full{where}; free some space or choose another --output_dir"
    if isinstance(error, ValueError | OSError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}; set PROXSPARSE_DEBUG=1 to see where"
