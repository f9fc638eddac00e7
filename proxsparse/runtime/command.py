"""The command line as the user typed it, and the argument parser of all commands."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from proxsparse._start import COMMANDS
from proxsparse.errors import InputError
from proxsparse.runtime.distributed import require_one_process

MANY_PROCESSES = ("train", "prune", "finetune")  # may be started by torchrun
PATHS = ("output_dir", "config", "masks", "json", "data_dir", "model", "base", "teacher", "adapter", "run_dir")


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
        self.command = command

    def parse_known_args(self, *given):
        """As argparse, with "~" expanded in paths, which must not be empty.

        Refuses several processes if the command runs in one.
        """
        options, others = super().parse_known_args(*given)
        if self.command not in MANY_PROCESSES:
            require_one_process(self.command)
        for action in self._actions:
            value = getattr(options, action.dest, None)
            if action.dest in PATHS and isinstance(value, str):
                if not value:  # it would mean the current directory
                    flag = action.option_strings[0] if action.option_strings else action.metavar or action.dest.upper()
                    raise InputError(f"{flag} '': empty; give a name")
                setattr(options, action.dest, os.path.expanduser(value))
        return options, others

    def error(self, message: str):
        raise InputError(f"{message.removeprefix('argument ')}; {self.hint}")
