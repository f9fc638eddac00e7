"""Greedy generation: a prefill, then decode steps with a cache of fixed size; on a GPU each step is one CUDA graph.

Dense and sparse models use the same loop, so that their speeds can be compared.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

WARM_UPS = 3  # before a capture, because libraries choose algorithms and allocate workspaces


def generate(
    model: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int,
    cuda_graph: bool | None = None,
) -> Tensor:
    """Appends the most likely token `max_new_tokens` times. Does not stop at an end-of-text token.

    Args:
        model: a causal language model of transformers.
        input_ids: [batch, prompt], prompts of equal length.
        cuda_graph: capture one decode step and replay it, which saves kernel launches; None: only on a GPU.
    Returns:
        [batch, prompt + max_new_tokens].
    Raises:
        ValueError: max_new_tokens < 1, or cuda_graph=True and the tokens are not on a GPU.
    """
    on_gpu = input_ids.device.type == "cuda"
    if cuda_graph and not on_gpu:
        raise ValueError(f"cuda_graph=True: the tokens are on {input_ids.device}; move model and tokens to a GPU")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    check_prompts(input_ids)
    batch, prompt = input_ids.shape
    faster = capture_graph if cuda_graph or (cuda_graph is None and on_gpu) else None
    decoder = GreedyDecoder(model, batch, prompt + max_new_tokens, faster)
    new = [decoder.prefill(input_ids).clone()]
    new += [decoder.step().clone() for _ in range(max_new_tokens - 1)]
    return torch.cat([input_ids, *new], dim=1)


class GreedyDecoder:
    """Appends the most likely tokens to `batch` prompts of equal length, one step at a time.

    Keys and values are in a cache of fixed size, the newest tokens in one tensor [batch, 1]. So every step does the
    same work on the same memory, as CUDA graphs and torch.compile require. `prefill` and `step` return the tensor of
    the newest tokens, which the next step overwrites: clone it to keep it.

    Args:
        model: a causal language model of transformers whose decoder blocks all have attention.
        batch: the number of prompts.
        length: capacity of the cache: prompt and new tokens together.
        faster: a function that makes a step faster: `capture_graph` or torch.compile. None: eager.
    """

    def __init__(self, model: nn.Module, batch: int, length: int, faster: Callable[[Callable], Callable] | None = None):
        self.model, self.length, self.seen = model, length, 0
        self.position = torch.zeros((), dtype=torch.long, device=model.device)  # tokens in the cache
        self.cache = static_cache(model, max(length, WARM_UPS + 3), self.position)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.run = self.eager_step
        if faster is not None:
            self.prefill(self.tokens.clone())  # the cache gets its memory
            with torch.no_grad(), without_onednn(self.tokens):
                self.run = faster(self.eager_step)
                self.run()  # compiles

    @torch.no_grad()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Prompts [batch, prompt] -> the first new tokens [batch, 1]. Empties the cache first.

        Raises ValueError for another batch size, or more tokens, than the decoder was created for.
        """
        check_prompts(input_ids)
        if len(input_ids) != len(self.tokens) or input_ids.shape[1] > self.length:
            raise ValueError(
                f"input_ids of shape {list(input_ids.shape)}: the decoder was created for batch={len(self.tokens)} and "
                f"length={self.length} tokens; create another one"
            )
        self.cache.reset()
        self.position.zero_()
        self.seen = input_ids.shape[1]
        self.choose(input_ids)
        return self.tokens

    @torch.no_grad()
    def step(self) -> Tensor:
        """The next tokens, [batch, 1]. Raises ValueError if the cache is full."""
        if self.seen >= self.length:
            raise ValueError(f"the cache of length={self.length} tokens is full; create a decoder with a larger length")
        self.seen += 1
        with without_onednn(self.tokens):
            self.run()
        return self.tokens

    def eager_step(self) -> None:
        """tokens <- the most likely next tokens."""
        self.choose(self.tokens)

    def choose(self, input_ids: Tensor) -> None:
        """Appends input_ids to the cache; tokens <- the most likely next tokens."""
        # Not 1, which makes a view: on CPUs torch copies the weight of the output layer for it (pytorch issue 151934).
        last = torch.arange(input_ids.shape[1] - 1, input_ids.shape[1], device=input_ids.device)
        logits = self.model(input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=last).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(input_ids.shape[1])


@contextmanager
def without_onednn(tokens: Tensor) -> Iterator[None]:
    """Within the block torch does not call oneDNN if `tokens` is one token on a CPU.

    A bfloat16 weight times one row, such as the output layer in decoding, then takes 0.4 to 0.7 of the time (32000 x
    4096, AVX512-BF16, two cores and one); times two rows it would take 1.4 times as long. torch.backends.mkldnn.flags
    would print a warning about Intel GPUs.
    """
    if tokens.numel() != 1 or tokens.device.type != "cpu" or not torch._C._get_mkldnn_enabled():
        yield
        return
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def check_prompts(input_ids: Tensor) -> None:
    """Raises ValueError unless input_ids is [batch, prompt] and not empty."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids of shape {list(input_ids.shape)} must be [batch, prompt], with at least one token per prompt"
        )


def static_cache(model: nn.Module, length: int, position: Tensor):
    """A cache of transformers with the full fixed length for every decoder block.

    StaticCache gives blocks with a sliding window a shorter cache that counts its tokens in Python: a captured step
    would always see the count at its capture. The full length is correct for these blocks too, because the mask has the
    window.

    Args:
        position: scalar tensor, the number of tokens in the cache; the caller advances it after each call of the model.
    """
    from transformers.cache_utils import Cache

    blocks = model.config.get_text_config(decoder=True).num_hidden_layers
    return Cache(layers=[counted_layer()(length, position) for _ in range(blocks)])


@functools.cache
def counted_layer() -> type:
    """StaticLayer of transformers with a token count that all layers share.

    The own count of StaticLayer needs three small kernels per block. A layer on another device than the shared count
    still uses its own.
    """
    from transformers.cache_utils import StaticLayer

    class CountedLayer(StaticLayer):
        def __init__(self, max_cache_len: int, position: Tensor):
            super().__init__(max_cache_len)
            self.position = position

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            self.cumulative_length = self.position
            super().lazy_initialization(key_states, value_states)  # copies it to another device
            self.is_counted_for = self.cumulative_length is self.position

        def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            if not self.is_counted_for:
                return super().update(key_states, value_states, *args, **kwargs)
            tokens = key_states.shape[-2]
            places = self.position.view(1)
            if tokens > 1:
                places = places + torch.arange(tokens, device=places.device)
            self.keys.index_copy_(2, places, key_states)
            self.values.index_copy_(2, places, value_states)
            return self.keys, self.values

    return CountedLayer


def capture_graph(step: Callable[[], None]) -> Callable[[], None]:
    """Runs a step a few times, captures it as a CUDA graph, and returns the replay.

    The tensors of the step must stay at their addresses on the current device (torch.cuda.set_device). The warm-up runs
    on a side stream, as "CUDA Graphs" in the documentation of torch requires.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
