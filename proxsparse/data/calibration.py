"""Calibration samples: tokenized documents in batches."""

import random
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from proxsparse.errors import InputError
from proxsparse.runtime.progress import Phase, phase

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy ignores this target


def calibration_batches(
    texts: list[str],
    tokenizer,
    num_samples: int,
    seq_len: int,
    batch_size: int = 1,
    packing: bool = False,
    seed: int = 42,
) -> list[dict[str, Tensor]]:
    """Batches for a causal language model; the same arguments give the same batches.

    Documents are shuffled by `random.Random(seed)` and tokenized as needed; documents of fewer than 2 tokens are
    skipped. A sample is one document truncated to `seq_len` tokens, as in the ProxSparse paper. With `packing` it is a
    window of exactly `seq_len` tokens of the concatenated documents, which the eos token separates. Every sample begins
    with the bos token if the tokenizer adds one to a text.

    Args:
        num_samples: number of samples; fewer, with a warning, if the texts are too short.
        seq_len: largest number of tokens in a sample.
        batch_size: samples in a batch; the last batch may have fewer.
    Returns:
        Dicts of int64 [B, T], T <= seq_len: input_ids, padded on the right; attention_mask, 1 on tokens and 0 on
        padding; labels, the input_ids with -100 on padding (the model shifts them).
    Raises:
        InputError: a number is out of range, or no sample can be made.
    """
    for name, value, least in (("num_samples", num_samples, 1), ("seq_len", seq_len, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    documents = (texts[index] for index in order if texts[index].strip())
    with phase("tokenizing the calibration text", num_samples, "sample") as current:
        if packing:
            samples = packed_samples(documents, tokenizer, num_samples, seq_len, current)
        else:
            tokenized = (tokenizer(text, truncation=True, max_length=seq_len)["input_ids"] for text in documents)
            samples = list(current.count(islice((tokens for tokens in tokenized if len(tokens) >= 2), num_samples)))
        current.result = f"{sum(map(len, samples)):,} tokens"
    if not samples:
        needed = f"{seq_len} tokens in total; add text or lower seq_len" if packing else "2 tokens; add text"
        raise InputError(f"no sample in {len(texts)} texts: a sample needs at least {needed}")
    if len(samples) < num_samples:
        short = f"{len(texts)} texts give only {len(samples)} samples with seq_len={seq_len}; continuing with these"
        warnings.warn(f"num_samples={num_samples}, but {short}", stacklevel=2)
    padding_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return [collate(samples[i : i + batch_size], padding_id) for i in range(0, len(samples), batch_size)]


def sample_stream(batches: list[dict[str, Tensor]], seed: int) -> Iterator[dict[str, Tensor]]:
    """Repeats the batches without end: the first pass in the given order, every later pass shuffled with the seed."""
    order, generator = list(range(len(batches))), random.Random(seed)
    while True:
        yield from (batches[index] for index in order)
        generator.shuffle(order)


def single_samples(batches: Iterable[dict[str, Tensor]]) -> Iterator[Tensor]:
    """The samples of all batches one by one: input_ids, [1, T], without padding."""
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            yield ids[mask.bool()][None]


def packed_samples(
    documents: Iterable[str], tokenizer, num_samples: int, seq_len: int, current: Phase
) -> list[list[int]]:
    """At most `num_samples` windows of exactly `seq_len` tokens of the stream document, eos, document, eos, ...

    If the tokenizer adds bos, a window that would begin with another token begins with bos and has one token less of
    the stream: without bos some models (Gemma) compute other activations than those of their later use.
    """
    stream, wanted, eos = [], num_samples * seq_len, tokenizer.eos_token_id
    for document in documents:
        if len(stream) >= wanted:
            break
        # truncates only tokens beyond the last window, and avoids the tokenizer's warning about long texts
        tokens = tokenizer(document, truncation=True, max_length=wanted - len(stream) + 1)["input_ids"]
        if len(tokens) >= 2:
            stream += tokens if not stream or eos in (None, stream[-1]) else [eos, *tokens]
            current.done = min(len(stream), wanted) // seq_len
    bos, samples, start = added_bos(tokenizer), [], 0
    while len(samples) < num_samples and start < len(stream):
        head = [] if bos in (None, stream[start]) else [bos]
        end = start + seq_len - len(head)
        if end > len(stream):
            break
        samples.append(head + stream[start:end])
        start = end
    return samples


def added_bos(tokenizer) -> int | None:
    """The id of the bos token if the tokenizer puts it before a text, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def collate(samples: list[list[int]], padding_id: int) -> dict[str, Tensor]:
    """Samples of T_i tokens -> {input_ids, attention_mask, labels}, each int64 [B, max T_i]."""
    tokens = [torch.tensor(sample, dtype=torch.int64) for sample in samples]
    pad = partial(pad_sequence, batch_first=True)
    return {
        "input_ids": pad(tokens, padding_value=padding_id),
        "attention_mask": pad([torch.ones_like(sample) for sample in tokens], padding_value=0),
        "labels": pad(tokens, padding_value=IGNORED_LABEL),
    }


def add_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels [B, T]: the given labels, else input_ids with -100 on padding."""
    padding = batch["attention_mask"] == 0
    return {"labels": batch["input_ids"].masked_fill(padding, IGNORED_LABEL)} | batch


def evaluation_tokens(text: str, tokenizer) -> Tensor:
    """The tokens of the whole text, int64 [N]."""
    with phase("tokenizing the evaluation text") as current:  # verbose=False: no warning about the length
        tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        current.result = f"{len(tokens):,} tokens"
    return tokens
