"""`proxsparse serve`: a live server on the loopback address, asked with the openai client; what it refuses; its end."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from commands import refused
from tiny_models import save_tiny_model, tiny_model
from transformers import GenerationConfig

from proxsparse import serve
from proxsparse.errors import FAILED, INTERRUPTED, TERMINATED
from proxsparse.models.loading import load_model

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from live_server import (  # noqa: E402 (needs the packages above)
    TOKENS,
    address_in,
    answers_of,
    ask,
    client_of,
    send,
    serving,
    stream,
)

from proxsparse.integrations import transformers_batches  # noqa: E402

POSITIONS = 128  # of the tiny model
MESSAGES = [{"role": "user", "content": "hello"}]  # an answer that is whole characters: a stream drops half of one


@pytest.fixture(scope="module")
def expected(folders):
    """expected(prompt) -> what greedy `generate` of the dense model answers."""
    return answers_of(folders[0])


@pytest.fixture(scope="module")
def server(forks, folders, tmp_path_factory):
    """A client of a server of the packed folder; a pass has at most 32 tokens."""
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(forks, log, folders[1], main="live_server.serve_short_passes") as client:
        yield client


def test_answers_are_those_of_generate(server, expected):
    assert [model.id for model in server.models.list()] == ["packed"]
    assert ask(server, "hello") == expected("hello")
    assert "".join(stream(server, "hello")) == expected("hello")
    settings = {"model": "packed", "max_output_tokens": TOKENS, "temperature": 0, "input": "hello"}
    assert server.responses.create(**settings).output_text == expected("hello")
    chat = {"model": "packed", "max_tokens": TOKENS, "temperature": 0, "messages": MESSAGES}
    assert server.chat.completions.create(**chat).choices[0].message.content == expected("hello")
    parts = [part.choices[0].delta.content for part in server.chat.completions.create(**chat, stream=True)]
    assert "".join(filter(None, parts)) == expected("hello")


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_several_requests_at_a_time_while_clients_leave(count, server, expected):
    long = stream(server, "a long answer", max_tokens=100, temperature=2)
    leaving = client_of(str(server.base_url))
    for answer in (long, stream(leaving, "a long answer", max_tokens=100)):
        next(answer)
    leaving.close()
    impatient = client_of(str(server.base_url)).with_options(timeout=0.05)
    prompts = [f"request {number % 5} " * (number % 5 + 1) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        answers = pool.map(lambda prompt: ask(server, prompt), prompts)
        with contextlib.suppress(openai.APITimeoutError):
            ask(impatient, "not waiting", max_tokens=100)
        assert list(answers) == [expected(prompt) for prompt in prompts]
    assert "".join(long)
    assert ask(server, "hello") == expected("hello")


def test_settings_of_a_request(server, expected):
    answer = expected("hello")
    assert len({ask(server, "hello", temperature=2) for _ in range(5)}) > 1
    assert len({ask(server, "hello", temperature=2, seed=3) for _ in range(3)}) == 1
    assert {ask(server, "hello", temperature=2, top_p=1e-6) for _ in range(3)} == {answer}
    assert ask(server, "hello", stop=answer[1:3]) == answer[: answer.index(answer[1:3]) + 2]
    assert ask(server, "hello", frequency_penalty=1) != answer
    assert ask(server, "hello") == answer


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": "x" * POSITIONS}, "the prompt has 128 tokens, but the model has 128 positions"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1, not 0"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_a_request_that_cannot_be_answered_is_a_clear_error(request_, words, streaming, server):
    with pytest.raises(openai.APIStatusError, match=re.escape(words)) as raised:
        list(stream(server, **{"prompt": "x"} | request_) if streaming else ask(server, **{"prompt": "x"} | request_))
    assert raised.value.status_code == 400


def test_other_bad_requests(server):
    with pytest.raises(openai.BadRequestError, match="no tools here"):  # from the model's chat template
        server.chat.completions.create(model="packed", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}])
    for body, words in ({}, "missing or unknown: 'messages'"), ([5], "a JSON object"), (b"{", "a JSON object"):
        code, answer, _ = send(server, "POST", "/v1/chat/completions", body)
        assert (code, words in answer["error"]["message"]) == (400, True), answer


@pytest.mark.slow
def test_an_adapter_is_served_also_after_a_failure(forks, folders, expected, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    model, tokenizer = load_model(str(folders[0]))
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_alpha=500)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = tokenizer("hello", return_tensors="pt")
    answer = tokenizer.decode(adapted.generate(**ids, max_new_tokens=TOKENS, do_sample=False)[0, 5:])
    assert answer != expected("hello")
    flags = {"main": "live_server.serve_until_it_fails", "traceback": "in generation loop"}
    with serving(forks, tmp_path / "log", folders[1], "--adapter", tmp_path / "adapter", **flags) as client:
        assert ask(client, "hello") == answer
        assert send(client, "POST", "/reset", {})[0] == 404
        with pytest.raises(openai.InternalServerError):
            ask(client, "die")
        assert ask(client, "hello") == answer
    peft.LoraConfig(target_modules=["no_such_layer"]).save_pretrained(tmp_path / "other")
    peft.IA3Config().save_pretrained(tmp_path / "ia3")
    for name, words in {"other": "no_such_layer", "ia3": "IA3 is not LoRA", "absent": "absent"}.items():
        flags = ["--adapter", tmp_path / name, "--port", "0"]
        refused(capsys, serve.main, [folders[1], *flags], words, "give a LoRA adapter of this model")


def test_an_answer_fits_into_the_cache():
    model, batches = tiny_model("llama"), transformers_batches.Batches(cache_tokens=100)
    batches.request(model, None, {"input_ids": [5] * 90}, settings := GenerationConfig(max_new_tokens=50))
    assert settings.max_new_tokens == 10
    for tokens, words in {
        (5,) * 100: "100 tokens, but the server has room for 100; raise --cache_tokens",
        (5, 260): "the tokenizer gives token 260, but the model has only 260 embeddings",
    }.items():
        with pytest.raises(ValueError, match=words):
            batches.request(model, None, {"input_ids": list(tokens)}, settings)


def test_a_thread_that_an_error_has_ended_is_started_again():
    model, batches = tiny_model("llama"), transformers_batches.Batches(cache_tokens=64)
    for _ in range(2):
        batches.init_cb(model, None)
        request = batches.request(model, None, {"input_ids": [5]}, GenerationConfig(max_new_tokens=3))
        batches._cb.add_request([5], request_id=request, max_new_tokens=3)
        assert len(batches._cb.get_result(timeout=20).generated_tokens) == 3
        batches._cb.add_request([10**6], request_id="no such token")
        batches._cb._generation_thread.join(timeout=20)
        assert not batches.is_alive()


@pytest.mark.slow
def test_a_port_that_is_taken_ends_the_process(folders):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        command = [sys.executable, "-m", "proxsparse", "serve", str(folders[1]), "--port", str(busy.getsockname()[1])]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == FAILED
    assert "address already in use" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_a_signal_ends_the_process_while_it_answers(number, code, folders, tmp_path):
    """A process of its own: what is registered for the end of the interpreter runs too."""
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "proxsparse", "serve", str(folders[1]), "--port", "0"]
        default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        process = subprocess.Popen(command, stdout=file, stderr=file, **default)
    try:
        client = client_of(address_in(log, lambda: process.poll() is None))
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                pool.submit(ask, client, "x", max_tokens=POSITIONS)
            next(stream(client, "x"))  # the server is answering
            process.send_signal(number)
            assert process.wait(timeout=20) == code
    finally:
        process.kill()
        process.wait()
    with socket.create_server(("127.0.0.1", client.base_url.port)):
        pass  # the port is free
    assert "Traceback" not in log.read_text()


def test_folders_that_are_not_packed_models(folders, tmp_path, capsys):
    dense, packed = folders
    unpruned = save_tiny_model("llama", tmp_path / "unpruned")
    cut, missing, odd, mute = (shutil.copytree(packed, tmp_path / name) for name in ("cut", "missing", "a@b", "mute"))
    for file in mute.glob("token*"):
        file.unlink()
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-10])
    (missing / "model.safetensors").unlink()
    for folder, words in {
        dense: ["is not packed", "proxsparse pack"],
        unpruned: ["is not packed", "proxsparse prune"],
        cut: ["model.safetensors", "truncated", "download"],
        missing: ["model.safetensors is missing"],
        odd: ["a@b", "rename"],
        mute: ["no tokenizer", "copy the tokenizer files"],
        tmp_path / "absent": ["no such folder", "proxsparse pack"],
        tmp_path: ["config.json is missing", "proxsparse pack"],
    }.items():
        refused(capsys, serve.main, [folder, "--port", "0"], *words)


def test_a_cache_that_does_not_fit(folders, monkeypatch, capsys):
    def fail(*_) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    printed = []
    for tokens in (10**12, 64):
        arguments = [folders[1], "--port", "0", "--cache_tokens", tokens]
        printed += refused(capsys, serve.main, arguments, f"--cache_tokens {tokens}: ", "memory", "; lower it")
        monkeypatch.setattr(transformers_batches.Batches, "init_cb", fail)
    assert not any("serving" in line or "Traceback" in line for line in printed)


def test_other_refusals(folders, monkeypatch, capsys):
    refused(capsys, serve.main, [folders[1], "--port", "65536"], "--port 65536", "from 0 to 65535")
    refused(capsys, serve.main, [folders[1], "--allow_origin", "a.b"], "--allow_origin a.b", "https://chat.example.org")
    refused(capsys, serve.main, [folders[1], "--device", "sea"], "--device sea")
    monkeypatch.setattr(serve, "PACKAGES", ("fastapi", "no_such_package"))
    refused(capsys, serve.main, [folders[1]], "needs no_such_package", "in a clone", "pip install '.[serve,lora]'")
