"""Which layers, by their names: --include and --exclude of the commands, include and exclude of the functions."""

import re

from proxsparse.errors import InputError


def is_selected(name: str, include: list[str] | None, exclude: list[str] | None) -> bool:
    """Whether some `include` (None: everything) and no `exclude` expression is found in `name`.

    Raises:
        InputError: an expression is malformed.
    """
    try:
        included = not include or any(re.search(expression, name) for expression in include)
        return included and not any(re.search(expression, name) for expression in exclude or [])
    except re.error as error:
        raise InputError(f"include/exclude {error.pattern!r} is not a regular expression: {error}") from error
