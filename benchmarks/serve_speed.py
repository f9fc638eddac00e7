"""Measures tokens per second and time to first token of servers with a dense and a packed 2:4 model.

    python benchmarks/serve_speed.py                                    # 4 blocks of Mistral-7B with random weights
    python benchmarks/serve_speed.py --program vllm --vllm_python ~/vllm/bin/python

One server has the dense folder, the other the same weights packed. Both run all the time and are asked in turns, over
HTTP and as a stream. A batch is that number of requests sent at once, each with another prompt of random words. Every
answer has --new_tokens tokens. Rows are appended to results/serve_speed.jsonl. Needs the packages of
proxsparse[serve], and for --program vllm an environment as in docs/serving.md.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from lib.common import Results, devices, new_parser
from lib.random_models import KINDS, random_model

from proxsparse import pack
from proxsparse.errors import InputError, run_command
from proxsparse.models.loading import EMBEDDED_MODEL, local_files, read_tokenizer
from proxsparse.runtime.device import choose_device

START_SECONDS = 600
# proxsparse serve, for dense folders too. Arguments: name of the folder, port, device, dtype.
SERVER = """import sys
from proxsparse.integrations.transformers_server import PackedServer
name, port, device, dtype = sys.argv[1:]
PackedServer(name, 16384, host="127.0.0.1", port=int(port), device=device, dtype=dtype).wait()"""
COLUMNS = {
    "model": "{model}",
    "program": "{program}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "form": "{form}",
    "tokens/s": "{tokens_per_s:.1f}",
    "x dense": "{speed_times_dense:.2f}",
    "first token s": "{first_token_s:.3f}",
    "first token x dense": "{first_token_times_dense:.2f}",
}


def transformers_server(folder: Path, port: int, args: argparse.Namespace) -> tuple[list[str], dict]:
    """The command that serves a folder as `proxsparse serve` does, and the fields of a request for a greedy answer."""
    command = [sys.executable, "-c", SERVER, folder.name, str(port), args.device, args.dtype]
    return command, {"max_tokens": args.new_tokens, "temperature": 0}


def vllm_server(folder: Path, port: int, args: argparse.Namespace) -> tuple[list[str], dict]:
    """The same for vLLM."""
    command = [args.vllm_python, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", folder.name]
    flags = {"host": "127.0.0.1", "port": port, "dtype": args.dtype, "max-model-len": 2048, "max-num-seqs": 16}
    command += ["--enforce-eager", *(f"--{name}={value}" for name, value in flags.items())]
    return command, {"max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True}


PROGRAMS = {"transformers": transformers_server, "vllm": vllm_server}


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    results = Results("serve_speed", choose_device(args.device), not args.no_save, arguments)
    same = {"model": args.model, "layers": args.layers, "dtype": args.dtype, "program": args.program}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as running:
        folders = save_models(args, Path(scratch))
        choose, pool = random.Random(0), single_words(KINDS[args.model][1])
        asked = {form: running.enter_context(serving(folder, args)) for form, folder in folders.items()}
        for prompt, batch in itertools.product(args.prompts, args.batches):
            found = {form: [] for form in asked}
            for is_measured in [False] + [True] * args.repetitions:
                for form, ask in asked.items():
                    times = send(ask, ["".join(choose.choices(pool, k=prompt)) for _ in range(batch)])
                    found[form] += [times] * is_measured
            case = same | {"batch": batch, "prompt": prompt, "new_tokens": args.new_tokens}
            rows = summaries(found, batch * args.new_tokens)
            results.add([case | {"form": form} | row for form, row in rows.items()])
            print(f"measured batch {batch} with prompts of {prompt} tokens", flush=True)
    results.show(COLUMNS, "x dense: the median of the ratios of the rounds; above 1 packed is faster")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="mistral-7b-v0.1", choices=KINDS, metavar="NAME", help=", ".join(KINDS))
    parser.add_argument("--layers", type=int, default=4, help="decoder blocks")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--program", default="transformers", choices=[*PROGRAMS])
    parser.add_argument("--vllm_python", help="the Python of an environment with vLLM and proxsparse")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="requests at a time")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512], help="tokens of a prompt")
    parser.add_argument("--new_tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds")
    parser.add_argument("--device", default=devices()[0])
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args(arguments)
    if args.program == "vllm" and not args.vllm_python:
        raise InputError("--program vllm: give --vllm_python, the Python of its environment; see docs/serving.md")
    return args


def save_models(args: argparse.Namespace, scratch: Path) -> dict[str, Path]:
    """The folders of the dense and of the packed model."""
    folders = {form: scratch / form for form in ("dense", "packed")}
    model = random_model(args.model, args.layers, getattr(torch, args.dtype), torch.device("cpu"), sparse=False)
    model.generation_config.eos_token_id = None
    for part in (model, read_tokenizer(*local_files(EMBEDDED_MODEL))):
        part.save_pretrained(folders["dense"])
    pack.main([str(folders["dense"]), "--output_dir", str(folders["packed"])])
    return folders


def single_words(vocabulary: int) -> list[str]:
    """The words, each after a space, that are one of the first tokens."""
    tokenizer = read_tokenizer(*local_files(EMBEDDED_MODEL))
    found = {tokenizer.decode([number]).strip() for number in range(min(vocabulary, len(tokenizer)))}
    found = sorted(f" {word}" for word in found if word.isascii() and word.isalpha())
    tokens = tokenizer(found, add_special_tokens=False)["input_ids"]
    return [word for word, ids in zip(found, tokens, strict=True) if len(ids) == 1 and ids[0] < vocabulary]


@contextlib.contextmanager
def serving(folder: Path, args: argparse.Namespace) -> Iterator[Callable]:
    """Yields ask(prompt) -> the times at which the parts of the answer arrived, while a server runs.

    Raises InputError with the end of the log if the server does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, settings = PROGRAMS[args.program](folder, port, args)
    here = os.pathsep.join(filter(None, [str(Path(pack.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= os.environ | {"PYTHONPATH": here}
    with tempfile.TemporaryFile("w+") as log:
        files = {"stdout": log, "stderr": log, "start_new_session": True}
        server = subprocess.Popen(command, cwd=folder.parent, env=environment, **files)
        try:
            end = time.monotonic() + START_SECONDS
            while not is_healthy(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise InputError(f"the server did not start: {log.read()[-2000:]}")
                time.sleep(0.2)
            yield partial(ask, f"http://127.0.0.1:{port}/v1/completions", {"model": folder.name} | settings)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def ask(url: str, settings: dict, prompt: str) -> list[float]:
    """The times at which the parts of a streamed answer arrived."""
    body = json.dumps(settings | {"prompt": prompt, "stream": True}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            return [time.perf_counter() for line in answer if line.startswith(b"data: ")]
    except urllib.error.HTTPError as error:
        raise InputError(f"the server refused a request: {error.read().decode()}") from error


def send(ask: Callable, prompts: list[str]) -> tuple[float, float]:
    """Sends requests at once: the seconds until all are answered, and the median of those to the first part."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        arrivals = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
    return seconds, statistics.median(times[0] - start for times in arrivals)


def summaries(found: dict[str, list[tuple[float, float]]], tokens: int) -> dict[str, dict]:
    """The fields of the row of each form, from the (seconds, seconds to the first part) of its rounds."""
    rows = {}
    for form, rounds in found.items():
        times = torch.tensor(rounds)
        (seconds, first), ratios = times.quantile(0.5, 0).tolist(), torch.tensor(found["dense"]) / times
        rows[form] = {"tokens_per_s": tokens / seconds, "first_token_s": first, "rounds": len(rounds)}
        names = ("speed_times_dense", "first_token_times_dense")
        rows[form] |= dict(zip(names, ratios.quantile(0.5, 0).tolist(), strict=True))
    return rows


if __name__ == "__main__":
    sys.exit(run_command(main))
