"""The flags of `python -m proxsparse.prune`: those it shares with proxsparse.train, and one for every option.

An option is a keyword-only parameter of a registered method or allocation; its default gives the flag's type. One that
has the name of a shared flag, such as seed, takes its value from there.
"""

import argparse
import dataclasses
import textwrap
import typing
from pathlib import Path

from proxsparse.allocations.registry import Allocation, get_allocation, list_allocations
from proxsparse.allocations.uniform import UNIFORM
from proxsparse.errors import InputError
from proxsparse.methods import Method, get_method, list_methods
from proxsparse.run.config import Parser, TrainConfig, add_field, add_flag, converted, read_settings

SHARED = (
    *("model", "data", "text_field", "output_dir", "overwrite_output_dir", "resume_from_checkpoint"),
    *("num_samples", "seq_len", "packing", "pattern", "include", "exclude"),
    *("precision", "device", "seed", "eval_data", "eval_seq_len", "eval_max_windows"),
)

PROXSPARSE = Method(  # its code is proxsparse.train, its options are the flags there
    "proxsparse",
    needs_data=True,
    updates_weights=False,
    paper="Liu et al. 2025, ProxSparse: Regularized Learning of Semi-Structured Sparsity Masks for Pretrained LLMs",
    prune=None,
    options={},
)


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    """The command line over its --config: the shared flags, method, allocation, the options of these two, typed.

    Raises:
        InputError: an unknown flag, method or allocation, an option of another one, a value that makes no sense.
    """
    given = vars(flag_parser().parse_args(arguments))
    all_types = typing.get_type_hints(TrainConfig) | {"method": str, "allocation": str}
    all_types |= {name: type(default) for row in rows() for name, default in row.options.items()}
    if "config" in given:
        given = read_config(given.pop("config"), all_types) | given
    if given.get("method") not in list_methods():
        what = f"--method {given['method']!r}: there is no such method" if "method" in given else "--method is missing"
        raise InputError(f"{what}; choose from {', '.join(choices())}; --list says what they are")
    names = {"method": given.pop("method"), "allocation": given.pop("allocation", UNIFORM)}
    options = get_method(names["method"]).options | get_allocation(names["allocation"]).options
    types = all_types | {name: type(default) for name, default in options.items()}
    for name in given:
        if name not in options and name not in SHARED:
            raise InputError(
                f"--{name} is an option of {', '.join(defaults_of(name))}, not of --method {names['method']} or "
                f"--allocation {names['allocation']}, whose options are: {', '.join(options) or 'none'}"
            )
    values = {name: converted(f"--{name}", value, types[name]) for name, value in given.items()}
    checked = TrainConfig(**{name: value for name, value in values.items() if name in SHARED}).check()
    shared = {name: getattr(checked, name) for name in SHARED}
    for chosen in (get_method(names["method"]), get_allocation(names["allocation"])):
        chosen.check(**{name: {**shared, **values}.get(name, default) for name, default in chosen.options.items()})
    return argparse.Namespace(**names, **{**options, **shared, **values})


def read_config(path: str, types: dict[str, type]) -> dict:
    """The settings of a --config file. Raises InputError for one of proxsparse.train, and as `read_settings` does."""
    settings, to_train = read_settings(Path(path), "--config", types), f"python -m proxsparse.train --config {path}"
    if settings.get("method") == PROXSPARSE.name:
        raise InputError(
            f"--config {path}: method {PROXSPARSE.name} is proxsparse.train: drop this line, run {to_train}"
        )
    for name in settings:
        if name not in (*SHARED, "method", "allocation") and not defaults_of(name):
            raise InputError(f"--config {path} is a config of proxsparse.train (see {name}): run it with {to_train}")
    return settings


def flag_parser() -> argparse.ArgumentParser:
    """All flags, the options of all methods among them; values stay text."""
    parser = Parser(
        prog="python -m proxsparse.prune",
        usage="%(prog)s --method NAME [--flag VALUE ...]",
        description="Prune a pretrained language model to N:M sparsity by one of many methods; --list prints them.",
        epilog="--method proxsparse is proxsparse.train, with its flags; see --method proxsparse --help.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--list", action="store_true", help="print the tables of methods and allocations, and exit")
    parser.add_argument("--method", metavar="NAME", help=f"one of: {', '.join(choices())}")
    parser.add_argument(
        "--allocation",
        metavar="NAME",
        help=f"N:M of every layer; one of: {', '.join(list_allocations())} (default: uniform)",
    )
    types = typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        if field.name in (*SHARED, "config"):
            add_field(parser, field, types[field.name])
    group = parser.add_argument_group("options of single methods and allocations")
    for name in {name: None for row in rows() for name in row.options if name not in SHARED}:
        defaults = defaults_of(name)
        owners = ", ".join(f"{owner} {str(default).lower()}" for owner, default in defaults.items())
        add_flag(group, name, type(next(iter(defaults.values()))), f"default: {owners}")
    return parser


def choices() -> list[str]:
    """The names that --method takes."""
    return sorted([*list_methods(), PROXSPARSE.name])


def rows() -> list[Method | Allocation]:
    """All methods, then all allocations."""
    return [*map(get_method, list_methods()), *map(get_allocation, list_allocations())]


def defaults_of(option: str) -> dict[str, bool | int | float | str]:
    """Method or allocation -> its default of the option, for all that have it."""
    return {row.name: row.options[option] for row in rows() if option in row.options}


def tables() -> str:
    """What --list prints: a line for each method and each allocation, and under it its options with their defaults."""
    yes_no = {True: "yes", False: "no"}
    method_rows = [
        ((row.name, yes_no[row.needs_data], yes_no[row.updates_weights], row.paper), row.options)
        for row in (PROXSPARSE if name == PROXSPARSE.name else get_method(name) for name in choices())
    ]
    allocation_rows = [
        ((row.name, yes_no[row.needs_data], row.paper), row.options) for row in map(get_allocation, list_allocations())
    ]
    return "\n\n".join(
        [
            table(("method", "needs data?", "updates weights?", "paper"), method_rows),
            table(("allocation", "needs data?", "paper"), allocation_rows),
        ]
    )


def table(header: tuple[str, ...], rows: list[tuple[tuple[str, ...], dict]]) -> str:
    """Aligned columns; `rows` are pairs (cells, options)."""
    widths = [max(map(len, column)) for column in zip(header, *(cells for cells, _ in rows), strict=True)]
    lines = []
    for cells, options in [(header, {}), *rows]:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        if options:
            own = {name: str(value).lower() for name, value in options.items() if name not in SHARED}
            flags = " ".join(f"--{name}={value}" for name, value in own.items())
            lines += textwrap.wrap(flags, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)
