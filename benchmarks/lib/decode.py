"""Greedy decoding for the benchmarks: a prefill, then steps of one token on a cache of fixed size."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, StaticLayer

WARM_UPS = 3  # before a capture, because libraries choose algorithms and allocate workspaces
Step = Callable[[], None]


class Decoder:
    """Decodes `batch` prompts of equal length. `faster(step, device)` makes a step faster, such as `capture_graph`."""

    prefills = 0  # in a call of `decode`

    def __init__(self, model: nn.Module, batch: int, length: int, faster: Callable[[Step, torch.device], Step]):
        self.model, self.tokens = model, torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        blocks = model.config.get_text_config(decoder=True).num_hidden_layers
        # Not StaticCache: for a sliding window it counts tokens in Python, and a captured step would not see the count.
        self.cache = Cache(layers=[StaticLayer(max(length, WARM_UPS + 3)) for _ in range(blocks)])
        self.prefill(self.tokens.clone())  # the cache gets its memory
        with torch.no_grad():
            self.run = faster(self.eager_step, self.tokens.device)
        self.step()  # compiles

    @torch.no_grad()
    def prefill(self, input_ids: Tensor) -> Tensor:
        """Prompts [batch, prompt] -> the first new tokens [batch, 1], overwritten by the next step."""
        self.cache.reset()
        self.choose(input_ids)
        return self.tokens

    @torch.no_grad()
    def step(self) -> Tensor:
        """The next tokens, [batch, 1]."""
        enabled = torch._C._get_mkldnn_enabled()
        # For one bfloat16 row torch's own product takes 0.4 to 0.7 of oneDNN's time (32000 x 4096, AVX512-BF16).
        torch._C._set_mkldnn_enabled(enabled and self.tokens.numel() > 1)
        try:
            self.run()
        finally:
            torch._C._set_mkldnn_enabled(enabled)
        return self.tokens

    def decode(self, steps: int) -> Tensor:
        """The next tokens, [batch, steps]."""
        return torch.cat([self.step().clone() for _ in range(steps)], dim=1)

    def eager_step(self) -> None:
        """tokens <- the most likely next tokens."""
        self.choose(self.tokens)

    def choose(self, input_ids: Tensor) -> None:
        # Not 1, which makes a view: on CPUs torch copies the weight of the output layer for it (pytorch issue 151934).
        last = torch.arange(input_ids.shape[1] - 1, input_ids.shape[1], device=input_ids.device)
        logits = self.model(input_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=last).logits
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))


class Generate:
    """The same by `generate` of transformers with a static cache; `decode` computes the prompts again."""

    prefills = 1

    def __init__(self, model: nn.Module, _batch: int, _length: int):
        self.model = model

    def prefill(self, input_ids: Tensor) -> Tensor:
        self.prompts = input_ids
        return self.generate(1)

    def decode(self, steps: int) -> Tensor:
        return self.generate(steps + 1)[:, 1:]

    def generate(self, count: int) -> Tensor:
        settings = GenerationConfig(
            do_sample=False, cache_implementation="static", min_new_tokens=count, max_new_tokens=count, pad_token_id=0
        )
        tokens = self.model.generate(self.prompts, settings, attention_mask=torch.ones_like(self.prompts))
        return tokens[:, self.prompts.shape[1] :]


def capture_graph(step: Step, device: torch.device) -> Step:
    """Warms a step up on a side stream, captures it as a CUDA graph on this device, and returns the replay."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # not the default stream: that is on the device of the first capture of the process
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            step()
    return graph.replay
