"""Perplexity as pruning papers measure it: one text, windows that do not overlap, an explicit window length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.models.checks import evaluating
from proxsparse.runtime.device import autocast
from proxsparse.runtime.distributed import all_reduce_sum as sum_over_processes
from proxsparse.runtime.distributed import shard_items, world_size
from proxsparse.runtime.progress import phase


@dataclass(frozen=True)
class Perplexity:
    """The perplexity, and the number of windows and tokens that it was measured on."""

    value: float
    windows: int
    tokens: int


def evaluation_tokens(text: str, tokenizer) -> Tensor:
    """The tokens of the whole text, int64 [N]."""
    with phase("tokenizing the evaluation text") as current:  # verbose=False: no warning about the length
        tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        current.result = f"{len(tokens):,} tokens"
    return tokens


@torch.no_grad()
def perplexity(
    model: nn.Module,
    token_ids: Tensor,
    seq_len: int,
    max_windows: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    title: str = "perplexity",
) -> Perplexity:
    """exp(mean over windows of -1/(L-1) sum_{t>=2} log p(x_t | x_<t)), for windows of L = seq_len tokens.

    Tokens after the last full window are ignored. NaN if an output of the model is NaN.

    Args:
        token_ids: int64 [N], from `evaluation_tokens`.
        seq_len: L >= 2; never taken from the model's config.
        max_windows: largest number of windows; None: all.
        autocast_dtype: compute in this dtype under autocast; None: in the dtype of the weights.
        title: title of the progress bar.
    Raises:
        InputError: seq_len is below 2, or the text is shorter than one window.
    """
    if seq_len < 2:
        raise InputError(f"seq_len={seq_len}: must be at least 2, because the first token of a window is not predicted")
    windows = len(token_ids) // seq_len
    if windows == 0:
        raise InputError(
            f"the evaluation text has {len(token_ids)} tokens, fewer than one window of seq_len={seq_len}; lower it "
            "or give more text"
        )
    windows = min(windows, max_windows) if max_windows and max_windows > 0 else windows
    device = next(model.parameters()).device
    losses = []
    with evaluating(model), phase(title, windows, "window") as current:
        # all windows are copied at once, and all losses read at the end: each transfer makes the host wait for the GPU
        for window, counts in shard_items(token_ids[: windows * seq_len].to(device).view(windows, 1, seq_len)):
            with autocast(device, autocast_dtype):
                logits = model(input_ids=window, use_cache=False).logits
            losses.append(counts * nn.functional.cross_entropy(logits[0, :-1].float(), window[0, 1:]))
            current.step(world_size())
        mean = sum_over_processes([sum(torch.stack(losses).tolist())])[0] / windows
        score = Perplexity(math.inf if mean >= 700 else math.exp(mean), windows, windows * seq_len)
        current.result = f"{score.value:,.2f}"
    return score
