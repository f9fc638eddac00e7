"""Parses command lines to checked flags of a run.

Precedence, highest first: the command line, the --config file, the --recipe, the default.
"""

import argparse
import dataclasses
import textwrap
import typing

from proxsparse.allocations.registry import UNIFORM, Allocation, get_allocation, list_allocations
from proxsparse.errors import InputError
from proxsparse.io.text_table import text_table
from proxsparse.methods import Method, get_method, list_methods
from proxsparse.run.config import NOT_REPEATED, FinetuneConfig, RunConfig, TrainConfig
from proxsparse.run.flags import add_fields, add_flag, convert, read_settings
from proxsparse.run.recipes import DEFAULT_RECIPE, recipe_path
from proxsparse.runtime.command import Parser
from proxsparse.training.options import OBJECTIVES

PROXSPARSE = TrainConfig.method
MODEL_HELP = "folder of the pruned model, such as the --output_dir of proxsparse train"
SHARED = tuple(one.name for one in dataclasses.fields(RunConfig))
TRAIN_TYPES = typing.get_type_hints(TrainConfig)
# If a source changes --objective, the values of these flags from sources of lower precedence are dropped: they were
# chosen for the old one.
CHOSEN_FOR_OBJECTIVE = (*OBJECTIVES["paper"], "match_hidden")
# If a source sets one of a pair, the value of the other from sources of lower precedence is dropped.
EXCLUSIVE = (("reg_lambda", "reg_lambda_rel"), ("max_steps", "num_train_epochs"))


def parse_config(arguments: list[str]) -> TrainConfig:
    """The flags of a command line of `proxsparse train`; without arguments, the demo recipe.

    Raises:
        InputError: an unknown flag or recipe, an absent or malformed file, an invalid value.
    """
    return make_config(**parse_train_flags(arguments))


def parse_train_flags(arguments: list[str]) -> dict[str, object]:
    """The flags on a command line of `proxsparse train`, typed but not checked: arguments of `make_config`."""
    parser = Parser(
        "train",
        usage="%(prog)s [--flag VALUE ...]",
        description="Learn an N:M sparsity mask of a pretrained language model (ProxSparse, Algorithm 1).",
        epilog="Without arguments, a 135M-parameter model is pruned on text that comes with Python; no network needed.",
    )
    add_fields(parser, TrainConfig)
    given = vars(parser.parse_args(arguments))
    return {name: convert(f"--{name}", value, TRAIN_TYPES[name]) for name, value in given.items()}


def make_config(**given) -> TrainConfig:
    """The checked flags of a run: `given`, completed from the files of `config` and `recipe` and from the defaults.

    Raises:
        InputError: as `parse_config`.
    """
    from_file = settings_file(given["config"], "--config") if given.get("config") else {}
    recipe = given.get("recipe") or from_file.get("recipe")
    if not recipe and not {"model", "config", "data"} & given.keys():
        recipe = DEFAULT_RECIPE
    from_recipe = settings_file(recipe_path(recipe), "recipe") if recipe else {}
    merged: dict = {}
    for source in (from_recipe, from_file, given):
        current = merged.get("objective", TrainConfig.objective)
        if source.get("objective", current) != current:
            for name in CHOSEN_FOR_OBJECTIVE:
                merged.pop(name, None)
        for pair in (*EXCLUSIVE, *(pair[::-1] for pair in EXCLUSIVE)):
            if source.get(pair[0]) is not None:
                merged.pop(pair[1], None)
        merged.update(source)
    return TrainConfig(**{**merged, "recipe": recipe}).check()


def settings_file(path, what: str) -> dict:
    """The flags of `proxsparse train` in a YAML file."""
    return read_settings(path, what, TRAIN_TYPES, NOT_REPEATED)


# ---------------------------------------------------------------------------------------------- proxsparse finetune


