"""Tokens of documents in a flat array: in memory or, if there are many, in files that a stopped run continues.

FOLDER/ids.bin         the tokens, uint32
FOLDER/ends.bin        int64, where each document ends in ids.bin
FOLDER/progress.json   how much of both files is valid; written after them
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from proxsparse.errors import InputError
from proxsparse.io.atomic import require_space, sync, write_file
from proxsparse.io.checkpoints import PROGRESS
from proxsparse.runtime.progress import phase

TOKENS_IN_MEMORY = 2**20  # more are stored in files
BLOCK = 1_000  # documents between two writes
TEXTS_PER_CALL = 128  # of the tokenizer, which uses all cores for them
IDS, ENDS = "ids.bin", "ends.bin"
NO_TOKENS_YET = {"blocks": 0, "documents": 0, "tokens": 0, "ended": 0}  # ended: whether the text has no more


class TokenStore:
    """Documents of tokens, which are appended in blocks: to the files of a folder, or without one in memory.

    `source`: JSON value that identifies the text and how it is tokenized. Raises InputError if the files in the folder
    were written for another text, or are damaged.
    """

    def __init__(self, folder: Path | None = None, source: object = None):
        self.folder, self.source, self.counts = folder, source, NO_TOKENS_YET
        self.memory = {IDS: array("I"), ENDS: array("q")}  # without a folder
        if folder is None or not (folder / PROGRESS).exists():
            return
        try:
            progress = json.loads((folder / PROGRESS).read_bytes())
            before, self.counts = progress["source"], {name: progress[name] for name in NO_TOKENS_YET}
            for name, size in ((IDS, 4 * self.counts["tokens"]), (ENDS, 8 * self.counts["documents"])):
                if (folder / name).stat().st_size < size:
                    raise ValueError(f"{name} is cut")
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{folder}: damaged; delete it") from error
        if before != source:
            raise InputError(
                f"{folder}: the calibration text, or the modification time of its files, has changed since the run was "
                "stopped; delete this folder if the text is the same, else write to another directory"
            )

    def append(self, ids: array, ends: array, ended: bool = False) -> None:
        """Adds a block of documents: their tokens, and where each ends in the tokens of all blocks."""
        before, added = self.counts, {"blocks": 1, "documents": len(ends), "tokens": len(ids), "ended": int(ended)}
        self.counts = {name: before[name] + count for name, count in added.items()}
        if self.folder is None:
            self.memory[IDS].extend(ids)
            self.memory[ENDS].extend(ends)
            return
        for name, values, count in ((IDS, ids, before["tokens"]), (ENDS, ends, before["documents"])):
            with (self.folder / name).open("ab") as file:
                file.truncate(count * values.itemsize)  # what a killed process has written after its last progress
                values.tofile(file)
            sync(self.folder / name)
        write_file(self.folder / PROGRESS, json.dumps(self.counts | {"source": self.source}).encode())

    def samples(self, seq_len: int, packing: bool, documents: int = 0, tokens: int = 0) -> int:
        """The number of complete samples, see `tokenize`, with these documents and their tokens added."""
        return (self.counts["tokens"] + tokens) // seq_len if packing else self.counts["documents"] + documents

    def is_full(self, num_samples: int, seq_len: int, packing: bool) -> bool:
        """Whether it has `num_samples` samples, or all of the text."""
        return bool(self.counts["ended"]) or self.samples(seq_len, packing) >= num_samples

    def ids(self) -> np.ndarray | Path:
        """The tokens, uint32 [N], or the file that holds them."""
        if self.folder and self.counts["tokens"]:
            return self.folder / IDS
        return np.asarray(self.memory[IDS])

    def ends(self) -> np.ndarray:
        """Where each document ends, int64 [documents]."""
        if self.folder and self.counts["documents"]:
            return np.fromfile(self.folder / ENDS, np.int64, self.counts["documents"])
        return np.asarray(self.memory[ENDS])


def as_array(ids: np.ndarray | Path) -> np.ndarray:
    """The tokens of `TokenStore.ids`; a file is mapped into memory."""
    return np.memmap(ids, np.uint32, "r") if isinstance(ids, Path) else ids


def tokenize(
    blocks: Iterable[list[str]], tokenizer, num_samples: int, seq_len: int, packing: bool, store: TokenStore
) -> None:
    """Appends tokens to the store until it has `num_samples` samples, or the documents end.

    `blocks`: the documents; blocks that the store has are skipped, and so are documents of fewer than 2 tokens. A
    sample is a document truncated to `seq_len` tokens; with `packing` it is `seq_len` tokens of the documents, each of
    which then ends with eos.
    """
    if store.folder:
        store.folder.mkdir(parents=True, exist_ok=True)
        left = num_samples * seq_len - store.counts["tokens"]
        what = f"the calibration text (--num_samples {num_samples} times {seq_len} tokens; lower it) needs"
        require_space(store.folder, left * array("I").itemsize, what)
    longest = num_samples * seq_len + 1 if packing else seq_len
    blocks = islice(blocks, store.counts["blocks"], None)
    done = min(store.samples(seq_len, packing), num_samples)
    with phase("tokenizing the calibration text", num_samples, "sample", done) as current:
        while not store.is_full(num_samples, seq_len, packing):
            try:
                block, ids, ends = next(blocks, None), array("I"), array("q")
            except InputError as error:  # such as a network that is gone
                stored = store.counts["tokens"] if store.folder else 0
                remedy = f"; if the text has not changed, a resumed run continues after {stored:,} tokens"
                raise InputError(f"{error}{remedy if stored else ''}") from error
            for tokens in tokens_of(block or [], tokenizer, longest, min(TEXTS_PER_CALL, num_samples), packing):
                ids.extend(tokens)
                ends.append(store.counts["tokens"] + len(ids))
                current.done = min(store.samples(seq_len, packing, len(ends), len(ids)), num_samples)
                if current.done == num_samples:
                    break
            store.append(ids, ends, ended=block is None)
        current.result = f"{store.counts['tokens']:,} tokens"


def tokens_of(texts: list[str], tokenizer, longest: int, at_once: int, with_eos: bool) -> Iterator[list[int]]:
    """The tokens of each text of at least 2 tokens, truncated to `longest`; `with_eos`: eos at the end."""
    eos = tokenizer.eos_token_id if with_eos else None
    for start in range(0, len(texts), at_once):
        side, tokenizer.truncation_side = getattr(tokenizer, "truncation_side", "right"), "right"
        try:
            found = tokenizer(texts[start : start + at_once], truncation=True, max_length=longest)["input_ids"]
        finally:
            tokenizer.truncation_side = side
        for tokens in found:
            if len(tokens) >= 2:
                yield tokens if eos in (None, tokens[-1]) else [*tokens, eos]


def in_blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts that are not blank, in lists of `BLOCK`, which are read when they are used."""
    texts = filter(str.strip, texts)
    while block := list(islice(texts, BLOCK)):
        yield block


def windows(ids: np.ndarray, num_samples: int, seq_len: int, bos: int | None) -> np.ndarray:
    """Bounds of at most `num_samples` windows of `seq_len` tokens, int64 [windows + 1].

    A window that does not begin with bos has one token less, so that bos can be put before it: without bos some models
    (Gemma) compute other activations than those of their later use.
    """
    bounds = [0]
    while len(bounds) <= num_samples and bounds[-1] < len(ids):
        starts_with_bos = bos is None or ids[bounds[-1]] == bos
        bounds.append(bounds[-1] + seq_len - (not starts_with_bos))
    return np.array(bounds if bounds[-1] <= len(ids) else bounds[:-1])
