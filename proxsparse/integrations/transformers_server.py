"""The server of transformers, limited to one packed model.

What differs from `transformers serve DIR`: several requests are answered at a time; the model is loaded once; only the
routes of `ROUTES` exist; requests of foreign web pages are refused; the length of a body is checked before it is
read; and a request that cannot be answered is an error 400 in the form of the OpenAI API.
"""

import functools
import ipaddress
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from transformers.cli.serve import Serve

import proxsparse.integrations.transformers_quantizer  # noqa: F401 (registers the packed format)
from proxsparse.errors import InputError
from proxsparse.integrations.peft_lora import add_adapter_
from proxsparse.integrations.transformers_batches import Batches
from proxsparse.integrations.transformers_requests import checked

ROUTES = {  # all that is served; what else transformers has, now or later, is closed
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
}
MAX_BODY_BYTES = 2**22  # which takes seconds to tokenize; a million tokens of English text


class PackedServer(Serve):
    """Loads the model and listens in a thread of its own.

    Args:
        name: the model's folder in the current directory; clients ask for it by this name.
        cache_tokens: as in `Batches`.
        adapter: folder of a LoRA adapter.
        origins: web pages that may send requests, such as "https://chat.example.org".
        settings: of transformers' `Serve`: host, port, device.
    """

    def __init__(self, name: str, cache_tokens: int, adapter: Path | None = None, origins=(), **settings):
        self.name, self.batches, self.adapter, self.origins = name, Batches(cache_tokens), adapter, list(origins)
        settings = {"non_blocking": True, "continuous_batching": True, "log_level": "error"} | settings
        super().__init__(name, **settings)

    def start_server(self) -> None:
        """Called by transformers when the model is loaded: makes the changes and starts the threads.

        Raises InputError if the cache does not fit into the memory.
        """
        manager, state, app = self._model_manager, self._generation_state, self.server.config.app
        self.model, processor = manager.load_model_and_processor(manager.process_model_name(self.name))
        self.tokenizer = getattr(processor, "tokenizer", processor)
        if self.adapter:
            add_adapter_(self.model, self.adapter)
        # The model is never loaded again, so no other takes its place, nor this one without its adapter.
        manager.load_model_and_processor = lambda *_, **_more: (self.model, self.tokenizer)
        manager.process_model_name = lambda _name: self.name  # transformers adds @main
        modality = manager.get_model_modality(self.model, processor=self.tokenizer)
        manager.get_model_modality = lambda *_, **_more: modality
        entry = {"id": self.name, "object": "model", "owned_by": "", "created": int(time.time())}
        manager.get_gen_models = lambda: [entry]
        try:
            self.batches.init_cb(self.model, None)
        except (MemoryError, RuntimeError) as error:  # of transformers, or of torch: the system limits the memory
            if "memory" not in str(error):
                raise
            raise InputError(f"--cache_tokens {self.batches.cache_tokens}: {error}; lower it") from error
        state._cb_manager, state._cb_model_id = self.batches, self.name
        for handler in (self._chat_handler, self._completion_handler, self._response_handler):
            handler.handle_request = functools.partial(self.answer, handler.handle_request)
        app.router.routes[:] = [route for route in app.router.routes if methods(route) <= ROUTES]
        # RuntimeError: while an answer is generated.
        for kind in (HTTPException, RequestValidationError, ValueError, RuntimeError):
            app.add_exception_handler(kind, bad_request)
        if self.origins:
            app.add_middleware(CORSMiddleware, allow_origins=self.origins, allow_methods="*", allow_headers="*")
        app.middleware("http")(Guard(self.server.config.host, self.origins))
        super().start_server()

    async def answer(self, handle_request, body: dict, request_id: str):
        """The response to a request, by a handler of transformers."""
        body = checked(body, self.model.config.get_text_config().vocab_size)
        try:
            return await handle_request(body, request_id)
        except (HTTPException, ValueError, RuntimeError):
            raise
        except Exception as error:  # of any type: wrong parts of messages, roles that the chat template refuses
            words = "missing or unknown: " if isinstance(error, KeyError) else "the prompt cannot be read: "
            raise ValueError(f"{words}{error}") from error

    def wait_until_listening(self) -> str | None:
        """The address, http://HOST:PORT, when the server accepts requests; None if it cannot listen."""
        while not self.server.started:
            if not self._thread.is_alive():
                return None
            time.sleep(0.02)
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def wait(self) -> None:
        """Returns when the server has stopped."""
        self._thread.join()

    def stop(self) -> None:
        """Stops the server, and the thread that generates, without waiting for the requests in progress."""
        self.server.should_exit = self.server.force_exit = True
        self.batches.stop()
        self._thread.join(timeout=5)


class Guard:
    """Refuses requests of foreign web pages, through the browser of a user of the server, and bodies that are too long.

    A page can send requests to other servers: then Origin names the page. And the owner of a domain can let its name
    point to 127.0.0.1 (DNS rebinding): then Host names the domain. So Origin must be this machine or allowed, and for a
    server that listens on a loopback address Host too. Programs other than browsers send no Origin.
    """

    def __init__(self, host: str, origins: list[str]):
        self.names, self.origins = {"localhost", host.lower()}, origins
        self.allowed = {host_name(origin) for origin in origins}
        self.is_local = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback

    async def __call__(self, request: Request, call_next) -> Response:
        if refusal := self.refusal(request.headers):
            return error_response(*refusal)
        return await call_next(request)

    def refusal(self, headers: Headers) -> tuple[int, str] | None:
        """The status and the reason if a request with these headers is refused; None if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = host_name(f"//{host}")
        if self.is_local and not self.is_this_host(name) and name not in self.allowed:
            return 403, f"Host {host!r} is not this server; allow it with --allow_origin http://{host}"
        if origin is not None and origin not in self.origins and not self.is_this_host(host_name(origin)):
            return 403, f"pages of {origin!r} may not send requests; allow them with --allow_origin {origin}"
        if "transfer-encoding" in headers:
            return 411, "the request has no Content-Length; send the body in one piece"
        if int(headers.get("content-length", 0)) > MAX_BODY_BYTES:
            return 413, f"the request has more than {MAX_BODY_BYTES} bytes; shorten the prompt"
        return None

    def is_this_host(self, name: str) -> bool:
        """Whether this is --host, or a name that always means this machine."""
        try:
            return name in self.names or ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def host_name(url: str) -> str:
    """The name in a URL, or "" if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def methods(route) -> set[tuple[str, str]]:
    """The method and path pairs of a route of the app."""
    return {(method, route.path) for method in route.methods}


def error_response(code: int, text: str) -> JSONResponse:
    """An error in the form of the OpenAI API."""
    text = text.encode(errors="backslashreplace").decode()  # JSON may have halves of characters
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status_code=code)


async def bad_request(_request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that raised `error`."""
    if isinstance(error, HTTPException):
        return error_response(400 if error.status_code == 422 else error.status_code, str(error.detail))
    if isinstance(error, RequestValidationError):
        return error_response(400, f"the body must be a JSON object: {error.errors()[0]['msg']}")
    return error_response(500 if isinstance(error, RuntimeError) else 400, " ".join(str(error).split()))
