"""Perplexity as pruning papers measure it: one text, windows that do not overlap, an explicit window length."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import added_bos
from proxsparse.errors import InputError
from proxsparse.models.checks import evaluating, fit_window, refuse_other_tokens
from proxsparse.runtime.device import autocast
from proxsparse.runtime.distributed import all_reduce_sum as sum_over_processes
from proxsparse.runtime.distributed import shard_items, world_size
from proxsparse.runtime.progress import phase

WINDOW = 2048  # default number of tokens in a window
CHUNK = 256  # tokens whose logits are in float32 at a time: those of a window may need more memory than the model


@dataclass(frozen=True)
class Perplexity:
    """The perplexity, the number of windows and tokens that it was measured on, and where bos stands (`window_bos`)."""

    value: float
    windows: int
    tokens: int
    bos: str = "none"

    @property
    def measured_on(self) -> dict[str, int | str]:
        """The entries of a JSON row."""
        seq_len = self.tokens // self.windows
        return {"seq_len": seq_len, "windows": self.windows, "tokens": self.tokens, "bos": self.bos}


def window_bos(model: nn.Module, tokenizer, asked: str | None = None, flag: str = "bos") -> tuple[str, int | None]:
    """Where the bos token stands in the windows of a text.

    Args:
        asked: "first" or "each"; None: "each" for the Gemma family, whose models fail without bos, else "first", as in
            the tables of the pruning papers. InputError, which names `flag`, for "each" without a bos token.
    Returns:
        "each" and the token that `perplexity` puts before each window; "first" and None, as the tokenizer puts it
        at the start of the text; "none" and None if the tokenizer adds no bos.
    """
    added, token = added_bos(tokenizer), getattr(tokenizer, "bos_token_id", None)
    if asked == "each" and token is None:
        raise InputError(f"--{flag} each: the tokenizer has no bos token; leave --{flag} out")
    gemma = str(getattr(model.config, "model_type", "")).startswith("gemma")
    if asked == "each" or (asked is None and gemma and added is not None):
        return "each", token
    return "none" if added is None else "first", None


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokenizer,
    tokens: Tensor,
    seq_len: int | None = None,
    max_windows: int | None = None,
    bos: str | None = None,
    autocast_dtype: torch.dtype | None = None,
    title: str = "perplexity",
) -> Perplexity:
    """exp(mean over windows of -1/(L-1) sum_{t>=2} log p(x_t | x_<t)), for windows of L = seq_len tokens.

    Tokens after the last full window are ignored. NaN if an output of the model is NaN.

    Args:
        tokenizer: of the model; None: there is no bos token.
        tokens: int64 [N], from `data.calibration.evaluation_tokens`.
        seq_len: L >= 2; None: 2048, or the model's context length or the text if shorter.
        max_windows: largest number of windows; -1 or None: all.
        bos: as `asked` in `window_bos`. Before each window: the window has L-1 tokens of the text.
        autocast_dtype: compute in this dtype under autocast; None: in the dtype of the weights.
    Raises:
        InputError: a token that the model does not have; seq_len is below 2, or above the model's context length or
            the text; as `window_bos`.
    """
    refuse_other_tokens(model, tokens, "the evaluation text has token ids")
    seq_len = fit_window(model, seq_len, WINDOW, "seq_len", len(tokens))
    if seq_len < 2:
        raise InputError(f"seq_len={seq_len}: must be at least 2, because the first token of a window is not predicted")
    where, token = window_bos(model, tokenizer, bos)
    if token is not None and tokens[:1].tolist() == [token]:
        tokens = tokens[1:]
    step = seq_len - (token is not None)  # tokens of the text in a window
    windows = len(tokens) // step
    windows = min(windows, max_windows) if max_windows and max_windows > 0 else windows
    device = next(model.parameters()).device
    losses = []
    with evaluating(model), phase(title, windows, "window") as current:
        # all windows are copied at once, and all losses read at the end: each transfer makes the host wait for the GPU
        text = tokens[: windows * step].to(device).view(windows, 1, step)
        text = text if token is None else nn.functional.pad(text, (1, 0), value=token)
        for window, counts in shard_items(text):
            with autocast(device, autocast_dtype):
                logits = model(input_ids=window, use_cache=False).logits
            losses.append(counts * mean_loss(logits[0, :-1], window[0, 1:]))
            current.step(world_size())
        mean = sum_over_processes([sum(torch.stack(losses).tolist())])[0] / windows
        score = Perplexity(math.inf if mean >= 700 else math.exp(mean), windows, windows * seq_len, where)
        current.result = f"{score.value:,.2f}"
    return score


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) in float32, without a float32 copy of all logits [tokens, vocabulary]."""
    parts = zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
    return sum(nn.functional.cross_entropy(part.float(), own, reduction="sum") for part, own in parts) / len(targets)
