"""Adds a dataclass of flags to argparse, and converts text or YAML to typed values."""

import argparse
import dataclasses
import typing
from collections.abc import Collection
from pathlib import Path

from proxsparse.errors import InputError
from proxsparse.io.yaml_files import MOST, read_yaml

LIST = list[str] | None
METAVARS = {bool: "true|false", int: "N", float: "X", int | None: "N", float | None: "X"}
GROUPS = ("model", "data", "learning", "output", "hardware")  # in the order of --help


def add_fields(parser: argparse.ArgumentParser, flags: type, but: Collection[str] = ()) -> None:
    """Adds a flag for every field of a dataclass except `but`, in the field's group of --help."""
    groups = {group.title: group for group in parser._action_groups}
    types = typing.get_type_hints(flags)
    for one in sorted(dataclasses.fields(flags), key=lambda one: GROUPS.index(one.metadata["group"])):
        if one.name in but:
            continue
        title = one.metadata["group"]
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        default = "" if one.default is None else f" (default: {str(one.default).lower()})"
        add_flag(groups[title], one.name, types[one.name], one.metadata["help"] + default, one.metadata["choices"])


def add_flag(parser, name: str, kind, help_text: str, choices: tuple[str, ...] = ()) -> None:
    """Adds one flag. Its value stays text; without the flag on the command line it is absent from the result."""
    shape = {"nargs": "?", "const": "true"} if kind is bool else {"nargs": "+"} if kind == LIST else {}
    metavar = "|".join(choices) if choices else METAVARS.get(kind, "VALUE")
    help_text = help_text.replace("%", "%%")
    parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=help_text, metavar=metavar, **shape)


def read_settings(path: Path | str, what: str, types: dict[str, type], not_repeated: tuple[str, ...]) -> dict:
    """The typed values of a YAML file of flags.

    Args:
        what: what the file is, for messages.
        types: flag -> type.
        not_repeated: flags that are allowed only on the command line.
    Raises:
        InputError: the file is absent or malformed, or has an unknown flag.
    """
    settings = read_yaml(Path(path), what)
    for name in settings:
        if name not in types or name in not_repeated:
            raise InputError(f"{what} {path}: {name} is not a flag that a file can set; --help lists the flags")
    return {name: convert(f"{what} {path}: {name}", value, types[name]) for name, value in settings.items()}


def convert(what: str, value, wanted):
    """Converts a value of the command line or of YAML to the type of its field.

    Raises:
        InputError: the value has another type; `what` names the flag.
    """
    if value is None and type(None) in typing.get_args(wanted):
        return None
    plain = next((kind for kind in (bool, int, float, str) if wanted in (kind, kind | None)), list)
    try:
        return CONVERSIONS[plain](value)
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{what} {value}: must be {NAMES[plain]}") from error


def _list(value) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError
    return value


def _text(value) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(kind: type):
    def to_number(value):
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise TypeError
        number = kind(value)
        if kind is int and abs(number) >= MOST:
            raise ValueError
        return number

    return to_number


CONVERSIONS = {
    bool: lambda value: {"true": True, "false": False}[str(value).lower()],
    int: _number(int),
    float: _number(float),  # also from text: YAML reads 1e-4 as text
    str: _text,
    list: _list,
}
NAMES = {
    bool: "true or false",
    int: f"a whole number below {MOST}",
    float: "a number",
    str: "a string",
    list: "a list of strings",
}