def parse_finetune(arguments: list[str]) -> FinetuneConfig:
    """The flags of a command line of `proxsparse finetune MODEL`.

    Raises:
        InputError: as `parse_config`; MODEL is missing.
    """
    types = typing.get_type_hints(FinetuneConfig)
    parser = Parser(
        "finetune",
        usage="%(prog)s MODEL [--flag VALUE ...]",
        description="Train the kept weights of an N:M model; the pruned weights stay zero.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=MODEL_HELP)
    add_fields(parser, FinetuneConfig, but=("model",))
    given = vars(parser.parse_args(arguments))
    given = {name: convert(f"--{name}", value, types[name]) for name, value in given.items()}
    if "config" in given:
        given = read_settings(given["config"], "--config", types, NOT_REPEATED) | given
    if "model" not in given:
        raise InputError("MODEL is missing; give the folder of a pruned model: proxsparse finetune MODEL")
    return FinetuneConfig(**given).check()


# ---------------------------------------------------------------------------------------------- proxsparse prune


def parse_prune(arguments: list[str]) -> TrainConfig | argparse.Namespace:
    """The command line of `proxsparse prune`: shared flags, method, allocation, and the options of these two.

    --method proxsparse has the flags of `proxsparse train`.

    Raises:
        InputError: an unknown flag, method or allocation, an option of another method, an invalid value.
    """
    asked, others = split_method(arguments)
    if asked.method == PROXSPARSE:
        if asked.allocation != UNIFORM:
            raise InputError(
                f"--allocation {asked.allocation}: {PROXSPARSE} has one --pattern for all layers; leave it out, or "
                f"choose another --method: {', '.join(own_flag_methods())}"
            )
        return parse_config(others)
    given = vars(prune_parser().parse_args(arguments))
    types = TRAIN_TYPES | {"method": str, "allocation": str}
    types |= {name: type(default) for row in rows() for name, default in row.options.items()}
    if "config" in given:
        given = prune_settings(given.pop("config"), types) | given
    if given.get("method") not in own_flag_methods():
        what = f"--method {given['method']!r}: no such method" if "method" in given else "--method is missing"
        raise InputError(f"{what}; choose from {', '.join(list_methods())}; --list describes them")
    names = {"method": given.pop("method"), "allocation": given.pop("allocation", UNIFORM)}
    chosen = (get_method(names["method"]), get_allocation(names["allocation"]))
    options = chosen[0].options | chosen[1].options
    for name in given:
        if name not in options and name not in SHARED:
            raise InputError(
                f"--{name} is an option of {', '.join(defaults_of(name))}, not of --method {names['method']} or "
                f"--allocation {names['allocation']}, whose options are: {', '.join(options) or 'none'}"
            )
    types |= {name: type(default) for name, default in options.items() if name not in SHARED}
    values = {name: convert(f"--{name}", value, types[name]) for name, value in given.items()}
    shared = vars(RunConfig(**{name: value for name, value in values.items() if name in SHARED}).check())
    for row in chosen:
        row.check(**{name: {**shared, **values}.get(name, default) for name, default in row.options.items()})
    return argparse.Namespace(**names, **{**options, **shared, **values})


def split_method(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The values of --method and --allocation, and the command line without them."""
    parser = Parser("prune", add_help=False)
    parser.add_argument("--method")
    parser.add_argument("--allocation", default=UNIFORM)
    return parser.parse_known_args(arguments)


def prune_settings(path: str, types: dict[str, type]) -> dict:
    """The flags in a --config file. Raises InputError for a config of `proxsparse train`, and as `read_settings`."""
    settings = read_settings(path, "--config", types, NOT_REPEATED)
    foreign = [name for name in settings if name not in (*SHARED, "method", "allocation") and not defaults_of(name)]
    command = f"proxsparse train --config {path}"
    if settings.get("method") == PROXSPARSE:
        raise InputError(f"--config {path}: method {PROXSPARSE}: delete this line and run: {command}")
    if foreign:
        raise InputError(f"--config {path}: {foreign[0]} is a flag of proxsparse train; run: {command}")
    return settings


def prune_parser() -> Parser:
    """All flags of `proxsparse prune`, including the options of all methods; values stay text."""
    parser = Parser(
        "prune",
        usage="%(prog)s --method NAME [--flag VALUE ...]",
        description="Prune a pretrained language model to N:M sparsity; --list prints the methods.",
        epilog=f"--method {PROXSPARSE} has the flags of proxsparse train; see proxsparse train --help.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--list", action="store_true", help="print the tables of methods and allocations, and exit")
    parser.add_argument("--method", metavar="NAME", help=f"one of: {', '.join(list_methods())}")
    parser.add_argument(
        "--allocation",
        metavar="NAME",
        help=f"how the N:M of each decoder block is chosen; one of: {', '.join(list_allocations())} "
        f"(default: {UNIFORM})",
    )
    add_fields(parser, RunConfig)
    group = parser.add_argument_group("options of methods and allocations")
    for name in {name: None for row in rows() for name in row.options if name not in SHARED}:
        defaults = defaults_of(name)
        owners = ", ".join(f"{owner} {str(default).lower()}" for owner, default in defaults.items())
        description = next(row.descriptions[name] for row in rows() if name in row.options)
        add_flag(group, name, type(next(iter(defaults.values()))), f"{description} (default: {owners})")
    return parser


def own_flag_methods() -> list[str]:
    """The methods whose options are flags of `proxsparse prune`: all but proxsparse."""
    return [name for name in list_methods() if name != PROXSPARSE]


def rows() -> list[Method | Allocation]:
    """All methods of `own_flag_methods`, then all allocations."""
    return [*map(get_method, own_flag_methods()), *map(get_allocation, list_allocations())]


def defaults_of(option: str) -> dict[str, bool | int | float | str]:
    """Method or allocation -> its default of the option, for all that have the option."""
    return {row.name: row.options[option] for row in rows() if option in row.options}


def tables() -> str:
    """The text of --list: each method and each allocation with its options and their defaults."""
    yes_no = {True: "yes", False: "no"}
    method_rows = [
        (
            (row.name, yes_no[row.needs_data], yes_no[row.updates_weights], row.paper),
            {} if row.name == PROXSPARSE else row.options,
        )
        for row in map(get_method, list_methods())
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
    """A table of the cells, with the options below each row. `rows`: pairs (cells, options)."""
    table = text_table(header, [cells for cells, _ in rows]).splitlines()
    lines = table[:1]
    for line, (_, options) in zip(table[1:], rows, strict=True):
        lines.append(line)
        if options:
            own = {name: str(value).lower() for name, value in options.items() if name not in SHARED}
            flags = " ".join(f"--{name}={value}" for name, value in own.items())
            lines += textwrap.wrap(flags, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)
