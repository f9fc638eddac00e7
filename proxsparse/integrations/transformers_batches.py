"""Continuous batching in the server of transformers: the requests in progress share each pass through the model.

transformers (5.23) applies the sampling settings of the first request to all of them, and ignores penalties and stop
strings. Here each request has its own.
"""

import copy
import math
import uuid

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBGenerateManager

from proxsparse.models.checks import context_length

REQUESTS = 8  # at a time. torch's attention on a CPU computes all queries times the cached tokens of all requests
BATCH_TOKENS = 256  # in one pass. A longer prompt takes several, in which the answers to others go on
PAGE_TOKENS = 32  # of the cache
COLDEST = 1e-6  # the scores are divided by the temperature, in fp32; a lower one means greedy


class Batches(CBGenerateManager):
    """Generates the answers of one model.

    Args:
        cache_tokens: largest number of tokens that the requests in progress hold together, prompts included.
    """

    def __init__(self, cache_tokens: int):
        pages = math.ceil(cache_tokens / PAGE_TOKENS)
        super().__init__(
            ContinuousBatchingConfig(
                PAGE_TOKENS,  # page_size, called block_size in transformers 5.17
                num_blocks=pages,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=REQUESTS,
                use_cuda_graph=False,  # `Choices` cannot be in a graph
                use_async_batching=False,
            )
        )
        self.cache_tokens = cache_tokens

    def init_cb(self, model, _gen_config) -> None:
        """Called before each request: starts the thread that generates, again if an error has ended it.

        Raises MemoryError if the cache does not fit.
        """
        # `is_alive` is true until the thread has failed all requests; until then it drops new ones without an answer
        if self._cb is None or self._cb.background_thread_status.can_accept_new_requests() is not None:
            self._cb = None  # frees the cache of the thread that has ended
            ends = model.generation_config.eos_token_id
            settings = GenerationConfig(do_sample=False, eos_token_id=ends)  # `Request` has those of the requests
            cb = model.init_continuous_batching(settings, copy.copy(self._cb_config))
            cb.logit_processor = Choices()
            cb.batch_processor = cb._create_batch_processor()  # reserves the cache; the thread would only log an error
            cb.start()
            self._cb = cb

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, **more):
        """As in transformers, with the settings of this request."""
        request = self.request(model, processor, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request, **more)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        request = self.request(model, processor, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, request)

    def stop(self) -> None:
        """Stops after the pass in progress; the requests in progress fail."""
        if self._cb is not None:
            self._cb.stop(timeout=5, hard_stop=True)

    def request(self, model, processor, inputs, gen_config) -> "Request":
        """The request, which ends its answer at the last position.

        Raises ValueError if the prompt is empty, leaves no room for an answer, or has a token without an embedding.
        """
        tokens, known = inputs["input_ids"], model.get_input_embeddings().num_embeddings
        positions = context_length(model)
        room = min(positions, self.cache_tokens)  # for the prompt and its answer
        if not tokens:
            raise ValueError("the prompt is empty")
        if len(tokens) >= room:
            words = f"the model has {room} positions; shorten it"
            if room < positions:
                words = f"the server has room for {room}; raise --cache_tokens"
            raise ValueError(f"the prompt has {len(tokens)} tokens, but {words}")
        if max(tokens) >= known:  # would end the thread, and with it all requests
            raise ValueError(f"the tokenizer gives token {max(tokens)}, but the model has only {known} embeddings")
        room -= len(tokens)
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or room, room)
        return Request(model, processor, tokens, gen_config)


class Request(str):
    """The id of a request, which also chooses its tokens: transformers hands only the id on to `Choices`.

    Each is new. The scheduler would mix two requests with one id, and clients choose theirs (x-request-id).
    """

    def __new__(cls, *_settings):
        return super().__new__(cls, uuid.uuid4())

    def __init__(self, model, tokenizer, prompt, gen_config):
        if gen_config.temperature is not None:
            gen_config.do_sample = gen_config.temperature >= COLDEST
        if not gen_config.do_sample:
            gen_config.temperature = gen_config.top_p = gen_config.top_k = None
        stop = gen_config.stop_strings or []
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        self.tokenizer, self.prompt_tokens, self.is_sampled = tokenizer, len(prompt), bool(gen_config.do_sample)
        model._prepare_special_tokens(gen_config, kwargs_has_attention_mask=True, device=model.device)
        self.processors = model._get_logits_processor(gen_config, len(prompt), device=model.device)

    def choose(self, tokens: list[int], scores: torch.Tensor) -> tuple[int, bool]:
        """The token after `tokens`, the prompt and the answer so far, and whether it completes a stop string.

        scores is [1, vocabulary].
        """
        scores = self.processors(torch.tensor([tokens], device=scores.device), scores)
        token = int(torch.multinomial(scores.softmax(-1), 1) if self.is_sampled else scores.argmax())
        if not self.stop:
            return token, False
        answer = self.tokenizer.decode([*tokens[self.prompt_tokens :], token], skip_special_tokens=True)
        return token, any(text in answer for text in self.stop)


class Choices:
    """What transformers calls for the logits of a batch, in place of `ContinuousBatchingLogitsProcessorList`.

    It chooses the tokens, and gives them the largest score.
    """

    do_processing = True
    tensors_required = 0

    def check_kwargs(self, _keywords) -> None:
        """All settings are in the `Request`."""

    def fill_defaults(self, _tensor) -> None:
        """There is nothing to fill."""

    def prepare_tensor_args(self, requests_in_batch, arg_storage):
        """Notes whose tokens are chosen in this pass, in the order of the rows."""
        self.states = [request.state for request in requests_in_batch if request.has_new_token]
        return arg_storage

    def __call__(self, _input_ids, scores: torch.Tensor, _arguments) -> torch.Tensor:
        """scores, [at least one row per token, vocabulary], after the choice. The last rows may belong to no token."""
        for row, state in zip(scores, self.states, strict=False):
            try:
                token, is_last = state.request_id.choose(state.initial_tokens + state.generated_tokens, row[None])
            except Exception as error:  # would end the thread, and with it all requests
                state.error, token, is_last = str(error), 0, True
            if is_last:
                state._eos_token_ids.add(token)
            row[token] = torch.inf
        return scores
