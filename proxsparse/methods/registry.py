"""The registry of pruning methods."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from proxsparse.errors import InputError, require
from proxsparse.methods.pruned import Pruned
from proxsparse.methods.walk import prune_layers_
from proxsparse.training.options import Valid


@dataclass(frozen=True)
class Method:
    """A registered method.

    `prune(model, layers, batches, patterns, **options)` prunes the model in place and returns a `Pruned`:

        layers: layer name -> nn.Linear, in model order
        batches: calibration samples, dicts of input_ids, attention_mask and optionally labels, int64 [B, T]
        patterns: layer name -> NMPattern, one for every layer
        options: see below

    An allocation is one too; its `prune` returns layer name -> pattern and does not change the model.

    Pruned weights become +0.0; kept weights are bit-identical to before unless `updates_weights`.
    """

    name: str
    needs_data: bool
    updates_weights: bool
    paper: str
    prune: Callable[..., Pruned]
    options: dict[str, bool | int | float | str]  # name -> default; the default determines the type
    check: Callable[..., None] = lambda **options: None  # raises InputError for options out of range
    takes: tuple[str, ...] = ()  # which of `checkpoints` and `pretrained` are arguments of `prune`
    descriptions: dict[str, str] = field(default_factory=dict)  # of the options, for --help


_methods: dict[str, Method] = {}


def register_method(
    name: str,
    needs_data: bool,
    updates_weights: bool,
    paper: str,
    options: dict | None = None,
    check: Callable[..., None] = Method.check,
):
    """Decorator: registers a function that prunes a whole model, see `Method`.

    Its options are `options` (name -> default) or, by default, its keyword-only parameters.
    """

    def add(prune: Callable) -> Callable:
        defaults = options_of(prune) if options is None else options
        takes = tuple(name for name in ("checkpoints", "pretrained") if name in inspect.signature(prune).parameters)
        about = name, needs_data, updates_weights, paper
        _methods[name] = Method(*about, prune, defaults, check, takes, describe_options(prune))
        return prune

    return add


def register_layer_method(
    name: str,
    updates_weights: bool,
    paper: str,
    statistics: type | None = None,
    check: Callable[..., None] = Method.check,
):
    """Decorator: registers a function that prunes one layer; it is called for every layer in model order.

        prune(weight, statistics, pattern, *, option=default, ...) -> (mask, new weight, or None if unchanged)

    `weight` is [out_features, in_features]. `statistics` is an instance of the class given here, of the layer's
    calibration inputs, see `walk`; None without a class, and the method needs no data. The mask is bool, and the new
    weight is in the dtype of the computation; both have the shape of `weight`.
    """

    def add(prune_layer: Callable) -> Callable:
        prune = partial(prune_layers_, name, prune_layer, statistics)
        takes = ("checkpoints",) if statistics else ()
        about = name, statistics is not None, updates_weights, paper
        _methods[name] = Method(*about, prune, options_of(prune_layer), check, takes, describe_options(prune_layer))
        return prune_layer

    return add


def ranges(**valid: Valid) -> Callable[..., None]:
    """The `check` of a method: option -> its range."""

    def check(**options) -> None:
        for name, (holds, words) in valid.items():
            require(name, options[name], holds(options[name]), words)

    return check


def options_of(function: Callable) -> dict:
    """Name -> default of the keyword-only parameters. Raises ValueError for one without a default of a simple type."""
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name, default in options.items():
        if not isinstance(default, bool | int | float | str):
            raise ValueError(f"option {name!r} of {function.__name__}: its default must be a bool, int, float or str")
    return options


def describe_options(function: Callable) -> dict[str, str]:
    """Name -> first sentence of the entry under Args in the docstring, of all parameters that have one."""
    entries = re.findall(r"^    (\w+): (.+(?:\n        .+)*)", inspect.getdoc(function), re.MULTILINE)
    return {name: re.split(r"(?<=[\w)])\. |\.$", " ".join(text.split()))[0] for name, text in entries}


def check_option_names(options: dict, known: dict, what: str) -> None:
    """Raises InputError for an option that `what` (a method or an allocation) does not have."""
    if foreign := options.keys() - known.keys():
        raise InputError(f"{what} has no option {sorted(foreign)[0]!r}; its options: {', '.join(known) or 'none'}")


def list_methods() -> list[str]:
    """The names of all registered methods."""
    return sorted(_methods)


def get_method(name: str, what: str = "method") -> Method:
    """The method of that name. Raises InputError, which begins with `what`, if there is none."""
    if name not in _methods:
        raise InputError(f"{what} {name!r}: no such method; choose from {', '.join(list_methods())}")
    return _methods[name]
