"""Calibration samples: tokenized documents in batches."""

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from proxsparse.data.tokens import TOKENS_IN_MEMORY, TokenStore, as_array, in_blocks, tokenize, windows
from proxsparse.errors import InputError
from proxsparse.runtime.progress import phase

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy ignores this target
Batch = dict[str, Tensor]


@dataclass(eq=False)
class TokenBatches(Sequence[Batch]):
    """Batches of samples in a flat array of tokens, of 4 bytes each; a batch is made when it is read. No slices."""

    ids: np.ndarray | Path  # uint32 [N]; or their file, which is mapped into memory
    bounds: np.ndarray  # int64 [samples + 1]; sample i has the tokens [bounds[i], bounds[i + 1])
    order: np.ndarray  # the samples in the order of their use, int64
    batch_size: int  # samples in a batch; the last batch may have fewer
    bos: int | None  # put before a sample that does not begin with it; None: nothing
    padding_id: int  # the token on padding

    @property
    def samples(self) -> int:
        return len(self.order)

    @property
    def tokens(self) -> np.ndarray:
        return as_array(self.ids)  # not kept: other processes get the name of the file, and not its content

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        start = range(len(self))[index] * self.batch_size
        return collate([self.sample(each) for each in self.order[start : start + self.batch_size]], self.padding_id)

    def sample(self, index: int) -> np.ndarray:
        """The tokens of a sample, int64 [T]."""
        tokens = self.tokens[self.bounds[index] : self.bounds[index + 1]].astype(np.int64)
        return tokens if self.bos in (None, tokens[0]) else np.concatenate([[self.bos], tokens])


def calibration_batches(
    texts: list[str],
    tokenizer,
    num_samples: int,
    seq_len: int,
    batch_size: int = 1,
    packing: bool = False,
    seed: int = 42,
    rest: Iterable[str] = (),
    store: TokenStore | None = None,
) -> TokenBatches:
    """Batches for a causal language model; the same arguments give the same batches.

    Documents are shuffled by `random.Random(seed)` and tokenized as needed; documents of fewer than 2 tokens are
    skipped. A sample is one document truncated to `seq_len` tokens, as in the ProxSparse paper. With `packing` it is a
    window of exactly `seq_len` tokens of the concatenated documents, which the eos token separates. Every sample begins
    with the bos token if the tokenizer adds one to a text.

    Args:
        num_samples: number of samples; fewer, with a warning, if the texts are too short.
        rest: more documents, which are read after the others if they are needed. If there may be more than
            `TOKENS_IN_MEMORY` tokens, the samples are shuffled too.
        store: where the tokens are; None: in memory.
    Returns:
        Dicts of int64 [B, T], T <= seq_len: input_ids, padded on the right; attention_mask, 1 on tokens and 0 on
        padding; labels, the input_ids with -100 on padding (the model shifts them).
    Raises:
        InputError: a number is out of range, or no sample can be made.
    """
    for name, value, least in (("num_samples", num_samples, 1), ("seq_len", seq_len, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise InputError(f"{name}={value}: must be at least {least}")
    first, store = list(texts), store or TokenStore()
    random.Random(seed).shuffle(first)
    tokenize(chain(in_blocks(first), in_blocks(rest)), tokenizer, num_samples, seq_len, packing, store)
    ids, bos = store.ids(), added_bos(tokenizer)
    if packing:
        bounds = windows(as_array(ids), num_samples, seq_len, bos)
    else:
        bounds = np.append([0], store.ends()[:num_samples])
    if len(bounds) == 1:
        needed = f"{seq_len} tokens in total; add text or lower seq_len" if packing else "2 tokens; add text"
        raise InputError(f"no sample in the text: a sample needs at least {needed}")
    if (samples := len(bounds) - 1) < num_samples:
        short = f"the text gives only {samples} samples with seq_len={seq_len}; continuing with these"
        warnings.warn(f"num_samples={num_samples}, but {short}", stacklevel=2)
    large = num_samples * seq_len > TOKENS_IN_MEMORY  # then most documents are not among the first
    use = np.random.default_rng(seed).permutation(samples) if large else np.arange(samples)
    padding_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return TokenBatches(ids, bounds, use, batch_size, bos, padding_id)


def arrays_of(batches: Iterable[Batch]) -> Iterator[np.ndarray]:
    """Arrays that determine the batches and their order; of `TokenBatches`, without making a million batches."""
    if isinstance(batches, TokenBatches):
        yield from (batches.tokens[: batches.bounds[-1]], batches.bounds, batches.order)
        yield np.array([batches.batch_size, -1 if batches.bos is None else batches.bos])
    else:
        for _, tensor in chain.from_iterable(sorted(batch.items()) for batch in batches):
            yield from (np.array(tensor.shape), tensor.numpy())


def endless_order(count: int, seed: int) -> Iterator[int]:
    """The indices of batches without end: the first pass in the given order, every later pass shuffled by the seed."""
    order, generator = list(range(count)), random.Random(seed)
    while True:
        yield from order
        generator.shuffle(order)


def single_samples(batches: Iterable[dict[str, Tensor]]) -> Iterator[Tensor]:
    """The samples of all batches one by one: input_ids, [1, T], without padding."""
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            yield ids[mask.bool()][None]


def added_bos(tokenizer) -> int | None:
    """The id of the bos token if the tokenizer puts it before a text, else None."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def collate(samples: list[list[int]] | list[np.ndarray], padding_id: int) -> Batch:
    """Samples of T_i tokens -> {input_ids, attention_mask, labels}, each int64 [B, max T_i]."""
    tokens = [torch.as_tensor(sample, dtype=torch.int64) for sample in samples]
    ids = pad_sequence(tokens, batch_first=True, padding_value=padding_id)
    mask = pad_sequence([torch.ones_like(sample) for sample in tokens], batch_first=True)
    return add_labels({"input_ids": ids, "attention_mask": mask})


def add_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels [B, T]: the given labels, else input_ids with -100 on padding."""
    padding = batch["attention_mask"] == 0
    return {**batch, "labels": batch.get("labels", batch["input_ids"].masked_fill(padding, IGNORED_LABEL))}


def evaluation_tokens(text: str, tokenizer) -> Tensor:
    """The tokens of the whole text, int64 [N]."""
    with phase("tokenizing the evaluation text") as current:  # verbose=False: no warning about the length
        tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        current.result = f"{len(tokens):,} tokens"
    return tokens
