"""Bad input at the command line: one message that names the thing and the remedy, never a traceback."""

import errno
import os
import sys
from collections.abc import Callable


class InputError(ValueError):
    """What the user gave cannot be used; the message says what and how to mend it."""


def run_command(main: Callable[[], int | None]) -> int:
    """Calls `main` and returns the exit code; bad input is one line on stderr (a traceback if PROXSPARSE_DEBUG)."""
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was saved", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("PROXSPARSE_DEBUG"):
            raise
        print(f"error: {describe(error)}", file=sys.stderr)
        return 2


def describe(error: Exception) -> str:
    """The error in one line, with the remedy where the system's own text has none."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space or choose another --output_dir"
    if isinstance(error, PermissionError):
        return f"no permission to write {error.filename}; choose another --output_dir"
    return " ".join(str(error).split()) or type(error).__name__
