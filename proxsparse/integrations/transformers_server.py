"""The server of transformers, limited to one packed model.

What differs from `transformers serve DIR`: several requests are answered at a time, /load_model loads no other model,
/v1/models lists the model, a prompt is never longer than the positions of the model, and a request that cannot be
answered is an error 400 in the form of the OpenAI API.
"""

import time
from pathlib import Path

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers.cli.serve import Serve

import proxsparse.integrations.transformers_quantizer  # noqa: F401 (registers the packed format)
from proxsparse.integrations.peft_lora import add_adapter_
from proxsparse.integrations.transformers_batches import Batches

# What a request can cause: a missing or wrong field, no chat template in the tokenizer, roles that it does not accept,
# and, while the answer is generated, RuntimeError.
BAD_REQUEST = (HTTPException, ValueError, KeyError, TypeError, TemplateError, RuntimeError)


class PackedServer(Serve):
    """Loads the model and listens in a thread of its own.

    Args:
        name: the model's folder in the current directory; clients ask for it by this name.
        cache_tokens: as in `Batches`.
        adapter: folder of a LoRA adapter.
        settings: of transformers' `Serve`: host, port, device.
    """

    def __init__(self, name: str, cache_tokens: int, adapter: Path | None = None, **settings):
        self.name, self.batches, self.adapter = name, Batches(cache_tokens), adapter
        super().__init__(name, non_blocking=True, continuous_batching=True, **settings)

    def start_server(self) -> None:
        """Called by transformers when the model is loaded: makes the changes and starts the thread."""
        manager, pinned = self._model_manager, self._model_manager.process_model_name(self.name)
        load, entry = manager.load_model_and_processor, {"id": self.name, "object": "model", "owned_by": ""}
        entry["created"] = int(time.time())

        def load_pinned(name: str, *arguments, **keywords):
            if name != pinned:
                raise ValueError(f"this server has only the model {self.name!r}")
            return load(name, *arguments, **keywords)

        manager.load_model_and_processor, manager.get_gen_models = load_pinned, lambda: [entry]
        model, _tokenizer = load(pinned)
        if self.adapter:
            add_adapter_(model, self.adapter)
        self.batches.init_cb(model, None)
        self._generation_state._cb_manager, self._generation_state._cb_model_id = self.batches, pinned
        for kind in BAD_REQUEST:
            self.server.config.app.add_exception_handler(kind, bad_request)
        super().start_server()

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


async def bad_request(_request: Request, error: Exception) -> JSONResponse:
    """The answer to a request that raised `error`."""
    text = error.detail if isinstance(error, HTTPException) else " ".join(str(error).split())
    text = f"missing or unknown: {text}" if isinstance(error, KeyError) else text
    code = getattr(error, "status_code", 500 if isinstance(error, RuntimeError) else 400)
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status_code=code)
