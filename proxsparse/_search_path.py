"""Imported first: `python -m proxsparse.X` does not import modules from the current folder, which may be untrusted.

Python puts that folder first on the search path, before the standard library. Here it is taken off, unless it is the
checkout that holds this package. A program of the user's own that imports proxsparse keeps its search path.
"""

import os
import sys

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# While Python looks for the module named after -m, sys.argv[0] is "-m".
is_own_command = sys.argv[:1] == ["-m"] and any(
    word.removeprefix("-m").partition(".")[0] == "proxsparse" for word in sys.orig_argv[1:]
)
if is_own_command and not sys.flags.safe_path and sys.path[0] == os.getcwd() != PACKAGE_PARENT:
    del sys.path[0]
