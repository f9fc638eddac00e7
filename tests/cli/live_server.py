"""A live server of a tiny packed model on the loopback address, asked with the openai client."""

import contextlib
import http.client
import json
import logging
import os
import re
import signal
import sys
import time

import openai

from proxsparse import serve
from proxsparse.errors import INTERRUPTED, run_command
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
def serving(log, *arguments, traceback=None):
    """A client of a server in a forked process, which SIGINT ends.

    Its log must have no traceback, except one after the words `traceback`.
    """
    log.touch()
    if (child := os.fork()) == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            logging.raiseExceptions = False  # handlers that earlier tests left write to files that are closed
            with log.open("w", buffering=1) as file:
                sys.stdout = sys.stderr = file
                code = run_command(lambda: serve.main([*map(str, arguments), "--port", "0"]))
        finally:
            os._exit(code)
    try:
        yield client_of(address_in(log, lambda: os.waitpid(child, os.WNOHANG) == (0, 0)))
    finally:
        os.kill(child, signal.SIGINT)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == INTERRUPTED, log.read_text()
    assert "interrupted" in log.read_text()
    assert "Traceback" not in log.read_text() or (traceback and traceback in log.read_text())


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
