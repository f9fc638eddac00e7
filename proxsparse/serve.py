"""`proxsparse serve`: the server of transformers, which has an OpenAI-compatible API, for a packed checkpoint."""

import argparse
import atexit
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from proxsparse.errors import FAILED, INTERRUPTED, TERMINATED, InputError, Terminated, require, run_command
from proxsparse.inference import convert
from proxsparse.inference import packed_checkpoint as disk
from proxsparse.io.model_files import FROM_CLONE, check_folder, headers, weight_files
from proxsparse.models.loading import TOKENIZER_FILES, skeleton
from proxsparse.runtime.command import Parser
from proxsparse.runtime.device import choose_device

DESCRIPTION = """\
Serve a packed checkpoint with the server of transformers: /v1/completions, /v1/chat/completions and /v1/responses of
the OpenAI API, with streaming and several requests at a time. Clients name the model as the folder is named; other
models are refused. Ctrl-C stops the server."""
PACKAGES = ("fastapi", "uvicorn", "openai", "accelerate")
INSTALL = FROM_CLONE.format("'.[serve,lora]'")


def main(arguments: list[str] | None = None) -> int:
    """Checks the folder, loads the model, and serves it until Ctrl-C."""
    options = parse(arguments)
    missing = [name for name in (*PACKAGES, *["peft"] * bool(options.adapter)) if find_spec(name) is None]
    if missing:
        raise InputError(f"serve needs {', '.join(missing)}; {INSTALL}")
    folder = Path(os.path.abspath(options.model))
    adapter = Path(os.path.abspath(options.adapter)) if options.adapter else None
    check_packed(folder)
    device = choose_device(options.device)
    os.chdir(folder.parent)  # transformers' server answers only to the name that it loads
    from proxsparse.integrations.transformers_server import PackedServer  # imports the optional packages

    where = {"host": options.host, "port": options.port, "device": str(device)}
    server = PackedServer(folder.name, options.cache_tokens, adapter, options.allow_origin, **where)
    try:
        address = server.wait_until_listening()
        if address is None:
            server.stop()
            return FAILED  # uvicorn has printed the reason
        print(f"serving {options.model} as the model {folder.name!r} at {address}/v1; Ctrl-C stops", flush=True)
        server.wait()
        server.stop()
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
        server.stop()
        # A thread of transformers may be inside `generate`; Python's own exit would abort with it.
        atexit.register(os._exit, TERMINATED if isinstance(stop, Terminated) else INTERRUPTED)
        raise
    return 0


def check_packed(folder: Path) -> None:
    """Raises ValueError, with the remedy, unless the folder is a complete packed checkpoint."""
    name = str(folder)
    config = disk.read_packed_config(folder / "config.json", packed=True)
    if set(folder.name) & set("@:"):
        raise InputError(f"{name!r}: a model name with @ or : means a revision or a file; rename the folder")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise InputError(f"{name!r}: no tokenizer; copy the tokenizer files of the pretrained model into the folder")
    check_folder(folder)
    convert.packed_layers(headers(weight_files(folder)), skeleton(folder), config["quantization_config"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("serve", description=DESCRIPTION)
    add = parser.add_argument
    add("model", metavar="DIR", help="output folder of `proxsparse pack`")
    add("--adapter", metavar="DIR", help="folder of a LoRA adapter of this model, saved by peft")
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1, this machine only")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port; default: 8000")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto, the default: a GPU if there is one")
    cache = "largest number of tokens of the requests in progress together, prompts included; default: 8192"
    add("--cache_tokens", type=int, default=8192, metavar="N", help=cache)
    pages = "web pages that may send requests, such as https://chat.example.org; pages of this machine always may"
    add("--allow_origin", nargs="+", default=[], metavar="URL", help=pages)
    options = parser.parse_args(arguments)
    for origin in options.allow_origin:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise InputError(f"--allow_origin {origin}: give scheme and host, such as https://chat.example.org")
    require("cache_tokens", options.cache_tokens, options.cache_tokens > 0, "at least 1")
    require("port", options.port, 0 <= options.port < 2**16, "from 0 to 65535")
    return options


if __name__ == "__main__":
    sys.exit(run_command(main))
