"""Calibration data in any of its forms: the name of a source, texts, rows, tokens, dicts, a DataLoader."""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from proxsparse.data.calibration import IGNORED_LABEL, Batch, add_labels, calibration_batches, evaluation_tokens
from proxsparse.data.sources import FIRST_DOCUMENTS, evaluation_text, first_and_rest, identity_of, text_of
from proxsparse.data.tokens import TOKENS_IN_MEMORY, TokenStore
from proxsparse.errors import InputError
from proxsparse.models.checks import context_length, fit_window, refuse_other_tokens
from proxsparse.runtime.distributed import on_rank_zero

FORMS = (
    "give the name of a source (such as 'c4', or a file), a list of texts or of dicts with a text, a list of token "
    "tensors, a list of dicts with input_ids, or a DataLoader of token tensors or of dicts with input_ids"
)
TOKEN_FIELDS = ("input_ids", "attention_mask")


def read_batches(
    data: str | Iterable,
    model: nn.Module,
    tokenizer=None,
    *,
    num_samples: int = 400,
    seq_len: int | None = None,
    window: int = 512,
    packing: bool = False,
    text_field: str = "text",
    batch_size: int = 1,
    seed: int = 42,
    folder: Path | None = None,
) -> tuple[Sequence[Batch], int]:
    """The calibration batches, and the largest number of tokens in a sample.

    Args:
        data: the name of a source, see `data.sources.load_texts`; or texts, or dicts with a text; these are tokenized,
            see `calibration_batches`. Or a list or DataLoader of tokens, int64 [T] or [B, T] each, or of dicts with
            such input_ids and optionally attention_mask and labels; these are used in their order, except those
            without a token to predict.
        model: limits the length of the samples, and the tokens.
        num_samples: number of samples; of a longer list or DataLoader the first ones are used.
        seq_len: largest number of tokens in a sample; None: `window`, or the model's context length if shorter. Tokens
            and dicts are cut only if it is given.
        tokenizer, packing, text_field, batch_size, seed: for texts.
        folder: where many tokens of a source are stored, see `data.tokens`; None: in memory.
    Raises:
        InputError: no sample; the data has another form; tokens that the model does not have; a text without tokenizer.
    """
    data = str(data) if isinstance(data, Path) else data
    is_source = isinstance(data, str)
    items, are_texts = read_items([data] if is_source else data, tokenizer, text_field)
    if are_texts:
        length = on_rank_zero(lambda: fit_window(model, seq_len, window, "seq_len"))

        def read() -> Sequence[Batch]:
            large = is_source and folder is not None and num_samples * length > TOKENS_IN_MEMORY
            how = [str(getattr(tokenizer, "name_or_path", "")), num_samples, length, packing, seed, text_field]
            store = TokenStore(folder, [identity_of(data), *how]) if large else TokenStore()
            if store.is_full(num_samples, length, packing):  # stored before the run was stopped
                first, rest = [], ()
            elif is_source:
                first, rest = first_and_rest(data, "train", text_field)
            else:
                limit = None if isinstance(data, list | tuple) else FIRST_DOCUMENTS
                first, rest = list(islice(items, limit)), items
            batches = calibration_batches(first, tokenizer, num_samples, length, batch_size, packing, seed, rest, store)
            refuse_other_tokens(model, batches.tokens, "the calibration text has token ids")
            return batches

        return on_rank_zero(read), length
    batches, count = [], 0
    for item in items:
        batch = as_batch(item, model, seq_len)
        predicts = (add_labels(batch)["labels"][:, 1:] != IGNORED_LABEL).any(1)
        if not predicts.any():
            continue
        batch = {name: tensor[predicts][: num_samples - count] for name, tensor in batch.items()}
        batches.append(batch)
        count += len(batch["input_ids"])
        if count >= num_samples:  # a DataLoader may be endless
            break
    if not batches:
        raise InputError("data: no sample has a token to predict; give samples of at least 2 tokens")
    length, limit = max(batch["input_ids"].shape[-1] for batch in batches), context_length(model)
    if length > limit:
        cut = f"give --seq_len {limit}, to which samples are cut"
        raise InputError(f"data: a sample has {length} tokens, the model's context length is {limit}; {cut}")
    return batches, length


