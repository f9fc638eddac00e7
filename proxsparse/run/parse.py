"""Parses the command lines of `proxsparse prune`, `train` and `finetune`.

A value comes from the command line, else from the --config file, else from the --recipe, else it is the default.
"""

import argparse
import dataclasses
import typing
from datetime import date
from pathlib import Path
from types import SimpleNamespace

from proxsparse.allocations.registry import ALLOCATIONS, UNIFORM, get_allocation
from proxsparse.errors import InputError
from proxsparse.io.yaml_files import read_yaml
from proxsparse.methods import get_method, list_methods
from proxsparse.run.args import (
    DEFAULT_RECIPE,
    HIDDEN,
    NOT_REPEATED,
    PROXSPARSE,
    RECIPE_NAMES,
    RECIPES,
    SECTIONS,
    SHARED,
    RunArgs,
    checked,
)
from proxsparse.runtime.command import Parser
from proxsparse.training.options import OBJECTIVES, FinetuneOptions, LearningOptions


def parse_train(arguments: list[str] | None) -> RunArgs:
    """The flags of `proxsparse train`; without any, the demo recipe. `arguments`: None: those of the process.

    Raises InputError for an unknown flag or recipe, an absent or malformed file, an invalid value.
    """
    return train_args(**vars(train_parser().parse_args(arguments)))


def train_parser() -> Parser:
    parser = Parser(
        "train",
        usage="%(prog)s [--flag VALUE ...]",
        description="Learn an N:M sparsity mask of a pretrained language model (ProxSparse, Algorithm 1).",
        epilog="Without arguments, a 135M-parameter model is pruned on text that comes with Python; no network needed.",
    )
    return add_sections(parser, "train")


# If a source changes --objective, the values of these flags from sources of lower precedence are dropped: they were
# chosen for the old one.
CHOSEN_FOR_OBJECTIVE = {*OBJECTIVES["paper"], "distill", "match_hidden"}
OF_TRAIN = (("method", PROXSPARSE), ("allocation", UNIFORM), ("finetune", False))  # a file of `prune` may say so
# If a source sets one of a pair, the value of the other from sources of lower precedence is dropped.
EXCLUSIVE = (("reg_lambda", "reg_lambda_rel"), ("max_steps", "num_train_epochs"), ("save_minutes", "save_steps"))


def train_args(**given) -> RunArgs:
    """The checked flags of `proxsparse train`: `given`, completed from its `config` and `recipe` and from the defaults.

    Raises InputError as `parse_train`.
    """
    from_file = file_flags(given["config"], "--config", train_parser(), OF_TRAIN) if given.get("config") else {}
    recipe = given.get("recipe") or from_file.get("recipe")
    if not recipe and not {"model", "config", "data"} & given.keys():
        recipe = DEFAULT_RECIPE
    if recipe and recipe not in RECIPE_NAMES:
        raise InputError(f"--recipe {recipe}: no such recipe; choose from {', '.join(RECIPE_NAMES)}")
    from_recipe = file_flags(RECIPES / f"{recipe}.yaml", "recipe", train_parser()) if recipe else {}
    args = checked("train", PROXSPARSE, UNIFORM, over(over(from_recipe, from_file), given) | {"recipe": recipe})
    if args.hardware.pretrained_weights is None:  # masked layers need them at every step
        args.hardware.pretrained_weights = "device" if args.options.masked else "cpu"
    return args


def over(lower: dict[str, object], source: dict[str, object]) -> dict[str, object]:
    """The values of both, those of `source` first, see CHOSEN_FOR_OBJECTIVE and EXCLUSIVE."""
    dropped = {pair[1] for row in EXCLUSIVE for pair in (row, row[::-1]) if source.get(pair[0]) is not None}
    before = lower.get("objective", LearningOptions.objective)
    if source.get("objective", before) != before:
        dropped |= CHOSEN_FOR_OBJECTIVE
    return {name: value for name, value in lower.items() if name not in dropped} | source


def parse_finetune(arguments: list[str] | None) -> RunArgs:
    """The flags of `proxsparse finetune MODEL`. Raises InputError as `parse_train`, and if MODEL is missing."""
    parser = Parser(
        "finetune",
        usage="%(prog)s MODEL [--flag VALUE ...]",
        description="Train the kept weights of an N:M model; the pruned weights stay zero.",
    )
    what = "folder of the pruned model, such as the --output_dir of proxsparse train"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=what)
    given = vars(add_sections(parser, "finetune", skip={"model"}).parse_args(arguments))
    if given.get("config"):
        given = over(file_flags(given["config"], "--config", add_sections(Parser("finetune"), "finetune")), given)
    if "model" not in given:
        raise InputError("MODEL is missing; give the folder of a pruned model: proxsparse finetune MODEL")
    return checked("finetune", "finetune", UNIFORM, given)


