"""The first import: the commands, and whether this process needs torch."""

import os
import sys

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


def names_a_command() -> bool:
    """Whether this is `proxsparse COMMAND` or `python -m proxsparse COMMAND`."""
    if sys.argv[:1] == ["-m"]:  # Python is still locating the module; its name precedes the arguments
        return sys.orig_argv[-len(sys.argv)] in ("proxsparse", "-mproxsparse")
    return bool(sys.argv) and os.path.basename(sys.argv[0]) in ("proxsparse", "proxsparse.exe")


# `proxsparse --help` and an unknown command do not need torch, whose import takes seconds.
needs_torch = not names_a_command() or (sys.argv[1:] or [""])[0] in COMMANDS