def read_tokens(
    data: str | Iterable, model: nn.Module, tokenizer, split: str | None = None, text_field: str = "text"
) -> Tensor:
    """All tokens of a text in any form of `read_batches`, int64 [N], for the perplexity. Raises InputError as that."""
    if isinstance(data, str | Path):
        data = [evaluation_text(str(data), split, text_field)]
    items, are_texts = read_items(data, tokenizer, text_field)
    if are_texts:
        limit = None if isinstance(data, list | tuple) else FIRST_DOCUMENTS
        return evaluation_tokens("\n\n".join(islice(items, limit)), tokenizer)
    batches = [as_batch(item, model, None, TOKEN_FIELDS) for item in items]
    return torch.cat([batch["input_ids"][batch["attention_mask"] != 0] for batch in batches])


def read_items(data: Iterable, tokenizer, text_field: str) -> tuple[Iterator, bool]:
    """The items of the data, and whether they are texts, which are read when they are used.

    Raises InputError for data that has no items.
    """
    if isinstance(tokenizer, str):
        raise InputError(f"tokenizer={tokenizer!r}: a name; give AutoTokenizer.from_pretrained({tokenizer!r})")
    if hasattr(data, "columns"):
        text = f"data[{text_field!r}]"
        raise InputError(f"data: a {type(data).__name__} of columns; give that of the text, such as {text}")
    if isinstance(data, Mapping) and hasattr(data, "column_names"):
        first = next(iter(data), "train")
        raise InputError(f"data: a {type(data).__name__}; give one of its splits, such as data[{first!r}]")
    if data is None or isinstance(data, bytes) or not isinstance(data, Iterable):
        raise InputError(f"data={reprlib.repr(data)}: {FORMS}")
    items = iter([data] if isinstance(data, Mapping) else data)  # one batch, such as the output of a tokenizer
    try:
        first = next(items)
    except StopIteration:
        raise InputError(f"data: it is empty; {FORMS}") from None
    items = chain([first], items)
    has_text = isinstance(first, Mapping) and "input_ids" not in first and text_field in first
    if not (isinstance(first, str) or has_text):
        return items, False
    if tokenizer is None:
        raise InputError("tokenizer=None: texts need the tokenizer of the model; give it")
    return (text_of(item, "data", text_field) for item in items), True


def as_batch(
    item: object, model: nn.Module, seq_len: int | None, names: tuple[str, ...] = (*TOKEN_FIELDS, "labels")
) -> Batch:
    """The entries `names` of an item, each int64 [B, T]; attention_mask is made. Raises InputError for other items."""
    if isinstance(item, list | tuple) and len(item) == 1 and isinstance(item[0], Tensor):
        item = item[0]  # of a DataLoader over a TensorDataset
    fields = item if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in fields:
        raise InputError(f"data: a dict with {', '.join(map(str, fields)) or 'no entries'}, without input_ids; {FORMS}")
    if fields.get("position_ids") is not None:
        remedy = "leave them out, or split the samples"
        raise InputError(f"data: position_ids: the tokens of each sample are counted from 0; {remedy}")
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    try:
        found = {name: torch.as_tensor(value) for name, value in given.items()}
        ids = found["input_ids"]
    except (TypeError, ValueError, RuntimeError, KeyError) as error:  # KeyError: it is None
        kind = type(item).__name__
        raise InputError(f"data: an item of type {kind}, which is not a tensor of tokens; {FORMS}") from error
    for name, tensor in found.items():
        valid, rule = tensor.dtype != torch.bool and torch.can_cast(tensor.dtype, torch.int64), "integers"
        if name == "attention_mask":
            valid, rule = ((tensor == 0) | (tensor == 1)).all(), "0 or 1"
        if (ids.numel() and not valid) or tensor.ndim not in (1, 2):  # [] is float
            raise InputError(f"data: {name}, {tensor.dtype} {list(tensor.shape)}: must be {rule}, [T] or [B, T]")
    batch = {name: torch.atleast_2d(tensor.to(torch.int64)).cpu() for name, tensor in found.items()}
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    for name, tensor in batch.items():
        if tensor.shape != batch["input_ids"].shape:
            raise InputError(f"data: {name} is {list(tensor.shape)}, input_ids are {list(batch['input_ids'].shape)}")
    if seq_len is not None:
        real_first = (batch["attention_mask"] == 0).byte().argsort(dim=1, stable=True)  # padding may be on the left
        batch = {name: tensor.gather(1, real_first)[:, :seq_len] for name, tensor in batch.items()}
    refuse_other_tokens(model, batch["input_ids"][batch["attention_mask"] != 0], "data: token ids")
    if "labels" in batch:
        refuse_other_tokens(model, batch["labels"][batch["labels"] != IGNORED_LABEL], "data: labels")
    return batch