def parse_prune(arguments: list[str]) -> RunArgs:
    """The flags of `proxsparse prune`: shared flags, the options of the method and the allocation, and of --finetune.

    --method proxsparse has the flags of `proxsparse train`. Raises InputError as `parse_train`, and for an unknown
    method or allocation.
    """
    chooser = Parser("prune", add_help=False, argument_default=argparse.SUPPRESS)
    for name in ("--method", "--allocation", "--config"):
        chooser.add_argument(name)
    add_flag(chooser, "finetune", bool, "")
    asked, others = chooser.parse_known_args(arguments)
    in_file = read_yaml(Path(asked.config), "--config") if "config" in asked else {}
    asked = in_file | vars(asked)
    method, allocation = asked.get("method"), str(asked.get("allocation") or UNIFORM)
    finetune = str(asked.get("finetune")).lower() == "true"  # a file may have it as text
    if finetune and method in list_methods() and "learning_rate" in get_method(method).options:  # trains by itself
        remedy = "run proxsparse finetune on its --output_dir afterwards"
        raise InputError(f"--finetune: not with --method {method}; {remedy}")
    if method == PROXSPARSE:
        if allocation != UNIFORM:
            reason = f"{PROXSPARSE} has one --pattern for all layers; leave it out, or choose another --method"
            raise InputError(f"--allocation {allocation}: {reason}")
        return parse_train([*others, *(["--config", asked["config"]] if "config" in asked else [])])
    parser = prune_parser(method, allocation, finetune)
    given = vars(parser.parse_args(arguments))  # --help ends here
    if method not in list_methods():
        what = f"--method {method!r}: no such method" if method else "--method is missing"
        raise InputError(f"{what}; choose from {', '.join(list_methods())}; --list describes them")
    if in_file:
        given = over(file_flags(given["config"], "--config", parser), given)
    args = checked("prune", method, allocation, given)
    rows = (get_method(method), get_allocation(allocation))
    values = rows[0].options | rows[1].options | given | vars(args.hardware)
    args.options = SimpleNamespace(**{name: values[name] for row in rows for name in row.options})
    for row in rows:
        row.check(**args.options_of(row))
    return args


def prune_parser(method: str | None, allocation: str, finetune: bool = False) -> Parser:
    """The flags of `proxsparse prune`, with the options of a method, if it exists, an allocation, and --finetune."""
    more = "--help lists the flags, --method NAME --help also those of the method, --finetune --help those of training"
    parser = Parser(
        "prune",
        usage="%(prog)s --method NAME [--flag VALUE ...]",
        description="Prune a pretrained language model to N:M sparsity; --list prints the methods.",
        epilog=more,
    )
    parser.hint = more
    parser.add_argument("--list", action="store_true", default=argparse.SUPPRESS, help="print the methods, and exit")
    add_flag(parser, "method", str, f"one of: {', '.join(list_methods())}")
    what = f"how N:M of each decoder block is chosen; one of: {', '.join(ALLOCATIONS)} (default: {UNIFORM})"
    add_flag(parser, "allocation", str, what)
    what = "then train the kept weights on the same samples, as proxsparse finetune; the mask is held"
    add_flag(parser, "finetune", bool, what)
    add_sections(parser, "prune", more=(FinetuneOptions,) if finetune else ())
    rows = [get_method(method)] if method in list_methods() else []
    for row in (*rows, get_allocation(allocation)):
        group = parser.add_argument_group(f"options of {row.name}")
        for name, default in row.options.items():
            if name not in SHARED:
                add_flag(group, name, type(default), f"{row.descriptions[name]} (default: {str(default).lower()})")
    return parser


# ---------------------------------------------------------------------------------------------- values


def file_flags(path: Path | str, what: str, parser: Parser, ignored: tuple = ()) -> dict[str, object]:
    """The values of a YAML file of flags, except the pairs `ignored`.

    Raises InputError if it is malformed, or has an unknown flag or value.
    """
    given = read_yaml(Path(path), what).items()
    settings = {name: value for name, value in given if value not in (None, []) and (name, value) not in ignored}
    arguments = []
    for name, value in settings.items():
        if name in NOT_REPEATED:
            raise InputError(f"{what} {path}: {name} is not a flag that a file can set")
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, str | int | float | date) or (isinstance(item, bool) and item is not value):
                raise InputError(f"{what} {path}: --{name}: {item!r:.60} is not text or a number; put it in quotes")
            arguments.append(f"--{name}={str(item).lower() if isinstance(item, bool) else item}")
    try:
        found = vars(parser.parse_args(arguments))
    except InputError as error:
        raise InputError(f"{what} {path}: {error}") from error
    for name, value in settings.items():
        if isinstance(value, bool | list) and not isinstance(found.get(name), type(value)):
            raise InputError(f"{what} {path}: --{name}: YAML reads this value as {value}; put it in quotes")
    return found


def true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text}: must be true or false")
    return text.lower() == "true"


KINDS = {bool: (true_or_false, "true|false"), int: (int, "N"), float: (float, "X"), str: (str, "VALUE")}
GROUPS = ("model", "data", "learning", "output", "hardware")  # in the order of --help


def add_sections(parser: Parser, command: str, more: tuple[type, ...] = (), skip: set[str] = frozenset()) -> Parser:
    """Adds a flag for every field of the sections of a command and `more`, except `skip`, in its group of --help."""
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    added = {*skip, *HIDDEN[command]}
    for section in (*SECTIONS[command], *more):
        kinds = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            if field.name not in added:
                added.add(field.name)
                about, default = field.metadata, field.default
                words = about["help"] + ("" if default is None else f" (default: {str(default).lower()})")
                group = groups[about["group"] or section.group]
                add_flag(group, field.name, kinds[field.name], words, about["choices"])
    return parser


def add_flag(parser, name: str, kind, help_text: str, choices: tuple[str, ...] = ()) -> None:
    """Adds one flag; without it on the command line it is absent from the result."""
    plain = next((plain for plain in KINDS if kind in (plain, plain | None)), str)
    shape = {"nargs": "?", "const": True} if plain is bool else {}
    if kind == list[str] | None:
        shape = {"nargs": "+", "action": "extend"}
    convert, metavar = KINDS[plain]
    shape |= {"type": convert, "metavar": "|".join(choices) or metavar, "default": argparse.SUPPRESS}
    parser.add_argument(f"--{name}", help=help_text.replace("%", "%%"), **shape)
