"""A live server of a tiny packed model on the loopback address, asked with the openai client."""

import contextlib
import http.client
import json
import os
import re
import signal
import time

import openai
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus

from proxsparse import serve
from proxsparse.errors import INTERRUPTED
from proxsparse.integrations import transformers_batches
from proxsparse.models.loading import load_model

TOKENS = 8  # of an answer


def answers_of(folder):
    """answer(prompt) -> what greedy `generate` of the model answers."""
    model, tokenizer = load_model(str(folder))

    def answer(prompt: str, tokens: int = TOKENS) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=tokens, do_sample=False)[0, ids["input_ids"].shape[-1] :]
        return tokenizer.decode(new, skip_special_tokens=True)

    return answer


def address_in(log, is_alive, seconds=120) -> str:
    """The address that the server prints when it listens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and is_alive():
        if found := re.search(r"\bserving .* at (http://127.0.0.1:\d+/v1); Ctrl-C stops\n", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def client_of(address: str):
    return openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=120)


@contextlib.contextmanager
def serving(forks, log, *arguments, main="proxsparse.serve.main", traceback=None):
    """A client of a server in a process of its own, which SIGINT ends.

    Its log must have no traceback, except one after the words `traceback`.
    """
    log.touch()
    process = forks.start([*arguments, "--port", "0"], main, log)
    try:
        yield client_of(address_in(log, lambda: "error: " not in log.read_text()))
    finally:
        os.kill(process, signal.SIGINT)
        code = forks.wait(process)
    assert code == INTERRUPTED, log.read_text()
    assert "interrupted" in log.read_text()
    assert "Traceback" not in log.read_text() or (traceback and traceback in log.read_text())


def serve_short_passes(arguments: list[str]) -> int:
    """A server whose passes have at most 32 tokens."""
    transformers_batches.BATCH_TOKENS = 32
    return serve.main(arguments)


def serve_until_it_fails(arguments: list[str]) -> int:
    """A server whose thread is ended by a prompt of three tokens, after the client has got its error."""
    choose, record = transformers_batches.Choices.__call__, BackgroundThreadStatus.record_fatal_error

    def die(self, _ids, scores, arguments):
        assert all(len(state.initial_tokens) != 3 for state in self.states)
        return choose(self, _ids, scores, arguments)

    def record_later(self, error):
        time.sleep(2)
        record(self, error)

    transformers_batches.Choices.__call__, BackgroundThreadStatus.record_fatal_error = die, record_later
    return serve.main(arguments)


def ask(client, prompt: str, **more) -> str:
    """The answer to a prompt, greedy."""
    settings = {"model": "packed", "max_tokens": TOKENS, "temperature": 0, **more}
    return client.completions.create(prompt=prompt, **settings).choices[0].text


def stream(client, prompt: str, **more):
    """The parts of an answer."""
    settings = {"model": "packed", "max_tokens": TOKENS, "temperature": 0, **more}
    return (part.choices[0].text for part in client.completions.create(prompt=prompt, stream=True, **settings))


def send(client, method: str, path: str, body=None, headers=None) -> tuple[int, dict | str, dict]:
    """Status, body and headers of the answer to a request that the openai client does not send.

    body is an object or bytes, or an iterator of bytes, which is sent in chunks without a length.
    """
    connection = http.client.HTTPConnection("127.0.0.1", client.base_url.port, timeout=120)
    try:
        data = json.dumps(body) if isinstance(body, dict | list) else body
        connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text, dict(answer.headers)
    finally:
        connection.close()
