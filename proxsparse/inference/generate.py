"""Greedy generation: one prefill, then decode steps on a cache of fixed size; on a GPU a step is one CUDA graph.

Dense and sparse models run through the same loop, so that their speeds compare.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from proxsparse.inference.glue import with_compiled_glue

WARM_UPS = 3  # before a capture: libraries choose algorithms and allocate their workspaces


def generate(
    model: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int,
    cuda_graph: bool | None = None,
    compile_glue: bool = False,
) -> Tensor:
    """input_ids [batch, prompt] -> [batch, prompt + max_new_tokens]: every new token is the likeliest one.

    It does not stop at an end-of-text token: cut the text there. All prompts have the same length.

    Args:
        model: a causal language model of transformers. `merge_projections_` (proxsparse.inference.merge), called once
            on it, saves 3 of the 7 products of a block.
        cuda_graph: one decode step is captured once and replayed, which spares the launches of its kernels; None: on
            a GPU yes, on a CPU, where there are none, no.
        compile_glue: RMSNorm, the rotary embedding and act(gate) * up of the decode steps are compiled by torch.compile
            (`proxsparse.inference.glue`), once a process for each shape: about half a minute. In bfloat16 they round
            less often than in eager mode, so a token may differ.
    Raises:
        ValueError: fewer than one new token, or a CUDA graph for tokens that are not on a GPU.
    """
    on_gpu = input_ids.device.type == "cuda"
    if cuda_graph and not on_gpu:
        raise ValueError(f"cuda_graph=True: the tokens are on {input_ids.device}; move model and tokens to a GPU")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: ask for one at least")
    check_prompts(input_ids)
    batch, prompt = input_ids.shape
    faster = capture_graph if cuda_graph or (cuda_graph is None and on_gpu) else None
    faster = with_compiled_glue(model, faster) if compile_glue else faster
    decoder = GreedyDecoder(model, batch, prompt + max_new_tokens, faster)
    new = [decoder.prefill(input_ids).clone()]
    new += [decoder.step().clone() for _ in range(max_new_tokens - 1)]
    return torch.cat([input_ids, *new], dim=1)


class GreedyDecoder:
    """Continues `batch` prompts of equal length by the likeliest tokens, one step at a time.

    Keys and values stay in a cache of fixed size, the newest tokens in one tensor [batch, 1]: so a step is the same
    work on the same memory every time, which CUDA graphs and torch.compile ask for. `prefill` and `step` return that
    tensor: clone what is to be kept.

    Args:
        model: a causal language model of transformers, every decoder block of it with attention.
        length: of prompt and new tokens together, what the cache holds.
        faster: step -> the same, faster: `captured`, torch.compile or `with_compiled_glue(model, captured)`; it is
            applied here. None: eager.
    """

    def __init__(self, model: nn.Module, batch: int, length: int, faster: Callable[[Callable], Callable] | None = None):
        self.model, self.length, self.seen = model, length, 0
        self.position = torch.zeros((), dtype=torch.long, device=model.device)  # tokens in the cache
        self.cache = static_cache(model, max(length, WARM_UPS + 3), self.position)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.run = self.eager_step
        if faster is not None:
            self.prefill(self.tokens.clone())  # the cache gets its memory
            with torch.no_grad():
                self.run = faster(self.eager_step)
                self.run()  # what compiles, compiles now

    @torch.no_grad()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """The prompts, [batch, prompt] -> the first new tokens, [batch, 1]. Forgets whatever was seen before.

        Raises ValueError for another batch, or more tokens, than the decoder was made for.
        """
        check_prompts(input_ids)
        if len(input_ids) != len(self.tokens) or input_ids.shape[1] > self.length:
            raise ValueError(
                f"input_ids of shape {list(input_ids.shape)}: the decoder was made for batch={len(self.tokens)} and "
                f"length={self.length} tokens; make another one"
            )
        self.cache.reset()
        self.position.zero_()
        self.seen = input_ids.shape[1]
        self.choose(input_ids)
        return self.tokens

    @torch.no_grad()
    def step(self) -> Tensor:
        """The newest tokens -> the next ones, [batch, 1]. Raises ValueError where the cache is full."""
        if self.seen >= self.length:
            raise ValueError(f"the cache is full: it was made for length={self.length} tokens; make it longer")
        self.seen += 1
        self.run()
        return self.tokens

    def eager_step(self) -> None:
        """tokens <- the likeliest after them."""
        self.choose(self.tokens)

    def choose(self, input_ids: Tensor) -> None:
        """Appends input_ids to what was seen; tokens <- the likeliest next ones."""
        logits = self.model(input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(input_ids.shape[1])


def check_prompts(input_ids: Tensor) -> None:
    """Raises ValueError unless input_ids is [batch, prompt], with a token in it."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids of shape {list(input_ids.shape)} must be [batch, prompt]: prompts of one length, at least 1"
        )


def static_cache(model: nn.Module, length: int, position: Tensor):
    """transformers' cache of fixed size, all of it for every decoder block.

    StaticCache would give blocks with a sliding window a shorter one that counts its tokens in Python: a captured step
    would see the count of its capture forever. A full one is right for them too, the mask holds the window.

    Args:
        position: the number of tokens in the cache, which the caller advances after each call of the model.
    """
    from transformers.cache_utils import Cache

    blocks = model.config.get_text_config(decoder=True).num_hidden_layers
    return Cache(layers=[counted_layer()(length, position) for _ in range(blocks)])


@functools.cache
def counted_layer() -> type:
    """transformers' StaticLayer with the count of its tokens in a tensor that all layers share.

    StaticLayer counts by itself, in three small kernels a block. A layer on another device than the shared count still
    does so.
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
    """A step as a CUDA graph: its kernels in one launch. It runs a few times here.

    Its tensors have to stay where they are, on the current device (torch.cuda.set_device).
    See "CUDA Graphs" in torch's documentation: work before a capture has to be on a side stream.
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
