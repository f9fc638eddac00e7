"""Bad input at the command line: one message that names the thing and the remedy, never a traceback."""

import errno
import os
import re
import sys
from collections.abc import Callable

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes


class InputError(ValueError):
    """What the user gave cannot be used; the message says what and how to mend it."""


def run_command(main: Callable[[], int | None]) -> int:
    """Calls `main` and returns the exit code; any error is one line on stderr (a traceback with PROXSPARSE_DEBUG=1)."""
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # the last resort of a command line: whatever it is, the user gets one line
        if os.environ.get("PROXSPARSE_DEBUG"):
            raise
        print(f"error: {describe(error)}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, ValueError | OSError) else FAILED


def describe(error: Exception) -> str:
    """The error in one line, with the remedy where the system's own text has none."""
    text = " ".join(str(error).split())
    # safetensors reports a full disk as an error class of its own, with the number in its text
    if getattr(error, "errno", None) == errno.ENOSPC or re.search(rf"os error {errno.ENOSPC}\b", text):
        where = f" while writing {error.filename}" if getattr(error, "filename", None) else ""
        return f"the disk is full{where}; free some space or choose another --output_dir"
    if isinstance(error, ValueError | OSError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}; set PROXSPARSE_DEBUG=1 to see where"
