"""Odd and hostile requests to `proxsparse serve`: same ids, closed routes, foreign pages, long prompts, values."""

import os
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
from live_server import answers_of, ask, send, serving, stream
from pruned import chat_folders
from starlette.datastructures import Headers
from transformers.cli.serving import chat_completion, completion, response
from transformers.cli.serving import server as theirs

from proxsparse.integrations import transformers_requests, transformers_server

PAGE = "https://chat.example.org"
ANSWER_TOKENS = 20
GREEDY = {"model": "packed", "max_tokens": 2, "temperature": 0}
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
each_path = pytest.mark.parametrize(
    ("path", "handler", "needed"),
    [
        ("/v1/completions", completion.CompletionHandler, {"prompt": "x", "max_tokens": 2}),
        ("/v1/chat/completions", chat_completion.ChatCompletionHandler, MESSAGES),
        ("/v1/responses", response.ResponseHandler, {"input": "x", "max_output_tokens": 2}),
    ],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """As everywhere, but with 6:8."""
    return chat_folders(tmp_path_factory.mktemp("llama"), "6:8")


@pytest.fixture(scope="module")
def server(forks, folders, tmp_path_factory):
    """A client of a server that a web page may use."""
    with serving(forks, tmp_path_factory.mktemp("log") / "log", folders[1], "--allow_origin", PAGE) as client:
        yield client


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_requests_with_the_same_id_are_answered_as_alone(rounds, server, folders):
    expected, same = answers_of(folders[0]), {"extra_headers": {"x-request-id": "one"}, "max_tokens": ANSWER_TOKENS}
    ways = [lambda prompt: ask(server, prompt, **same), lambda prompt: "".join(stream(server, prompt, **same))]
    prompts = ["hello", "the sea", "a third"]
    answers = {prompt: expected(prompt, ANSWER_TOKENS) for prompt in prompts}
    alone = {(way, prompt): way(prompt) for way in ways for prompt in prompts}  # a stream drops half of a character
    assert all(alone[ways[0], prompt] == answers[prompt] for prompt in prompts)
    for together in (2, 3):
        for way in ways:
            with ThreadPoolExecutor(together) as pool:
                for _ in range(rounds):
                    answered = list(pool.map(way, prompts[:together]))
                    assert answered == [alone[way, prompt] for prompt in prompts[:together]]


@each_path
def test_answers_name_the_model_and_the_id(path, handler, needed, server):
    for streaming in (False, True):
        code, answer, headers = send(server, "POST", path, needed | {"stream": streaming}, {"x-request-id": "mine"})
        assert (code, headers["x-request-id"]) == (200, "mine")
        text = str(answer)
        assert "packed" in text
        assert "@main" not in text


def test_the_routes_of_the_app(folders, monkeypatch):
    build = theirs.build_server

    def build_newer(*arguments, **keywords):
        app = build(*arguments, **keywords)
        app.add_api_route("/v1/new", lambda: None)
        return app

    monkeypatch.setattr(theirs, "build_server", build_newer)
    monkeypatch.setattr(transformers_server.Serve, "start_server", lambda self: None)  # does not listen
    monkeypatch.chdir(os.path.dirname(folders[1]))
    server = transformers_server.PackedServer("packed", 64, host="127.0.0.1", device="cpu")
    server.batches.stop()
    routes = [transformers_server.methods(route) for route in server.server.config.app.router.routes]
    assert set().union(*routes) == transformers_server.ROUTES


FOREIGN = "Host evil.example, Host localhost.evil.example:80, Host 192.168.1.5, Host [, Origin http://evil.example"
FOREIGN += ", Origin http://127.0.0.1.evil.example, Origin null, Origin http://chat.example.org"
OWN = "Host localhost, Host LOCALHOST:1, Host [::1]:80, Host chat.example.org, Origin http://localhost:3000"
OWN += f", Origin {PAGE}"


@pytest.mark.parametrize("header", f"{FOREIGN}, {OWN}".split(", "))
def test_requests_of_foreign_pages_are_refused(header, server):
    headers, code = dict([header.split()]), 403 if header in FOREIGN.split(", ") else 200
    for method, path, body in ("POST", "/v1/completions", GREEDY | {"prompt": "x"}), ("GET", "/v1/models", None):
        found, answer, received = send(server, method, path, body, headers)
        assert found == code, answer
        assert (received.get("access-control-allow-origin") == PAGE) == (headers.get("Origin") == PAGE)
    assert code == 200 or "--allow_origin" in answer["error"]["message"]


def test_an_allowed_page_may_ask_before_it_sends(server):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    code, _, headers = send(server, "OPTIONS", "/v1/completions", None, asks | {"Origin": PAGE})
    assert (code, headers["access-control-allow-origin"]) == (200, PAGE)
    assert send(server, "OPTIONS", "/v1/completions", None, asks | {"Origin": "http://evil.example"})[0] == 403


def test_a_server_for_other_machines_has_any_name():
    guard = transformers_server.Guard(host="0.0.0.0", origins=[])
    for host in ("gpu3", "gpu3.lab.example:8000", "192.168.1.5:8000"):
        assert guard.refusal(Headers({"host": host})) is None
        assert "not send" in guard.refusal(Headers({"host": host, "origin": "http://evil.example"}))[1]


def test_a_body_that_is_too_long_is_not_read(server):
    body = b'{"prompt": "' + b"x" * 2**23 + b'"}'
    for data, status, words in (body, 413, "more than 4194304 bytes"), (iter([body]), 411, "no Content-Length"):
        code, answer, _ = send(server, "POST", "/v1/completions", data)
        assert (code, words in answer["error"]["message"]) == (status, True), answer


NUMBERS = ["x", [1], {}, True, float("nan"), float("inf"), -1e300, 1e300, -(10**400), 10**400]
OTHERS = {  # of all routes that have the field
    "temperature": [-1, 101],
    "top_p": [-0.1, 1.1],
    "frequency_penalty": [-1, 3],
    "seed": [1.5, 2**64],
    "max_tokens": [0, 1.5],
    "stop": [5, [5], "", [""], ["a", ""], {}, [["a"]]],
    "logit_bias": [5, [5], {"260": 1}, {"-1": 1}, {"x": 1}, {"5": "x"}, {"5": float("nan")}, {"5": 1e300}],
    "stream": ["yes", 1],
    "prompt": [5, ["x"], {}],
    "model": [5, "\ud800", "gpt2"],
    "suffix": [5],
    "input": [5, {}],
    "messages": ["x", 5, [5], [{"role": 5}], [{"role": "user", "content": 5}]],
    "tools": [5, [5]],
    "chat_template_kwargs": [5, {"padding": "max_length"}, {"chat_template": "x"}],
    "generation_config": [5, "x", '{"top_k": 5}'],
}


WORDS = {"model": "Server is pinned to 'packed'"}  # of transformers


def numeric_fields(handler) -> set[str]:
    """The fields of a request that may be numbers in the client of OpenAI, and that are not lists or objects."""
    fields = typing.get_type_hints(handler._valid_params_class)
    return {name for name, kind in fields.items() if {int, float} & {kind, *typing.get_args(kind)}}


@each_path
def test_wrong_values_are_refused_with_the_name_of_the_field(path, handler, needed, server):
    known = handler._valid_params_class.__mutable_keys__
    numeric = numeric_fields(handler)
    assert {"temperature", "top_p", "seed"} <= numeric <= transformers_requests.Fields.model_fields.keys()
    for name in sorted((numeric | OTHERS.keys()) & known):
        numbers = [value for value in NUMBERS if value is not True or name != "logprobs"] if name in numeric else []
        if name.startswith("max_"):
            numbers = [value for value in numbers if value != 10**400]  # the answer ends earlier anyway
        for value in numbers + OTHERS.get(name, []):
            code, answer, _ = send(server, "POST", path, needed | {name: value})
            assert code == 400, (name, value, answer)
            assert answer["error"]["message"].startswith(WORDS.get(name, name)), (name, value, answer)
        if name not in ("prompt", "messages", "input"):
            code, answer, _ = send(server, "POST", path, needed | {name: None})
            assert code == 200, (name, answer)
    assert send(server, "GET", "/health")[0] == 200


def test_right_values_are_accepted(server):
    chat = {"logit_bias": {"65": 100}, "stop": ["x", "y"], "seed": -1, "temperature": 1e-300, "top_p": 0, "n": 1}
    chat |= {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
    chat |= {"chat_template_kwargs": {"colour": "red"}, "tools": []}
    code, answer, _ = send(server, "POST", "/v1/chat/completions", chat)
    assert code == 200, answer
    assert send(server, "POST", "/v1/completions", {"prompt": "\ud800"})[0] == 400  # half of a character
    code, answer, _ = send(server, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 10**30, "temperature": 2})
    assert (code, answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (200, 128, "length")
