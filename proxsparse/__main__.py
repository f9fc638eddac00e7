"""`proxsparse COMMAND ...`, `python -m proxsparse COMMAND ...` or `python -m proxsparse.COMMAND ...`: runs a command.

Without a command, and for --help and --version, torch is not imported.
"""

import importlib
import sys

from proxsparse import __version__
from proxsparse._start import COMMANDS
from proxsparse.errors import InputError, run_command


def main() -> int:
    """Runs the command that the first argument names. Returns the exit code."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in COMMANDS:
        module = importlib.import_module(f"proxsparse.{command}")
        return run_command(lambda: module.main(arguments))
    return run_command(lambda: answer(command))


def answer(option: str) -> None:
    """Prints the help, with a line for each command, or the version. Raises InputError for any other option."""
    if option in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print("usage: proxsparse COMMAND [ARGUMENT ...]\n\ncommands:")
        for name, what in COMMANDS.items():
            print(f"  {name:<{width}}  {what}")
        print("\nproxsparse COMMAND --help lists the flags of a command.")
    elif option == "--version":
        print(f"proxsparse {__version__}")
    else:
        raise InputError(f"{option}: no such command; choose from {', '.join(COMMANDS)}")


if __name__ == "__main__":
    sys.exit(main())
