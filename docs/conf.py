"""Settings of the Sphinx site; `make docs` builds it into docs/_build."""

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxsparse import __version__

project = "proxsparse"
author = "the proxsparse developers"
copyright = author
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"proxsparse {version}"
html_static_path = []
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
add_module_names = False

# What reStructuredText would read as markup; `...` stays as it is.
MARKUP = re.compile(r"(`[^`]*`)|([*|]|(?<=\w)_(?!\w))")
SECTION = re.compile(r"\s*(Args|Returns|Yields|Raises|Attributes):$")


def escape_markup(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: |w| and prox_nm_ are no markup, and an indented paragraph is an equation or code."""
    escaped, literal = [], False
    for before, line in zip(["", *lines], lines, strict=False):
        if literal:
            literal = line.startswith("    ") or not line
        elif line.startswith("    ") and not before and last_text(escaped, indented=False):
            escaped += ["::", ""]
            literal = True
        escaped.append(line if literal else MARKUP.sub(lambda m: m[1] or f"\\{m[2]}", line))
    lines[:] = escaped


def last_text(lines: list[str], indented: bool) -> bool:
    """Whether the last line with text is a line of a paragraph that is not indented, and is not a section's title."""
    text = next((line for line in reversed(lines) if line), "    ")
    return text.startswith("    ") == indented and not SECTION.match(text)


def insert_help(app, name: str, content: list[str]) -> None:
    """`<!-- help: train -->` in a page becomes what `proxsparse train --help` prints."""
    content[0] = re.sub("<!-- help: (\\w+) -->", lambda m: f"```text\n{help_of(m[1])}\n```", content[0])


def help_of(command: str) -> str:
    """The help text of a command."""
    os.environ["COLUMNS"], sys.argv[0] = "110", "proxsparse"
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        importlib.import_module(f"proxsparse.{command}").main(["--help"])
    return printed.getvalue().rstrip()


def setup(app) -> None:
    """Before napoleon, whose priority is 500, looks for the sections."""
    app.connect("autodoc-process-docstring", escape_markup, priority=400)
    app.connect("source-read", insert_help)
