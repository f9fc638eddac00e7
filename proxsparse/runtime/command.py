"""The command line as the user typed it, and the argument parser of all commands."""

import argparse
import shlex
import sys
from pathlib import Path

from proxsparse._start import COMMANDS
from proxsparse.errors import InputError


def program(command: str) -> str:
    """How a command was started: "proxsparse train", "python -m proxsparse train" or "python -m proxsparse.train"."""
    started = Path(sys.argv[0])
    if started.stem == "proxsparse":
        return f"proxsparse {command}"
    by_name = started.name == "__main__.py" and started.parent.name == "proxsparse"
    return f"python -m proxsparse{' ' if by_name else '.'}{command}"


def command_line() -> str:
    """The command line of this process, quoted for a shell; in a user's own program, the command is "train"."""
    command, arguments = Path(sys.argv[0]).stem, sys.argv[1:]
    if program("").endswith(" "):
        command, *arguments = arguments
    return shlex.join([*program(command if command in COMMANDS else "train").split(), *arguments])


class Parser(argparse.ArgumentParser):
    """argparse.ArgumentParser whose usage shows how the command was started, and whose errors are one line."""

    hint = "--help lists the flags"

    def __init__(self, command: str, **settings):
        settings |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(prog=program(command), **settings)

    def error(self, message: str):
        raise InputError(f"{message.removeprefix('argument ')}; {self.hint}")
