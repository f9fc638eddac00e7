"""Calibration text that the dense model writes itself (`--data self`), for users who may not share data.

The idea is that of Williams et al., "Self-calibration for Language Model Quantization and Pruning" (NAACL 2025, arXiv
2410.17170). A document is sampled token by token at temperature 1, without top-k and top-p,

    x_i ~ softmax(logits(start, x_0 ... x_{i-1})),

where start is the bos token, else the eos token. x_i is the inverse of the cumulative distribution at u_i; the numbers
u_i in [0, 1) of document k depend only on the seed and k. The paper has a schedule of temperatures for the first
tokens. Here a hotter start (1.5 falling to 1 over ten tokens) gave SmolLM2-135M documents that are less like real text:
a loss of 4.24 per token after the tenth in 32 documents, against 3.95 without and 3.64 on C4.

A file of JSON lines keeps the documents: {"key": digest of the model and of the settings, "text": "...", "tokens":
[...]}. It is written after every batch, so a stopped run continues after the last one. A batch always has the same
documents, because rounding depends on its size: a resumed run has the tokens of an uninterrupted one.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.errors import InputError
from proxsparse.io.atomic import write_file
from proxsparse.models.checks import evaluating, first_not_finite
from proxsparse.models.loading import DIGESTED, weights_sha256
from proxsparse.runtime.device import autocast
from proxsparse.runtime.progress import Phase, phase

BATCH = 32  # documents sampled together
MIN_TOKENS = 10  # of a document; a few tokens are no text


def sample_documents(
    model: nn.Module,
    tokenizer,
    num_samples: int,
    seq_len: int,
    *,
    file: Path,
    seed: int = 42,
    packing: bool = False,
    device: torch.device | str = "cpu",
    weight_dtype: torch.dtype = torch.float32,
    autocast_dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Documents sampled from the model; those that `file` already has are read instead.

    A document has at most `seq_len` tokens and ends before the first end-of-text token, which is not sampled among the
    first `MIN_TOKENS`. With `packing` every sample has `seq_len` tokens: after an end-of-text token the model
    continues with another document. A sample begins with the bos token if the tokenizer adds this token to every text.

    Args:
        file: where the documents are kept; those of another model, seed, seq_len or packing are replaced.
        device, weight_dtype: of the model while it samples; afterwards it has its own tensors again.
        autocast_dtype: compute in this dtype under autocast; None: in `weight_dtype`.
    Returns:
        `num_samples` lists of at most `seq_len` token ids.
    Raises:
        InputError: the tokenizer has no bos and no eos token; an output of the model is NaN.
    """
    start = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), None)
    if start is None:
        raise InputError(
            "--data self: the tokenizer has no bos or eos token, with which a text starts; use a text file"
        )
    prefix = [start] if tokenizer("")["input_ids"][:1] == [start] else []
    ends = torch.tensor([] if packing else end_tokens(model, tokenizer), dtype=torch.int64, device=device)
    settings = [seed, seq_len, packing, start, ends.tolist(), BATCH, MIN_TOKENS]
    key = hashlib.sha256(json.dumps([weights_sha256(model, DIGESTED), *settings]).encode()).hexdigest()
    rows = read_rows(file, key, model.config.get_text_config().vocab_size)[:num_samples]
    batches = -(-num_samples // BATCH)
    if len(rows) == num_samples:
        return [row["tokens"] for row in rows]
    del rows[len(rows) // BATCH * BATCH :]
    first, steps = len(rows) // BATCH, seq_len - len(prefix)
    with (
        phase("sampling text from the model", batches * steps, "step", first * steps) as current,
        placed(model, torch.device(device), weight_dtype),
        evaluating(model),
        autocast(torch.device(device), autocast_dtype),
    ):
        for begin in range(len(rows), num_samples, BATCH):
            numbers = [random.Random(f"{seed} {i}") for i in range(begin, min(begin + BATCH, num_samples))]
            uniform = torch.tensor([[one.random() for _ in range(steps)] for one in numbers], dtype=torch.float64)
            for tokens in sample_batch(model, start, ends, uniform.to(device), current):
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                rows.append({"key": key, "text": text, "tokens": prefix + tokens})
            current.done = len(range(0, begin + 1, BATCH)) * steps
            write_file(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
        current.result = f"{num_samples:,} documents, {sum(len(row['tokens']) for row in rows):,} tokens"
    return [row["tokens"] for row in rows]


@torch.no_grad()
def sample_batch(model: nn.Module, start: int, ends: Tensor, uniform: Tensor, current: Phase) -> list[list[int]]:
    """Samples one document for each row of `uniform`.

    Args:
        start: the token that the model sees first.
        ends: the tokens that end a document, int64 [E].
        uniform: u_i of each document, float64 [B, T].
    Returns:
        B lists of at most T tokens, without `start` and the token that ended the document.
    """
    count, steps = uniform.shape
    sampled = torch.full((count, steps), start, device=uniform.device)
    lengths = torch.full((count,), steps, device=uniform.device)
    rows, tokens, cache = torch.arange(count, device=uniform.device), sampled[:, :1].clone(), None  # rows still sampled
    for i in range(steps):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        if i < MIN_TOKENS:
            logits[:, ends] = -torch.inf
        sums = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
        if not sums[:, -1].isfinite().all():
            where = first_not_finite(model, sampled[rows[:1], : i + 1])
            raise InputError(f"--data self: the logits of the model are NaN{where}; use --precision fp32")
        tokens = torch.searchsorted(sums, uniform[rows, i, None] * sums[:, -1:], right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)  # a product rounded up to the sum
        sampled[rows, i] = tokens[:, 0]
        lengths[rows] = torch.where(torch.isin(tokens[:, 0], ends), lengths[rows].clamp(max=i), lengths[rows])
        going_on = (lengths[rows] == steps).nonzero()[:, 0]
        current.step()
        if not len(going_on):
            break
        if len(going_on) <= 0.75 * len(rows):  # not at every end: it copies the cache
            rows, tokens = rows[going_on], tokens[going_on]
            cache.batch_select_indices(going_on)
    return [row[:length] for row, length in zip(sampled.tolist(), lengths.tolist(), strict=True)]


def end_tokens(model: nn.Module, tokenizer) -> list[int]:
    """The end-of-text tokens of the tokenizer and of the model's generation settings."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({i for i in (*ends, tokenizer.eos_token_id) if i is not None})


@contextmanager
def placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Within the block the parameters are on the device and of the dtype; afterwards those from before are back."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.to(device, dtype if isinstance(tensor, nn.Parameter) else None)
        yield
    finally:
        for tensor, own in zip(tensors, before, strict=True):
            tensor.data = own


def read_rows(file: Path, key: str, vocabulary: int) -> list[dict]:
    """The rows of the file up to the first that is damaged, or that has another key; [] if there is no file."""
    rows = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            tokens = row["tokens"] if row["key"] == key else []
            if not tokens or not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
                break
            rows.append(row)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return rows
