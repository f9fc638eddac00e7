"""The first import: prepares the process of a proxsparse command before the slow imports begin.

`python -m` puts the current directory first on sys.path, before the standard library. Its files may be untrusted, so
a command removes it, unless it is the checkout that contains this package. Ctrl-C during the imports ends a command
at once. In any other program that imports proxsparse, sys.path and the signal handlers stay as they are.
"""

import os
import signal
import sys

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COMMANDS = {  # the commands of `proxsparse`, each a module with a `main`
    "train": "learn the N:M mask of a pretrained language model (ProxSparse)",
    "prune": "prune a model by any method: magnitude, wanda, sparsegpt, ...",
    "finetune": "train the kept weights of a pruned model; the mask is held",
    "apply": "make the pruned model from the pretrained model and masks.safetensors",
    "evaluate": "measure perplexity and zero-shot accuracy",
    "pack": "pack the 2:4 layers of a pruned model, or unpack them",
    "serve": "serve a packed model with an OpenAI-compatible API",
    "report": "regenerate the report and the plots of a run",
    "env": "print versions and the backend of each operation on this machine",
}


def command_line_of_ours() -> str:
    """The module of `python -m` if it is part of proxsparse, "proxsparse" for the console script, else ""."""
    if sys.argv[:1] == ["-m"]:  # Python is still locating the module; its name precedes the arguments
        word = sys.orig_argv[-len(sys.argv)]
        module = word.partition("m")[2] if word.startswith("-") else word  # "-mproxsparse.train" is one argument
        return module if module.partition(".")[0] == "proxsparse" else ""
    return "proxsparse" if sys.argv and os.path.basename(sys.argv[0]) in ("proxsparse", "proxsparse.exe") else ""


def quit_at_once(_number, _frame) -> None:
    """Handles Ctrl-C while modules are being imported: exits without a traceback; there is nothing to save."""
    os.write(2, b"\ninterrupted\n")
    os._exit(130)


started_as = command_line_of_ours()
# `proxsparse --help` and an unknown command do not need torch, whose import takes seconds.
needs_torch = started_as != "proxsparse" or (sys.argv[1:] or [""])[0] in COMMANDS
if started_as and sys.argv[0] == "-m" and not sys.flags.safe_path and sys.path[0] == os.getcwd() != PACKAGE_PARENT:
    del sys.path[0]
if started_as and sys.stdout:  # a name that the terminal cannot show must not end a run
    sys.stdout.reconfigure(errors="backslashreplace")
if started_as and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, quit_at_once)
