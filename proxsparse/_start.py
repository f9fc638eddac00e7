"""Imported before anything else: what a command of proxsparse needs while Python is still importing.

Python puts the current folder first on the search path of `python -m`, before the standard library. Its files may be
untrusted, so a command takes it off, unless it is the checkout that holds this package. Ctrl-C during the imports ends
a command at once. A program of the user's own that imports proxsparse keeps its search path and its signals.
"""

import os
import signal
import sys

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMANDS = {  # the commands of `proxsparse`, each a module with a `main`
    "train": "learn the N:M mask of a pretrained language model (ProxSparse)",
    "prune": "prune a model by any method: magnitude, wanda, sparsegpt, ...",
    "evaluate": "measure perplexity and zero-shot accuracy",
    "pack": "pack the 2:4 layers of a pruned model, or unpack them again",
    "report": "write the report and the plots of a run again",
    "env": "print versions and which backend serves which operation here",
}


def command_line_of_ours() -> str:
    """The module named after `python -m` if it is ours, "proxsparse" for the console script, "" for other programs."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module, which stands before the arguments
        word = sys.orig_argv[-len(sys.argv)]
        module = word.partition("m")[2] if word.startswith("-") else word  # "-mproxsparse.train" is one word
        return module if module.partition(".")[0] == "proxsparse" else ""
    return "proxsparse" if sys.argv and os.path.basename(sys.argv[0]) in ("proxsparse", "proxsparse.exe") else ""


def quit_at_once(_number, _frame) -> None:
    """Ctrl-C while modules are being imported: there is nothing to save, and a traceback would help nobody."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


started_as = command_line_of_ours()
# `proxsparse --help` and a mistyped command answer without torch, whose import takes seconds.
needs_torch = started_as != "proxsparse" or (sys.argv[1:] or [""])[0] in COMMANDS
if started_as and sys.argv[0] == "-m" and not sys.flags.safe_path and sys.path[0] == os.getcwd() != PACKAGE_PARENT:
    del sys.path[0]
if started_as and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, quit_at_once)
